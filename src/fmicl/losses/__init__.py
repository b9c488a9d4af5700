"""Contrastive objectives: similarities, pure functions (`fmicl.functional`), loss modules and their registry."""

from fmicl.losses.align_uniform import AlignUniformLoss
from fmicl.losses.barlow_twins import BarlowTwinsLoss
from fmicl.losses.cross_entropy import CrossEntropyLoss
from fmicl.losses.dcl import DCLLoss
from fmicl.losses.dhel import DHELLoss
from fmicl.losses.fmicl import FMICLLoss
from fmicl.losses.icon import IConLoss
from fmicl.losses.infonce import InfoNCELoss
from fmicl.losses.registry import OBJECTIVES, ObjectiveContext, ObjectiveOptions, register_objective
from fmicl.losses.renyi import RenyiLoss
from fmicl.losses.rpc import RPCLoss
from fmicl.losses.siglip import SigLIPLoss
from fmicl.losses.similarities import Cosine, Fitted, Gaussian, Similarity
from fmicl.losses.spectral import SpectralContrastiveLoss
from fmicl.losses.vicreg import VICRegLoss

__all__ = [
    "OBJECTIVES",
    "AlignUniformLoss",
    "BarlowTwinsLoss",
    "Cosine",
    "CrossEntropyLoss",
    "DCLLoss",
    "DHELLoss",
    "FMICLLoss",
    "Fitted",
    "Gaussian",
    "IConLoss",
    "InfoNCELoss",
    "ObjectiveContext",
    "ObjectiveOptions",
    "RPCLoss",
    "RenyiLoss",
    "SigLIPLoss",
    "Similarity",
    "SpectralContrastiveLoss",
    "VICRegLoss",
    "register_objective",
]
