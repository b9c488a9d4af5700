"""Numerics: precision of matrix products, normalisation to unit length, floating-point types."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

PER_DEVICE = hasattr(torch.backends, "fp32_precision")
"""Whether each kind of device has its own precision of float32 products, as since torch 2.9."""
EXACT = "ieee" if PER_DEVICE else "highest"
"""What torch calls full precision."""

_LOCK = threading.Lock()
_ACTIVE: dict[str, tuple[int, str]] = {}  # by kind of device: active contexts, and the setting before the first


@contextmanager
def exact_matmul(device: torch.device) -> Iterator[None]:
    """Context of full float32 matrix products, whatever training has set: no autocast, TF32 or bfloat16.

    It only sets flags and restores them, so it works while a CUDA graph is captured. The flags belong to the process:
    of several threads, the last one to leave restores them.

    Example:
        >>> torch.set_float32_matmul_precision("medium")
        >>> with exact_matmul(torch.device("cpu")):
        ...     matmul_precision("cpu") == EXACT
        True
        >>> matmul_precision("cpu") == EXACT
        False
        >>> torch.set_float32_matmul_precision("highest")
    """
    kind = ("cpu" if device.type == "cpu" else "cuda") if PER_DEVICE else "all"
    with _LOCK:
        number, before = _ACTIVE.get(kind, (0, matmul_precision(kind)))
        _ACTIVE[kind] = number + 1, before
        _set_matmul_precision(kind, EXACT)
    try:
        with torch.autocast(device.type, enabled=False) if autocast_enabled(device.type) else nullcontext():
            yield
    finally:
        with _LOCK:
            number, before = _ACTIVE.pop(kind)
            if number > 1:
                _ACTIVE[kind] = number - 1, before
            else:
                if PER_DEVICE:
                    # The value may come from a more general setting: written here, it would outlast a change of it.
                    _set_matmul_precision(kind, "none")
                if matmul_precision(kind) != before:
                    _set_matmul_precision(kind, before)


def matmul_precision(kind: str) -> str:
    """Precision of float32 products on a kind of device, "cpu" or "cuda", in torch's words."""
    return str(_matmul(kind).fp32_precision) if PER_DEVICE else torch.get_float32_matmul_precision()


def _set_matmul_precision(kind: str, precision: str) -> None:
    if PER_DEVICE:
        _matmul(kind).fp32_precision = precision
    else:
        torch.set_float32_matmul_precision(precision)


def _matmul(kind: str) -> Any:
    backend: Any = torch.backends.mkldnn if kind == "cpu" else torch.backends.cuda
    return backend.matmul


def autocast_enabled(device: str) -> bool:
    """Whether autocast is on for a kind of device; some kinds have none.

    Example:
        >>> autocast_enabled("cpu"), autocast_enabled("meta")
        (False, False)
    """
    # torch.compile can't trace is_autocast_available before torch 2.12
    available = torch.compiler.is_dynamo_compiling() or torch.amp.is_autocast_available(device)
    return available and torch.is_autocast_enabled(device)


def normalise(x: Tensor) -> Tensor:
    """Scale each row of x to unit length. A zero row stays zero, with a finite gradient.

    Example:
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    return unit_rows(x)[0]


def unit_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`normalise`, and which rows are zero.

    Example:
        >>> unit_rows(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))[1]
        tensor([False,  True])
    """
    # divide by the largest entry first: squares of very small or large entries leave the type's range
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    zero = largest == 0
    x = x / torch.where(zero, 1.0, largest)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0), zero.squeeze(-1)


def to_float64(x: Tensor) -> Tensor:
    """Convert to float64, unless the device has none (MPS).

    Example:
        >>> to_float64(torch.ones(1)).dtype
        torch.float64
    """
    return x if x.device.type == "mps" else x.double()


def to_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32; float64 stays.

    Example:
        >>> to_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_float32(torch.ones(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
