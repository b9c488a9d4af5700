"""InfoNCE: the NT-Xent loss of SimCLR, and MoCo's loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Unpack

from torch import Tensor, nn

from fmicl.losses import functional
from fmicl.losses.base import LabelledLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import LabelOptions, ObjectiveContext, TemperatureOptions, register_objective
from fmicl.losses.targets import LabelNegatives
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.validation import Negatives


class InfoNCELoss(LabelledLoss):
    """InfoNCE: SimCLR's NT-Xent by default, MoCo's loss with explicit negatives. See `functional.infonce_loss`.

    With labels it is SupCon, or SINCERE if negatives are those of other classes.

    Related: `FMICLLoss("kl", shift="optimal")` moves the mean over anchors into the logarithm and, as an objective, is
    never above this one with `decoupled=True` plus the log of the number of negatives; `FMICLLoss("kl")` drops the
    logarithm.

    Args:
        temperature: SimCLR takes 0.5 on CIFAR-10, MoCo 0.07, SimCSE 0.05.
        negatives: "both" (SimCLR), "cross" or "anchor"; pass explicit ones to the call (MoCo).
        decoupled: leave the positive out of the denominator.
        label_negatives: in calls with labels, "all" other samples are negatives, or "other_classes" only.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> loss = fmicl.InfoNCELoss(temperature=0.5)
        >>> loss(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
        >>> loss(torch.randn(4, 16), torch.randn(4, 16), labels=torch.tensor([0, 1, 0, -1])).shape      # SupCon
        torch.Size([])
    """

    function: ClassVar[Callable[..., Tensor]] = staticmethod(functional.infonce_loss)
    arguments: ClassVar[tuple[str, ...]] = ("temperature", "negatives", "decoupled")

    def __init__(
        self,
        temperature: Scalar = 0.5,
        negatives: Negatives = "both",
        *,
        decoupled: bool = False,
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, label_negatives, **options)
        require_positive_scalar("temperature", temperature)
        self.temperature, self.decoupled = temperature, decoupled


@register_objective("infonce", summary="InfoNCE / NT-Xent, the loss of SimCLR and MoCo.")
@dataclass(frozen=True)
class InfoNCEOptions(TemperatureOptions, LabelOptions):
    """Options of InfoNCE."""

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return InfoNCELoss(self.temperature, label_negatives=self.label_negatives, **self.common(context))
