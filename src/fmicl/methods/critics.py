"""Critics of two learned vectors: the loss of methods with a density ratio exp(x . y / sqrt(d)) (CPC, Deep InfoMax)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from fmicl.divergences import Divergence
from fmicl.divergences.learned import require_fixed
from fmicl.kernels.exchange import World, all_sum, gather_rows, gather_with_gradient, world_of
from fmicl.losses import ObjectiveContext, ObjectiveOptions
from fmicl.losses.fmicl import FMICLOptions
from fmicl.losses.infonce import InfoNCEOptions
from fmicl.methods.registry import MethodOptions


class CriticLoss(nn.Module):
    r"""Minus a lower bound of the mutual information by the critic T(x, y) = x . y / sqrt(d), without unit vectors.

    For each of P positions the N x N products of a batch are scored, and the loss is the mean over positions. With a
    divergence, T is the log density ratio r:

    .. math:: L = -\frac1N \sum_i s(T_{ii}) + \frac1{N(N-1)} \sum_{i \ne j} p(T_{ij})

    with its score s and penalty p: the bound of f-MICL with alpha = 1, which for JS is Deep InfoMax's loss up to a
    constant. Without one it is InfoNCE, the cross-entropy of finding y_i among all y_j. Over several processes, j runs
    over the samples of all.

    Args:
        divergence: None for InfoNCE.

    Example:
        >>> x, y = torch.tensor([[[1.0]], [[0.0]]]), torch.tensor([[[1.0]], [[2.0]]])     # N = 2, P = 1, d = 1
        >>> CriticLoss(None)(x, y)        # (log(1 + e) + log 2) / 2
        tensor(1.0032)
    """

    def __init__(self, divergence: Divergence | None) -> None:
        super().__init__()
        if divergence is not None:
            require_fixed(divergence)
        self.divergence = divergence

    def forward(self, x: Tensor, y: Tensor, present: Tensor | None = None) -> Tensor:
        """The loss of vectors x (N, P, d) and y (N, P, d) or (N, 1, d).

        Args:
            x: anchors.
            y: what belongs to them.
            present: (N, P) booleans, False for pairs that are missing: they are no positives, and their y no negatives.

        Returns:
            This process's share of the loss; the mean over processes is the loss of the joined batch.
        """
        with torch.autocast(x.device.type, enabled=False):
            x, y = x.float() / math.sqrt(x.shape[-1]), y.float()
            world = world_of(x.flatten(1))
            columns = gather_with_gradient(y.contiguous(), world)
            scores = x.transpose(0, 1) @ columns.permute(1, 2, 0)  # (P, N, M)
            positives = (x * y).sum(dim=2).T  # (P, N)
            if present is None:
                present = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device)
            rows, there = present.T, gather_rows(present, world).T
            index = torch.arange(world.total, device=x.device)
            own = index == index[world.first : world.first + len(x), None]  # (N, M)
            others = rows.unsqueeze(2) & there.unsqueeze(1) & ~own
            if self.divergence is None:
                choices = scores.masked_fill(~(others | own), -torch.inf).logsumexp(dim=2)
                return self._mean(choices - positives, rows, world)
            cost = self._mean(self.divergence.penalty(scores.masked_fill(~others, 0.0)), others, world)
            return cost - self._mean(self.divergence.score(positives), rows, world)

    @staticmethod
    def _mean(values: Tensor, chosen: Tensor, world: World) -> Tensor:
        """This process's share of the mean over the chosen values of all processes."""
        number = all_sum(chosen.sum().to(values.dtype), world)
        return world.size * torch.where(chosen, values, 0.0).sum() / number

    def extra_repr(self) -> str:
        """The settings."""
        return "InfoNCE" if self.divergence is None else f"{self.divergence}"


@dataclass(frozen=True, kw_only=True)
class _CriticObjective(ObjectiveOptions):
    collapse_hint = "Lower --learning-rate, or take another divergence."

    chosen: ObjectiveOptions

    def build(self, context: ObjectiveContext) -> nn.Module:
        one_of_many = isinstance(self.chosen, InfoNCEOptions)
        return CriticLoss(None if one_of_many else self.chosen.information_divergence(context))

    def information_divergence(self, context: ObjectiveContext) -> Divergence:
        return self.chosen.information_divergence(context)


@dataclass(frozen=True)
class CriticOptions(MethodOptions):
    """Options of methods with a learned critic: fmicl's divergence or InfoNCE, and no kernel on a sphere."""

    objectives: ClassVar[tuple[type[ObjectiveOptions], ...]] = (FMICLOptions, InfoNCEOptions)

    def resolve_objective(self, chosen: ObjectiveOptions) -> ObjectiveOptions:
        """The bound by the critic."""
        if not isinstance(chosen, self.objectives):
            raise ValueError(
                f"{self.method.__name__} needs a bound of the mutual information for any critic: take --objective "
                "fmicl, with any --divergence, or infonce"
            )
        return _CriticObjective(chosen=chosen)

    def why_unused(self) -> dict[str, str]:
        """All options of an objective but the divergence."""
        names = ("negatives", "alpha", "gamma", "mu", "similarity", "shift", "temperature", "decoupled")
        return dict.fromkeys(names, f"the critic of {self.method.__name__} is a learned inner product")
