"""CIFAR-10, STL-10 and the digits: sets that come as a few files of pixels.

Every file is checked before it is used, and an error says which file it is and what to do about it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fmicl.data.images.samples import ArraySamples, Splits

__all__ = ["load_cifar10", "load_digits", "load_stl10"]

_CIFAR10_RECORD = 1 + 3 * 32 * 32
_CIFAR10_BYTES = 10_000 * _CIFAR10_RECORD
_CIFAR10_MD5 = {
    "data_batch_1.bin": "5dd7e06a14cb22eb9f671a540d1b7c25",
    "data_batch_2.bin": "5ea93a67294ea407fff1d09f752e9692",
    "data_batch_3.bin": "942cd6a4bcdd0dd3c604fbe906cb4421",
    "data_batch_4.bin": "ae636b3ba5c66a11e91e8cb52e771fcb",
    "data_batch_5.bin": "53f37980c15c3d472c316c40844f3f0d",
    "test_batch.bin": "803d5f7f4d78ea53de84dbe85f74fb6d",
}
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")

_STL10_IMAGE = 3 * 96 * 96
_STL10_CLASSES = ("airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck")
_STL10_FILES = {  # bytes and MD5 of the official files
    "train_X.bin": (5_000 * _STL10_IMAGE, "918c2871b30a85fa023e0c44e0bee87f"),
    "train_y.bin": (5_000, "5a34089d4802c674881badbb80307741"),
    "test_X.bin": (8_000 * _STL10_IMAGE, "7f263ba9f9e0b06b93213547f721ac82"),
    "test_y.bin": (8_000, "36f9794fa4beb8a2c72628de14fa638e"),
    "unlabeled_X.bin": (100_000 * _STL10_IMAGE, "5242ba1fed5e4be9e1e742405eb56ca4"),
}


def load_cifar10(data_dir: Path, *, download: bool = False, checksum: bool = True) -> Splits:
    """CIFAR-10 in either official form.

    Args:
        data_dir: ``cifar-10-batches-bin`` (the binary version) or ``cifar-10-batches-py`` (the Python version),
            or the folder that one of them is in.
        download: Get the Python version through torchvision if neither is there.
        checksum: Check the MD5 of every file. Without, the binary version may have any number of records.

    Raises:
        FileNotFoundError: If there is no CIFAR-10, or a file of it is missing.
        ValueError: If a file is damaged, or if ``checksum`` is off for the Python version, which is made of
            pickles: those can run code, so none is opened that is not the official one.
    """
    binary = _folder(data_dir, "cifar-10-batches-bin", "data_batch_1.bin", "test_batch.bin")
    if binary is not None:
        return _cifar10_binary(binary, checksum)
    python = _folder(data_dir, "cifar-10-batches-py", "data_batch_1", "test_batch")
    if python is not None or download:
        return _cifar10_python(data_dir if python is None else python.parent, python, download, checksum)
    raise FileNotFoundError(
        f"no CIFAR-10 in {data_dir}: neither cifar-10-batches-bin/ nor cifar-10-batches-py/ is there. "
        + _get_it(data_dir, "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz", "cifar-10-*.tar.gz")
    )


def _cifar10_binary(folder: Path, checksum: bool) -> Splits:
    parts: list[tuple[Tensor, Tensor]] = []
    for name, md5 in _CIFAR10_MD5.items():
        path = folder / name
        data = np.frombuffer(_read(path, _CIFAR10_RECORD, _CIFAR10_BYTES, md5 if checksum else None), np.uint8)
        records = torch.from_numpy(data.reshape(-1, _CIFAR10_RECORD).copy())
        labels = records[:, 0].long()
        if int(labels.max()) > 9:
            raise ValueError(f"{path} has the label {int(labels.max())}, where CIFAR-10 has 0 to 9: it is damaged")
        parts.append((records[:, 1:].reshape(-1, 3, 32, 32), labels))
    train = ArraySamples(torch.cat([images for images, _ in parts[:-1]]), torch.cat([y for _, y in parts[:-1]]))
    return Splits(train, train, ArraySamples(parts[-1][0].contiguous(), parts[-1][1]), _CIFAR10_CLASSES)


def _cifar10_python(root: Path, folder: Path | None, download: bool, checksum: bool) -> Splits:
    from torchvision.datasets import CIFAR10

    if not checksum:
        raise ValueError(
            f"{root}: the Python version of CIFAR-10 is made of pickles, which can run code, so it is only read "
            f"with its checksums. Use the binary version (cifar-10-batches-bin), or leave the checksums on."
        )
    if folder is not None and not download:  # torchvision would say that something is wrong, but not what
        official = [*CIFAR10.train_list, *CIFAR10.test_list, [CIFAR10.meta["filename"], CIFAR10.meta["md5"]]]
        for name, md5 in official:
            _read(folder / name, 1, None, md5)
    train, test = (_from_torchvision(CIFAR10, root, train=part, download=download) for part in (True, False))
    return Splits(train, train, test, _CIFAR10_CLASSES)


def _from_torchvision(dataset: type, root: Path, *, train: bool, download: bool) -> ArraySamples:
    try:
        loaded = dataset(root=str(root), train=train, download=download)
    except (RuntimeError, OSError) as error:
        what = f"download {dataset.__name__} into" if download else f"read {dataset.__name__} in"
        raise OSError(f"torchvision could not {what} {root}: {error}") from error
    images = torch.from_numpy(np.ascontiguousarray(loaded.data.transpose(0, 3, 1, 2)))
    return ArraySamples(images, torch.tensor(loaded.targets))


def load_stl10(data_dir: Path, *, download: bool = False, checksum: bool = True) -> Splits:
    """STL-10 from its official binaries; the encoder is trained on the labelled and the unlabelled images.

    Args:
        data_dir: ``stl10_binary``, or the folder that it is in.
        download: Get it through torchvision (2.6 GB) if it is not there.
        checksum: Check the MD5 of every file. Without, the files may have any number of images.

    Raises:
        FileNotFoundError: If there is no STL-10, or a file of it is missing.
        ValueError: If a file is damaged.
    """
    folder = _folder(data_dir, "stl10_binary", "train_X.bin", "test_X.bin", "unlabeled_X.bin")
    if folder is None and download:
        from torchvision.datasets import STL10

        try:
            STL10(root=str(data_dir), split="test", download=True)
        except (RuntimeError, OSError) as error:
            raise OSError(f"torchvision could not download STL-10 into {data_dir}: {error}") from error
        folder = data_dir / "stl10_binary"
    if folder is None:
        raise FileNotFoundError(
            f"no STL-10 in {data_dir}: stl10_binary/ is not there. "
            + _get_it(data_dir, "https://ai.stanford.edu/~acoates/stl10/stl10_binary.tar.gz", "stl10_*.tar.gz")
        )
    arrays = {}
    for name, (size, md5) in _STL10_FILES.items():
        record = _STL10_IMAGE if "_X" in name else 1
        arrays[name] = _map(folder / name, record, size, md5 if checksum else None)
    labels = {part: _stl10_labels(folder, part, arrays) for part in ("train", "test")}
    train = _stl10_images(arrays["train_X.bin"], arrays["unlabeled_X.bin"])
    count = len(labels["train"])
    return Splits(
        pretrain=ArraySamples(train),
        train=ArraySamples(train[:count], labels["train"]),
        test=ArraySamples(_stl10_images(arrays["test_X.bin"]), labels["test"]),
        classes=_STL10_CLASSES,
    )


def _stl10_labels(folder: Path, part: str, arrays: dict[str, np.ndarray]) -> Tensor:
    labels = torch.from_numpy(arrays[f"{part}_y.bin"].astype(np.int64))
    images = len(arrays[f"{part}_X.bin"]) // _STL10_IMAGE
    if len(labels) != images:
        raise ValueError(
            f"{folder / f'{part}_y.bin'} has {len(labels)} labels for the {images} images of {part}_X.bin: "
            f"one of the two is damaged, extract the archive again"
        )
    if int(labels.min()) < 1 or int(labels.max()) > 10:
        raise ValueError(
            f"{folder / f'{part}_y.bin'} has labels from {int(labels.min())} to {int(labels.max())}, where STL-10 "
            f"has 1 to 10: it is damaged, extract the archive again"
        )
    return labels - 1


def _stl10_images(*arrays: np.ndarray) -> Tensor:
    """Copy into one tensor by and by: the files have an image's columns where rows are usual, and are large."""
    images = torch.empty(sum(len(a) for a in arrays) // _STL10_IMAGE, 3, 96, 96, dtype=torch.uint8)
    start = 0
    for array in arrays:
        flat = array.reshape(-1, 3, 96, 96)
        for begin in range(0, len(flat), 1000):
            chunk = np.array(flat[begin : begin + 1000])
            images[start : start + len(chunk)] = torch.from_numpy(chunk).transpose(2, 3)
            start += len(chunk)
    return images


def load_digits() -> Splits:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels; a quarter is the test split, always the same.

    Example:
        >>> splits = load_digits()
        >>> splits.pretrain.images.shape, len(splits.test)
        (torch.Size([1347, 1, 8, 8]), 450)
    """
    from sklearn.datasets import load_digits as digits
    from sklearn.model_selection import train_test_split

    data = digits()
    images = torch.from_numpy(np.rint(data.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    kept, held = train_test_split(np.arange(len(images)), test_size=0.25, random_state=0, stratify=data.target)
    train, test = (ArraySamples(images, labels).select(torch.from_numpy(np.sort(i))) for i in (kept, held))
    return Splits(train, train, test, tuple(str(d) for d in range(10)))


def _folder(data_dir: Path, name: str, *signs: str) -> Path | None:
    """The folder of a data set: below ``data_dir``, or that itself, which is known by the files in it."""
    if (data_dir / name).is_dir():
        return data_dir / name
    if data_dir.name == name or any((data_dir / sign).is_file() for sign in signs):
        return data_dir if data_dir.is_dir() else None
    return None


def _get_it(data_dir: Path, address: str, archives: str) -> str:
    found = sorted(data_dir.glob(archives)) if data_dir.is_dir() else []
    if found:
        return f"The archive {found[0].name} is, though: extract it with `tar xf {found[0]} -C {data_dir}`."
    return (
        f"Get {address} and extract it there, or let torchvision download the data (--download). "
        f"If you have it elsewhere, say where with --data-dir."
    )


def _check(path: Path, record: int, size: int | None, md5: str | None) -> None:
    """Raise if a file is missing, too short, or not the official one (where its MD5 is given)."""
    again = "extract the archive again, or download it anew"
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {again}")
    found = path.stat().st_size
    if found == 0:
        raise ValueError(f"{path} is empty: {again}")
    if md5 is not None and size is not None and found < size:
        raise ValueError(f"{path} is cut off: it has {found:,} of {size:,} bytes; {again}{_on_purpose()}")
    if found % record:
        raise ValueError(f"{path} is damaged: {found:,} bytes are no multiple of a record's {record:,}; {again}")
    if md5 is not None:
        seen = _md5(path)
        if seen != md5:
            raise ValueError(
                f"{path} is not the official file: its MD5 is {seen}, and should be {md5}; {again}{_on_purpose()}"
            )


def _on_purpose() -> str:
    return ". If it is a part of the data on purpose, switch the check off (--no-checksum; checksum=False)"


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _read(path: Path, record: int, size: int | None, md5: str | None) -> bytes:
    _check(path, record, size, md5)
    return path.read_bytes()


def _map(path: Path, record: int, size: int | None, md5: str | None) -> np.ndarray:
    _check(path, record, size, md5)
    return np.memmap(path, dtype=np.uint8, mode="r")
