"""Stream of sentences for training: each sentence twice, of which the encoder's dropout makes two views."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from fmicl.data.stream import Batch, Stream
from fmicl.data.text.tokens import Sentences

_BLOCK = 64  # batches that are assembled and sent to the device at once


def padded_width(longest: int, limit: int) -> int:
    """Width of a batch: a multiple of 8, for the GPU and for few distinct shapes, but at most the limit.

    Example:
        >>> padded_width(17, 32), padded_width(30, 30)
        (24, 30)
    """
    return min(-(-longest // 8) * 8, limit)


class SentenceStream(Stream):
    """All sentences in random order; see :class:`fmicl.data.Stream` for order and resumption.

    A batch is (B, L) token ids, padded with -1; L is the length of its longest sentence, rounded up to a multiple of 8.
    First and second view are the same tensor: the encoder's dropout makes them differ. Batches are assembled many at a
    time and sent to the device while it computes.

    Args:
        sentences: what to train on.
        batch_size: sentences in a batch of one process, not of all together.
        length: largest number of tokens of a sentence.
        seed: source of all randomness.
        device: where the batches are put.
        rank: number of this process.
        world_size: number of processes.
        fixed: pad all batches to one shape, which compilers and CUDA graphs need.

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
        super().__init__(len(sentences), batch_size, seed=seed, device=device, rank=rank, world_size=world_size)
        self.sentences, self.length = sentences, length
        self.longest = padded_width(int(np.diff(sentences.offsets).max()), length)  # L of the widest batch
        self.width = self.longest if fixed else None

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        order = self._order(epoch).numpy()
        for first in range(start, len(self), _BLOCK):
            yield from self._block(order[first : first + _BLOCK])

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
