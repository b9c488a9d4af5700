"""Augmentations on a CPU: small groups of samples with the same operations in the same order, which stay in its cache.

It computes the same as `fmicl.data.augmentations.operations`, which treats a whole batch alike, for a GPU. There
every sample goes through each operation, if only with a neutral factor, and each pass goes through the whole batch.
Here an operation runs on the samples that have it, in place, with a few vectorised passes over planes of one channel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from fmicl.data.augmentations.operations import LUMA, CropBoxes, check_kernel

if TYPE_CHECKING:
    from fmicl.data.augmentations.maker import ViewParameters
    from fmicl.data.augmentations.views import Views

_GROUP_PIXELS = 2**15
"""Pixels of a group: three channels of them as float32, and what is computed of them, fit into a core's cache."""
_BRIGHTNESS, _CONTRAST, _SATURATION, _HUE = range(4)  # columns of the factors


def is_eager_cpu(images: Tensor) -> bool:
    """Whether these images are on a CPU, and no graph is traced.

    Example:
        >>> is_eager_cpu(torch.zeros(1, 3, 8, 8))
        True
    """
    return images.device.type == "cpu" and not torch.compiler.is_compiling()


def crop_resize_each(images: Tensor, boxes: CropBoxes, flip: Tensor, size: int) -> Tensor:
    """Crop, resize (antialiased bilinear) and flip one image after the other.

    Args:
        images: (N, C, H, W) uint8.
        boxes: crops, inside the images.
        flip: (N,) bool.
        size: side of the result.

    Returns:
        (N, C, size, size) uint8: `fmicl.data.augmentations.operations.crop_resize` to within a level, as each axis is
        rounded.

    Example:
        >>> image = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4)
        >>> zero, four = torch.zeros(1), torch.full((1,), 4.0)
        >>> crop_resize_each(image, CropBoxes(zero, zero, four, four), torch.tensor([True]), 4)[0, 0, 0].tolist()
        [3, 2, 1, 0]
    """
    result = images.new_empty(len(images), images.shape[1], size, size)
    corners = torch.stack(boxes, dim=1).long().tolist()
    for out, image, (top, left, height, width), flipped in zip(result, images, corners, flip.tolist(), strict=True):
        crop = image[:, top : top + height, left : left + width]
        if (height, width) != (size, size):
            crop = F.interpolate(crop.unsqueeze(0), (size, size), mode="bilinear", antialias=True)[0]
        out.copy_(crop.flip(2) if flipped else crop)
    return result


