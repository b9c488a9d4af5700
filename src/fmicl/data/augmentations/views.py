"""Options of random image views (augmentations): crops, flips, colour jitter, blur, solarisation, normalisation.

Without torch, so that the command line can be built from it. :class:`fmicl.data.augmentations.maker.ViewMaker` makes
the views.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from fmicl.utils.options import Options, fraction, option

CIFAR10_MEAN, CIFAR10_STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
STL10_MEAN, STL10_STD = (0.4467, 0.4398, 0.4066), (0.2603, 0.2566, 0.2713)
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def _require_ranges(options: Any, *names: str) -> None:
    """Raise ValueError for options whose value is not a pair (low, high) in this order."""
    for name in names:
        low, high = getattr(options, name)
        if low > high:
            raise ValueError(f"{name} must be a range from low to high, but it is {(low, high)}")


@dataclass(frozen=True)
class Views(Options):
    """Random views of an image; the operations are listed in the order in which they are applied.

    The defaults are SimCLR's for CIFAR-10: no blur, and weaker colour jitter than on ImageNet.

    Example:
        >>> Views(size=96, blur=0.5).kernel_size
        9
        >>> Views(grey=1.5)
        Traceback (most recent call last):
        ...
        ValueError: grey must be at least 0 and at most 1, but it is 1.5
    """

    size: int = option(32, "Side of a view in pixels.", at_least=2)
    crop_scale: tuple[float, float] = option(
        (0.2, 1.0), "Range of the crop's area, as a fraction of the image's.", above=0, at_most=1
    )
    crop_ratio: tuple[float, float] = option(
        (3 / 4, 4 / 3), "Range of the crop's aspect ratio (width / height), drawn log-uniformly.", above=0
    )
    flip: float = fraction(0.5, "Probability of a horizontal flip.")
    jitter: float = fraction(0.8, "Probability of colour jitter. Its four operations are applied in random order.")
    brightness: float = option(
        0.4,
        "Strength of the brightness jitter: the factor is uniform in [max(0, 1 - strength), 1 + strength].",
        at_least=0,
    )
    contrast: float = option(0.4, "Strength of the contrast jitter, as for brightness.", at_least=0)
    saturation: float = option(
        0.4,
        "Strength of the saturation jitter, as for brightness. No effect on one-channel images, as hue and grey.",
        at_least=0,
    )
    hue: float = option(
        0.1,
        "Largest hue shift, as a fraction of the colour circle, at most 0.5: uniform in +-hue.",
        at_least=0,
        at_most=0.5,
    )
    grey: float = fraction(0.2, "Probability of conversion to greyscale.")
    blur: float = fraction(0.0, "Probability of a Gaussian blur, with a kernel of about a tenth of the side.")
    blur_sigma: tuple[float, float] = option((0.1, 2.0), "Range of the blur's standard deviation, in pixels.", above=0)
    solarise: float = fraction(0.0, "Probability of solarisation: values of 128 and more are inverted.")
    mean: tuple[float, ...] = option(
        CIFAR10_MEAN,
        "Mean that is subtracted from each channel, on the scale [0, 1]. Its length, 1 or 3, is the number of "
        "channels; one-channel images are repeated where it is 3.",
    )
    std: tuple[float, ...] = option(CIFAR10_STD, "Standard deviation that each channel is divided by.", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_ranges(self, "crop_scale", "crop_ratio", "blur_sigma")
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean):
            raise ValueError(
                f"mean and std must have one number per channel, 1 or 3, but they have {len(self.mean)} and "
                f"{len(self.std)}"
            )

    @property
    def kernel_size(self) -> int:
        """Width of the blur's kernel: odd, about a tenth of the side, at least 3 (SimCLR: 23 for 224)."""
        return max(3, int(0.1 * self.size) | 1)


@dataclass(frozen=True)
class SecondViewOptions(Options):
    """How the second view of a sample differs from the first, for methods with asymmetric views (MoCo v3, BYOL)."""

    second_blur: float | None = fraction(None, "Probability of blur in the second view (None: as in the first).")
    second_solarise: float | None = fraction(
        None, "Probability of solarisation in the second view (None: as in the first)."
    )


@dataclass(frozen=True)
class LocalCropOptions(Options):
    """Multi-crop: further views of a sample, each a small crop at a low resolution (Caron et al., SwAV, 2020)."""

    local_crops: int = option(
        0,
        "Multi-crop: small crops of each sample beside its two views (0: none), each a pair with both of them.",
        at_least=0,
    )
    local_size: int | None = option(
        None, "Side of a local crop in pixels (None: 3/7 of the views', 96 for 224).", at_least=2
    )
    local_scale: tuple[float, float] = option(
        (0.05, 0.14),
        "Range of a local crop's area, as a fraction of the image's; --crop-scale is that of the views.",
        above=0,
        at_most=1,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_ranges(self, "local_scale")

    def why_unused(self) -> dict[str, str]:
        """Size and scale need a crop."""
        return {} if self.local_crops else dict.fromkeys(("local_size", "local_scale"), "local_crops is 0")

    def size(self, view_size: int) -> int:
        """Side of a local crop beside views of this side; by default an even number.

        Example:
            >>> [LocalCropOptions().size(side) for side in (224, 96, 32, 8)]
            [96, 42, 14, 4]
        """
        return max(2, 2 * round(view_size * 3 / 14)) if self.local_size is None else self.local_size

    def views(self, views: Views) -> Views:
        """Options of the local crops, which differ from those of the views in size and area.

        Example:
            >>> LocalCropOptions(local_crops=6).views(Views(size=224)).crop_scale
            (0.05, 0.14)
        """
        return dataclasses.replace(views, size=self.size(views.size), crop_scale=self.local_scale)


def view_pair(views: Views, second: SecondViewOptions) -> tuple[Views, Views]:
    """Options of the first and of the second view of a sample.

    Example:
        >>> first, second = view_pair(Views(blur=1.0), SecondViewOptions(second_blur=0.1))
        >>> first.blur, second.blur, second.solarise
        (1.0, 0.1, 0.0)
    """
    blur = views.blur if second.second_blur is None else second.second_blur
    solarise = views.solarise if second.second_solarise is None else second.second_solarise
    return views, dataclasses.replace(views, blur=blur, solarise=solarise)
