r"""Fused batch normalisation, residual sum and ReLU, with as few passes over memory as possible.

A convolutional network on small images spends as much time on memory traffic of activations as on convolutions. Here a
normalisation takes one pass for the moments and one that also applies the residual sum and the ReLU; backward likewise.
Where two layers use an activation, their gradients arrive separately and are added when they are read; a strided
shortcut gets only the pixels that it reads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmicl.models.fast import norm_device as device
from fmicl.models.norms import RunningStatisticsNorm
from fmicl.utils.triton import launch, multiprocessors

_LARGEST_BLOCK = 64  # columns of a tile: 128 bytes in bfloat16
_ROWS = 128  # of a tile in elementwise passes
_SUMMED = 64  # rows of a tile in reductions
_JOINED = 64  # chunks that are combined at a time
_FORWARD, _BACKWARD = 4, 2  # programs of a reduction per multiprocessor: as many as its registers allow
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def fused_batch_norm(
    norm: nn.Module, x: Tensor, residual: Tensor | None = None, *, relu: bool = True, stride: int = 1
) -> tuple[Tensor, Tensor]:
    r"""relu(norm(x) + residual) in training mode, returned twice: for the two layers that use it.

    .. math:: y = \mathrm{relu}\Big(w \frac{x - E[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} + b + s\Big)

    The backward pass adds the gradients of both results. With stride 1 they share their memory.

    Args:
        norm: BatchNorm1d or BatchNorm2d with weight, bias and running statistics, which are updated as usual; or a
            RunningStatisticsNorm, which normalises by the statistics of earlier batches and has no gradients.
        x: (N, C) or (N, C, H, W), on a CUDA device.
        residual: of the same shape, or None.
        relu: whether to apply the ReLU.
        stride: of the pixels of the second result.

    Returns:
        y and y[:, :, ::stride, ::stride], in the dtype of x.

    Raises:
        ValueError: a channel has fewer than two values, and so no variance.
    """
    if x.numel() <= x.shape[1]:
        raise ValueError(f"batch normalisation needs more than one value per channel, got shape {tuple(x.shape)}")
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    residual = None if residual is None else residual.contiguous(memory_format=layout)
    past = isinstance(norm, RunningStatisticsNorm)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not past):
        whole, strided = _FusedBatchNorm.apply(
            x, residual, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked,
            norm.momentum, norm.eps, relu, stride, past,
        )  # fmt: skip
    return whole, strided


class _FusedBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
        stride: int,
        past: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        c = x.shape[1]
        m = x.numel() // c
        block = _block(c)
        chunk, parts = _chunks(m, c, block, x.device, _FORWARD)
        partial = torch.empty(2, parts, c, dtype=torch.float32, device=x.device)
        mean, rstd = torch.empty(2, c, dtype=torch.float32, device=x.device).unbind()
        columns = -(-c // block)
        summed, applied = _tiles(m, c, block, x.element_size())
        h, w = _pixels(x)
        launch(device.moments, (parts, columns))(
            x, partial, _counters(x.device, columns), mean, rstd, running_mean, running_var, batches,
            m, c, chunk, momentum, eps, PAST=past, BP=_JOINED, **summed,
        )  # fmt: skip
        if past:  # not in the kernel, whose programs read it at different times
            batches.add_(1)
        y = torch.empty_like(x)
        strided = y if stride == 1 else torch.empty_like(x[:, :, ::stride, ::stride], memory_format=torch.channels_last)
        launch(device.apply, (-(-m // _ROWS), columns))(
            x, x if residual is None else residual, y, strided, mean, rstd, weight, bias, m, c, h, w,
            SKIP=residual is not None, RELU=relu, EVERY=stride, **applied,
        )  # fmt: skip
        # Without a residual the sign of y follows from x, so y isn't saved.
        ctx.save_for_backward(x, y if residual is not None and relu else None, weight, bias, mean, rstd)
        ctx.relu, ctx.residual, ctx.stride = relu, residual is not None, stride
        return y, y.detach() if stride == 1 else strided

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        stride = ctx.stride
        given = [_like(gradient, x) for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 12
        if gradients[0] is None and stride > 1:  # the kernels expect the first gradient to have all pixels
            whole = torch.zeros_like(x)
            whole[:, :, ::stride, ::stride] = given[0]
            given = [whole]
        one, two = given[0], given[-1]
        c = x.shape[1]
        m = x.numel() // c
        block = _block(c)
        columns = -(-c // block)
        chunk, parts = _chunks(m, c, block, x.device, _BACKWARD)
        partial = torch.empty(2, parts, c, dtype=torch.float32, device=x.device)
        sums = torch.empty(2, c, dtype=torch.float32, device=x.device)
        several = len(given) > 1
        # The residual's gradient is that behind the ReLU; where it is written, the second pass reads it too.
        summed, applied = _tiles(m, c, block, x.element_size())
        h, w = _pixels(x)
        sent = torch.empty_like(x) if ctx.residual and (several or ctx.relu) else None
        launch(device.slopes, (parts, columns))(
            one, two, x, x if y is None else y, x if sent is None else sent, mean, rstd, weight, bias, partial,
            _counters(x.device, columns), sums[0], sums[1], m, c, h, w, chunk,
            TWO=several, RELU=ctx.relu, KEPT=y is not None, SENT=sent is not None, EVERY=stride if several else 1,
            BP=_JOINED, **summed,
        )  # fmt: skip
        grad = torch.empty_like(x)
        source = one if sent is None else sent
        launch(device.apply_gradient, (-(-m // _ROWS), columns))(
            source, two, x, grad, mean, rstd, weight, bias, sums[0], sums[1], m, c, h, w,
            TWO=several and sent is None, RELU=ctx.relu and sent is None,
            EVERY=stride if several and sent is None else 1, **applied,
        )  # fmt: skip
        return grad, source if ctx.residual else None, sums[1], sums[0], *(None,) * 8


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient in the dtype and memory layout of x."""
    gradient = gradient.to(x.dtype)
    return gradient.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else gradient.contiguous()


def _pixels(x: Tensor) -> tuple[int, int]:
    return (x.shape[2], x.shape[3]) if x.ndim == 4 else (1, 1)


def _tiles(m: int, c: int, block: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Tiles of the reductions and of the elementwise passes; WHOLE ones need no mask."""
    rows = _SUMMED if size <= 2 else _SUMMED // 2  # four stages of four tensors must fit in shared memory
    summed = {"WHOLE": c % block == 0 and m % rows == 0, "BM": rows, "BC": block, "num_warps": 4}
    return summed, {"WHOLE": c % block == 0 and m % _ROWS == 0, "BM": _ROWS, "BC": block, "num_warps": 8}


def _block(c: int) -> int:
    return min(_LARGEST_BLOCK, max(16, 1 << (c - 1).bit_length()))


def _chunks(m: int, c: int, block: int, place: torch.device, on_each: int) -> tuple[int, int]:
    """Rows that one program reduces, a multiple of its tile, and the number of such chunks."""
    programs = max(1, on_each * multiprocessors(place) // -(-c // block))
    chunk = -(-m // (programs * _SUMMED)) * _SUMMED
    return chunk, -(-m // chunk)


def _counters(place: torch.device, number: int) -> Tensor:
    """Zeros with which the programs of a reduction find out which of them is last; that one resets its counter.

    They are never freed or replaced: captured CUDA graphs keep using them.
    """
    size = max(256, 1 << (number - 1).bit_length())
    if (place, size) not in _COUNTERS:
        _COUNTERS[place, size] = torch.zeros(size, dtype=torch.int32, device=place)
    return _COUNTERS[place, size]
