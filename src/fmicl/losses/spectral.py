"""The spectral contrastive loss of HaoChen et al. (2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from fmicl.losses import functional
from fmicl.losses.base import ContrastiveLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import MuOptions, ObjectiveContext, register_objective
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.validation import Negatives


class SpectralContrastiveLoss(ContrastiveLoss):
    """The spectral contrastive loss of HaoChen et al. See `functional.spectral_contrastive_loss`.

    Related: `FMICLLoss("pearson")` is the same with a Gaussian kernel in place of the inner product.

    Args:
        mu: squared radius of the sphere that the embeddings are scaled to.
        negatives: "cross" (theirs), "anchor" or "both"; pass explicit ones to the call.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.SpectralContrastiveLoss(mu=3.0)(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.spectral_contrastive_loss)
    arguments = ("mu", "negatives")

    def __init__(self, mu: Scalar = 1.0, negatives: Negatives = "cross", **options: Unpack[ComputeOptions]) -> None:
        super().__init__(negatives, **options)
        require_positive_scalar("mu", mu)
        self.mu = mu


@register_objective("spectral", summary="Spectral contrastive loss (HaoChen et al., 2021).")
@dataclass(frozen=True)
class SpectralOptions(MuOptions):
    """Options of the spectral contrastive loss."""

    usual_negatives = "cross"  # the other second views, as in its paper
    collapse_hint = "Change --mu, or lower --learning-rate."

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.mu == "normalised":
            raise ValueError("mu='normalised' is a setting of the objective fmicl; spectral takes a number")

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module."""
        return SpectralContrastiveLoss(float(self.mu), **self.common(context))
