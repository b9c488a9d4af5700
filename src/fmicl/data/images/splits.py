"""Training, test and validation splits of an image dataset."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fmicl.data.images.samples import Samples, Skipped, printable

_NAMED_CLASSES = 10  # classes that a description names


@dataclass(frozen=True, eq=False)
class Splits:
    """A dataset, ready for training and evaluation.

    Attributes:
        pretrain: what the encoder is trained on, without labels: ``train``, or that followed by unlabelled samples.
            Never a sample of ``test``.
        train: the labelled training samples of k-NN and linear probe; None without labels.
        test: the labelled samples that they are evaluated on; None without labels.
        classes: names of the classes; a label is an index into them.
        skipped: images that can't be read and are in none of the splits.
        split: name of the split that ``test`` is: "test", "val", "held-out" or "validation".
        root: the data folder, if samples are image files in it.
        names: paths below ``root`` of the samples of ``pretrain``, in its order; empty if they are not files.
        left_out: subfolders of ``root`` that were not searched: they can't be opened, or are excluded.
        test_names: as ``names``, of the samples of ``test``.
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


def describe_splits(splits: Splits) -> str:
    """In one line, the classes and the number of images that are evaluated on.

    Example:
        >>> from fmicl.data import ArraySamples
        >>> images = ArraySamples(torch.zeros(4, 1, 2, 2, dtype=torch.uint8))
        >>> describe_splits(Splits(images, images, images, ("cat", "dog"), split="held-out"))
        '2 classes: cat, dog; 4 images held out'
        >>> describe_splits(Splits(images, None, None))
        'no classes: 4 images without labels'
    """
    if splits.test is None:
        return f"no classes: {len(splits.pretrain):,} images without labels"
    names = [printable(name) for name in splits.classes]
    more = f" and {len(names) - _NAMED_CLASSES:,} more" if len(names) > _NAMED_CLASSES else ""
    where = "held out" if splits.split in ("held-out", "validation") else f"in the {splits.split} split"
    return f"{len(names):,} classes: {', '.join(names[:_NAMED_CLASSES])}{more}; {len(splits.test):,} images {where}"


def too_few_to_evaluate(labels: Tensor, held_out: int) -> str:
    """What is missing for an evaluation, in words; "" if nothing is.

    The linear probe holds out a training sample itself, and the geometry compares held-out samples.

    Args:
        labels: (N,) labels of the training samples.
        held_out: number of held-out samples.

    Example:
        >>> too_few_to_evaluate(torch.tensor([0, 0, 1]), 2)
        ''
        >>> too_few_to_evaluate(torch.tensor([0, 0, 1]), 1)
        'at least two classes, ... but there are 3 training images of 2 classes, at most 2 of one, and 1 held out'
    """
    counts = labels.bincount(minlength=1)
    classes, most = int((counts > 0).sum()), int(counts.max())
    if classes >= 2 and most >= 2 and held_out >= 2:
        return ""
    return (
        "at least two classes, two training images of one of them and two held-out images are needed, but there are "
        f"{len(labels)} training images of {classes} class{'' if classes == 1 else 'es'}, at most {most} of one, "
        f"and {held_out} held out"
    )


def stratified_split(labels: Tensor, share: float, seed: int) -> tuple[Tensor, Tensor]:
    """Hold out a share of each class at random.

    A class of at least two samples has at least one on either side; one of a single sample is kept.

    Args:
        labels: (N,) integers.
        share: fraction to hold out, in (0, 1).
        seed: of the random split.

    Returns:
        The indices that are kept and those that are held out, both increasing.

    Raises:
        ValueError: the share is not in (0, 1), or nothing would be held out.

    Example:
        >>> stratified_split(torch.tensor([0, 0, 1, 1, 1, 1, 2]), 0.5, seed=0)
        (tensor([1, 3, 4, 6]), tensor([0, 2, 5]))
    """
    _check_share(share)
    generator = torch.Generator().manual_seed(seed)
    held = torch.zeros(len(labels), dtype=torch.bool)
    labels = labels.cpu()
    for label in range(int(labels.max()) + 1 if len(labels) else 0):
        members = (labels == label).nonzero()[:, 0]
        if len(members) > 1:
            count = min(max(1, round(share * len(members))), len(members) - 1)
            held[members[torch.randperm(len(members), generator=generator)[:count]]] = True
    if not held.any():
        raise _nothing_to_hold_out(len(labels))
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


