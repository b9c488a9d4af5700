"""CIFAR-10, from its binary or its Python version."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fmicl.data.images.official_files import check_file, find_folder, how_to_get, map_file
from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.samples import ArraySamples
from fmicl.data.images.splits import Splits

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
RECORD = 1 + 3 * 32 * 32
FILE_SIZE = 10_000 * RECORD
MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}


@register_dataset("cifar10", summary="CIFAR-10, binary or Python version: 60,000 images of 32 x 32.", downloads=True)
def load_cifar10(request: LoadRequest) -> Splits:
    """CIFAR-10 from ``cifar-10-batches-bin`` (binary) or ``cifar-10-batches-py`` (Python), in the root or as the root.

    A download gets the Python version. Without checksums the binary version may have any number of records.

    Raises:
        FileNotFoundError: there is no CIFAR-10, or a file of it is missing.
        ValueError: a file is damaged, or ``checksum`` is off for the Python version. That consists of pickles, which
            can run code, so only the official ones are opened.
    """
    root = request.root
    binary = find_folder(root, "cifar-10-batches-bin", "data_batch_1.bin", "test_batch.bin")
    if binary is not None:
        return _load_binary(binary, request.checksum)
    python = find_folder(root, "cifar-10-batches-py", "data_batch_1", "test_batch")
    if python is not None or request.download:
        return _load_python(root if python is None else python.parent, python, request)
    raise FileNotFoundError(
        f"no CIFAR-10 in {root}: neither cifar-10-batches-bin/ nor cifar-10-batches-py/ is there. "
        + how_to_get(root, "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "cifar-10-*.tar.gz")
    )


def _load_binary(folder: Path, checksum: bool) -> Splits:
    parts: list[tuple[Tensor, Tensor]] = []
    for name, md5 in MD5.items():
        data = map_file(folder / name, md5 if checksum else None, record=RECORD, size=FILE_SIZE)
        records = torch.from_numpy(np.array(data).reshape(-1, RECORD))
        labels = records[:, 0].long()
        if int(labels.max()) > 9:
            raise ValueError(f"{folder / name} is damaged: it has the label {int(labels.max())}, CIFAR-10 has 0 to 9")
        parts.append((records[:, 1:].reshape(-1, 3, 32, 32), labels))
    train = ArraySamples(torch.cat([images for images, _ in parts[:-1]]), torch.cat([y for _, y in parts[:-1]]))
    return Splits(train, train, ArraySamples(parts[-1][0].contiguous(), parts[-1][1]), CLASSES)


def _load_python(root: Path, folder: Path | None, request: LoadRequest) -> Splits:
    from torchvision.datasets import CIFAR10

    if not request.checksum:
        raise ValueError(
            f"{root}: the Python version of CIFAR-10 consists of pickles, which can run code, so it is only read with "
            f"its checksums. Use the binary version (cifar-10-batches-bin), or leave the checksums on."
        )
    if folder is not None and not request.download:  # torchvision would not say which file is damaged
        official = [*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]]
        for name, md5 in official:
            check_file(folder / name, md5)
    train, test = (_from_torchvision(root, train=part, download=request.download) for part in (True, False))
    return Splits(train, train, test, CLASSES)


def _from_torchvision(root: Path, *, train: bool, download: bool) -> ArraySamples:
    from torchvision.datasets import CIFAR10

    try:
        loaded = CIFAR10(root=str(root), train=train, download=download)
    except (RuntimeError, OSError) as error:
        what = "download CIFAR-10 into" if download else "read CIFAR-10 in"
        raise OSError(f"torchvision could not {what} {root}: {error}") from error
    images = torch.from_numpy(np.ascontiguousarray(loaded.data.transpose(0, 3, 1, 2)))
    return ArraySamples(images, torch.tensor(loaded.targets))
