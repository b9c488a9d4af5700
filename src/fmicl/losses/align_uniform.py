"""Alignment and uniformity, the loss of Wang and Isola (2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.options import option
from fmicl.utils.validation import Negatives, require_power


class AlignUniformLoss(ContrastiveLoss):
    """Alignment and uniformity of Wang and Isola. See `functional.align_uniform_loss`.

    Related: with `weight=1 / gamma` and `power=2` it is `FMICLLoss("kl", gamma=gamma, shift="optimal")` up to a factor
    and a constant.

    Args:
        gamma: inverse width of the Gaussian kernel (their t).
        power: power of the distance in the alignment term.
        weight: weight of the uniformity term.
        negatives: "anchor", "both" or "cross"; pass explicit ones to the call.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.AlignUniformLoss()(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.align_uniform_loss)
    arguments = ("gamma", "power", "weight", "negatives")

    def __init__(
        self,
        gamma: Scalar = 2.0,
        power: float = 2.0,
        weight: Scalar = 1.0,
        negatives: Negatives = "anchor",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, **options)
        require_positive_scalar("gamma", gamma)
        require_power(power)
        require_positive_scalar("weight", weight)
        self.gamma, self.power, self.weight = gamma, power, weight


@register_objective("align_uniform", summary="Alignment and uniformity (Wang and Isola, 2020).")
@dataclass(frozen=True)
class AlignUniformOptions(ObjectiveOptions):
    """Options of alignment and uniformity."""

    uniformity_gamma: float = option(
        2.0,
        "Inverse width of the Gaussian kernel in the uniformity term: Wang and Isola's t, and their value.",
        above=0,
    )
    uniformity_weight: float = option(1.0, "Weight of the uniformity term.", above=0)

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return AlignUniformLoss(gamma=self.uniformity_gamma, weight=self.uniformity_weight, **self.common(context))

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """What may help a run whose embeddings have collapsed."""
        # negatives that have a gradient spread out more the harder they are repelled; others don't move
        word = "Lower" if self.detached_share(context) else "Raise"
        return f"{word} --uniformity-weight, or lower --learning-rate."
