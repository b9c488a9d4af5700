"""Methods of contrastive learning: which embeddings are pairs and which are negatives.

Those without a loss or critic of their own take every objective. On images, every method takes a second term, rotation
prediction (:class:`Rotation`). A new method is one file with a `register_method`; see CONTRIBUTING.md.
"""

from fmicl.methods.base import Comparison, Method, MomentumMethod, PredictionMethod
from fmicl.methods.byol import BYOL
from fmicl.methods.cpc import CPC
from fmicl.methods.dim import DIM
from fmicl.methods.moco import MoCo
from fmicl.methods.mocov3 import MoCoV3
from fmicl.methods.registry import METHODS, MethodOptions, MomentumOptions, OwnLoss, register_method
from fmicl.methods.rotation import Rotation
from fmicl.methods.simclr import SimCLR
from fmicl.methods.swav import SwAV

__all__ = [
    "BYOL",
    "CPC",
    "DIM",
    "METHODS",
    "Comparison",
    "Method",
    "MethodOptions",
    "MoCo",
    "MoCoV3",
    "MomentumMethod",
    "MomentumOptions",
    "OwnLoss",
    "PredictionMethod",
    "Rotation",
    "SimCLR",
    "SwAV",
    "register_method",
]
