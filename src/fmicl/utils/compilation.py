"""What torch.compile leaves as it is. Import it where that compiles: this loads the compiler, which takes a second."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

__all__ = ["as_written"]

P = ParamSpec("P")
R = TypeVar("R")


@torch.compiler.disable(  # type: ignore[untyped-decorator]
    reason="of fmicl's losses torch.compile can trace those with kernel='reference', and shift='optimal' only with KL; "
    "the others run as they are written, between two graphs. If there is to be one (fullgraph=True), take these, or "
    "compile the model and leave the loss outside"
)
def as_written(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """What a function gives, for a caller that is compiled while the function is not.

    Example:
        >>> torch.compile(lambda x: 1 + as_written(float, x), backend="eager")(torch.ones(()))
        2.0
    """
    return function(*args, **kwargs)
