"""BYOL: each view predicts the momentum embedding of the other, without negatives (Grill et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fmicl.kernels.exchange import world_of
from fmicl.losses import ObjectiveOptions
from fmicl.methods.base import Method, PredictionMethod
from fmicl.methods.registry import MomentumOptions, OwnLoss, register_method
from fmicl.utils.numerics import normalise


class PredictionLoss(nn.Module):
    r"""Squared distance of predictions to their targets on the unit sphere, without negatives: BYOL's loss.

    .. math:: L = \frac1N \sum_i |\bar q_i - \bar k_i|^2 = \frac1N \sum_i (2 - 2 \cos(q_i, k_i))

    Alone it is minimised by a constant embedding; BYOL's predictor and momentum encoder keep training away from it.

    Example:
        >>> import torch
        >>> PredictionLoss()(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 3.0]]))
        tensor(2.)
    """

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss of predictions x and targets y, (N, d) each; over processes, the mean is the global loss."""
        world = world_of(x)
        distances = (normalise(x.float()) - normalise(y.float())).square().sum(dim=1)
        return distances.sum() * (world.size / world.total)


class BYOL(PredictionMethod):
    """Each view predicts the other view's momentum embedding; there are no negatives.

    After Grill et al., "Bootstrap your own latent", 2020. The loss is the mean of both directions, half of the paper's
    sum. Projection head and predictor have two layers each.

    Args:
        encoder: as in :class:`fmicl.methods.base.PredictionMethod`, and so are the other arguments.
        objective: None for BYOL's own loss. With another one, such as ``FMICLLoss``, it has negatives.

    Example:
        >>> import torch
        >>> from fmicl.models.vision import SmallConv
        >>> method = BYOL(SmallConv(), dim=8, hidden=16)
        >>> method.loss(torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)).loss.shape
        torch.Size([])
    """

    head_layers = 2

    def __init__(self, encoder: nn.Module, objective: nn.Module | None = None, **options: Any) -> None:
        super().__init__(encoder, PredictionLoss() if objective is None else objective, **options)


@register_method("byol", summary="Momentum encoder and predictor, without negatives; a loss of its own.")
@dataclass(frozen=True)
class BYOLOptions(MomentumOptions):
    """Options of BYOL."""

    method: ClassVar[type[Method]] = BYOL
    own_loss: ClassVar[bool] = True

    def resolve_objective(self, chosen: ObjectiveOptions) -> ObjectiveOptions:
        """BYOL's loss."""
        del chosen
        advice = "Nothing but training dynamics keeps BYOL from it: lower --learning-rate or raise --encoder-momentum."
        return OwnLoss(make=lambda _: PredictionLoss(), advice=advice)
