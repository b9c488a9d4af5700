"""Eager execution within torch.compile.

Import this module only while torch.compile traces: it loads the compiler, which takes a second.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="this loss depends on parameters of its divergence or similarity, or on one that was made within the "
    "compiled function, so it runs eagerly, between two graphs. For a single graph (fullgraph=True) make the "
    "divergence outside, take kernel='reference', which is traced, or compile the model and leave the loss outside"
)
def run_eager(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Call a function that torch.compile must not trace, from code that it compiles.

    Example:
        >>> torch.compile(lambda x: 1 + run_eager(float, x), backend="eager")(torch.ones(()))
        2.0
        >>> torch.compiler.reset()
    """
    return function(*args, **kwargs)
