"""SwAV: each view predicts the cluster assignment of the other, balanced by Sinkhorn iterations (Caron et al.)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from fmicl.kernels.exchange import all_logsumexp, world_of
from fmicl.losses import ObjectiveContext, ObjectiveOptions
from fmicl.methods.base import Comparison, Method
from fmicl.methods.queues import enqueue
from fmicl.methods.registry import MethodOptions, OwnLoss, register_method
from fmicl.utils.numerics import normalise
from fmicl.utils.options import fraction, option


@torch.no_grad()
def sinkhorn(
    scores: Tensor,
    *,
    epsilon: float = 0.05,
    iterations: int = 3,
    past: Tensor | None = None,
    past_weight: Tensor | None = None,
) -> Tensor:
    r"""Balanced soft assignments of samples to prototypes by Sinkhorn-Knopp iterations, in the log domain.

    Q starts as exp(scores / epsilon). An iteration divides each column (prototype) by its sum over all samples of all
    processes, and then each row (sample) by its sum. The limit is the assignment of largest entropy-regularised score
    that uses all prototypes equally.

    Args:
        scores: (N, K) of this process's samples.
        epsilon: weight of the entropy; small ones give sharp assignments.
        iterations: number of iterations.
        past: scores (M, K) of past samples, the same on all processes, which take part in the balance.
        past_weight: 1 if they count, 0 if not, a scalar; by default they do.

    Returns:
        (N, K) rows that sum to 1, without gradient.

    Example:
        >>> sinkhorn(torch.tensor([[1.0, 0.9], [1.0, 0.0]]), iterations=100).round(decimals=2)
        tensor([[0., 1.],
                [1., 0.]])
    """
    world, n = world_of(scores), len(scores)
    log_codes = scores.float() / epsilon
    log_weights = log_codes.new_zeros(n, 1)
    if past is not None:
        counted = log_codes.new_ones(()) if past_weight is None else past_weight
        # each process has all of them: together they count once
        share = (counted.log() - math.log(world.size)).expand(len(past), 1)
        log_codes, log_weights = torch.cat([log_codes, past.float() / epsilon]), torch.cat([log_weights, share])
    for _ in range(iterations):
        log_codes = log_codes - all_logsumexp((log_codes + log_weights).logsumexp(dim=0), world)
        log_codes = log_codes.log_softmax(dim=1)
    return log_codes[:n].exp()


def swapped_prediction_loss(
    x: Tensor,
    y: Tensor,
    prototypes: Tensor,
    *,
    temperature: float = 0.1,
    epsilon: float = 0.05,
    iterations: int = 3,
    past: Tensor | None = None,
    past_weight: Tensor | None = None,
) -> Tensor:
    r"""Cross-entropy between the assignments of one view and the softmax predictions of others.

    .. math:: L = -\frac1{MN} \sum_{m=1}^M \sum_i \sum_k q_{ik} \log \mathrm{softmax}_k(\bar y_{mi} \cdot c_k / \tau)

    with q the :func:`sinkhorn` assignments of the unit vectors x to the prototypes c.

    Args:
        x: (N, d) embeddings whose assignments are predicted; they get no gradient.
        y: (M N, d) embeddings of M other views of the same samples, one view after another.
        prototypes: (K, d), of unit length.
        temperature: tau.
        epsilon: as in :func:`sinkhorn`.
        iterations: likewise.
        past: (Q, d) embeddings of unit length of past batches, which take part in the balance.
        past_weight: as in :func:`sinkhorn`.

    Returns:
        This process's share of the loss; the mean over processes is the loss of the joined batch.

    Example:
        >>> x = torch.eye(2)
        >>> round(float(swapped_prediction_loss(x, x, x)), 5)    # each sample has a prototype of its own
        5e-05
    """
    with torch.autocast(x.device.type, enabled=False):
        prototypes = prototypes.float()
        scores = normalise(x.detach().float()) @ prototypes.T
        others = None if past is None else past.float() @ prototypes.T
        codes = sinkhorn(scores.detach(), epsilon=epsilon, iterations=iterations, past=others, past_weight=past_weight)
        views = len(y) // len(x)
        predictions = (normalise(y.float()) @ prototypes.T / temperature).log_softmax(dim=1)
        world = world_of(x)
        return -(codes.repeat(views, 1) * predictions).sum() * (world.size / (world.total * views))


class SwappedPredictionLoss(nn.Module):
    """:func:`swapped_prediction_loss` with trained prototypes.

    Args:
        dim: d, the dimension of the embeddings.
        prototypes: their number K.
        temperature: of the predictions.
        epsilon: of the assignments.
        iterations: of Sinkhorn-Knopp.
    """

    def __init__(
        self,
        dim: int,
        prototypes: int = 3000,
        *,
        temperature: float = 0.1,
        epsilon: float = 0.05,
        iterations: int = 3,
    ) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(normalise(torch.randn(prototypes, dim)))
        self.temperature, self.epsilon, self.iterations = temperature, epsilon, iterations

    def forward(self, x: Tensor, y: Tensor, **past: Tensor) -> Tensor:
        """The loss of predicting the assignments of x from y."""
        return swapped_prediction_loss(
            x, y, self.prototypes,
            temperature=self.temperature, epsilon=self.epsilon, iterations=self.iterations, **past,
        )  # fmt: skip

    @torch.no_grad()
    def normalise_prototypes(self) -> None:
        """Set the prototypes back to unit length, in place."""
        self.prototypes.copy_(normalise(self.prototypes))

    def extra_repr(self) -> str:
        """The settings."""
        return (
            f"prototypes={len(self.prototypes)}, temperature={self.temperature:g}, epsilon={self.epsilon:g}, "
            f"iterations={self.iterations}"
        )


class SwAV(Method):
    """Each view predicts the assignment of the other to prototypes; assignments are balanced over the global batch.

    After Caron et al., "Unsupervised Learning of Visual Features by Contrasting Cluster Assignments", 2020. Local crops
    predict the assignments of both views, and have none themselves. Prototypes are set back to unit length before each
    step.

    Args:
        encoder: as in :class:`Method`, and so are the other arguments.
        objective: a :class:`SwappedPredictionLoss`; None makes one.
        freeze: share of the run during which the prototypes don't move.
        queue: embeddings of each view that are kept from past batches and take part in the balance, for batches that
            are small beside the number of prototypes; 0 for none.
        queue_start: share of the run after which they do, once there are as many.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = SwAV(SmallConv(), SwappedPredictionLoss(8, 10), dim=8, hidden=16, queue=32)
        >>> method.loss(torch.randn(4, 1, 8, 8), torch.randn(4, 1, 8, 8)).second.shape
        torch.Size([8, 8])
    """

    local_crops = True
    head_layers = 2

    queue: Tensor
    queue_position: Tensor
    queue_filled: Tensor
    queue_started: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module | None = None,
        *,
        dim: int = 128,
        freeze: float = 0.0,
        queue: int = 0,
        queue_start: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(encoder, SwappedPredictionLoss(dim) if objective is None else objective, dim=dim, **options)
        self.freeze, self.queue_start = freeze, queue_start
        self.frozen = False
        self.has_queue = queue > 0
        if self.has_queue:
            self.register_buffer("queue", normalise(torch.randn(queue, 2, dim)))
            self.register_buffer("queue_position", torch.zeros((), dtype=torch.long))
            self.register_buffer("queue_filled", torch.zeros((), dtype=torch.long))
            self.register_buffer("queue_started", torch.zeros((), dtype=torch.bool))

    def start_step(self, progress: float) -> None:
        """Normalise the prototypes, and see whether they move and whether the queue counts."""
        self.objective.normalise_prototypes()  # type: ignore[operator]
        self.frozen = progress < self.freeze
        if self.has_queue:
            self.queue_started.fill_(progress >= self.queue_start)

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The mean over both views' assignments of the loss of predicting them from all other views and crops."""
        n = len(first)
        one, other = self.embed(torch.cat([first, second])).split(n)
        crops = self.embed_local(local, n)
        losses = [
            self.objective(x, torch.cat([y, *crops]), **self._past(view))
            for view, (x, y) in enumerate(((one, other), (other, one)))
        ]
        return Comparison(
            torch.stack(losses).mean(), torch.cat([one, other]).detach(), torch.cat([other, one]).detach()
        )

    def _past(self, view: int) -> dict[str, Tensor]:
        if not self.has_queue:
            return {}
        counted = self.queue_started & (self.queue_filled >= len(self.queue))
        return {"past": self.queue[:, view], "past_weight": counted.float()}

    def after_backward(self, second: Tensor) -> None:
        """Drop the gradient of frozen prototypes, and enqueue the embeddings of both views."""
        if self.frozen:
            self.objective.prototypes.grad = None
        if self.has_queue:
            other, one = normalise(second.float()).chunk(2)
            self.queue_filled.add_(enqueue(self.queue, self.queue_position, torch.stack([one, other], dim=1)))


