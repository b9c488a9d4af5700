"""Queues of embeddings of past batches, which are buffers of a method and so part of a checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from fmicl.kernels.exchange import gather_rows, world_of


@torch.no_grad()
def enqueue(queue: Tensor, position: Tensor, rows: Tensor) -> int:
    """Overwrite the oldest rows of a queue, in place: by those of all processes, in rank order.

    Args:
        queue: (Q, ...).
        position: the oldest row, an integer scalar; it moves on.
        rows: (N, ...) of this process.

    Returns:
        The number of rows of all processes.

    Raises:
        ValueError: more rows than the queue holds.

    Example:
        >>> queue, position = torch.zeros(3, 1), torch.tensor(2)
        >>> enqueue(queue, position, torch.tensor([[1.0], [2.0]])), queue.flatten().tolist(), int(position)
        (2, [2.0, 0.0, 1.0], 1)
    """
    rows = gather_rows(rows, world_of(rows.flatten(1)))
    if len(rows) > len(queue):
        raise ValueError(f"a batch has {len(rows)} keys, but the queue holds {len(queue)}: make queue larger")
    places = (position + torch.arange(len(rows), device=rows.device)) % len(queue)
    queue.index_copy_(0, places, rows)
    position.copy_((position + len(rows)) % len(queue))
    return len(rows)
