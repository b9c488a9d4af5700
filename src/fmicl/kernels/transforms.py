"""What goes through a computation: torch.func, several gradients at once, or the recording of a CUDA graph."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["in_transforms", "is_batched", "recording"]


def in_transforms() -> bool:
    """Whether it is called within torch.func's grad, vmap and the like, for which torch has no public name.

    Example:
        >>> in_transforms(), float(torch.func.grad(lambda x: x if in_transforms() else -x)(torch.ones(())))
        (False, 1.0)
    """
    return bool(torch._C._are_functorch_transforms_active())


def is_batched(gradient: Tensor) -> bool:
    """Whether a gradient stands for several, that go through a graph at once.

    Example:
        >>> is_batched(torch.ones(2)), bool(torch.func.vmap(lambda x: x + is_batched(x))(torch.zeros(2)).all())
        (False, True)
    """
    if torch.compiler.is_compiling():
        return False
    # torch has two kinds of them, and no public name for either
    keys, parse = torch._C._dispatch_keys(gradient), torch._C._parse_dispatch_key
    return any(keys.has(kind) for kind in (parse("Batched"), parse("FuncTorchBatched")) if kind is not None)


def recording(x: Tensor) -> bool:
    """Whether what is done to x now goes into a CUDA graph, so that no value can be looked at.

    Example:
        >>> recording(torch.zeros(1))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
