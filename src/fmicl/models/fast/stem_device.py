"""Triton kernels of a convolution with few input channels, which gather short patches on the fly."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _patches(
    images, rows, there, height, width, out_height, out_width, stride, padding,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(rows, BK): the patch of each output pixel, with channels last; 0 beyond the border."""
    k = tl.arange(0, BK)
    dy, dx, channel = k // (KERNEL * CHANNELS), (k // CHANNELS) % KERNEL, k % CHANNELS
    n = rows // (out_height * out_width)
    y = (rows // out_width % out_height * stride - padding)[:, None] + dy[None, :]
    x = (rows % out_width * stride - padding)[:, None] + dx[None, :]
    inside = there[:, None] & (k < KERNEL * KERNEL * CHANNELS)[None, :]
    inside &= (y >= 0) & (y < height) & (x >= 0) & (x < width)
    at = ((n[:, None] * height + y) * width + x) * CHANNELS + channel[None, :]
    return tl.load(images + at, mask=inside, other=0.0)


@triton.jit
def convolve(
    images, weight, result, m, outputs, height, width, out_height, out_width, stride, padding,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """result[row, :] = patch(row) @ weight, with weight (BK, outputs)."""
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    there, inside = rows < m, columns < outputs
    patches = _patches(images, rows, there, height, width, out_height, out_width, stride, padding, CHANNELS, KERNEL, BK)
    factor = tl.load(weight + tl.arange(0, BK)[:, None] * outputs + columns[None, :], mask=inside[None, :], other=0.0)
    value = tl.dot(patches, factor, input_precision="ieee")
    at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
    tl.store(result + at, value.to(result.dtype.element_ty), mask=there[:, None] & inside[None, :])


@triton.jit
def weight_gradient(
    images, gradient, partial, m, outputs, chunk, height, width, out_height, out_width, stride, padding,
    CHANNELS: tl.constexpr, KERNEL: tl.constexpr, BK: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """partial[p] = patches^T @ gradient over the rows of chunk p: (BK, outputs)."""
    p = tl.program_id(0)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = columns < outputs
    first = p * chunk
    last = tl.minimum(first + chunk, m)
    total = tl.zeros((BK, BN), tl.float32)
    for start in range(first, last, BM):
        rows = start + tl.arange(0, BM)
        there = rows < last
        patches = _patches(
            images, rows, there, height, width, out_height, out_width, stride, padding, CHANNELS, KERNEL, BK
        )
        at = rows.to(tl.int64)[:, None] * outputs + columns[None, :]
        given = tl.load(gradient + at, mask=there[:, None] & inside[None, :], other=0.0)
        total += tl.dot(tl.trans(patches), given, input_precision="ieee")
    at = (p * BK + tl.arange(0, BK))[:, None] * outputs + columns[None, :]
    tl.store(partial + at, total, mask=inside[None, :])
