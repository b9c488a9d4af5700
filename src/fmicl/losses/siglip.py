"""SigLIP: the pairwise sigmoid loss with learned scale and bias (Zhai et al., 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.utils.options import option
from fmicl.utils.validation import require_positive


class SigLIPLoss(ContrastiveLoss):
    """SigLIP: each pair of views is classified as one sample or two. See `functional.siglip_loss`.

    The scale t = e^`log_scale` and the bias are parameters of this module: give them to the optimiser too.

    Related: it is `FMICLLoss("js", alpha=N - 1, gamma=t / 2, mu=e^(bias + t), negatives="cross")` plus N log 2.

    Args:
        scale: t at the start.
        bias: at the start.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> loss = fmicl.SigLIPLoss(scale=3.0, bias=-2.0)
        >>> js = fmicl.FMICLLoss("js", alpha=8 - 1, gamma=3.0 / 2, mu=math.exp(-2.0 + 3.0), negatives="cross")
        >>> torch.isclose(loss(x, y), js(x, y) + 8 * math.log(2))
        tensor(True)
        >>> sorted(dict(loss.named_parameters()))
        ['bias', 'log_scale']
    """

    def __init__(self, scale: float = 10.0, bias: float = -10.0, **options: Unpack[ComputeOptions]) -> None:
        super().__init__("cross", **options)
        require_positive("scale", scale)
        if not math.isfinite(bias):
            raise ValueError(f"bias must be a finite number, got bias={bias!r}")
        self.log_scale = nn.Parameter(torch.tensor(math.log(scale)))
        self.bias = nn.Parameter(torch.tensor(float(bias)))

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d); explicit negatives (M, d) replace the other second views."""
        scale = self.log_scale.exp()
        return functional.siglip_loss(x, y, scale=scale, bias=self.bias, negatives=negatives, **self.options)

    def settings(self) -> dict[str, Any]:
        """The learned scale and bias, as numbers."""
        return {"scale": float(self.log_scale.detach().exp()), "bias": float(self.bias.detach())}


@register_objective("siglip", summary="SigLIP: JS f-MICL with learned gamma and mu (Zhai et al., 2023).")
@dataclass(frozen=True)
class SigLIPOptions(ObjectiveOptions):
    """Options of SigLIP."""

    usual_negatives = "cross"  # the other second views: what the loss is about
    collapse_hint = "Lower --learning-rate, or change --siglip-scale or --siglip-bias."

    siglip_scale: float = option(10.0, "Scale of the inner product at the start; it is learned.", above=0)
    siglip_bias: float = option(-10.0, "Bias of the inner product at the start; it is learned.")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return SigLIPLoss(self.siglip_scale, self.siglip_bias, **self.compute_options(context))

    def why_unused(self) -> dict[str, str]:
        """Negatives are always the other second views."""
        return {"negatives": "siglip's are always the other second views"}
