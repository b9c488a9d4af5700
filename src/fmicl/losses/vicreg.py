"""VICReg: variance, invariance and covariance regularisation (Bardes, Ponce and LeCun, 2022)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from fmicl.losses import functional
from fmicl.losses.registry import ObjectiveContext, register_objective
from fmicl.losses.statistics import BatchStatisticsLoss, BatchStatisticsOptions
from fmicl.utils.options import option
from fmicl.utils.validation import require_positive


class VICRegLoss(BatchStatisticsLoss):
    """VICReg: near views, coordinates of unit variance that are uncorrelated. See `functional.vicreg_loss`.

    It takes embeddings as they are, not of unit length, and works best with wide ones: the projection head is its
    expander (8192 in its paper, 2048 in solo-learn on CIFAR-10). It has no negatives.

    Related: `BarlowTwinsLoss` has the correlation between the views. No identity ties it to f-MICL; its covariance term
    is that of the spectral loss in another form (`functional.vicreg_loss`).

    Args:
        variance: weight of the variance term.
        invariance: weight of the distance of the views.
        covariance: weight of the covariance term.
        gather: take statistics over all processes, or with False over this one alone.

    Example:
        >>> import torch, fmicl
        >>> fmicl.VICRegLoss(25, 25, 1)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.vicreg_loss)
    arguments = ("variance", "invariance", "covariance")

    def __init__(
        self, variance: float = 25.0, invariance: float = 25.0, covariance: float = 1.0, *, gather: bool = True
    ) -> None:
        super().__init__(gather)
        for name, value in (("variance", variance), ("invariance", invariance), ("covariance", covariance)):
            require_positive(name, value)
        self.variance, self.invariance, self.covariance = variance, invariance, covariance


@register_objective("vicreg", summary="VICReg: variance, invariance and covariance (Bardes et al., 2022).")
@dataclass(frozen=True)
class VICRegOptions(BatchStatisticsOptions):
    """Options of VICReg."""

    collapse_hint = "Raise --variance-weight, or lower --learning-rate."

    variance_weight: float = option(25.0, "Weight of the variance term.", above=0)
    invariance_weight: float = option(25.0, "Weight of the mean squared distance of the views.", above=0)
    covariance_weight: float = option(1.0, "Weight of the covariance term.", above=0)

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: the method has a queue.
        """
        self.refuse_queue("vicreg", context)
        return VICRegLoss(self.variance_weight, self.invariance_weight, self.covariance_weight)
