"""What a family of random views is: settings only, without torch, so that recipes can hold them.

:mod:`fmicl.data.augmentations` turns these settings into pictures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from fmicl.config.fields import require_types

__all__ = ["CIFAR10_MEAN", "CIFAR10_STD", "IMAGENET_MEAN", "IMAGENET_STD", "STL10_MEAN", "STL10_STD", "Views"]

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
STL10_MEAN, STL10_STD = (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)

_PROBABILITIES = ("flip", "jitter", "grey", "blur", "solarise")
_STRENGTHS = ("brightness", "contrast", "saturation")


@dataclass(frozen=True)
class Views:
    """One family of random views of an image; the operations are in the order in which they are applied.

    The defaults are SimCLR's for CIFAR-10: no blur, and weaker colours than on ImageNet.

    Args:
        size: Side of the square view, in pixels.
        crop_scale: Range of the crop's share of the area of the image.
        crop_ratio: Range of the crop's aspect ratio (width / height), drawn uniformly in the logarithm.
        flip: Probability of a horizontal flip.
        jitter: Probability of colour jitter; its four operations come in a random order.
        brightness: The factor is uniform in [max(0, 1 - brightness), 1 + brightness].
        contrast: As brightness.
        saturation: As brightness. Without effect on one-channel images, as hue and grey.
        hue: The shift is uniform in [-hue, hue], as a share of the colour circle; at most 0.5.
        grey: Probability of losing the colours.
        blur: Probability of a Gaussian blur, with a kernel of about a tenth of the side.
        blur_sigma: Range of the standard deviation of the blur, in pixels.
        solarise: Probability of inverting every value from 128 upwards.
        mean: Subtracted at the end, on the scale [0, 1]. Its length is the number of channels of a view:
            one-channel images are repeated to three channels where it is 3.
        std: Divided by at the end.

    Raises:
        ValueError: If a setting is out of its range; the message names it.

    Example:
        >>> Views(size=96, blur=0.5).kernel_size
        9
        >>> Views(grey=1.5)
        Traceback (most recent call last):
        ...
        ValueError: grey is a probability, so between 0 and 1; got 1.5
    """

    size: int = 32
    crop_scale: tuple[float, float] = (0.2, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: float = 0.5
    jitter: float = 0.8
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.4
    hue: float = 0.1
    grey: float = 0.2
    blur: float = 0.0
    blur_sigma: tuple[float, float] = (0.1, 2.0)
    solarise: float = 0.0
    mean: tuple[float, ...] = CIFAR10_MEAN
    std: tuple[float, ...] = CIFAR10_STD

    def __post_init__(self) -> None:
        require_types(self)
        if self.size < 2:
            raise ValueError(f"size is the side of a view in pixels, at least 2; got {self.size}")
        for name in _PROBABILITIES:
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is a probability, so between 0 and 1; got {getattr(self, name)}")
        for name in _STRENGTHS:
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is the strength of a jitter, so at least 0; got {getattr(self, name)}")
        if not 0 <= self.hue <= 0.5:
            raise ValueError(f"hue is a share of the colour circle, so between 0 and 0.5; got {self.hue}")
        if not 0 < self.crop_scale[0] <= self.crop_scale[1] <= 1:
            raise ValueError(f"crop_scale is a range of shares of the area in (0, 1]; got {self.crop_scale}")
        if not 0 < self.crop_ratio[0] <= self.crop_ratio[1] < math.inf:
            raise ValueError(f"crop_ratio is a range of positive numbers; got {self.crop_ratio}")
        if not 0 < self.blur_sigma[0] <= self.blur_sigma[1] < math.inf:
            raise ValueError(f"blur_sigma is a range of positive numbers; got {self.blur_sigma}")
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(
                f"mean and std have one number for each channel, 1 or 3; got {len(self.mean)} and {len(self.std)}"
            )
        if min(self.std) <= 0:
            raise ValueError(f"std is divided by, so it must be positive; got {self.std}")

    @property
    def channels(self) -> int:
        """Number of channels of a view."""
        return len(self.mean)

    @property
    def kernel_size(self) -> int:
        """Width of the blur's kernel: odd, about a tenth of the side, at least 3 (SimCLR: 23 for 224)."""
        return max(3, int(0.1 * self.size) | 1)
