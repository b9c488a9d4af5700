"""From tokens to batches: each sentence twice, for dropout to make two views of."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fmicl.data.images.stream import Batch, generator_of
from fmicl.data.text.tokens import Sentences

__all__ = ["SentenceStream", "padded_width"]

_BLOCK = 64  # batches that are put together, and sent to the device, at once


def padded_width(longest: int, limit: int) -> int:
    """The width of a batch: a multiple of 8, which GPUs like and which keeps the shapes few, but not over the limit.

    Example:
        >>> padded_width(17, 32), padded_width(30, 30)
        (24, 30)
    """
    return min(-(-longest // 8) * 8, limit)


class SentenceStream:
    """All sentences in random order; one pass is one epoch, and the next pass is the next epoch.

    A batch is (B, L) token ids, -1 where a sentence has ended, and L is the longest sentence's length, rounded up to a
    multiple of 8; with ``fixed``, that of the longest sentence of all. First and second view are the same tensor: what
    tells them apart is the encoder's dropout.

    The order is a function of (seed, epoch), the same in all processes, of which each takes its part. So a pass can
    start anywhere, and goes on as if it had never stopped. Sentences that don't fill a last batch are left out of an
    epoch, others each time. Batches are put together many at a time and sent to the device while it computes.

    Args:
        sentences: what to train on.
        batch_size: sentences of a batch in one process, not of all together.
        length: no sentence is longer.
        seed: where the order comes from.
        device: where the batches are wanted.
        rank: number of this process.
        world_size: how many processes there are.
        fixed: all batches have one shape, as compilers and CUDA graphs like it.

    Raises:
        ValueError: there are too few sentences for one batch in each process.

    Example:
        >>> sentences = Sentences(np.arange(12), np.arange(0, 13, 2), 0, {})
        >>> stream = SentenceStream(sentences, 2, length=8, seed=0, device="cpu")
        >>> whole = [batch.first.tolist() for batch in stream]
        >>> stream.set_position(epoch=0, batch=2)
        >>> [batch.first.tolist() for batch in stream] == whole[2:]
        True
    """

    def __init__(
        self,
        sentences: Sentences,
        batch_size: int,
        *,
        length: int,
        seed: int,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        fixed: bool = False,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size:
            raise ValueError(
                f"batch_size must be positive and rank in [0, world_size); got {batch_size}, {rank} of {world_size}"
            )
        if len(sentences) < batch_size * world_size:
            raise ValueError(
                f"{len(sentences)} sentences don't fill one batch of {batch_size}"
                + (f" in each of {world_size} processes" if world_size > 1 else "")
                + ": use a smaller --batch-size, or more text"
            )
        self.sentences, self.batch_size, self.length = sentences, batch_size, length
        self.seed, self.device, self.rank, self.world_size = seed, torch.device(device), rank, world_size
        self.longest = padded_width(int(np.diff(sentences.offsets).max()), length)  # L of the widest batch
        self.width = self.longest if fixed else None
        self.epoch, self.batch = 0, 0

    def __len__(self) -> int:
        """Batches in an epoch, the same number in every process."""
        return len(self.sentences) // (self.batch_size * self.world_size)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Where the next pass starts; it ends with the epoch.

        Raises:
            ValueError: there is no such batch in an epoch.
        """
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(f"an epoch has the batches 0 to {len(self) - 1}; got epoch {epoch}, batch {batch}")
        self.epoch, self.batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self.epoch, self.batch
        self.epoch, self.batch = epoch + 1, 0
        order = torch.randperm(len(self.sentences), generator=generator_of(self.seed, epoch)).numpy()
        shares = order[: len(self) * self.world_size * self.batch_size].reshape(len(self), self.world_size, -1)
        for first in range(start, len(self), _BLOCK):
            yield from self._block(shares[first : first + _BLOCK, self.rank])

    def _block(self, index: np.ndarray) -> Iterator[Batch]:
        """The batches of sentences (batches, B)."""
        longest = self.sentences.lengths(index.reshape(-1)).reshape(index.shape).max(axis=1)
        widths = [self.width or padded_width(int(x), self.length) for x in longest]
        rows = self.sentences.padded(index.reshape(-1), max(widths)).reshape(*index.shape, -1)
        ids, chosen = torch.from_numpy(rows), torch.from_numpy(index)
        if self.device.type == "cuda":
            ids, chosen = (x.pin_memory().to(self.device, non_blocking=True) for x in (ids, chosen))
        else:
            ids, chosen = ids.to(self.device), chosen.to(self.device)
        for batch, width in enumerate(widths):
            tokens = ids[batch, :, :width].contiguous()
            yield Batch(tokens, tokens, chosen[batch])
