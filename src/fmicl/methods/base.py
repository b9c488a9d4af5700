"""What all methods share: views in, a loss out, and an optimiser whose learning rate follows from the step."""

from __future__ import annotations

import copy
import math
import warnings
from abc import abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from fmicl.kernels import triton_runs_on
from fmicl.methods.rotation import Rotation
from fmicl.models.fast import Recorded, record, speed_up, speed_up_head, suits
from fmicl.models.norms import use_running_statistics
from fmicl.models.vision import projection_head

if TYPE_CHECKING:
    from fmicl.data import Batch


@dataclass(frozen=True)
class Optimisation:
    """How the weights move: optimiser, highest learning rate, and the length of warm-up and of all in steps."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    total_steps: int = 1
    accumulate: int = 1
    seed: int = 0
    schedule: Literal["cosine", "linear"] = "cosine"
    total_batches: int | None = None
    """After which the last step is made, also of fewer batches than `accumulate`."""


class Compared(NamedTuple):
    """The loss of a batch with the embeddings (N, d) that it compared, for whoever watches."""

    loss: Tensor
    first: Tensor
    second: Tensor
    terms: Tensor | None = None
    """(2,) alignment and uniformity, the objective's summands of the loss, where it has them."""
    rotation: Tensor | None = None
    """The summand that is no objective's, where there is one (:class:`fmicl.methods.rotation.Rotation`)."""

    @staticmethod
    def mean(pairs: list[Compared]) -> Compared:
        """The mean loss, and the mean of its terms; to watch, the embeddings of the first."""
        first, *others = pairs
        if not others:
            return first
        loss = torch.stack([pair.loss for pair in pairs]).mean()
        terms = [pair.terms for pair in pairs if pair.terms is not None]
        return first._replace(loss=loss, terms=torch.stack(terms).mean(0) if terms else None)


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 1/warmup to 1, then (1 + cos(pi t)) / 2 with t from 0 to 1.

    Example:
        >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def warmup_linear(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 1/warmup to 1, then 1 - t with t from 0 to 1.

    Example:
        >>> [round(warmup_linear(step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 1 - min(1.0, (step - warmup) / max(1, total - warmup))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights, which decay, and biases and normalisation parameters (one dimension), which don't.

    Example:
        >>> groups = parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (3, 0.0)]
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _seed(seed: int, device: torch.device) -> None:
    """Seed the generators that a step draws from.

    torch.manual_seed seeds those of every kind of device, and for a kind that isn't in use it writes down the whole
    stack each time: in steps of a small network that is a good part of the time.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        torch.get_device_module(device).manual_seed(seed)


class Method(LightningModule):
    """A method of contrastive learning over any objective.

    Everything that a run must remember is in ``state_dict()``, in the optimiser, or in the one number
    :attr:`batches`: the learning rate, the momentum and the random numbers of a batch are functions of it. That is
    why a run which was cut off ends with the same bits.

    Args:
        encoder: maps views, images (N, C, H, W) or token ids (N, L), to features (N, ``num_features``).
        objective: called as ``objective(x, y)``, or ``objective(q, k, negatives=queue)``.
        optimisation: optimiser and schedule.
        dim: dimension of the embeddings.
        hidden: width of the projection head.
        projection: a head from features to embeddings (N, ``dim``), in the place of the usual one of width ``hidden``.

    Attributes:
        rotation: a second term of the loss, of the first views alone; None, as at first, is none.
    """

    channels_last = False
    """Whether images are put into the memory format that convolutions on a GPU like."""
    last_norm = False
    """Whether the projection head ends in batch normalisation, as the method's paper has it."""
    many_views = False
    """Whether more than two views of a sample may be given."""
    recording = False
    """Whether the loss of a batch is recorded as a CUDA graph at the first one."""

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        optimisation: Optimisation,
        *,
        dim: int = 512,
        hidden: int = 2048,
        projection: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.encoder = encoder
        if projection is None:
            projection = projection_head(int(encoder.num_features), hidden, dim, last_norm=self.last_norm)  # type: ignore[arg-type]
        self.projection = projection
        self.objective = objective
        self.optimisation = optimisation
        self.rotation: Rotation | None = None
        self.batches = 0
        self._recorded: Recorded | None = None
        self._given: tuple[str, ...] = ()

    @abstractmethod
    def pairs(self, first: Tensor, second: Tensor) -> Compared:
        """The loss of two views (N, ...) of a batch, and what it compared.

        A method that takes K views of a sample has the others in `second`, ((K - 1) N, ...), one after another.
        """

    def total(self, first: Tensor, second: Tensor) -> Compared:
        """What :meth:`pairs` gives, with the term of turned images in its loss where there is one."""
        pairs = self.pairs(first, second)
        if self.rotation is None:
            return pairs
        term = self.rotation(self.encoder, first)
        return pairs._replace(loss=pairs.loss + term, rotation=term.detach())

    @property
    def step(self) -> int:
        """Steps of the optimiser up to now."""
        o = self.optimisation
        return o.total_steps if self.batches == o.total_batches else self.batches // o.accumulate

    @property
    def learning_rate(self) -> float:
        """Of the step that comes next."""
        o = self.optimisation
        factor = warmup_cosine if o.schedule == "cosine" else warmup_linear
        return o.learning_rate * factor(self.step, o.warmup_steps, o.total_steps)

    def embed(self, images: Tensor) -> Tensor:
        """Embeddings (N, d) of images, before any normalisation."""
        embeddings: Tensor = self.projection(self.encoder(images))
        return embeddings

    def compare(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Compared:
        """The objective's loss of x against y, with its two terms where it tells them apart."""
        explicit = {} if negatives is None else {"negatives": negatives}
        terms = getattr(self.objective, "terms", None)
        if terms is None:
            return Compared(self.objective(x, y, **explicit), x.detach(), y.detach())
        alignment, uniformity = terms(x, y, **explicit)
        return Compared(
            alignment + uniformity, x.detach(), y.detach(), torch.stack([alignment.detach(), uniformity.detach()])
        )

    def networks(self) -> list[nn.Module]:
        """What runs in each step, encoders first."""
        return [self.encoder, self.projection, *([] if self.rotation is None else [self.rotation.head])]

    def share_statistics(self) -> None:
        """Make batch normalisation take its statistics over all processes, in place."""
        from timm.layers.norm_act import convert_sync_batchnorm

        # not torch's own, which drops the activation of timm's normalisations
        convert_sync_batchnorm(self)  # type: ignore[no-untyped-call]

    def compile_parts(self, device: torch.device, *, alone: bool = True) -> None:
        """Make what runs in each step faster, in place, so that names in checkpoints stay what they are.

        A network that `fmicl.models.fast` knows gets its kernels, and then needs no compiler; others are compiled.

        Args:
            device: where training will be.
            alone: whether one process trains. Several may share statistics of a batch, which those kernels don't.
        """
        known = alone and triton_runs_on(device) and suits(self.encoder)
        for network in self.networks():
            if not known:
                network.compile()
            elif suits(network):
                speed_up(network)
            else:
                speed_up_head(network)
        self.recording = alone and self.optimisation.accumulate == 1 and device.type == "cuda"

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Tensor]:  # noqa: ARG002 (Lightning's name)
        """One batch: set what follows from the number of batches so far, then compute the loss.

        Raises:
            ValueError: views that don't belong together, or more than the method compares.
        """
        n, others = len(batch.first), len(batch.second)
        if others % n or not others or (others > n and not self.many_views):
            raise ValueError(
                f"{type(self).__name__} compares {'two or more' if self.many_views else 'two'} views of each sample, "
                f"but of {n} first views there are {others} others"
            )
        # Dropout and the like draw from here; seeding by the batch makes them the same after a resume.
        _seed(hash((self.optimisation.seed, self.batches, self.global_rank)) % 2**63, self.device)
        if self.batches % self.optimisation.accumulate == 0:
            self.on_step_start()
        if self.channels_last:
            first, second = (x.contiguous(memory_format=torch.channels_last) for x in (batch.first, batch.second))
            batch = batch._replace(first=first, second=second)
        values = self._values(batch.first, batch.second)
        self.batches += 1
        return dict(zip(self._given, values, strict=True))

    def _values(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        """What `total` gives, less what it doesn't: from the recorded graph where there is one."""
        if not (self.recording and self.training):
            return self._plain_values(first, second)
        if self._recorded is None:
            try:
                parts = [*self.networks(), self.objective]  # which may have parameters of its own
                self._recorded = record(self._plain_values, parts, first, second)
            except RuntimeError as error:  # a network that looks at values on the way can't be recorded
                self.recording = False
                reason = str(error).strip().splitlines()[0]
                warnings.warn(f"the step can't be recorded as a CUDA graph, so it is slower: {reason}", stacklevel=2)
                return self._plain_values(first, second)
        return self._recorded(first, second)

    def _plain_values(self, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        found = {name: value for name, value in self.total(first, second)._asdict().items() if value is not None}
        self._given = tuple(found)
        return tuple(found.values())

    def on_step_start(self) -> None:
        """Before the first batch of a step."""
        optimizer = self.optimizers()
        assert isinstance(optimizer, torch.optim.Optimizer)
        for group in optimizer.param_groups:
            group["lr"] = self.learning_rate

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """SGD with momentum 0.9, or AdamW; biases and normalisation parameters do not decay."""
        o = self.optimisation
        groups = parameter_groups(self, o.weight_decay)
        fused = all(parameter.is_cuda for parameter in self.parameters())  # one kernel for all weights
        if o.optimizer == "adamw":
            return torch.optim.AdamW(groups, lr=o.learning_rate, fused=fused)
        return torch.optim.SGD(groups, lr=o.learning_rate, momentum=0.9, fused=fused)

    def configure_gradient_clipping(
        self,
        optimizer: torch.optim.Optimizer,  # noqa: ARG002 (Lightning's names)
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,  # noqa: ARG002
    ) -> None:
        """Clip the norm of the gradient; Lightning's own way refuses fused optimisers."""
        if gradient_clip_val:
            nn.utils.clip_grad_norm_(self.parameters(), gradient_clip_val)


class MomentumMethod(Method):
    """A method with a second encoder, whose weights are a moving average of the first one's.

    The average moves once a step, before the batch: target <- m target + (1 - m) online, with
    m = :meth:`momentum` of the step. Gradients never reach it.

    Batch normalisation by the statistics of the batch makes each key know which batch it is of, and so does each query:
    where negatives are of other batches (MoCo's queue), a network can learn to tell batches apart in place of samples.
    With ``statistics="past"`` keys are normalised by those of the batches before
    (:class:`fmicl.models.norms.RunningStatisticsNorm`), and
    the key of a sample doesn't depend on the rest of its batch. Cai et al., "Exponential Moving Average Normalization
    for Self-supervised and Semi-supervised Learning", 2021, take an average of the first encoder's in their place.

    Args:
        encoder: as in :class:`Method`, and the others alike.
        momentum: m at the first step.
        final_momentum: m after the last one, to which it rises along half a cosine; None: it stays.
        statistics: of batch normalisation in the second encoder, "batch" or "past".
    """

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
    ) -> None:
        super().__init__(encoder, objective, optimisation, dim=dim, hidden=hidden, projection=projection)
        self.initial_momentum = momentum
        self.final_momentum = momentum if final_momentum is None else final_momentum
        self.target_encoder = copy.deepcopy(self.encoder).requires_grad_(False)
        self.target_projection = copy.deepcopy(self.projection).requires_grad_(False)
        if statistics not in ("batch", "past"):
            raise ValueError(f'statistics are those of the "batch" or of the "past" ones, got {statistics!r}')
        if statistics == "past":
            self.target_encoder = use_running_statistics(self.target_encoder)
            self.target_projection = use_running_statistics(self.target_projection)

    def momentum(self) -> float:
        """The m of the step that comes next: m1 - (m1 - m0) (1 + cos(pi t)) / 2, with t from 0 to 1 over the run."""
        t = min(1.0, self.step / self.optimisation.total_steps)
        end = self.final_momentum
        return end - (end - self.initial_momentum) * 0.5 * (1 + math.cos(math.pi * t))

    @torch.no_grad()
    def target(self, images: Tensor) -> Tensor:
        """Embeddings (N, d) by the momentum encoder, without gradient."""
        embeddings: Tensor = self.target_projection(self.target_encoder(images))
        return embeddings

    def networks(self) -> list[nn.Module]:
        """The momentum encoder too."""
        encoder, *heads = super().networks()
        return [encoder, self.target_encoder, *heads, self.target_projection]

    @torch.no_grad()
    def on_step_start(self) -> None:
        """Move the average, then set the learning rate."""
        online: list[Tensor] = [*self.encoder.parameters(), *self.projection.parameters()]
        target: list[Tensor] = [*self.target_encoder.parameters(), *self.target_projection.parameters()]
        torch._foreach_lerp_(target, online, 1 - self.momentum())
        super().on_step_start()
