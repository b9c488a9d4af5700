"""Options of image data: which dataset, where it is, how it is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fmicl.data.cache import CacheOptions
from fmicl.utils.options import fraction, option


@dataclass(frozen=True)
class ImageDataOptions(CacheOptions):
    """Which image dataset to load, and how."""

    dataset: str = option("images", "Name of the dataset, such as cifar10, or images for any folder of image files.")
    data_dir: Path | None = option(None, "Folder of the dataset; digits needs none.", role="location")
    download: bool = option(
        False, "Download the dataset into --data-dir first, where torchvision offers it.", role="machine"
    )
    checksum: bool = option(
        True, "Verify the MD5 checksums of CIFAR-10 and STL-10. Switch off to load a part of them.", role="machine"
    )
    memory_gib: float = option(
        4.0,
        "Keep a folder of images in memory if it takes at most this many GiB once resized.",
        role="machine",
        at_least=0,
    )
    cache_gib: float = option(
        32.0,
        "Decode and resize a folder of many images once, into a file of at most this many GiB in --cache-dir that "
        "later runs share, and read a folder larger than --memory-gib from there (0: decode in every run, and the "
        "larger folder in every epoch, with crops from the whole images).",
        role="machine",
        at_least=0,
    )
    validation: float = option(
        0.0,
        "Hold out this fraction of the labelled training data and evaluate on it instead of the test split, to tune "
        "hyperparameters.",
        at_least=0,
        below=1,
    )
    labels: bool = option(
        False, "Train with the classes of the data: samples of one class are positives of each other."
    )
    label_noise: float = fraction(
        0.0, "With --labels: train with this share of wrong labels, drawn by the seed. Evaluation has the true ones."
    )
    workers: int = option(
        8, "Worker processes that decode images, for data that doesn't fit into memory.", role="machine", at_least=0
    )
    multiplicity: int = option(
        2,
        "Views of each sample in a batch, two or more. The loss is the mean over all pairs of them, and an epoch "
        "takes proportionally longer.",
        at_least=2,
    )
