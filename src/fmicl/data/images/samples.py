"""Sets of image samples: arrays in memory or mapped from a file, or image files that are decoded on demand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class ArraySamples:
    """Images in memory, on any device.

    Args:
        images: (N, C, H, W) uint8, with 1 or 3 channels.
        labels: (N,) int64, or None without labels.

    Raises:
        ValueError: another shape or dtype.

    Example:
        >>> samples = ArraySamples(torch.zeros(5, 3, 8, 8, dtype=torch.uint8), torch.arange(5))
        >>> len(samples), samples.select([4, 0]).labels
        (5, tensor([4, 0]))
    """

    images: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[1] not in (1, 3):
            raise ValueError(
                f"images must be uint8 of shape (N, 1 or 3, H, W); "
                f"got {self.images.dtype} of shape {tuple(self.images.shape)}"
            )
        _check_labels(self.labels, len(self.images))

    def __len__(self) -> int:
        return len(self.images)

    def to(self, device: torch.device | str) -> ArraySamples:
        """The samples on another device; on a GPU the images are contiguous, as the kernel of views needs them."""
        images = self.images.to(device)
        if images.device.type != "cpu":
            images = images.contiguous()
        return ArraySamples(images, None if self.labels is None else self.labels.to(device))

    def select(self, index: Sequence[int] | Tensor) -> ArraySamples:
        """Some of the samples, in the given order; a contiguous range shares their memory."""
        index = torch.as_tensor(index, device="cpu", dtype=torch.int64)
        part: slice | Tensor = index
        if len(index) and torch.equal(index, torch.arange(int(index[0]), int(index[0]) + len(index))):
            part = slice(int(index[0]), int(index[0]) + len(index))
        return ArraySamples(self.images[part], None if self.labels is None else self.labels[part])

    def read(self, index: Sequence[int] | Tensor) -> Tensor:
        """(n, C, H, W) uint8 images of some samples, in the given order."""
        return self.select(index).images


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Image files that worker processes decode, for data that doesn't fit into memory.

    Args:
        paths: one image file per sample.
        labels: (N,) int64, or None without labels.

    Raises:
        ValueError: the number of labels is not that of the paths.

    Example:
        >>> samples = FileSamples((Path("a.png"), Path("b.png")), torch.tensor([0, 1]))
        >>> samples.select([1]).paths
        (...Path('b.png'),)
    """

    paths: tuple[Path, ...]
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.paths))

    def __len__(self) -> int:
        return len(self.paths)

    def select(self, index: Sequence[int] | Tensor) -> FileSamples:
        """Some of the samples, in the given order."""
        index = torch.as_tensor(index)
        labels = None if self.labels is None else self.labels[index]
        return FileSamples(tuple(self.paths[i] for i in index.tolist()), labels)


@dataclass(frozen=True, eq=False)
class MappedSamples:
    """Images in a file that is mapped into memory, for data that would not fit: batches of them are read as needed.

    Args:
        images: (M, C, H, W) uint8 on the CPU.
        rows: (N,) int64, the image of each sample.
        labels: (N,) int64, or None without labels.

    Raises:
        ValueError: the number of labels is not that of the rows.

    Example:
        >>> images = torch.arange(5, dtype=torch.uint8).view(5, 1, 1, 1)
        >>> MappedSamples(images, torch.arange(5)).select([3, 1]).read([1, 0])[:, 0, 0, 0].tolist()
        [1, 3]
    """

    images: Tensor
    rows: Tensor
    labels: Tensor | None = None

    def __post_init__(self) -> None:
        _check_labels(self.labels, len(self.rows))

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, index: Sequence[int] | Tensor) -> MappedSamples:
        """Some of the samples, in the given order."""
        index = torch.as_tensor(index, device="cpu", dtype=torch.int64)
        return MappedSamples(self.images, self.rows[index], None if self.labels is None else self.labels[index])

    def read(self, index: Sequence[int] | Tensor) -> Tensor:
        """(n, C, H, W) uint8 images of some samples, in the given order, on the CPU."""
        return self.images.index_select(0, self.rows[torch.as_tensor(index, device="cpu", dtype=torch.int64)])


Samples = ArraySamples | FileSamples | MappedSamples


@dataclass(frozen=True)
class Skipped:
    """An image that can't be read, or a folder that was not searched, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


def summarise_skipped(skipped: Sequence[Skipped]) -> str:
    """The first three with their reasons, and the number of the others, in one line.

    Example:
        >>> summarise_skipped([Skipped(Path(name), "is empty") for name in ("a.png", "b.png", "c.png", "d.png")])
        'a.png: is empty; b.png: is empty; c.png: is empty; and 1 more'
    """
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return "; ".join(str(x) for x in skipped[:3]) + more


def printable(name: str) -> str:
    r"""A file name as valid Unicode: bytes that are not UTF-8 are written as ``\xff``.

    Example:
        >>> print(printable(os.fsdecode(b"\xff.png")))
        \xff.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


def _check_labels(labels: Tensor | None, n: int) -> None:
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != (n,)):
        raise ValueError(
            f"labels must be int64 of shape ({n},), one for each sample; "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
