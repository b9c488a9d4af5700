"""Automatic hyperparameters of the recipe `images`: values of options that are "auto", by the data and the device.

A function from facts about a folder and the machine to values: no image is read here, and the same folder on the same
kind of device gives the same values.

On a CPU they are for less than two minutes of training on two cores with some hundred images: a small ResNet, images
of 48 pixels, and as many epochs as that allows. Larger folders have fewer epochs, and take longer all the same. On a
GPU it is ResNet-18 with images of up to 224 pixels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fmicl.data.augmentations.views import IMAGENET_MEAN, IMAGENET_STD

CPU_SIZE = 48
"""Side of images on a CPU. Smaller ones are enlarged to it: the encoder reduces the resolution 32 times."""
GPU_SIZES = (64, 96, 128, 160, 192, 224)
"""Sides of images on a GPU: the smallest one that loses nothing, or the largest."""
LARGEST_BATCH = {"cpu": 64, "gpu": 256}
EPOCHS = {"cpu": (10, 60), "gpu": (50, 800)}
"""Fewest and most epochs."""
VIEWS = {"cpu": 35_000, "gpu": 20_000_000}
"""Views of a run, where the number of epochs allows it: two for each image and epoch."""
FINE_TUNING = 5
"""Times fewer epochs, at most, and a lower learning rate with trained weights."""


@dataclass(frozen=True)
class ImageFacts:
    """What the defaults follow from.

    Attributes:
        count: training images.
        side: median length of their shorter sides, in pixels.
        gpu: whether they are trained on a GPU.
        trained: whether the encoder starts from trained weights.

    Example:
        >>> str(ImageFacts(count=272, side=480))
        '272 training images of about 480 pixels, on a CPU'
    """

    count: int
    side: int
    gpu: bool = False
    trained: bool = False

    def __str__(self) -> str:
        place = "a GPU" if self.gpu else "a CPU"
        start = ", from trained weights" if self.trained else ""
        return f"{self.count:,} training images of about {self.side} pixels, on {place}{start}"


def choose_defaults(facts: ImageFacts) -> dict[str, Any]:
    """Encoder, size, normalisation, batch size, epochs and learning rate.

    Example:
        >>> found = choose_defaults(ImageFacts(count=272, side=480))
        >>> found["encoder"], found["size"], found["batch_size"], found["epochs"]
        ('resnet10t', 48, 64, 60)
        >>> [choose_defaults(ImageFacts(100_000, side=100, gpu=gpu))["epochs"] for gpu in (False, True)]
        [10, 100]
    """
    place = "gpu" if facts.gpu else "cpu"
    batch = LARGEST_BATCH[place]
    while batch > 2 and batch * 2 > facts.count:  # two batches in an epoch, at least
        batch //= 2
    fewest, most = EPOCHS[place]
    epochs = min(most, max(fewest, round(VIEWS[place] / (2 * facts.count))))
    return {
        "encoder": "resnet18" if facts.gpu else "resnet10t",
        "size": next((size for size in GPU_SIZES if size >= facts.side), GPU_SIZES[-1]) if facts.gpu else CPU_SIZE,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "batch_size": batch,
        "epochs": max(fewest, epochs // FINE_TUNING) if facts.trained else epochs,
        "learning_rate": 1e-4 if facts.trained else 1e-3,
    }
