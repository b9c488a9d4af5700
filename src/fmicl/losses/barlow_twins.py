"""Barlow Twins: redundancy reduction (Zbontar et al., 2021)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from fmicl.losses import functional
from fmicl.losses.registry import ObjectiveContext, register_objective
from fmicl.losses.statistics import BatchStatisticsLoss, BatchStatisticsOptions
from fmicl.utils.options import option
from fmicl.utils.validation import require_positive


class BarlowTwinsLoss(BatchStatisticsLoss):
    """Barlow Twins: the cross-correlation of the views should be the identity. See `functional.barlow_twins_loss`.

    It takes embeddings as they are, not of unit length, and works best with wide ones (2048 and more). It has no
    negatives.

    Related: `VICRegLoss` has covariances within each view. No identity ties it to f-MICL: it compares coordinates, not
    samples. `functional.barlow_twins_loss` has what the two have in common.

    Args:
        weight: weight of the off-diagonal terms (their lambda).
        scale: factor of the loss. With LARS it is the learning rate of biases and batch normalisation that it scales,
            whose gradients LARS leaves as they are: 0.1 in solo-learn on CIFAR-10.
        gather: take statistics over all processes, or with False over this one alone.

    Example:
        >>> import torch, fmicl
        >>> fmicl.BarlowTwinsLoss(weight=0.005)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.barlow_twins_loss)
    arguments = ("weight",)

    def __init__(self, weight: float = 0.005, *, scale: float = 1.0, gather: bool = True) -> None:
        super().__init__(gather)
        require_positive("weight", weight)
        require_positive("scale", scale)
        self.weight, self.scale = weight, scale

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d); explicit negatives are refused."""
        return self.scale * super().forward(x, y, negatives)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{super().extra_repr()}, scale={self.scale:g}"


@register_objective("barlow_twins", summary="Barlow Twins: cross-correlation of the views (Zbontar et al., 2021).")
@dataclass(frozen=True)
class BarlowTwinsOptions(BatchStatisticsOptions):
    """Options of Barlow Twins."""

    collapse_hint = "Lower --learning-rate, or change --redundancy-weight."

    redundancy_weight: float = option(0.005, "Weight of the off-diagonal terms of the cross-correlation.", above=0)
    barlow_scale: float = option(1.0, "Factor of the loss; solo-learn has 0.1 on CIFAR-10.", above=0)

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: the method has a queue.
        """
        self.refuse_queue("barlow_twins", context)
        return BarlowTwinsLoss(self.redundancy_weight, scale=self.barlow_scale)
