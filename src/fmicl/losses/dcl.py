"""Decoupled contrastive learning (Yeh et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from fmicl.losses import functional
from fmicl.losses.infonce import InfoNCELoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import LabelOptions, ObjectiveContext, TemperatureOptions, register_objective
from fmicl.losses.targets import LabelNegatives
from fmicl.utils.learnable import Scalar
from fmicl.utils.validation import Negatives


class DCLLoss(InfoNCELoss):
    """DCL: InfoNCE without the positive in the denominator, `InfoNCELoss(decoupled=True)`. See `functional.dcl_loss`.

    Related: `FMICLLoss("kl", shift="optimal")` has one normaliser for all anchors where this has one for each, and is
    never above it (as an objective, plus the log of the number of negatives).

    Args:
        temperature: lightly's default is 0.1.
        negatives: "both" (theirs), "cross" or "anchor"; pass explicit ones to the call.
        label_negatives: in calls with labels, "all" other samples are negatives, or "other_classes" only.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> bool(fmicl.DCLLoss(0.1)(x, y) == fmicl.InfoNCELoss(0.1, decoupled=True)(x, y))
        True
    """

    function = staticmethod(functional.dcl_loss)
    arguments = ("temperature", "negatives")

    def __init__(
        self,
        temperature: Scalar = 0.1,
        negatives: Negatives = "both",
        *,
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(temperature, negatives, decoupled=True, label_negatives=label_negatives, **options)


@register_objective("dcl", summary="Decoupled contrastive learning: InfoNCE without its positive (Yeh et al., 2022).")
@dataclass(frozen=True)
class DCLOptions(TemperatureOptions, LabelOptions):
    """Options of DCL."""

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return DCLLoss(self.temperature, label_negatives=self.label_negatives, **self.common(context))
