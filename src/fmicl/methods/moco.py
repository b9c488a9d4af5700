"""MoCo: keys by a momentum encoder, and a queue of past keys as the negatives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from fmicl.kernels.exchange import gather_rows, world_of
from fmicl.methods.base import Compared, MomentumMethod, Optimisation
from fmicl.utils.numerics import normalise

if TYPE_CHECKING:
    from fmicl.data import Batch


class MoCo(MomentumMethod):
    """Queries against keys of a momentum encoder, with a queue of past keys as explicit negatives.

    After He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020. With ``InfoNCELoss``
    it is MoCo, with ``FMICLLoss("js")`` JS-MICL on MoCo. The queue is a buffer, so it is part of a checkpoint; on
    several processes each one enqueues the keys of all, in rank order, so that all hold the same queue. In place of
    MoCo's shuffled batch normalisation, batch statistics span all GPUs (``sync_batchnorm``).

    Args:
        encoder: as in :class:`fmicl.methods.Method`, and the others alike.
        queue: number of negatives kept; at least the keys of a batch.
        symmetric: each view is a query against the other one's key, as in MoCo v2+ (Chen and He, "Exploring Simple
            Siamese Representation Learning", 2021), and the keys of both are enqueued. Both views go through a network
            together, so that queries and keys have the same statistics of the batch: take ``statistics="past"``.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = MoCo(SmallConv(), nn.Identity(), Optimisation(), dim=8, hidden=16, queue=32)
        >>> method.enqueue(torch.ones(20, 8)); method.enqueue(torch.ones(20, 8))
        >>> int(method.queue_position), tuple(method.queue.shape)
        (8, (32, 8))
    """

    queue: Tensor
    queue_position: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        optimisation: Optimisation,
        *,
        dim: int = 512,
        hidden: int = 2048,
        projection: nn.Module | None = None,
        momentum: float = 0.99,
        final_momentum: float | None = None,
        statistics: Literal["batch", "past"] = "batch",
        queue: int = 4096,
        symmetric: bool = False,
    ) -> None:
        super().__init__(
            encoder, objective, optimisation, dim=dim, hidden=hidden, projection=projection, momentum=momentum,
            final_momentum=final_momentum, statistics=statistics,
        )  # fmt: skip
        self.symmetric = symmetric
        # Until the queue has been filled once, random directions stand in for keys, as in MoCo.
        self.register_buffer("queue", normalise(torch.randn(queue, dim)))
        self.register_buffer("queue_position", torch.zeros((), dtype=torch.long))
        self._keys: list[Tensor] = []

    def pairs(self, first: Tensor, second: Tensor) -> Compared:
        """The loss of queries against their keys and the queue; if symmetric, the mean of both directions."""
        if self.symmetric:
            first, second = torch.cat([first, second]), torch.cat([second, first])
        return self.compare(self.embed(first), self.target(second), negatives=self.queue)

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        """As for every method; the keys wait to be enqueued."""
        values = super().training_step(batch, batch_idx)
        self._keys.append(values["second"])
        return values

    def on_after_backward(self) -> None:
        """Enqueue this batch's keys: not sooner, for the backward pass still needs the queue as it was."""
        for keys in self._keys:
            self.enqueue(keys)
        self._keys.clear()

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest entries with keys (N, d): those of all processes, in rank order.

        Raises:
            ValueError: more keys than the queue holds.
        """
        keys = normalise(keys.float())
        keys = gather_rows(keys, world_of(keys))
        if len(keys) > len(self.queue):
            raise ValueError(f"a batch has {len(keys)} keys, but the queue holds {len(self.queue)}: make queue larger")
        places = (self.queue_position + torch.arange(len(keys), device=keys.device)) % len(self.queue)
        self.queue.index_copy_(0, places, keys)
        self.queue_position.copy_((self.queue_position + len(keys)) % len(self.queue))
