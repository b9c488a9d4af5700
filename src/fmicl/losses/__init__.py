"""Contrastive objectives: similarities, pure functions (`fmicl.functional`) and modules."""

from fmicl.losses.modules import AlignUniformLoss, FMICLLoss, InfoNCELoss, SpectralContrastiveLoss
from fmicl.losses.similarities import Cosine, Gaussian, Similarity

__all__ = [
    "AlignUniformLoss",
    "Cosine",
    "FMICLLoss",
    "Gaussian",
    "InfoNCELoss",
    "Similarity",
    "SpectralContrastiveLoss",
]
