"""Streams of training batches: random order, exact resumption, one share per process."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """Two or more views of each sample of a batch.

    Attributes:
        first: (B, C, S, S) float32, normalised, on the device; for sentences (B, L) token ids, padded with -1.
        second: another random view of the same samples in the same order, as first. With K views per sample, the K - 1
            others, ((K - 1) B, ...): all of the second, then all of the third, ...
        index: (B,) int64 on the device, the samples' positions in the dataset.
        local: K local crops of each sample, (K B, C, s, s), all of the first, then all of the second, ...; None if
            there are none.
        labels: (B,) int64 on the device, their labels, -1 if unknown; None if training is without labels.
    """

    first: Tensor
    second: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here
    local: Tensor | None = None
    labels: Tensor | None = None


class Stream(ABC):
    """Batches of all samples in random order; one pass is one epoch, the next pass is the next epoch.

    Every random number is a function of the seed and of the position, never of torch's global generator. So a pass can
    start anywhere and continues exactly as if it had never stopped. The order of an epoch is the same in all processes,
    each of which takes its share of every batch. Samples that don't fill the last batch are dropped, others each epoch.

    Args:
        count: number of samples.
        batch_size: samples in a batch of one process, not of all together.
        seed: source of all randomness.
        device: where the batches are put.
        rank: number of this process.
        world_size: number of processes.

    Raises:
        ValueError: there are too few samples for one batch in each process, or an argument is out of range.
    """

    def __init__(
        self, count: int, batch_size: int, *, seed: int, device: torch.device | str, rank: int = 0, world_size: int = 1
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be positive and rank in [0, world_size); got {batch_size}, {rank} of {world_size}"
            )
        if count < batch_size * world_size:
            raise ValueError(
                f"{count} samples don't fill one batch of {batch_size}"
                + (f" in each of {world_size} processes" if world_size > 1 else "")
                + ": use a smaller --batch-size, or more data"
            )
        self.count, self.batch_size, self.seed, self.device = count, batch_size, seed, torch.device(device)
        self.rank, self.world_size = rank, world_size
        self.epoch, self.batch = 0, 0

    def __len__(self) -> int:
        """Batches in an epoch, the same number in every process."""
        return self.count // (self.batch_size * self.world_size)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Set where the next pass starts; it ends with the epoch.

        Raises:
            ValueError: an epoch has no such batch.
        """
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(f"an epoch has the batches 0 to {len(self) - 1}; got epoch {epoch}, batch {batch}")
        self.epoch, self.batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch."""
        epoch, start = self.epoch, self.batch
        self.epoch, self.batch = epoch + 1, 0
        return self._batches(epoch, start)

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """The batches of an epoch from one of them on."""

    def _order(self, epoch: int) -> Tensor:
        """(batches, batch_size) samples of this process in an epoch."""
        order = torch.randperm(self.count, generator=seeded_generator(self.seed, epoch))
        used = order[: len(self) * self.world_size * self.batch_size]
        return used.view(len(self), self.world_size, self.batch_size)[:, self.rank]


def seeded_generator(*numbers: int) -> torch.Generator:
    """A random generator that is a function of these numbers; neighbouring numbers give independent streams."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
