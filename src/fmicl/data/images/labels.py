"""Training labels: the classes of a dataset, with label noise if asked for."""

from __future__ import annotations

import torch
from torch import Tensor

from fmicl.data.images.splits import Splits
from fmicl.data.stream import seeded_generator


def training_labels(splits: Splits, noise: float, seed: int) -> Tensor:
    """Labels of the samples that are trained on, (N,) int64; -1 for those without a class.

    Only training sees wrong labels: those of ``splits`` stay as they are.

    Args:
        splits: the dataset.
        noise: share of labels that are replaced by another class.
        seed: of the choice.

    Raises:
        ValueError: the data has no classes, or fewer than two of them while some labels shall be wrong.
    """
    if splits.train is None or splits.train.labels is None:
        raise ValueError("--labels needs images with classes, but these have none: put them into a subfolder per class")
    known = splits.train.labels.cpu()
    if noise:
        known = wrong_labels(known, len(splits.classes), noise, seed)
    return torch.cat([known, known.new_full((len(splits.pretrain) - len(known),), -1)])


def wrong_labels(labels: Tensor, classes: int, share: float, seed: int) -> Tensor:
    """Replace a share of the labels, chosen at random, by another class, each with the same probability.

    Args:
        labels: (N,) in [0, classes).
        classes: number of classes.
        share: in [0, 1].
        seed: of the choice; the same seed and share give the same labels.

    Raises:
        ValueError: there is no other class.

    Example:
        >>> labels = torch.zeros(10, dtype=torch.long)
        >>> int((wrong_labels(labels, 3, 0.4, seed=0) != labels).sum())
        4
    """
    if classes < 2:
        raise ValueError(f"--label-noise needs at least two classes, but there are {classes}")
    generator = seeded_generator(seed, len(labels))
    chosen = torch.randperm(len(labels), generator=generator)[: round(share * len(labels))]
    steps = torch.randint(1, classes, (len(chosen),), generator=generator)
    changed = labels.clone()
    changed[chosen] = (labels[chosen] + steps) % classes
    return changed
