"""Weights in half precision: all of a network's in one kernel, and their gradients back in one.

Autocast converts each weight where it is used. For small kernels that is as many starts again as there are layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["narrow"]


def narrow(weights: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Weights of float32 in the type that autocast wants on a device; others, or without it, as they are.

    Their gradients come back together, when the last of them is there.

    Args:
        weights: on that device.
        device: where they are used.

    Example:
        >>> weight = torch.ones(2, 3, requires_grad=True)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     (half,) = narrow([weight], weight.device)
        >>> half.sum().backward()
        >>> half.dtype, weight.grad.dtype
        (torch.bfloat16, torch.float32)
    """
    whole = {weight.dtype for weight in weights} == {torch.float32}
    if not (whole and torch.is_autocast_enabled(device.type)):
        return list(weights)
    return list(_Narrow.apply(torch.get_autocast_dtype(device.type), *weights))


class _Narrow(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _converted(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        there = [gradient for gradient in gradients if gradient is not None]
        wide = iter(_converted(there, torch.float32))
        return None, *(None if gradient is None else next(wide) for gradient in gradients)


def _converted(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Copies with the same strides, without which torch would copy one after the other."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)
