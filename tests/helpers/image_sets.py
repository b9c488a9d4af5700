"""Small datasets in their real file formats, and ways to damage image files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from fmicl.data import ArraySamples, FileSamples, MappedSamples, Splits


def make(name: str, root: Path, n: int = 12) -> Path:
    """Write the data set under ``root`` and return the folder to give as --data-dir."""
    makers = {"cifar10": _cifar10, "stl10": _stl10, "tinyimagenet": _tinyimagenet}
    makers |= dict.fromkeys(("imagenet", "imagenet_mocov3"), _imagenet)
    folder = root / name
    folder.mkdir()
    makers.get(name, _images)(folder, n)
    return folder


def picture(label: int, side: int, rng: np.random.Generator) -> NDArray[np.uint8]:
    """Noise around a colour that tells the class."""
    colour = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255]])[label % 3]
    noise = rng.integers(0, 120, (side, side, 3))
    return np.asarray(colour * 0.5 + noise, dtype=np.uint8)


def _records(n: int, side: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 3
    return np.stack([picture(int(label), side, rng) for label in labels]), labels.astype(np.uint8)


def _cifar10(folder: Path, n: int) -> None:
    inner = folder / "cifar-10-batches-bin"
    inner.mkdir()
    images, labels = _records(n, 32)
    records = np.concatenate([labels[:, None], images.transpose(0, 3, 1, 2).reshape(n, -1)], axis=1)
    for name in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"):
        (inner / f"{name}.bin").write_bytes(records.tobytes())


def _stl10(folder: Path, n: int) -> None:
    inner = folder / "stl10_binary"
    inner.mkdir()
    images, labels = _records(n, 96)
    for part in ("train", "test", "unlabeled"):
        # column by column, as the set's authors wrote it
        (inner / f"{part}_X.bin").write_bytes(images.transpose(0, 3, 2, 1).tobytes())
        if part != "unlabeled":
            (inner / f"{part}_y.bin").write_bytes((labels + 1).tobytes())


def _save(path: Path, image: NDArray[np.uint8]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)


def _tinyimagenet(folder: Path, n: int) -> None:
    root = folder / "tiny-imagenet-200"
    images, labels = _records(n, 64)
    names = ["n01443537", "n01629819", "n01641577"]
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        wnid = names[label]
        _save(root / "train" / wnid / "images" / f"{wnid}_{i}.JPEG", image)
        _save(root / "val" / "images" / f"val_{i}.JPEG", image)
    lines = [f"val_{i}.JPEG\t{names[label]}\t0\t0\t63\t63" for i, label in enumerate(labels)]
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    (root / "words.txt").write_text("\n".join(f"{name}\tthing {name}" for name in names) + "\n")


def _imagenet(folder: Path, n: int) -> None:
    images, labels = _records(n, 48)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        for part in ("train", "val"):
            _save(folder / part / f"n0000000{label}" / f"{i}.JPEG", image)


def _images(folder: Path, n: int) -> None:
    images, labels = _records(n, 40)
    for i, (image, label) in enumerate(zip(images, labels, strict=True)):
        _save(folder / "abc"[label] / f"{i}.png", image)


def write_image(path: Path, seed: int = 0, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1] // 5, size[0] // 5, 3), dtype=np.uint8)
    Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC).save(path)


def make_classes(root: Path, counts: dict[str, int], suffix: str = ".png") -> None:
    for k, (name, count) in enumerate(counts.items()):
        for i in range(count):
            write_image(root / name / f"{i:03d}{suffix}", seed=1000 * k + i)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def damage_header(path: Path) -> None:
    path.write_text("<html>404</html>")


def damage_inside(path: Path) -> None:
    """Remove the middle of a file; header and end are intact."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + data[-12:])


def arrays(splits: Splits) -> tuple[ArraySamples, ArraySamples, ArraySamples]:
    assert isinstance(splits.pretrain, ArraySamples)
    assert isinstance(splits.train, ArraySamples)
    assert isinstance(splits.test, ArraySamples)
    return splits.pretrain, splits.train, splits.test


def labels_of(samples: object) -> list[int]:
    assert isinstance(samples, ArraySamples | FileSamples | MappedSamples)
    assert samples.labels is not None
    return samples.labels.tolist()