def split_by_name(names: Sequence[str], labels: Sequence[int], share: float, salt: str) -> tuple[list[int], list[int]]:
    """Hold out about a share of each class by a hash of the samples' names.

    A sample is held out if the hash of its name, as a number in [0, 1), lies below the share. So no file changes sides
    because others are added or removed. The one exception is a class of at least two that would be all on one side: its
    lowest number is then held out, or its highest kept. A class of a single sample is kept.

    Args:
        names: one per sample; they should differ.
        labels: as many integers.
        share: fraction to hold out, in (0, 1).
        salt: selects one of the possible splits.

    Returns:
        The indices that are kept and those that are held out, both increasing.

    Raises:
        ValueError: the share is not in (0, 1), or nothing would be held out.

    Example:
        >>> split_by_name(["a/1.png", "a/2.png", "a/3.png", "b/1.png"], [0, 0, 0, 1], 0.3, "x")
        ([0, 2, 3], [1])
    """
    _check_share(share)
    members: dict[int, list[tuple[float, int]]] = {}
    for index, (name, label) in enumerate(zip(names, labels, strict=True)):
        members.setdefault(label, []).append((_hash_fraction(name, salt), index))
    held: set[int] = set()
    for numbered in members.values():
        if len(numbered) > 1:
            below = sum(number < share for number, _ in numbered)
            held.update(index for _, index in sorted(numbered)[: min(max(1, below), len(numbered) - 1)])
    if not held:
        raise _nothing_to_hold_out(len(names))
    return [i for i in range(len(names)) if i not in held], sorted(held)


def hold_out(splits: Splits, share: float, seed: int) -> Splits:
    """Replace the test split with a validation split: a share of the training split, which is then not trained on.

    Files are split by name, arrays at random.

    Raises:
        ValueError: there are no labels, or too few samples would be left on one side.
    """
    if splits.train is None or splits.train.labels is None:
        raise ValueError("validation needs labelled images, but these have no labels (no class subfolders)")
    count, labels = len(splits.train), splits.train.labels
    if splits.names:
        sides = split_by_name(splits.names[:count], labels.tolist(), share, f"validation {seed}")
        kept, held = (torch.tensor(side) for side in sides)
    else:
        kept, held = stratified_split(labels, share, seed)
    missing = too_few_to_evaluate(labels[kept], len(held))
    if missing:
        raise ValueError(f"--validation {share} is too small or too large for this data: {missing}")
    train = splits.train.select(kept)
    if splits.pretrain is splits.train:
        pretrain = train
    else:  # it starts with the samples of train
        pretrain = splits.pretrain.select(torch.cat([kept, torch.arange(count, len(splits.pretrain))]))
    return dataclasses.replace(
        splits,
        pretrain=pretrain,
        train=train,
        test=splits.train.select(held),
        split="validation",
        names=(*(splits.names[i] for i in kept.tolist()), *splits.names[count:]) if splits.names else (),
        test_names=tuple(splits.names[i] for i in held.tolist()) if splits.names else (),
    )


def _check_share(share: float) -> None:
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be between 0 and 1; got {share}")


def _nothing_to_hold_out(count: int) -> ValueError:
    return ValueError(
        f"no class of the {count} samples has two of them, so none can be held out to evaluate on: add images, or move "
        "all into one folder, without classes"
    )


def _hash_fraction(name: str, salt: str) -> float:
    """A number in [0, 1) for a name, uniform over names."""
    digest = hashlib.blake2b(os.fsencode(name), key=salt.encode(), digest_size=6).digest()
    return int.from_bytes(digest, "big") / 2**48