@register_method(
    "swav", summary="Prototypes, assigned by Sinkhorn iterations over the global batch; a loss of its own."
)
@dataclass(frozen=True)
class SwAVOptions(MethodOptions):
    """Options of SwAV."""

    method: ClassVar[type[Method]] = SwAV
    own_loss: ClassVar[bool] = True

    prototypes: int = option(3000, "Number of prototypes.", above=0)
    prototype_temperature: float = option(0.1, "Temperature of the softmax over prototypes.", above=0)
    sinkhorn_epsilon: float = option(0.05, "Weight of the entropy in the assignments; small ones are sharp.", above=0)
    sinkhorn_iterations: int = option(3, "Sinkhorn-Knopp iterations.", above=0)
    freeze_prototypes: float = fraction(
        0.005, "Share of the run during which prototypes don't move: 0.005 is 1 of 200 epochs."
    )
    sinkhorn_queue: int = option(
        0,
        "Embeddings of past batches that take part in the balance, for batches far smaller than --prototypes (0: no).",
        at_least=0,
    )
    sinkhorn_queue_start: float = fraction(0.05, "Share of the run after which the queue counts.")

    def resolve_objective(self, chosen: ObjectiveOptions) -> ObjectiveOptions:
        """SwAV's loss."""
        del chosen
        return OwnLoss(make=self._loss, advice="Lower --learning-rate, --prototypes or --sinkhorn-epsilon.")

    def _loss(self, context: ObjectiveContext) -> nn.Module:
        return SwappedPredictionLoss(
            context.dim, self.prototypes, temperature=self.prototype_temperature, epsilon=self.sinkhorn_epsilon,
            iterations=self.sinkhorn_iterations,
        )  # fmt: skip

    def arguments(self) -> dict[str, Any]:
        """Freezing and queue; the rest is the loss's."""
        return {
            "freeze": self.freeze_prototypes, "queue": self.sinkhorn_queue, "queue_start": self.sinkhorn_queue_start
        }  # fmt: skip

    def why_unused(self) -> dict[str, str]:
        """The queue's start needs a queue."""
        return {} if self.sinkhorn_queue else {"sinkhorn_queue_start": "sinkhorn_queue is 0"}

    def check_batch(self, batch_size: int) -> None:
        """The queue must hold a batch."""
        if 0 < self.sinkhorn_queue < batch_size:
            raise ValueError(
                f"sinkhorn_queue ({self.sinkhorn_queue}) must hold at least one batch ({batch_size}): make it larger"
            )
