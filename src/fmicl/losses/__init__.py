"""Contrastive objectives: similarities, pure functions (`fmicl.functional`), loss modules and their registry."""

from fmicl.losses.align_uniform import AlignUniformLoss
from fmicl.losses.fmicl import FMICLLoss
from fmicl.losses.infonce import InfoNCELoss
from fmicl.losses.registry import OBJECTIVES, ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.losses.similarities import Cosine, Gaussian, Similarity
from fmicl.losses.spectral import SpectralContrastiveLoss

__all__ = [
    "OBJECTIVES",
    "AlignUniformLoss",
    "Cosine",
    "FMICLLoss",
    "Gaussian",
    "InfoNCELoss",
    "ObjectiveContext",
    "ObjectiveOptions",
    "Similarity",
    "SpectralContrastiveLoss",
    "register_objective",
]
