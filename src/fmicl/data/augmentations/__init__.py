"""Random views of a whole batch at once, on whatever device the images are on.

Each sample has its own random parameters, and nothing here loops over samples, waits for the device, or
branches on data, so it runs on a GPU at its speed and compiles as one graph. With the parameters fixed, each
operation gives what ``torchvision.transforms.v2.functional`` gives, to within one grey level.
"""

from fmicl.data.augmentations.maker import ViewMaker, ViewParameters, crop_boxes
from fmicl.data.augmentations.operations import (
    CropBoxes,
    colour_jitter,
    crop_resize,
    gaussian_blur,
    normalise,
    shift_hue,
    solarise,
    to_grey,
)
from fmicl.data.augmentations.views import (
    CIFAR10_MEAN,
    CIFAR10_STD,
    IMAGENET_MEAN,
    IMAGENET_STD,
    STL10_MEAN,
    STL10_STD,
    Views,
)

__all__ = [
    "CIFAR10_MEAN",
    "CIFAR10_STD",
    "IMAGENET_MEAN",
    "IMAGENET_STD",
    "STL10_MEAN",
    "STL10_STD",
    "CropBoxes",
    "ViewMaker",
    "ViewParameters",
    "Views",
    "colour_jitter",
    "crop_boxes",
    "crop_resize",
    "gaussian_blur",
    "normalise",
    "shift_hue",
    "solarise",
    "to_grey",
]
