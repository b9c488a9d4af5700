"""Decoupled hyperspherical energy loss (Koromilas et al., 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import Tensor, nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, TemperatureOptions, register_objective
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.options import option


class DHELLoss(ContrastiveLoss):
    """DHEL: alignment of positives, and the energy of each view by itself. See `functional.dhel_loss`.

    Related: without the second views' energy it is `DCLLoss` with the other anchors as negatives, and
    `FMICLLoss("kl", shift="optimal")` is the same with the mean over anchors inside of the logarithm.

    Args:
        temperature: theirs is 0.3.
        both_views: add the energy of the second views, as the authors do.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.DHELLoss(0.3)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    arguments = ("temperature", "both_views")

    def __init__(self, temperature: Scalar = 0.3, both_views: bool = True, **options: Unpack[ComputeOptions]) -> None:
        super().__init__("anchor", **options)
        require_positive_scalar("temperature", temperature)
        self.temperature, self.both_views = temperature, both_views

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d); explicit negatives (M, d) replace the energy of the views."""
        return functional.dhel_loss(x, y, negatives=negatives, **self.settings(), **self.options)


@register_objective(
    "dhel", summary="Decoupled hyperspherical energy: negatives of one's own view (Koromilas et al., 2024)."
)
@dataclass(frozen=True)
class DHELOptions(TemperatureOptions):
    """Options of DHEL."""

    usual_negatives = "anchor"  # those of the anchor's own view: what the loss is about

    both_views: bool = option(True, "Add the energy of the second views, as the authors do.")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return DHELLoss(self.temperature, self.both_views, **self.compute_options(context))

    def why_unused(self) -> dict[str, str]:
        """Negatives are always those of one view."""
        return {"negatives": "dhel's are always those of the anchor's own view"}
