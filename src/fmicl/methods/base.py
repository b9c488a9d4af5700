"""Base classes of the methods: which embeddings are compared, with or without a momentum encoder.

A method is a plain `nn.Module`, usable in any training loop:

    method = SimCLR(encoder, fmicl.FMICLLoss("js"), dim=128)
    method.start_step(progress)                   # moves a momentum encoder; progress is in [0, 1]
    method.loss(first, second).loss.backward()    # two views (N, ...) of the same N samples
    method.after_backward(...)                    # MoCo enqueues its keys

`fmicl.training` runs it by Lightning.
"""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn

from fmicl.methods.rotation import Rotation
from fmicl.models.norms import frozen_running_statistics, use_running_statistics
from fmicl.models.vision import predictor, projection_head


class Comparison(NamedTuple):
    """The loss of a batch, and the embeddings (N, d) that it compared."""

    loss: Tensor
    first: Tensor
    second: Tensor
    terms: Tensor | None = None
    """(2,) alignment and uniformity: the two summands of the objective, if it has two."""
    rotation: Tensor | None = None
    """The summand of rotation prediction (:class:`fmicl.methods.Rotation`), if there is one."""

    @staticmethod
    def mean(comparisons: list[Comparison]) -> Comparison:
        """The mean loss and terms, with the embeddings of the first comparison."""
        first, *others = comparisons
        if not others:
            return first
        loss = torch.stack([each.loss for each in comparisons]).mean()
        terms = [each.terms for each in comparisons if each.terms is not None]
        return first._replace(loss=loss, terms=torch.stack(terms).mean(0) if terms else None)


