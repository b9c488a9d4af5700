"""What a set of samples is: images in memory, or files to decode as they are needed."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

__all__ = [
    "ArraySamples",
    "FileSamples",
    "Samples",
    "Skipped",
    "Splits",
    "described",
    "lacking",
    "listed",
    "printable",
    "split_by_name",
    "stratified_split",
]

_NAMED = 10  # classes that a line names


@dataclass(frozen=True, eq=False)
class ArraySamples:
    """Images that live in memory, on any device.

    Args:
        images: (N, C, H, W) uint8, with 1 or 3 channels.
        labels: (N,) int64, or None where there are none.

    Raises:
        ValueError: If the shapes or dtypes are others.

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
        """The same samples on another device; on a GPU their images are dense, as the kernel of views reads them."""
        images = self.images.to(device)
        if images.device.type != "cpu":
            images = images.contiguous()
        return ArraySamples(images, None if self.labels is None else self.labels.to(device))

    def select(self, index: Sequence[int] | Tensor) -> ArraySamples:
        """Some of the samples, in the given order; a run of neighbours shares their memory."""
        index = torch.as_tensor(index, device="cpu", dtype=torch.int64)
        part: slice | Tensor = index
        if len(index) and torch.equal(index, torch.arange(int(index[0]), int(index[0]) + len(index))):
            part = slice(int(index[0]), int(index[0]) + len(index))
        return ArraySamples(self.images[part], None if self.labels is None else self.labels[part])


