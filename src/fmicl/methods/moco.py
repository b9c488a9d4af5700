"""MoCo: keys by a momentum encoder, and a queue of past keys as negatives (He et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fmicl.methods.base import Comparison, Method, MomentumMethod
from fmicl.methods.queues import enqueue
from fmicl.methods.registry import MomentumOptions, register_method
from fmicl.utils.numerics import normalise
from fmicl.utils.options import option


class MoCo(MomentumMethod):
    """Queries against keys of a momentum encoder, with a queue of past keys as negatives.

    After He et al., "Momentum Contrast for Unsupervised Visual Representation Learning", 2020. With ``InfoNCELoss`` it
    is MoCo, with ``FMICLLoss("js")`` JS-MICL on MoCo. The queue is a buffer, so it is part of a checkpoint. On several
    processes each enqueues the keys of all, in rank order, so that all hold the same queue. Instead of MoCo's shuffled
    batch normalisation, batch statistics span all GPUs (``sync_batchnorm``).

    Args:
        encoder: as in :class:`fmicl.methods.base.MomentumMethod`, and so are the other arguments.
        queue: number of negatives; at least the keys of a batch.
        symmetric: each view is a query against the other view's key, as in MoCo v2+ (Chen and He, "Exploring Simple
            Siamese Representation Learning", 2021), and the keys of both are enqueued. Both views go through a network
            together, so that queries and keys share the statistics of the batch: use ``statistics="past"``.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = MoCo(SmallConv(), nn.Identity(), dim=8, hidden=16, queue=32)
        >>> method.enqueue(torch.ones(20, 8)); method.enqueue(torch.ones(20, 8))
        >>> int(method.queue_position), tuple(method.queue.shape)
        (8, (32, 8))
    """

    explicit_negatives = True
    local_crops = True

    queue: Tensor
    queue_position: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        *,
        dim: int = 512,
        queue: int = 4096,
        symmetric: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(encoder, objective, dim=dim, **options)
        self.symmetric = symmetric
        # Until the queue has been filled once, random directions stand in for keys, as in MoCo.
        self.register_buffer("queue", normalise(torch.randn(queue, dim)))
        self.register_buffer("queue_position", torch.zeros((), dtype=torch.long))

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The loss of queries against their keys and the queue; if symmetric, the mean of both directions.

        Local crops are further queries, for the keys of all views that have one.
        """
        n = len(first)
        if self.symmetric:
            first, second = torch.cat([first, second]), torch.cat([second, first])
        queries, keys = self.embed(first), self.target(second)
        crops, goals = self.embed_local(local, n), keys.split(n)
        if not crops:
            return self.compare(queries, keys, negatives=self.queue)
        everything = torch.cat([queries, *crops * len(goals)]), torch.cat([keys, *(k for k in goals for _ in crops)])
        compared = self.compare(*everything, negatives=self.queue)
        return compared._replace(first=queries.detach(), second=keys)  # only these keys are enqueued

    def after_backward(self, second: Tensor) -> None:
        """Enqueue the batch's keys: not sooner, for the backward pass needs the queue unchanged."""
        self.enqueue(second)

    def enqueue(self, keys: Tensor) -> None:
        """Overwrite the oldest entries with keys (N, d): those of all processes, in rank order.

        Raises:
            ValueError: more keys than the queue holds.
        """
        enqueue(self.queue, self.queue_position, normalise(keys.float()))


@register_method("moco", summary="Momentum encoder; negatives are a queue of its past keys.")
@dataclass(frozen=True)
class MoCoOptions(MomentumOptions):
    """Options of MoCo."""

    method: ClassVar[type[Method]] = MoCo

    queue: int = option(4096, "Negatives that are kept from past batches.", above=0)
    symmetric: bool = option(
        False,
        "Each view is a query for the other's key, and both keys are enqueued (MoCo v2+). Twice as many views go "
        "through each network, and the queue reaches back half as many batches.",
    )

    def statistics(self) -> Literal["batch", "past"]:
        """Symmetric MoCo needs those of past batches."""
        if self.key_statistics == "auto":
            return "past" if self.symmetric else "batch"
        return self.key_statistics

    def arguments(self) -> dict[str, Any]:
        """Queue and symmetry too."""
        return {**super().arguments(), "queue": self.queue, "symmetric": self.symmetric}

    def why_unused(self) -> dict[str, str]:
        """The queue replaces the objective's negatives."""
        return {"negatives": "moco's negatives are its queue"}

    def detached(self) -> dict[str, float]:
        """Keys in the queue have no gradient."""
        return {"anchor": 1.0, "both": 1.0, "cross": 1.0}

    def check_batch(self, batch_size: int) -> None:
        """The queue must hold the keys of a batch."""
        keys = batch_size * (2 if self.symmetric else 1)
        if self.queue < keys:
            raise ValueError(f"queue ({self.queue}) must hold at least one batch of keys ({keys}): make it larger")
