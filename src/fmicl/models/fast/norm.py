r"""Batch normalisation with what follows it (a residual sum, a ReLU) in as few passes over memory as there can be.

A convolutional network on small images spends as much time on moving activations through memory as on convolving
them. Here a normalisation costs one pass to read the moments and one to apply them, with the residual sum and the ReLU
in the same pass; backward likewise. Where two layers use one activation, their gradients come separately and are added
where they are read; a layer that looks at every second pixel only (a shortcut with a stride) gets those alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fmicl.kernels.triton import processors
from fmicl.models.fast import norm_device as device
from fmicl.models.norms import RunningStatisticsNorm
from fmicl.utils.triton import launch

__all__ = ["normalise"]

_LARGEST_BLOCK = 64  # columns of a tile: 128 bytes in bfloat16
_ROWS = 128  # of a tile that is applied
_SUMMED = 64  # of a tile that is added up
_JOINED = 64  # chunks that are joined at a time
_FORWARD, _BACKWARD = 4, 2  # programs that add up rows on a processor: as many as its registers hold
_COUNTERS: dict[tuple[torch.device, int], Tensor] = {}


def normalise(
    norm: nn.Module, x: Tensor, skip: Tensor | None = None, *, relu: bool = True, every: int = 1
) -> tuple[Tensor, Tensor]:
    r"""relu(norm(x) + skip) in training mode, twice: for the two layers that use it.

    .. math:: y = \mathrm{relu}\Big(w \frac{x - E[x]}{\sqrt{\mathrm{Var}[x] + \epsilon}} + b + s\Big)

    What flows back into either result is added on the way. They are one tensor in memory, but where the second has
    fewer pixels.

    Args:
        norm: BatchNorm1d or BatchNorm2d with weight, bias and running statistics, which move as they always do; or a
            RunningStatisticsNorm, whose mean and variance are those of the batches before, and which has no gradients.
        x: (N, C) or (N, C, H, W), on a CUDA device.
        skip: another of the same shape, the residual; None is none.
        relu: whether negative values become 0.
        every: of rows and of columns of pixels, which ones the second result has: each, each second, ...

    Returns:
        y and y[:, :, ::every, ::every], in the type of x.

    Raises:
        ValueError: a channel has one value or none, and so no variance.
    """
    if x.numel() <= x.shape[1]:
        raise ValueError(f"batch normalisation needs more than one value of a channel, got shape {tuple(x.shape)}")
    layout = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    x = x.contiguous(memory_format=layout)
    skip = None if skip is None else skip.contiguous(memory_format=layout)
    past = isinstance(norm, RunningStatisticsNorm)
    with torch.set_grad_enabled(torch.is_grad_enabled() and not past):
        one, two = _Normalise.apply(
            x, skip, norm.weight, norm.bias, norm.running_mean, norm.running_var, norm.num_batches_tracked,
            norm.momentum, norm.eps, relu, every, past,
        )  # fmt: skip
    return one, two


class _Normalise(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        skip: Tensor | None,
        weight: Tensor,
        bias: Tensor,
        running_mean: Tensor,
        running_var: Tensor,
        batches: Tensor,
        momentum: float,
        eps: float,
        relu: bool,
        every: int,
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
        if past:  # not by the program above, whose parts look at it at different times
            batches.add_(1)
        y = torch.empty_like(x)
        sample = y if every == 1 else torch.empty_like(x[:, :, ::every, ::every], memory_format=torch.channels_last)
        launch(device.apply, (-(-m // _ROWS), columns))(
            x, x if skip is None else skip, y, sample, mean, rstd, weight, bias, m, c, h, w,
            SKIP=skip is not None, RELU=relu, EVERY=every, **applied,
        )  # fmt: skip
        # Without a residual the sign of y follows from x, so y needn't be kept for this.
        ctx.save_for_backward(x, y if skip is not None and relu else None, weight, bias, mean, rstd)
        ctx.relu, ctx.residual, ctx.every = relu, skip is not None, every
        return y, y.detach() if every == 1 else sample

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y, weight, bias, mean, rstd = ctx.saved_tensors
        every = ctx.every
        given = [_like(gradient, x) for gradient in gradients if gradient is not None]
        if not given:
            return (None,) * 12
        if gradients[0] is None and every > 1:  # what the kernels expect to come first is whole
            whole = torch.zeros_like(x)
            whole[:, :, ::every, ::every] = given[0]
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
        # A residual branch gets the gradient as it stands after the ReLU; so does the second pass here, then.
        summed, applied = _tiles(m, c, block, x.element_size())
        h, w = _pixels(x)
        sent = torch.empty_like(x) if ctx.residual and (several or ctx.relu) else None
        launch(device.slopes, (parts, columns))(
            one, two, x, x if y is None else y, x if sent is None else sent, mean, rstd, weight, bias, partial,
            _counters(x.device, columns), sums[0], sums[1], m, c, h, w, chunk,
            TWO=several, RELU=ctx.relu, KEPT=y is not None, SENT=sent is not None, EVERY=every if several else 1,
            BP=_JOINED, **summed,
        )  # fmt: skip
        grad = torch.empty_like(x)
        source = one if sent is None else sent
        launch(device.apply_gradient, (-(-m // _ROWS), columns))(
            source, two, x, grad, mean, rstd, weight, bias, sums[0], sums[1], m, c, h, w,
            TWO=several and sent is None, RELU=ctx.relu and sent is None,
            EVERY=every if several and sent is None else 1, **applied,
        )  # fmt: skip
        skip_grad = (one if sent is None else sent) if ctx.residual else None
        return grad, skip_grad, sums[1], sums[0], *(None,) * 8


def _like(gradient: Tensor, x: Tensor) -> Tensor:
    """A gradient laid out as x is, so that both are walked alike."""
    gradient = gradient.to(x.dtype)
    return gradient.contiguous(memory_format=torch.channels_last) if x.ndim == 4 else gradient.contiguous()


def _pixels(x: Tensor) -> tuple[int, int]:
    return (x.shape[2], x.shape[3]) if x.ndim == 4 else (1, 1)


def _tiles(m: int, c: int, block: int, size: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Shapes of the tiles that are added up, and of those that are applied; whole ones need no mask."""
    rows = _SUMMED if size <= 2 else _SUMMED // 2  # four tiles of four tensors must fit into a processor's memory
    summed = {"WHOLE": c % block == 0 and m % rows == 0, "BM": rows, "BC": block, "num_warps": 4}
    return summed, {"WHOLE": c % block == 0 and m % _ROWS == 0, "BM": _ROWS, "BC": block, "num_warps": 8}


def _block(c: int) -> int:
    return min(_LARGEST_BLOCK, max(16, 1 << (c - 1).bit_length()))


def _chunks(m: int, c: int, block: int, place: torch.device, on_each: int) -> tuple[int, int]:
    """Rows that one program adds up, whole tiles of them, and how many such chunks there are."""
    programs = max(1, on_each * processors(place) // -(-c // block))
    chunk = -(-m // (programs * _SUMMED)) * _SUMMED
    return chunk, -(-m // chunk)


def _counters(place: torch.device, number: int) -> Tensor:
    """Zeros by which programs know that they are the last; whoever is puts its own back to 0.

    They are kept for good: a recorded step goes on using those that it was recorded with.
    """
    size = max(256, 1 << (number - 1).bit_length())
    if (place, size) not in _COUNTERS:
        _COUNTERS[place, size] = torch.zeros(size, dtype=torch.int32, device=place)
    return _COUNTERS[place, size]
