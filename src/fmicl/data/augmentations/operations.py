"""Augmentations of a batch of images, with parameters per sample: crop, colour jitter, blur, solarisation.

Images are (N, C, H, W) on the scale [0, 255]. Values stay floating-point; torchvision rounds after each operation.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LUMA = (0.2989, 0.587, 0.114)
"""torchvision's weights of red, green and blue."""
_CONTRAST, _SATURATION, _HUE = 1, 2, 3  # columns of the factors; brightness is 0


class CropBoxes(NamedTuple):
    """Crop boxes: integers as floats, each of shape (N,)."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor


def crop_resize(images: Tensor, boxes: CropBoxes, flip: Tensor, size: int) -> Tensor:
    r"""Crop, resize to a square and flip, as one resampling.

    Antialiased bilinear resizing is separable: a view is :math:`A X B^\top` with a small matrix per sample and axis. A
    row of it is a triangle around that pixel's position in the image, as wide as a pixel of the coarser grid. Cropping
    truncates the triangles, flipping reverses the rows of B.

    Args:
        images: (N, C, H, W), any dtype.
        boxes: crops, inside the images.
        flip: (N,) bool.
        size: side S of the result.

    Returns:
        (N, C, S, S) float32, on the scale of the images. As these are matrix products, the error on a GPU is 0.6 grey
        levels with ``set_float32_matmul_precision("high")``, and 3 with "medium".

    Example:
        >>> image = torch.arange(16.0).view(1, 1, 4, 4)
        >>> zero, four = torch.zeros(1), torch.full((1,), 4.0)
        >>> crop_resize(image, CropBoxes(zero, zero, four, four), torch.tensor([True]), 4)[0, 0, 0].tolist()
        [3.0, 2.0, 1.0, 0.0]
    """
    rows = _axis_weights(boxes.top, boxes.height, torch.zeros_like(flip), images.shape[2], size)
    columns = _axis_weights(boxes.left, boxes.width, flip, images.shape[3], size)
    return _separable(images.float(), rows, columns)


def colour_jitter(images: Tensor, factors: Tensor, order: Tensor, *, hue: bool = True) -> Tensor:
    """Brightness, contrast, saturation and hue, in a different order for each sample.

    The first three are blends ``factor * image + (1 - factor) * other`` with black, the mean grey value and the grey
    image, so one pass does any of them. The hue shift is by far the most expensive operation: it is done once, between
    three passes before and three after it, and each blend is neutral on one side, by its sample's order.

    Args:
        images: (N, 1 or 3, H, W) in [0, 255]. With one channel only brightness and contrast have an effect.
        factors: (N, 4), see :class:`fmicl.data.augmentations.maker.ViewParameters`.
        order: (N, 4) int64, permutations of 0..3.
        hue: whether to shift the hue at all; half of the passes are saved if not.

    Example:
        >>> factors, order = torch.tensor([[0.5, 1.0, 1.0, 0.0]]), torch.tensor([[3, 1, 0, 2]])
        >>> colour_jitter(torch.full((1, 1, 1, 2), 100.0), factors, order).flatten().tolist()
        [50.0, 50.0]
    """
    # The inverse permutation: the position of each operation in the order.
    position = (order.unsqueeze(1) == torch.arange(4, device=order.device).view(1, 4, 1)).int().argmax(dim=2)
    blends, hue_position = position[:, :_HUE], position[:, _HUE:]
    ratios = factors[:, :_HUE]
    if not hue or images.shape[1] == 1:
        return _blend(images, ratios, blends)
    images = _blend(images, torch.where(blends < hue_position, ratios, 1.0), blends)
    images = shift_hue(images, factors[:, _HUE])
    return _blend(images, torch.where(blends > hue_position, ratios, 1.0), blends)


def _blend(images: Tensor, ratios: Tensor, position: Tensor) -> Tensor:
    """Brightness, contrast and saturation with (N, 3) ``ratios``, by increasing (N, 3) ``position``."""
    rank = (position.unsqueeze(2) > position.unsqueeze(1)).sum(dim=2)
    for k in range(3):
        chosen = rank == k
        ratio = torch.where(chosen, ratios, 0.0).sum(dim=1)
        rest = torch.where(chosen, 1 - ratios, 0.0).view(-1, 3, 1, 1, 1)
        # torchvision blends integer images with integer grey levels. Without the floor, the difference could be 1.6
        # levels.
        grey = to_grey(images).floor() if images.shape[1] > 1 else images
        # Brightness blends with black, so it has no term here; a ratio of 1 is exactly neutral.
        other = grey.mean(dim=(2, 3), keepdim=True) * rest[:, _CONTRAST] + grey * rest[:, _SATURATION]
        images = (images * ratio.view(-1, 1, 1, 1) + other).clamp(0, 255)
    return images


def shift_hue(images: Tensor, shift: Tensor) -> Tensor:
    r"""Rotate the hue of each sample.

    With the hue :math:`h \in [0, 6)`, the value v (the largest channel) and the chroma d (largest minus smallest), the
    new channels are :math:`v - d \min(1, \max(0, \min(k, 4 - k)))` with
    :math:`k = (n + h + 6\,\mathrm{shift}) \bmod 6` and n = 5, 3, 1 for red, green, blue.

    Args:
        images: (N, 3, H, W), on any scale.
        shift: (N,) fraction of the colour circle.

    Example:
        >>> red = torch.tensor([255.0, 0.0, 0.0]).view(1, 3, 1, 1)
        >>> shift_hue(red, torch.tensor([1 / 3])).flatten().round().tolist()
        [0.0, 255.0, 0.0]
    """
    red, green, blue = images.unbind(dim=1)
    value, chroma = images.amax(dim=1), images.amax(dim=1) - images.amin(dim=1)
    divisor = torch.where(chroma == 0, 1.0, chroma)  # the hue of grey is multiplied by 0
    hue = torch.where(
        value == red,
        (green - blue) / divisor,
        torch.where(value == green, 2 + (blue - red) / divisor, 4 + (red - green) / divisor),
    )
    hue = hue + 6 * shift.view(-1, 1, 1)
    n = torch.arange(5, 0, -2, device=images.device, dtype=images.dtype).view(3, 1, 1)
    k = (n + hue.unsqueeze(1)).remainder(6)
    return value.unsqueeze(1) - chroma.unsqueeze(1) * torch.minimum(k, 4 - k).clamp(0, 1)


def to_grey(images: Tensor) -> Tensor:
    """The luma of (N, 3, H, W) images, as (N, 1, H, W); one-channel images are returned as they are.

    Example:
        >>> to_grey(torch.full((1, 3, 1, 1), 100.0)).round().item()
        100.0
    """
    if images.shape[1] == 1:
        return images
    red, green, blue = images.unbind(dim=1)
    return (LUMA[0] * red + LUMA[1] * green + LUMA[2] * blue).unsqueeze(1)


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_size: int) -> Tensor:
    """Gaussian blur with a standard deviation per sample; the border is reflected.

    Args:
        images: (N, C, H, W) floating-point.
        sigma: (N,) positive standard deviations, in pixels.
        kernel_size: odd; the kernel is truncated beyond.

    Raises:
        ValueError: the kernel size is even, or too large for the image to be reflected.

    Example:
        >>> dot = torch.zeros(1, 1, 5, 5)
        >>> dot[..., 2, 2] = 255
        >>> gaussian_blur(dot, torch.tensor([0.5]), 3)[0, 0, 2].round().tolist()
        [0.0, 21.0, 158.0, 21.0, 0.0]
    """
    height, width = images.shape[2:]
    check_kernel(kernel_size, height, width)
    return _separable(images, *(_blur_weights(sigma, kernel_size // 2, side) for side in (height, width)))


def check_kernel(kernel_size: int, height: int, width: int) -> None:
    """Check that a blur's kernel has a centre, and images of this size a border to reflect.

    Raises:
        ValueError: the kernel size is even, or too large.
    """
    if kernel_size % 2 == 0 or kernel_size // 2 >= min(height, width):
        raise ValueError(
            f"kernel_size must be odd and at most {2 * min(height, width) - 1} for images of {height} x {width} "
            f"pixels; got {kernel_size}"
        )


def solarise(images: Tensor) -> Tensor:
    """Invert every value from 128 upwards, on the scale [0, 255]: the smaller of v and 255 - v.

    Example:
        >>> solarise(torch.tensor([0.0, 127.0, 128.0, 255.0])).tolist()
        [0.0, 127.0, 127.0, 0.0]
    """
    return torch.minimum(images, 255 - images)


def normalise(images: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """From [0, 255] to (images / 255 - mean) / std; one channel becomes three where mean has three.

    Args:
        images: (N, C, H, W), any dtype.
        mean: one number per channel, on the scale [0, 1].
        std: as many positive numbers.

    Raises:
        ValueError: the images have several channels, but not as many as ``mean``.

    Example:
        >>> white = torch.full((1, 1, 1, 1), 255, dtype=torch.uint8)
        >>> normalise(white, (0.5,) * 3, (0.5,) * 3).flatten().round(decimals=4).tolist()
        [1.0, 1.0, 1.0]
    """
    if images.shape[1] not in (1, len(mean)):
        raise ValueError(
            f"the images have {images.shape[1]} channels and mean has {len(mean)} numbers: "
            f"give one number for each channel"
        )
    scale = _constants([1 / (255 * s) for s in std], images.device)
    shift = _constants([-m / s for m, s in zip(mean, std, strict=True)], images.device)
    return torch.addcmul(shift, images.float(), scale)


def _constants(values: list[float], device: torch.device) -> Tensor:
    """(C, 1, 1), filled on the device: copying from a list would synchronise with it."""
    return torch.stack([torch.full((1, 1), value, device=device) for value in values])


def _axis_weights(start: Tensor, length: Tensor, reverse: Tensor, full: int, size: int) -> Tensor:
    """(N, size, full): weights of the pixels of an axis in each pixel of the resized crop."""
    scale = (length / size).view(-1, 1, 1)
    begin, end = start.view(-1, 1, 1), (start + length).view(-1, 1, 1)
    out = torch.arange(size, device=start.device, dtype=torch.float32).view(1, -1, 1) + 0.5
    out = torch.where(reverse.view(-1, 1, 1), size - out, out)
    pixel = torch.arange(full, device=start.device, dtype=torch.float32).view(1, 1, -1) + 0.5
    weights = (1 - (pixel - (begin + out * scale)).abs() / scale.clamp(min=1)).clamp(min=0)
    weights = torch.where((pixel > begin) & (pixel < end), weights, 0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def _blur_weights(sigma: Tensor, radius: int, side: int) -> Tensor:
    """(N, side, side): a Gaussian around each pixel, truncated at the radius and reflected at both ends."""
    scale = -0.5 / sigma.view(-1, 1, 1).square()

    def tap(distance: Tensor) -> Tensor:
        return torch.where(distance.abs() <= radius, (scale * distance.square()).exp(), 0.0)

    at = torch.arange(side, device=sigma.device, dtype=torch.float32)
    i, j = at.view(1, -1, 1), at.view(1, 1, -1)
    weights = tap(i - j)
    # Reflection repeats neither end: pixel j is also at -j and at 2 (side - 1) - j.
    weights = weights + torch.where(j > 0, tap(i + j), 0.0)
    weights = weights + torch.where(j < side - 1, tap(2 * (side - 1) - i - j), 0.0)
    return weights / weights.sum(dim=2, keepdim=True)


def _separable(images: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """``rows @ image @ columns^T`` for each sample and channel: two batched matrix products."""
    n, c, h, w = images.shape
    wide = torch.bmm(images.reshape(n, c * h, w), columns.mT).view(n, c, h, -1)
    tall = torch.bmm(rows, wide.transpose(1, 2).reshape(n, h, -1))
    return tall.view(n, rows.shape[1], c, -1).transpose(1, 2).contiguous()
