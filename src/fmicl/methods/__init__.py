"""Which embeddings are pairs, and who is a negative: a LightningModule for each method.

    simclr    all views of a batch through one encoder; negatives are the other samples of the batch
    moco      keys come from a momentum encoder; negatives are a queue of past keys
    mocov3    momentum encoder, a predictor on the side of the gradient, and both views take both roles

Each takes every objective, for an objective is only something that is called with two batches of embeddings. On images,
each takes a second term too, by which features tell how far an image was turned (:class:`Rotation`).
"""

from __future__ import annotations

import difflib

from fmicl.methods.base import Method, Optimisation, parameter_groups, warmup_cosine, warmup_linear
from fmicl.methods.moco import MoCo
from fmicl.methods.mocov3 import MoCoV3
from fmicl.methods.rotation import Rotation
from fmicl.methods.simclr import SimCLR

__all__ = [
    "METHODS",
    "Method",
    "MoCo",
    "MoCoV3",
    "Optimisation",
    "Rotation",
    "SimCLR",
    "method_class",
    "parameter_groups",
    "warmup_cosine",
    "warmup_linear",
]

METHODS: dict[str, type[Method]] = {"simclr": SimCLR, "moco": MoCo, "mocov3": MoCoV3}


def method_class(name: str) -> type[Method]:
    """The class of a method.

    Raises:
        ValueError: there is none of this name; the message names the near ones.

    Example:
        >>> method_class("moco").__name__
        'MoCo'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=3)
        hint = f"did you mean {' or '.join(near)}?" if near else f"there are: {', '.join(METHODS)}"
        raise ValueError(f"there is no method {name!r}; {hint}")
    return METHODS[name]
