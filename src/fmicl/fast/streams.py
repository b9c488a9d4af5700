"""Convolutions whose weight gradients are computed beside everything else.

In a backward pass only the gradient of a layer's input is waited for. Those of the weights, a third of the work, have
until the end: on a stream of their own they fill the moments in which the main one starts a kernel or ends it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["convolve", "join"]

_SIDES: dict[torch.device, torch.cuda.Stream] = {}


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """What conv(x) gives, in the type that autocast asks for; `join` must come before it in the network.

    Args:
        conv: without bias and groups.
        x: (N, C, H, W), on a CUDA device.
    """
    dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else x.dtype
    result: Tensor = _Convolve.apply(x.to(dtype), conv.weight, conv.stride, conv.padding)
    return result


def join(x: Tensor) -> Tensor:
    """x itself; on the way back, what was computed beside is waited for here."""
    joined: Tensor = _Join.apply(x)
    return joined


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        narrow = weight.to(x.dtype)
        ctx.save_for_backward(x, narrow)
        ctx.settings = (stride, padding, weight.dtype)
        return F.conv2d(x, narrow, stride=stride, padding=padding)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        x, weight = ctx.saved_tensors
        stride, padding, dtype = ctx.settings
        gradient = gradients[0].contiguous(memory_format=torch.channels_last)

        def half(of_input: bool) -> Tensor:
            found: Tensor = torch.ops.aten.convolution_backward(
                gradient, x, weight, None, stride, padding, (1, 1), False, (0, 0), 1, (of_input, not of_input, False)
            )[0 if of_input else 1]
            return found

        by_weight = None
        if ctx.needs_input_grad[1]:
            side = _side(x.device)
            side.wait_stream(torch.cuda.current_stream(x.device))
            with torch.cuda.stream(side):
                by_weight = half(of_input=False).to(dtype)
            for tensor in (gradient, x, weight):  # not to be given away while the other stream reads them
                tensor.record_stream(side)
        return half(of_input=True) if ctx.needs_input_grad[0] else None, by_weight, None, None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # noqa: ARG004
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # noqa: ARG004
        device = gradients[0].device
        torch.cuda.current_stream(device).wait_stream(_side(device))
        return gradients[0]


def _side(device: torch.device) -> torch.cuda.Stream:
    if device not in _SIDES:
        _SIDES[device] = torch.cuda.Stream(device)
    return _SIDES[device]
