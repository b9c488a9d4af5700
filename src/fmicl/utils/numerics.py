"""Arithmetic that keeps its digits, for whoever computes with embeddings."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

__all__ = ["exact_matmul", "normalise", "widened"]

_LOCK = threading.Lock()
_WITHIN: dict[str, tuple[int, str]] = {}  # by kind of device: how many are within, and what was set before the first


@contextmanager
def exact_matmul(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products inside, whatever training has set: no autocast, and neither TF32 nor bfloat16.

    Only flags are set and put back, so it may stand inside a CUDA graph that is being recorded. The flags are the
    process's: where several threads are within, the last one to leave puts them back.

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
        number, before = _WITHIN.get(kind, (0, backend.matmul.fp32_precision))
        _WITHIN[kind] = number + 1, before
        backend.matmul.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False) if mixed else nullcontext():
            yield
    finally:
        with _LOCK:
            number, before = _WITHIN.pop(kind)
            if number > 1:
                _WITHIN[kind] = number - 1, before
            else:
                # What is read may come from a setting above it: written here, it would outlast a change of that one.
                backend.matmul.fp32_precision = "none"
                if backend.matmul.fp32_precision != before:
                    backend.matmul.fp32_precision = before


def normalise(x: Tensor) -> Tensor:
    """Rows of x divided by their length. A zero row stays zero, with a finite gradient.

    Example:
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    # by the largest entry first: squares of very small or large ones leave the type
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)


def widened(x: Tensor) -> Tensor:
    """In float32 at least.

    Example:
        >>> widened(torch.ones(1, dtype=torch.bfloat16)).dtype, widened(torch.ones(1, dtype=torch.float64)).dtype
        (torch.float32, torch.float64)
    """
    return x.to(torch.promote_types(x.dtype, torch.float32))
