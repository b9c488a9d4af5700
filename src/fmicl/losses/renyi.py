"""RenyiCL: the skew Renyi divergence (Lee and Shin, 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, TemperatureOptions, register_objective
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.options import option
from fmicl.utils.validation import Negatives, require_positive, require_skew


class RenyiLoss(ContrastiveLoss):
    """RenyiCL: minus a bound of the skew Renyi divergence. See `functional.renyi_loss`.

    Related: order 1 without skew is `FMICLLoss("kl", alpha=1, shift="optimal")`, and another order g an increasing
    function of f-MICL with Tsallis of order g and its best mu.

    Args:
        order: order of the divergence (their gamma); 1 is KL.
        skew: share of positives that is mixed with the negatives (their alpha), in [0, 1).
        temperature: of the inner product.
        negatives: "cross" (theirs), "both" or "anchor"; pass explicit ones to the call.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.RenyiLoss(order=2.0, skew=1e-3)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.renyi_loss)
    arguments = ("order", "skew", "temperature", "negatives")

    def __init__(
        self,
        order: float = 2.0,
        skew: float = 1 / 65536,
        temperature: Scalar = 0.5,
        negatives: Negatives = "cross",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, **options)
        require_positive("order", order)
        require_skew(skew)
        require_positive_scalar("temperature", temperature)
        self.order, self.skew, self.temperature = order, skew, temperature


@register_objective("renyi", summary="RenyiCL: skew Renyi divergence (Lee and Shin, 2022).")
@dataclass(frozen=True)
class RenyiOptions(TemperatureOptions):
    """Options of RenyiCL."""

    usual_negatives = "cross"  # the other second views, as in its paper

    renyi_order: float = option(2.0, "Order of the Renyi divergence; 1 is KL.", above=0)
    renyi_skew: float = option(
        1 / 65536, "Share of positives that is mixed with the negatives, in [0, 1).", at_least=0, below=1
    )

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return RenyiLoss(self.renyi_order, self.renyi_skew, self.temperature, **self.common(context))