def colour_in_groups(images: Tensor, parameters: ViewParameters, views: Views) -> Tensor:
    """Everything after the crop: colour jitter, greyscale, blur, solarisation and normalisation.

    Args:
        images: (N, C, S, S), any dtype, in [0, 255].
        parameters: of the N views.
        views: options, of which the probabilities, the mean and the standard deviation are used.

    Returns:
        (N, channels, S, S) float32.
    """
    n, channels, height, width = images.shape
    result = torch.empty(n, len(views.mean), height, width)
    gain = torch.tensor([1 / (255 * s) for s in views.std]).view(-1, 1, 1, 1)
    offset = torch.tensor([-m / s for m, s in zip(views.mean, views.std, strict=True)]).view(-1, 1, 1, 1)
    for members, order in _groups(parameters, views, channels, max(1, _GROUP_PIXELS // (height * width))):
        index = torch.tensor(members)
        # Channels first, so that each is one contiguous block.
        pixels = images[index].transpose(0, 1).to(torch.float32, memory_format=torch.contiguous_format, copy=True)
        factors = parameters.factors[index]
        for operation in order:
            pixels = _jitter(pixels, operation, factors[:, operation])
        if views.grey > 0 and channels > 1:
            _change_some(pixels, parameters.grey[index], _luma)
        if views.blur > 0:
            chosen = parameters.blur[index]
            blur = functools.partial(_blur, sigma=parameters.sigma[index][chosen], kernel_size=views.kernel_size)
            _change_some(pixels, chosen, blur)
        if views.solarise > 0:
            _change_some(pixels, parameters.solarise[index], _invert_bright)
        result[index] = (pixels * gain).add_(offset).transpose(0, 1)
    return result


def _groups(
    parameters: ViewParameters, views: Views, channels: int, most: int
) -> Iterator[tuple[list[int], Sequence[int]]]:
    """Samples with the same operations of the colour jitter, at most so many at a time, and these in their order."""
    strengths = (views.brightness, views.contrast, views.saturation, views.hue)
    used = (
        {k for k in range(4) if strengths[k] > 0 and (channels > 1 or k < _SATURATION)} if views.jitter > 0 else set()
    )
    neutral = (parameters.factors == parameters.factors.new_tensor([1.0, 1.0, 1.0, 0.0])).all(dim=1)
    thirds, sixths = _split_hue_shift(parameters.factors[:, _HUE])
    rows = zip(parameters.order.tolist(), neutral.tolist(), thirds.tolist(), (sixths < 0).tolist(), strict=True)
    found: dict[tuple[tuple[int, ...], int, bool], list[int]] = {}
    for sample, (order, same, third, backwards) in enumerate(rows):
        operations = () if same else tuple(k for k in order if k in used)
        # Hue shifts of one sign, by the same number of thirds, are one formula.
        kind = (third, backwards) if _HUE in operations else (0, False)
        found.setdefault((operations, *kind), []).append(sample)
    for (operations, _, _), members in found.items():
        for start in range(0, len(members), most):
            yield members[start : start + most], operations


def _jitter(pixels: Tensor, operation: int, factors: Tensor) -> Tensor:
    """One operation of the colour jitter on (C, n, H, W), in place if possible."""
    if operation == _HUE:
        return _shift_hue(pixels, factors)
    ratio = factors.view(-1, 1, 1)
    if operation == _BRIGHTNESS:
        pixels.mul_(ratio)
    else:
        grey = _luma(pixels).floor_() if len(pixels) > 1 else pixels[0]
        rest = 1 - ratio
        other = rest * grey.mean(dim=(1, 2), keepdim=True) if operation == _CONTRAST else grey.mul_(rest)
        pixels.mul_(ratio).add_(other)
    if bool((factors > 1).any()):  # smaller ones keep the range
        pixels.clamp_(0, 255)
    return pixels


def _split_hue_shift(shift: Tensor) -> tuple[Tensor, Tensor]:
    """Hue shifts as whole thirds of the colour circle (0, 1, 2) and a rest in [-1, 1], in sixths of it."""
    thirds = (3 * shift).round()
    return thirds.remainder(3).int(), 6 * shift - 2 * thirds


def _shift_hue(pixels: Tensor, shift: Tensor) -> Tensor:
    r"""Rotate the hue of (3, n, H, W) pixels by n fractions of the colour circle, with `_split_hue_shift` of one kind.

    Thirds of the circle permute the channels. Let t be the rest, in sixths and positive, M the largest channel, m the
    smallest and :math:`d = M - m`. Then the new red is :math:`r - g + (M - t d)` where :math:`g \ge b`, elsewhere
    :math:`r - g + (m + t d)`, and clamped to [m, M]: the falling and the rising side of the trapezoid in
    `fmicl.data.augmentations.operations.shift_hue`. Green and blue follow by permuting the channels; with a negative
    rest the roles of the two neighbours are exchanged.
    """
    thirds, rest = _split_hue_shift(shift)
    step = -1 if bool((rest < 0).any()) else 1
    source = [pixels[(k - int(thirds[0])) % 3] for k in range(3)]
    result = torch.empty_like(pixels)
    largest = torch.maximum(source[0], source[1])
    smallest = torch.minimum(source[0], source[1])
    torch.maximum(largest, source[2], out=largest)
    torch.minimum(smallest, source[2], out=smallest)
    part = (largest - smallest).mul_(rest.abs().view(-1, 1, 1))
    falling, rising = largest - part, part.add_(smallest)
    side = torch.empty_like(largest)
    for k, new in enumerate(result):
        this, after, other = source[k], source[(k + step) % 3], source[(k - step) % 3]
        torch.ge(after, other, out=side)  # as numbers: a mask of booleans would be read one by one
        torch.lerp(rising, falling, side, out=side)
        torch.sub(this, after, out=new)
        torch.clamp(new.add_(side), smallest, largest, out=new)
    return result


def _change_some(pixels: Tensor, chosen: Tensor, change: Callable[[Tensor], Tensor]) -> None:
    """Replace the chosen samples of (C, n, H, W) by a function of them."""
    if bool(chosen.all()):
        pixels.copy_(change(pixels))
    elif bool(chosen.any()):
        pixels[:, chosen] = change(pixels[:, chosen])


def _luma(pixels: Tensor) -> Tensor:
    """(n, H, W) luma of (3, n, H, W)."""
    grey: Tensor = LUMA[0] * pixels[0]
    return grey.add_(pixels[1], alpha=LUMA[1]).add_(pixels[2], alpha=LUMA[2])


def _invert_bright(pixels: Tensor) -> Tensor:
    return torch.minimum(pixels, 255 - pixels)


def _blur(pixels: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Gaussian blur of (C, n, H, W) with n standard deviations, by one-dimensional convolutions."""
    channels, n, height, width = pixels.shape
    check_kernel(kernel_size, height, width)
    radius = kernel_size // 2
    at = torch.arange(-radius, radius + 1, dtype=torch.float32)
    taps = (-0.5 * (at / sigma.view(-1, 1)).square()).exp()
    taps = (taps / taps.sum(dim=1, keepdim=True)).repeat(channels, 1).view(channels * n, 1, 1, -1)
    images = F.pad(pixels.reshape(1, channels * n, height, width), (radius,) * 4, mode="reflect")
    images = F.conv2d(images, taps, groups=channels * n)
    return F.conv2d(images, taps.transpose(2, 3), groups=channels * n).view_as(pixels)
