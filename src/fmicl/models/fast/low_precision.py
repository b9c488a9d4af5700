"""Cast of weights to autocast's dtype: all of a network in one kernel, and their gradients back in one.

Autocast casts each weight where it is used, which launches one more kernel for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def cast_weights(weights: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Float32 weights in autocast's dtype for a device; weights of other dtypes, or without autocast, unchanged.

    Their gradients are cast back together, once the last one has arrived.

    Args:
        weights: on that device.
        device: where they are used.

    Example:
        >>> weight = torch.ones(2, 3, requires_grad=True)
        >>> with torch.autocast("cpu", torch.bfloat16):
        ...     (half,) = cast_weights([weight], weight.device)
        >>> half.sum().backward()
        >>> half.dtype, weight.grad.dtype
        (torch.bfloat16, torch.float32)
    """
    all_float32 = {weight.dtype for weight in weights} == {torch.float32}
    if not (all_float32 and torch.is_autocast_enabled(device.type)):
        return list(weights)
    return list(_CastWeights.apply(torch.get_autocast_dtype(device.type), *weights))


class _CastWeights(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _cast(weights, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ARG004
        cast = iter(_cast([gradient for gradient in gradients if gradient is not None], torch.float32))
        return None, *(None if gradient is None else next(cast) for gradient in gradients)


def _cast(tensors: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Copies with the same strides, without which torch would copy them one by one."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    if copies:
        torch._foreach_copy_(copies, list(tensors))
    return tuple(copies)
