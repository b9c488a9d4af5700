"""Numerically stable helpers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["exact_matmul", "normalise", "to_float32"]

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
        ...     torch.backends.mkldnn.matmul.fp32_precision
        'ieee'
        >>> torch.backends.mkldnn.matmul.fp32_precision
        'bf16'
        >>> torch.set_float32_matmul_precision("highest")
    """
    mixed = torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)
    backend: Any = torch.backends.mkldnn if device.type == "cpu" else torch.backends.cuda
    kind = "cpu" if device.type == "cpu" else "cuda"
    with _LOCK:
        number, before = _ACTIVE.get(kind, (0, backend.matmul.fp32_precision))
        _ACTIVE[kind] = number + 1, before
        backend.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False) if mixed else nullcontext():
            yield
    finally:
        with _LOCK:
            number, before = _ACTIVE.pop(kind)
            if number > 1:
                _ACTIVE[kind] = number - 1, before
            else:
                # The value may come from a more general setting: written here, it would outlast a change of that one.
                backend.matmul.fp32_precision = "none"
                if backend.matmul.fp32_precision != before:
                    backend.matmul.fp32_precision = before


def normalise(x: Tensor) -> Tensor:
    """Scale each row of x to unit length. A zero row stays zero, with a finite gradient.

    Example:
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    # divide by the largest entry first: squares of very small or large entries leave the type's range
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)


def to_float32(x: Tensor) -> Tensor:
    """Convert half precision to float32; float64 stays.

    Example:
        >>> to_float32(torch.ones(1, dtype=torch.bfloat16)).dtype, to_float32(torch.ones(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
