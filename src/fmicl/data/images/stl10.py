"""STL-10, from its official binary files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fmicl.data.images.official_files import find_folder, how_to_get, map_file
from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.samples import ArraySamples
from fmicl.data.images.splits import Splits

CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
IMAGE = 3 * 96 * 96
FILES = {  # bytes and MD5 of the official files
    "train_X.bin": (5_000 * IMAGE, "918c2871b30a85fa023e0c44e0bee87f"),
    "train_y.bin": (5_000, "5a34089d4802c674881badbb80307741"),
    "test_X.bin": (8_000 * IMAGE, "7f263ba9f9e0b06b93213547f721ac82"),
    "test_y.bin": (8_000, "36f9794fa4beb8a2c72628de14fa638e"),
    "unlabeled_X.bin": (100_000 * IMAGE, "5242ba1fed5e4be9e1e742405eb56ca4"),
}


@register_dataset("stl10", summary="STL-10 with its unlabelled split: 113,000 images of 96 x 96.", downloads=True)
def load_stl10(request: LoadRequest) -> Splits:
    """STL-10 from ``stl10_binary``, in the root or as the root; the encoder is trained on the unlabelled images too.

    A download is of 2.6 GB. Without checksums the files may have any number of images.

    Raises:
        FileNotFoundError: there is no STL-10, or a file of it is missing.
        ValueError: a file is damaged.
    """
    root = request.root
    folder = find_folder(root, "stl10_binary", "train_X.bin", "test_X.bin", "unlabeled_X.bin")
    if folder is None and request.download:
        from torchvision.datasets import STL10

        try:
            STL10(root=str(root), split="test", download=True)
        except (RuntimeError, OSError) as error:
            raise OSError(f"torchvision could not download STL-10 into {root}: {error}") from error
        folder = root / "stl10_binary"
    if folder is None:
        raise FileNotFoundError(
            f"no STL-10 in {root}: stl10_binary/ is not there. "
            + how_to_get(root, "https://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "stl10_*.tar.gz")
        )
    arrays = {
        name: map_file(folder / name, md5 if request.checksum else None, record=IMAGE if "_X" in name else 1, size=size)
        for name, (size, md5) in FILES.items()
    }
    labels = {part: _labels(folder, part, arrays) for part in ("train", "test")}
    train = _images(arrays["train_X.bin"], arrays["unlabeled_X.bin"])
    return Splits(
        pretrain=ArraySamples(train),
        train=ArraySamples(train[: len(labels["train"])], labels["train"]),
        test=ArraySamples(_images(arrays["test_X.bin"]), labels["test"]),
        classes=CLASSES,
    )


def _labels(folder: Path, part: str, arrays: dict[str, np.ndarray]) -> Tensor:
    path = folder / f"{part}_y.bin"
    labels = torch.from_numpy(arrays[path.name].astype(np.int64))
    images = len(arrays[f"{part}_X.bin"]) // IMAGE
    if len(labels) != images:
        raise ValueError(
            f"{path} has {len(labels)} labels for the {images} images of {part}_X.bin: "
            f"one of the two is damaged, extract the archive again"
        )
    if int(labels.min()) < 1 or int(labels.max()) > 10:
        raise ValueError(
            f"{path} is damaged: it has labels from {int(labels.min())} to {int(labels.max())}, STL-10 has 1 to 10; "
            f"extract the archive again"
        )
    return labels - 1


def _images(*arrays: np.ndarray) -> Tensor:
    """One tensor of images, which the files store column by column; copied in chunks, since they are large."""
    images = torch.empty(sum(len(a) for a in arrays) // IMAGE, 3, 96, 96, dtype=torch.uint8)
    start = 0
    for array in arrays:
        flat = array.reshape(-1, 3, 96, 96)
        for begin in range(0, len(flat), 1000):
            chunk = np.array(flat[begin : begin + 1000])
            images[start : start + len(chunk)] = torch.from_numpy(chunk).transpose(2, 3)
            start += len(chunk)
    return images