@dataclass(frozen=True, eq=False)
class FileSamples:
    """Image files that are decoded in worker processes, for sets that don't fit into memory.

    Args:
        paths: One image file for each sample.
        labels: (N,) int64, or None where there are none.

    Raises:
        ValueError: If there are not as many labels as paths.

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

    def to(self, device: torch.device | str) -> FileSamples:
        """The same samples, with the labels on another device; the images are on disk."""
        return FileSamples(self.paths, None if self.labels is None else self.labels.to(device))

    def select(self, index: Sequence[int] | Tensor) -> FileSamples:
        """Some of the samples, in the given order."""
        index = torch.as_tensor(index)
        labels = None if self.labels is None else self.labels[index.to(self.labels.device)]
        return FileSamples(tuple(self.paths[i] for i in index.tolist()), labels)


Samples = ArraySamples | FileSamples


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read, or a folder that was not looked into, and why."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return printable(f"{self.path}: {self.reason}")


def listed(skipped: Sequence[Skipped]) -> str:
    """The first three of what was left out, with the reasons, and how many more there are, in one line.

    Example:
        >>> listed([Skipped(Path(name), "is empty") for name in ("a.png", "b.png", "c.png", "d.png")])
        'a.png: is empty; b.png: is empty; c.png: is empty; and 1 more'
    """
    more = f"; and {len(skipped) - 3} more" if len(skipped) > 3 else ""
    return "; ".join(str(x) for x in skipped[:3]) + more


def printable(name: str) -> str:
    r"""A file name as text that can be written anywhere: bytes that are no UTF-8 become ``\xff``.

    Example:
        >>> print(printable(os.fsdecode(b"\xff.png")))
        \xff.png
    """
    return os.fsencode(name).decode("utf-8", "backslashreplace")


@dataclass(frozen=True, eq=False)
class Splits:
    """A data set, ready for training and evaluation.

    Attributes:
        pretrain: What the encoder is trained on, without its labels: ``train``, or that followed by unlabelled
            samples. Never a sample of ``test``.
        train: The labelled training samples that k-NN and the linear probe learn from; None without labels.
        test: The labelled samples that they are evaluated on; None without labels.
        classes: Names of the classes; a label is an index into them.
        skipped: Images that could not be read and are in none of the splits.
        split: Name of the split that ``test`` is: "test", "val", "held-out" or "validation".
        root: The data folder, where samples are image files in it.
        names: The paths below ``root`` of the samples of ``pretrain``, in its order; empty where they are no files.
        left_out: Subfolders of ``root`` that were not looked into: they can't be entered, or hold runs.
        test_names: As ``names``, of the samples of ``test``.
    """

    pretrain: Samples
    train: Samples | None
    test: Samples | None
    classes: tuple[str, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    split: str = "test"
    root: Path | None = None
    names: tuple[str, ...] = ()
    left_out: tuple[Skipped, ...] = ()
    test_names: tuple[str, ...] = ()


def described(splits: Splits) -> str:
    """In one line, which classes there are and how many images they are evaluated on.

    Example:
        >>> images = ArraySamples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8))
        >>> described(Splits(images, images, images, ("cat", "dog"), split="held-out"))
        '2 classes: cat, dog; 4 images held out'
        >>> described(Splits(images, None, None))
        'no classes: 4 images without labels'
    """
    if splits.test is None:
        return f"no classes: {len(splits.pretrain):,} images without labels"
    names = [printable(name) for name in splits.classes]
    more = f" and {len(names) - _NAMED:,} more" if len(names) > _NAMED else ""
    where = "held out" if splits.split in ("held-out", "validation") else f"in the {splits.split} split"
    return f"{len(names):,} classes: {', '.join(names[:_NAMED])}{more}; {len(splits.test):,} images {where}"


def lacking(labels: Tensor, held_out: int) -> str:
    """In words, what evaluation lacks, which learns from labelled samples and asks of others; "" where it has all.

    The linear probe holds a training sample out itself, and the geometry compares samples that were held out.

    Example:
        >>> lacking(torch.tensor([0, 0, 1]), 2)
        ''
        >>> lacking(torch.tensor([0, 0, 1]), 1)
        'training images of two classes, ... there are 3 of 2 classes, at most 2 of one, and 1 held out'
    """
    counts = labels.bincount(minlength=1)
    classes, most = int((counts > 0).sum()), int(counts.max())
    if classes >= 2 and most >= 2 and held_out >= 2:
        return ""
    return (
        "training images of two classes, two of one of them, and two that are held out are the least; "
        f"there are {len(labels)} of {classes} class{'' if classes == 1 else 'es'}, at most {most} of one, "
        f"and {held_out} held out"
    )


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Hold out a share of each class, at random but always the same for a seed.

    A class of at least two samples has at least one on either side; one of a single sample is kept.

    Args:
        labels: (N,) integers.
        share: In (0, 1), the part to hold out.
        seed: Which of the possible splits.

    Returns:
        The indices that are kept and those that are held out, both increasing.

    Raises:
        ValueError: If the share is not in (0, 1), or nothing would be held out.

    Example:
        >>> stratified_split(torch.tensor([0, 0, 1, 1, 1, 1, 2]), 0.5, seed=0)
        (tensor([1, 3, 4, 6]), tensor([0, 2, 5]))
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be between 0 and 1; got {share}")
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    labels = labels.cpu()
    for label in range(int(labels.max()) + 1 if len(labels) else 0):
        members = (labels == label).nonzero()[:, 0]
        if len(members) > 1:
            count = min(max(1, round(share * len(members))), len(members) - 1)
            held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    if not held.any():
        raise ValueError(f"no class of the {len(labels)} samples has two of them, so none can be held out")
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def split_by_name(names: Sequence[str], labels: Sequence[int], share: float, salt: str) -> tuple[list[int], list[int]]:
    """Hold out about a share of each class by the samples' names: which side a file is on, its own name decides.

    A sample is held out if a hash of its name, read as a number in [0, 1), lies below the share. So no file changes
    sides because others come or go. The one exception is a class of at least two that would be all on one side: its
    lowest number is then held out, or its highest kept. A class of a single sample is kept.

    Args:
        names: One for each sample; they should differ.
        labels: As many integers.
        share: In (0, 1), the part to hold out.
        salt: Which of the possible splits.

    Returns:
        The indices that are kept and those that are held out, both increasing.

    Raises:
        ValueError: If the share is not in (0, 1), or nothing would be held out.

    Example:
        >>> split_by_name(["a/1.png", "a/2.png", "a/3.png", "b/1.png"], [0, 0, 0, 1], 0.3, "x")
        ([0, 2, 3], [1])
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be between 0 and 1; got {share}")
    members: dict[int, list[tuple[float, int]]] = {}
    for index, (name, label) in enumerate(zip(names, labels, strict=True)):
        members.setdefault(label, []).append((_number(name, salt), index))
    held: set[int] = set()
    for numbered in members.values():
        if len(numbered) > 1:
            below = sum(number < share for number, _ in numbered)
            held.update(index for _, index in sorted(numbered)[: min(max(1, below), len(numbered) - 1)])
    if not held:
        raise ValueError(f"no class of the {len(names)} samples has two of them, so none can be held out")
    return [i for i in range(len(names)) if i not in held], sorted(held)


def _number(name: str, salt: str) -> float:
    """A number in [0, 1) for a name, uniform over names."""
    digest = hashlib.blake2b(os.fsencode(name), key=salt.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48


def _check_labels(labels: Tensor | None, n: int) -> None:
    if labels is not None and (labels.dtype != torch.int64 or labels.shape != (n,)):
        raise ValueError(
            f"labels must be int64 of shape ({n},), one for each sample; "
            f"got {labels.dtype} of shape {tuple(labels.shape)}"
        )
