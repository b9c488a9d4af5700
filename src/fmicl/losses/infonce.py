"""InfoNCE: the NT-Xent loss of SimCLR, and MoCo's loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.utils.learnable import Scalar, format_scalar, require_positive_scalar
from fmicl.utils.options import option, require_positive_fields
from fmicl.utils.validation import Negatives

__all__ = ["InfoNCELoss", "InfoNCEOptions"]


class InfoNCELoss(ContrastiveLoss):
    """InfoNCE: SimCLR's NT-Xent by default, MoCo's loss with explicit negatives. See `functional.infonce_loss`.

    Related: `FMICLLoss("kl", shift="optimal")` moves the mean over anchors into the logarithm and, as an objective, is
    never above this one with `decoupled=True` plus the log of the number of negatives; `FMICLLoss("kl")` drops the
    logarithm.

    Args:
        temperature: SimCLR takes 0.5 on CIFAR-10, MoCo 0.07, SimCSE 0.05.
        negatives: "both" (SimCLR), "cross" or "anchor"; pass explicit ones to the call (MoCo).
        decoupled: leave the positive out of the denominator.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> loss = fmicl.InfoNCELoss(temperature=0.5)
        >>> loss(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    def __init__(
        self,
        temperature: Scalar = 0.5,
        negatives: Negatives = "both",
        *,
        decoupled: bool = False,
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, **options)
        require_positive_scalar("temperature", temperature)
        self.temperature = temperature
        self.decoupled = decoupled

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return functional.infonce_loss(
            x, y, temperature=self.temperature, decoupled=self.decoupled, **self.common(negatives)
        )

    def settings(self) -> str:
        """The settings of this loss, for `repr`."""
        return f"temperature={format_scalar(self.temperature)}, negatives={self.negatives}, decoupled={self.decoupled}"


@register_objective("infonce", summary="InfoNCE / NT-Xent, the loss of SimCLR and MoCo.")
@dataclass(frozen=True)
class InfoNCEOptions(ObjectiveOptions):
    """Options of InfoNCE."""

    temperature: float = option(0.2, "Temperature of the softmax.")

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        super().__post_init__()
        require_positive_fields(self, "temperature")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return InfoNCELoss(self.temperature, **self.common(context))

    def default_negatives(self, context: ObjectiveContext) -> Negatives:
        """All views of the batch, as in SimCLR, or the other second views, as in SimCSE and MoCo v3."""
        return "cross" if context.contrast_views else "both"

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """What may help a run whose embeddings have collapsed."""
        del context
        return "Lower --learning-rate, or change --temperature."