class Method(nn.Module):
    """A method of contrastive learning with any objective.

    Everything that a run must remember is in ``state_dict()``: queues and momentum encoders are part of a checkpoint.

    Args:
        encoder: maps views, images (N, C, H, W) or token ids (N, L), to features (N, ``num_features``).
        objective: called as ``objective(x, y)``, or ``objective(q, k, negatives=queue)``.
        dim: dimension of the embeddings.
        hidden: width of the projection head.
        projection: head from features to embeddings (N, ``dim``); None makes an MLP of width ``hidden``.

    Attributes:
        rotation: a second term of the loss, of the first views alone; None by default.
        labels: classes of the current batch, (N,), which :meth:`compare` passes to the objective; None without labels.
    """

    last_norm = False
    """Whether the projection head ends in batch normalisation."""
    many_views = False
    """Whether the method takes more than two views of a sample."""
    contrast_views = False
    """Whether the negatives of a softmax loss are the other second views alone."""
    explicit_negatives = False
    """Whether the method passes negatives of its own to the objective, such as a queue."""
    has_predictor = False
    """Whether a head beside the projection has the width ``hidden``."""
    local_crops = False
    """Whether the method takes local crops (multi-crop)."""
    head_layers = 3
    """Linear layers of the projection head."""

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        *,
        dim: int = 512,
        hidden: int = 2048,
        projection: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        if projection is None:
            projection = self.projection_head(int(encoder.num_features), hidden, dim)  # type: ignore[arg-type]
        self.projection = projection
        self.objective = objective
        self.rotation: Rotation | None = None
        self.labels: Tensor | None = None

    @classmethod
    def projection_head(cls, features: int, hidden: int, dim: int) -> nn.Module:
        """The head from features to embeddings, where none is given."""
        return projection_head(features, hidden, dim, layers=cls.head_layers, last_norm=cls.last_norm)

    @abstractmethod
    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The objective's loss of two views (N, ...) of a batch.

        A method that takes K views of a sample gets the others as `second`, ((K - 1) N, ...), one view after another,
        and one that takes local crops gets these as `local`, likewise.
        """

    def loss(
        self, first: Tensor, second: Tensor, local: Tensor | None = None, labels: Tensor | None = None
    ) -> Comparison:
        """The whole loss of a batch: that of :meth:`compare_views`, and rotation prediction where it is set.

        Args:
            first: one view of each sample, (N, ...).
            second: the other views, of which most methods take one, ((K - 1) N, ...).
            local: local crops (multi-crop), any number of each sample, (K N, ...).
            labels: classes of the samples, (N,), for an objective that takes them.

        Raises:
            ValueError: the views don't belong together, or there are more than the method compares.
        """
        n, others = len(first), len(second)
        if others % n or not others or (others > n and not self.many_views):
            raise ValueError(
                f"{type(self).__name__} compares {'two or more' if self.many_views else 'two'} views of each sample, "
                f"but got {n} first views and {others} others"
            )
        self.labels = labels
        if local is None:
            comparison = self.compare_views(first, second)
        elif not self.local_crops:
            raise ValueError(f"{type(self).__name__} takes no local crops")
        elif len(local) % n or not len(local):
            raise ValueError(f"local crops must be as many of each sample, but got {len(local)} of {n} samples")
        else:
            comparison = self.compare_views(first, second, local)
        if self.rotation is None:
            return comparison
        term = self.rotation(self.encoder, first)
        return comparison._replace(loss=comparison.loss + term, rotation=term.detach())

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode; the encoder's frozen batch normalisation stays in evaluation mode."""
        super().train(mode)
        for name, module in self.encoder.named_modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and _is_frozen(module):
                for encoder in self.encoders():
                    encoder.get_submodule(name).eval()
        return self

    def encoders(self) -> list[nn.Module]:
        """The trained encoder, and copies of it."""
        return [self.encoder]

    def start_step(self, progress: float) -> None:
        """Called before the first batch of each optimiser step; progress goes from 0 to 1 over the run."""

    def after_backward(self, second: Tensor) -> None:
        """Called after the backward pass of each batch, with the second embeddings that the loss compared."""

    def embed(self, views: Tensor) -> Tensor:
        """Embeddings (N, d) of views, before any normalisation."""
        embeddings: Tensor = self.projection(self.encoder(views))
        return embeddings

    def embed_local(self, local: Tensor | None, n: int) -> tuple[Tensor, ...]:
        """Embeddings (N, d) of each local crop of N samples, in one pass; none without local crops.

        They don't update running statistics, which are for images like the views.
        """
        if local is None:
            return ()
        with frozen_running_statistics(self):
            crops: tuple[Tensor, ...] = self.embed(local).split(n)
        return crops

    def compare(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Comparison:
        """The objective's loss of x against y, with its two terms if it has them."""
        explicit = {} if negatives is None else {"negatives": negatives}
        if self.labels is not None:
            explicit["labels"] = self.labels.repeat(len(x) // len(self.labels))  # x may hold several views of a sample
        terms = getattr(self.objective, "terms", None)
        if terms is None:
            return Comparison(self.objective(x, y, **explicit), x.detach(), y.detach())
        alignment, uniformity = terms(x, y, **explicit)
        return Comparison(
            alignment + uniformity, x.detach(), y.detach(), torch.stack([alignment.detach(), uniformity.detach()])
        )

    def networks(self) -> list[nn.Module]:
        """The networks that run in each step: all submodules but the objective; of rotation prediction its head."""
        found: list[nn.Module] = []
        for module in self.children():
            if module is self.rotation:
                found.append(self.rotation.head)
            elif module is not self.objective:
                found += module if isinstance(module, nn.ModuleList) else [module]
        return found


class MomentumMethod(Method):
    """A method with a momentum encoder: a moving average of the trained encoder and its projection head.

    The average moves once per optimiser step, before its first batch: target <- m target + (1 - m) online. No gradient
    reaches it.

    If the momentum encoder normalises by the statistics of the batch, keys and queries both reveal which batch they
    belong to. With negatives of other batches (MoCo's queue) a network can then learn to tell batches apart instead of
    samples. With ``statistics="past"`` keys are normalised by statistics of past batches
    (:class:`fmicl.models.norms.RunningStatisticsNorm`), so that a key does not depend on the rest of its batch. Cai et
    al., "Exponential Moving Average Normalization for Self-supervised and Semi-supervised Learning", 2021, take a
    moving average of the trained encoder's statistics instead.

    Args:
        encoder: as in :class:`Method`, and so are the other arguments.
        momentum: m at the first step.
        final_momentum: m at the end of the run, reached along half a cosine; None keeps m constant.
        statistics: of batch normalisation in the momentum encoder, "batch" or "past".
    """

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        *,
        momentum: float = 0.99,
        final_momentum: float | None = None,
        statistics: Literal["batch", "past"] = "batch",
        **heads: Any,
    ) -> None:
        super().__init__(encoder, objective, **heads)
        self.initial_momentum = momentum
        self.final_momentum = momentum if final_momentum is None else final_momentum
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_projection = copy.deepcopy(self.projection).requires_grad_(False)
        if statistics not in ("batch", "past"):
            raise ValueError(f'statistics must be "batch" or "past", got {statistics!r}')
        if statistics == "past":
            self.target_encoder = use_running_statistics(self.target_encoder)
            self.target_projection = use_running_statistics(self.target_projection)

    def momentum(self, progress: float) -> float:
        """m1 - (m1 - m0) (1 + cos(pi t)) / 2 with t = progress, from 0 to 1 over the run."""
        end = self.final_momentum
        return end - (end - self.initial_momentum) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))

    @torch.no_grad()
    def target(self, views: Tensor) -> Tensor:
        """Embeddings (N, d) by the momentum encoder, without gradient."""
        embeddings: Tensor = self.target_projection(self.target_encoder(views))
        return embeddings

    def encoders(self) -> list[nn.Module]:
        """The momentum encoder too."""
        return [self.encoder, self.target_encoder]

    @torch.no_grad()
    def start_step(self, progress: float) -> None:
        """Move the average."""
        online: list[Tensor] = [*self.encoder.parameters(), *self.projection.parameters()]
        target: list[Tensor] = [*self.target_encoder.parameters(), *self.target_projection.parameters()]
        torch._foreach_lerp_(target, online, 1 - self.momentum(progress))


class PredictionMethod(MomentumMethod):
    """A method with a momentum encoder and a predictor: each view predicts the momentum embedding of the other.

    The loss is the mean over all pairs of a prediction and a momentum embedding of another view. Local crops predict
    those of both views; the momentum encoder sees views alone. The momentum rises to 1.

    Args:
        encoder: as in :class:`MomentumMethod`, and so are the other arguments.
    """

    has_predictor = True
    local_crops = True
    predictor_norm = False
    """Whether the predictor ends in batch normalisation."""

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        *,
        dim: int = 512,
        hidden: int = 2048,
        final_momentum: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(encoder, objective, dim=dim, hidden=hidden, final_momentum=final_momentum, **options)
        self.predictor = predictor(dim, hidden, last_norm=self.predictor_norm)

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The mean of both directions: the first view predicts the second one's key, and vice versa."""
        q1, q2 = self.predict(first), self.predict(second)
        k1, k2 = self.target(first), self.target(second)
        pairs = [(q1, k2), (q2, k1)]
        for crop in self.embed_local(local, len(first)):
            prediction = self.predictor(crop)
            pairs += [(prediction, k1), (prediction, k2)]
        return Comparison.mean([self.compare(q, k) for q, k in pairs])

    def predict(self, views: Tensor) -> Tensor:
        """The predictor's embeddings (N, d) of views."""
        embeddings: Tensor = self.predictor(self.embed(views))
        return embeddings


def _is_frozen(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return bool(parameters) and not any(parameter.requires_grad for parameter in parameters)
