r"""Contrastive learning with any f-divergence (f-MICL).

Three lines replace the InfoNCE loss of a training loop:

    import fmicl
    loss = fmicl.FMICLLoss("js", alpha=40.0, gamma=1.0)
    loss(x, y).backward()          # x, y: (N, d) embeddings of two views of the same N samples

Names are loaded when they are first used, so that `fmicl --help` answers without waiting for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmicl import information as information
    from fmicl import kernels as kernels
    from fmicl import losses as losses
    from fmicl import theory as theory
    from fmicl.config import recipe as recipe
    from fmicl.config import register_recipe as register_recipe
    from fmicl.data import register_dataset as register_dataset
    from fmicl.divergences import Divergence as Divergence
    from fmicl.divergences import divergence as divergence
    from fmicl.divergences import list_divergences as list_divergences
    from fmicl.divergences import register_divergence as register_divergence
    from fmicl.evaluation import sts as sts
    from fmicl.losses import AlignUniformLoss as AlignUniformLoss
    from fmicl.losses import BarlowTwinsLoss as BarlowTwinsLoss
    from fmicl.losses import Cosine as Cosine
    from fmicl.losses import DCLLoss as DCLLoss
    from fmicl.losses import DHELLoss as DHELLoss
    from fmicl.losses import FMICLLoss as FMICLLoss
    from fmicl.losses import Gaussian as Gaussian
    from fmicl.losses import IConLoss as IConLoss
    from fmicl.losses import InfoNCELoss as InfoNCELoss
    from fmicl.losses import RenyiLoss as RenyiLoss
    from fmicl.losses import RPCLoss as RPCLoss
    from fmicl.losses import SigLIPLoss as SigLIPLoss
    from fmicl.losses import Similarity as Similarity
    from fmicl.losses import SpectralContrastiveLoss as SpectralContrastiveLoss
    from fmicl.losses import VICRegLoss as VICRegLoss
    from fmicl.losses import functional as functional
    from fmicl.losses import register_objective as register_objective
    from fmicl.methods import register_method as register_method
    from fmicl.runs.export import load_encoder as load_encoder
    from fmicl.training.pipeline import train as train

__version__ = "0.1.0"

_MODULES = {
    "functional": "losses.functional",
    "information": "information",
    "kernels": "kernels",
    "losses": "losses",
    "sts": "evaluation.sts",
    "theory": "theory",
}
_HOMES = {
    "AlignUniformLoss": "losses",
    "Cosine": "losses",
    "Divergence": "divergences",
    "FMICLLoss": "losses",
    "Gaussian": "losses",
    "InfoNCELoss": "losses",
    "BarlowTwinsLoss": "losses",
    "DCLLoss": "losses",
    "DHELLoss": "losses",
    "IConLoss": "losses",
    "RenyiLoss": "losses",
    "RPCLoss": "losses",
    "VICRegLoss": "losses",
    "SigLIPLoss": "losses",
    "Similarity": "losses",
    "SpectralContrastiveLoss": "losses",
    "divergence": "divergences",
    "list_divergences": "divergences",
    "load_encoder": "runs.export",
    "recipe": "config",
    "register_dataset": "data",
    "register_divergence": "divergences",
    "register_method": "methods",
    "register_objective": "losses",
    "register_recipe": "config",
    "train": "training.pipeline",
}

__all__ = [*_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        try:
            value = getattr(import_module(f"fmicl.{_HOMES[name]}"), name)
        except ModuleNotFoundError as error:
            from fmicl.utils.extras import missing_package

            found = missing_package(error)
            if found is None:
                raise
            package, how = found
            raise ImportError(f"fmicl.{name} needs the package {package}, which is not there: {how}") from error
    elif name in _MODULES:
        value = import_module(f"fmicl.{_MODULES[name]}")
    else:
        raise AttributeError(f"module 'fmicl' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """The public names alone: completion should not offer what this module imports."""
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])
