"""Random parameters of image augmentations, and the views that they give."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.data.augmentations.cpu import colour_in_groups, crop_resize_each, is_eager_cpu
from fmicl.data.augmentations.operations import (
    CropBoxes,
    colour_jitter,
    crop_resize,
    gaussian_blur,
    normalise,
    solarise,
    to_grey,
)
from fmicl.data.augmentations.views import Views

ATTEMPTS = 10  # draws of torchvision's RandomResizedCrop before it falls back to a centre crop
CROP_UNIFORMS = 2 * ATTEMPTS + 3  # areas, ratios, top, left, flip
NUMBERS = CROP_UNIFORMS + 13  # jitter?, four strengths, four for their order, grey?, blur?, sigma, solarise?
_HUE = 3  # its column in the factors


class ViewParameters(NamedTuple):
    """The random parameters of a batch of views, one row per sample.

    Attributes:
        boxes: the crops.
        flip: (N,) bool, flip horizontally.
        factors: (N, 4) factors of brightness, contrast and saturation (1 is neutral), and hue shift (0 is neutral).
        order: (N, 4) int64, a permutation per sample: ``order[n, k]`` is the column of ``factors`` applied k-th.
        grey: (N,) bool, convert to greyscale.
        blur: (N,) bool.
        sigma: (N,) standard deviation of the blur, in pixels.
        solarise: (N,) bool.
    """

    boxes: CropBoxes
    flip: Tensor
    factors: Tensor
    order: Tensor
    grey: Tensor
    blur: Tensor
    sigma: Tensor
    solarise: Tensor


def crop_boxes(uniforms: Tensor, height: int, width: int, views: Views) -> CropBoxes:
    """Random crops, distributed as those of torchvision's ``RandomResizedCrop``.

    The area is uniform and the aspect ratio log-uniform. The first of ten draws that fits into the image is taken; if
    none does, the largest centre crop whose ratio is in range.

    Args:
        uniforms: (N, at least 22) independent uniform numbers in [0, 1).
        height: height of the images.
        width: width of the images.
        views: options, of which ``crop_scale`` and ``crop_ratio`` are used.

    Example:
        >>> boxes = crop_boxes(torch.rand(5, 22), 32, 48, Views())
        >>> bool(((boxes.left + boxes.width <= 48) & (boxes.top + boxes.height <= 32)).all())
        True
    """
    low, high = views.crop_ratio
    area = height * width * _between(uniforms[:, :ATTEMPTS], *views.crop_scale)
    ratio = _between(uniforms[:, ATTEMPTS : 2 * ATTEMPTS], math.log(low), math.log(high)).exp()
    widths, heights = (area * ratio).sqrt().round(), (area / ratio).sqrt().round()
    fits = (widths > 0) & (widths <= width) & (heights > 0) & (heights <= height)
    # Ranks decrease, so the largest one among the draws that fit is the first such draw's.
    rank = fits * torch.arange(ATTEMPTS, 0, -1, device=uniforms.device)
    first = rank.argmax(dim=1, keepdim=True)
    none = ~fits.any(dim=1)
    centre_height, centre_width = centre_crop(height, width, views)
    w = widths.gather(1, first)[:, 0].masked_fill(none, centre_width)
    h = heights.gather(1, first)[:, 0].masked_fill(none, centre_height)
    top = torch.minimum((uniforms[:, 2 * ATTEMPTS] * (height - h + 1)).floor(), height - h)
    left = torch.minimum((uniforms[:, 2 * ATTEMPTS + 1] * (width - w + 1)).floor(), width - w)
    return CropBoxes(
        top.masked_fill(none, (height - centre_height) // 2),
        left.masked_fill(none, (width - centre_width) // 2),
        h,
        w,
    )


def centre_crop(height: int, width: int, views: Views) -> tuple[int, int]:
    """Height and width of the largest centre crop whose aspect ratio is in range.

    Example:
        >>> centre_crop(30, 90, Views(crop_ratio=(0.75, 4 / 3)))
        (30, 40)
    """
    low, high = views.crop_ratio
    if width / height < low:
        return round(width / low), width
    if width / height > high:
        return height, round(height * high)
    return height, width


class ViewMaker:
    """Random views of a batch of images, with independent parameters for each sample.

    Operations whose probability or strength is 0 are not run.

    Args:
        views: options of the views.

    Example:
        >>> maker = ViewMaker(Views(size=24))
        >>> images = torch.randint(256, (5, 3, 32, 32), dtype=torch.uint8)
        >>> maker(images, torch.Generator().manual_seed(0)).shape
        torch.Size([5, 3, 24, 24])
    """

    def __init__(self, views: Views) -> None:
        self.views = views

    def sample(
        self,
        n: int,
        height: int,
        width: int,
        generator: torch.Generator,
        *,
        device: torch.device | str | None = None,
    ) -> ViewParameters:
        """Draw the parameters of n views.

        All numbers are drawn on the generator's device, so with a generator on the CPU the parameters are the same on
        any device, up to rounding.

        Args:
            n: number of samples.
            height: height of the images.
            width: width of the images.
            generator: source of randomness.
            device: where the parameters are put; by default the generator's device.
        """
        uniforms = self.uniforms(n, generator, generator.device if device is None else torch.device(device))
        return self.parameters(uniforms, height, width)

    def uniforms(self, n: int, generator: torch.Generator, device: torch.device) -> Tensor:
        """(N, 36) independent uniform numbers in [0, 1), drawn on the generator's device and moved to another."""
        uniforms = torch.rand(n, NUMBERS, generator=generator, device=generator.device)
        if device.type == "cuda" and uniforms.device.type == "cpu":
            uniforms = uniforms.pin_memory()  # else the copy would synchronise with the device
        return uniforms.to(device, non_blocking=True)

    def parameters(self, uniforms: Tensor, height: int, width: int) -> ViewParameters:
        """The parameters as a function of (N, 36) uniform numbers in [0, 1)."""
        v = self.views
        jitter, *strengths = uniforms[:, CROP_UNIFORMS : CROP_UNIFORMS + 5].unbind(1)
        grey, blur, sigma, invert = uniforms[:, CROP_UNIFORMS + 9 :].unbind(1)
        ranges = [(max(0.0, 1 - s), 1 + s) for s in (v.brightness, v.contrast, v.saturation)]
        factors = torch.stack(
            [_between(u, *limits) for u, limits in zip(strengths, [*ranges, (-v.hue, v.hue)], strict=True)],
            dim=1,
        )
        neutral = (torch.arange(4, device=uniforms.device) != _HUE).float()
        return ViewParameters(
            boxes=crop_boxes(uniforms, height, width, v),
            flip=uniforms[:, CROP_UNIFORMS - 1] < v.flip,
            factors=torch.where((jitter < v.jitter).unsqueeze(1), factors, neutral),
            order=uniforms[:, CROP_UNIFORMS + 5 : CROP_UNIFORMS + 9].argsort(dim=1),
            grey=grey < v.grey,
            blur=blur < v.blur,
            sigma=_between(sigma, *v.blur_sigma),
            solarise=invert < v.solarise,
        )

    def crop(self, images: Tensor, parameters: ViewParameters) -> Tensor:
        """Crop, resize and flip: (N, C, H, W) to (N, C, size, size) in [0, 255].

        The result is float32; on a CPU, that of uint8 images is rounded to uint8, as torchvision's is.
        """
        if images.dtype == torch.uint8 and is_eager_cpu(images):
            return crop_resize_each(images, parameters.boxes, parameters.flip, self.views.size)
        with torch.autocast(images.device.type, enabled=False):  # bfloat16 would be a grey level off
            return crop_resize(images, parameters.boxes, parameters.flip, self.views.size)

    def colour(self, images: Tensor, parameters: ViewParameters) -> Tensor:
        """Everything after the crop: (N, C, size, size) in [0, 255] to normalised float32."""
        with torch.autocast(images.device.type, enabled=False):
            if is_eager_cpu(images):
                return colour_in_groups(images, parameters, self.views)
            return _colour_at_once(images.float(), parameters, self.views)

    def apply(self, images: Tensor, parameters: ViewParameters) -> Tensor:
        """Views with given parameters: (N, C, H, W) uint8 to (N, channels, size, size) float32, normalised."""
        return self.colour(self.crop(images, parameters), parameters)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Random views of (N, C, H, W) uint8 images."""
        n, _, height, width = images.shape
        return self.apply(images, self.sample(n, height, width, generator, device=images.device))


def _between(uniforms: Tensor, low: float, high: float) -> Tensor:
    return low + (high - low) * uniforms


def _colour_at_once(images: Tensor, parameters: ViewParameters, v: Views) -> Tensor:
    """Colours of a whole batch, each operation on all samples: what a GPU does."""
    if v.jitter > 0 and max(v.brightness, v.contrast, v.saturation, v.hue) > 0:
        images = colour_jitter(images, parameters.factors, parameters.order, hue=v.hue > 0)
    if v.grey > 0 and images.shape[1] > 1:
        images = torch.where(parameters.grey.view(-1, 1, 1, 1), to_grey(images), images)
    if v.blur > 0:
        blurred = gaussian_blur(images, parameters.sigma, v.kernel_size)
        images = torch.where(parameters.blur.view(-1, 1, 1, 1), blurred, images)
    if v.solarise > 0:
        images = torch.where(parameters.solarise.view(-1, 1, 1, 1), solarise(images), images)
    return normalise(images, v.mean, v.std)
