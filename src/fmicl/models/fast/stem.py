"""Stem convolution: the first layer of a network on images, with few input channels.

cuDNN's tensor-core algorithms need more than three channels: it took longer for this layer than for one with twenty
times the work. Here each program gathers its patches (27 numbers for 3 x 3 pixels) and computes one small matrix
product, so that the time is that of writing the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.models.fast import stem_device as device
from fmicl.utils.triton import launch, multiprocessors

_LONGEST_PATCH = 64


def is_supported_stem(conv: nn.Conv2d, images: Tensor) -> bool:
    """Whether `convolve_stem` supports the convolution: short patches, and images without a gradient.

    Pixels are indexed with 32 bits, so larger batches are not supported.
    """
    size = conv.kernel_size[0]
    square = conv.kernel_size == (size, size) and conv.stride[0] == conv.stride[1]
    square = square and isinstance(conv.padding, tuple) and conv.padding[0] == conv.padding[1]
    plain = conv.groups == 1 and conv.dilation == (1, 1) and conv.bias is None and conv.padding_mode == "zeros"
    short = conv.in_channels * size**2 <= _LONGEST_PATCH and images.numel() < 2**31
    return square and plain and short and not images.requires_grad


def convolve_stem(conv: nn.Conv2d, images: Tensor) -> Tensor:
    """conv(images) in autocast's dtype.

    Args:
        conv: a convolution such that `is_supported_stem`.
        images: (N, C, H, W), on a CUDA device.

    Returns:
        (N, outputs, H', W'), with the channels last in memory.
    """
    dtype = images.dtype
    if torch.is_autocast_enabled(images.device.type):
        dtype = torch.get_autocast_dtype(images.device.type)
    # In two steps: `to` with a memory format doesn't copy a slice of larger images, whose strides are only in order.
    images = images.to(dtype).contiguous(memory_format=torch.channels_last)
    result: Tensor = _Convolve.apply(images, conv.weight, conv.stride[0], conv.padding[0])
    return result


class _Convolve(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: int, padding: int) -> Tensor:
        n, channels, height, width = images.shape
        outputs, _, kernel, _ = weight.shape
        out = [(side + 2 * padding - kernel) // stride + 1 for side in (height, width)]
        m, length = n * out[0] * out[1], kernel * kernel * channels
        depth = max(16, 1 << (length - 1).bit_length())
        # (kernel, kernel, channels, outputs), the layout of the patches
        factor = F.pad(weight.permute(2, 3, 1, 0).reshape(length, outputs), (0, 0, 0, depth - length))
        result = torch.empty(n, out[0], out[1], outputs, dtype=images.dtype, device=images.device)
        block = min(64, max(16, 1 << (outputs - 1).bit_length()))
        launch(device.convolve, (-(-m // 128), -(-outputs // block)))(
            images, factor.to(images.dtype), result, m, outputs, height, width, *out, stride, padding,
            CHANNELS=channels, KERNEL=kernel, BK=depth, BM=128, BN=block, num_warps=4,
        )  # fmt: skip
        ctx.save_for_backward(images, weight)
        ctx.settings = (stride, padding, out, depth, block)
        return result.permute(0, 3, 1, 2)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, None, None]:
        images, weight = ctx.saved_tensors
        stride, padding, out, depth, block = ctx.settings
        n, channels, height, width = images.shape
        outputs, _, kernel, _ = weight.shape
        gradient = gradients[0].to(images.dtype).contiguous(memory_format=torch.channels_last)
        m = n * out[0] * out[1]
        chunk = max(128, -(-m // (4 * multiprocessors(images.device))))
        parts = -(-m // chunk)
        partial = torch.empty(parts, depth, outputs, dtype=torch.float32, device=images.device)
        launch(device.weight_gradient, (parts, -(-outputs // block)))(
            images, gradient, partial, m, outputs, chunk, height, width, *out, stride, padding,
            CHANNELS=channels, KERNEL=kernel, BK=depth, BM=128, BN=block, num_warps=4,
        )  # fmt: skip
        found = partial.sum(dim=0)[: kernel * kernel * channels].view(kernel, kernel, channels, outputs)
        return None, found.permute(3, 2, 0, 1).to(weight.dtype).contiguous(), None, None
