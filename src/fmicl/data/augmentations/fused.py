"""Fused augmentations of small images on a GPU: one Triton program makes a view in registers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.data.augmentations.maker import ATTEMPTS, NUMBERS, centre_crop
from fmicl.data.augmentations.views import Views
from fmicl.utils.triton import launch, triton_runs_on

_LARGEST = 64  # side up to which three channels of an image fit in a program's registers


def can_fuse_views(views: Views, images: Tensor) -> bool:
    """Whether `fused_views` supports these views of these images: small, contiguous, on a GPU, with as many channels.

    Example:
        >>> can_fuse_views(Views(size=32), torch.zeros(1, 3, 32, 32, dtype=torch.uint8))      # on the CPU
        False
    """
    small = max(*images.shape[2:], views.size) <= _LARGEST
    channels = images.shape[1] in (1, len(views.mean))
    return small and channels and images.is_contiguous() and triton_runs_on(images.device)


def fused_views(views: Views, images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    """Random views of images[index]: those of `ViewMaker` from the same random numbers, up to rounding.

    Args:
        views: the family of views.
        images: (M, C, H, W) uint8, contiguous.
        index: (N,) int64, the image of each view.
        uniforms: (N, 36) independent random numbers in [0, 1).

    Returns:
        (N, channels, size, size) float32, normalised, with the channels last in memory.

    Raises:
        ValueError: the images are not contiguous, or there aren't 36 numbers for each view.
    """
    if not images.is_contiguous():
        raise ValueError(f"images must be contiguous, got strides {images.stride()}")
    if uniforms.shape != (len(index), NUMBERS):
        raise ValueError(f"uniforms must have shape ({len(index)}, {NUMBERS}), got {tuple(uniforms.shape)}")
    from fmicl.data.augmentations import device

    n, size, out = len(index), views.size, len(views.mean)
    _, channels, height, width = images.shape
    result = torch.empty(n, size, size, out, dtype=torch.float32, device=images.device)
    gain = [1 / (255 * s) for s in views.std]
    offset = [-m / s for m, s in zip(views.mean, views.std, strict=True)]
    centre_height, centre_width = centre_crop(height, width, views)
    low, high = views.crop_ratio
    strengths = (views.brightness, views.contrast, views.saturation, views.hue)
    launch(device.views, (n,))(
        images, index.contiguous(), uniforms.contiguous(), result, height, width, size,
        *views.crop_scale, math.log(low), math.log(high), centre_height, centre_width,
        views.flip, views.jitter, *strengths, views.grey, views.blur, *views.blur_sigma, views.kernel_size // 2,
        views.solarise, *(gain * 3)[:3], *(offset * 3)[:3],
        NUMBERS=NUMBERS, CHANNELS=channels, OUT=out, JITTER=views.jitter > 0 and max(strengths) > 0,
        HUE=views.hue > 0 and channels == 3, GREY=views.grey > 0 and channels == 3, BLUR=views.blur > 0,
        SOLARISE=views.solarise > 0, ATTEMPTS=ATTEMPTS,
        HEIGHT=_tile_side(height), WIDTH=_tile_side(width), SIZE=_tile_side(size), num_warps=4,
    )  # fmt: skip
    return result.permute(0, 3, 1, 2)


def _tile_side(side: int) -> int:
    """Side of the tile: a power of two, at least 16 for matrix products."""
    return max(16, 1 << (side - 1).bit_length())
