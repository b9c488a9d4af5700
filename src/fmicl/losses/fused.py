"""Whole losses as one autograd function: from raw embeddings to the loss, with the gradient computed in the same pass.

At the batch sizes of most training loops a loss takes as long as the calls that it consists of, not as their
arithmetic. Here f-MICL and InfoNCE are evaluated without a graph of small operations, and settings are checked once. On
a CPU that is some thirty calls of torch, with CUDA four to six launches of Triton kernels (`fmicl.kernels.views`).

`fmicl_loss` and `infonce_loss` return None where this doesn't apply: `fmicl.functional` then composes the loss of its
parts, with the same value. That is so for learned scalars, divergences without closed forms, float64, labels, explicit
negatives, several processes, and within torch.func.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from fmicl.divergences import (
    JS,
    KL,
    VLC,
    Divergence,
    DivergenceName,
    Jeffrey,
    Neyman,
    Pearson,
    ReverseKL,
    SquaredHellinger,
    Tsallis,
)
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic
from fmicl.kernels import tiled
from fmicl.kernels.transforms import in_transforms
from fmicl.losses.pairing import ComputeOptions, check_options
from fmicl.losses.similarities import Gaussian, Similarity, make_similarity
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.numerics import EXACT, autocast_enabled, exact_matmul, matmul_precision
from fmicl.utils.validation import Negatives

__all__ = ["fmicl_loss", "infonce_loss"]

_CLOSED_FORMS = {JS, KL, VLC, Jeffrey, Neyman, Pearson, ReverseKL, SquaredHellinger, Tsallis}
_TYPES = (torch.float32, torch.bfloat16, torch.float16)
# Lengths of rows whose squares float32 represents with all of its digits.
_SHORTEST, _LONGEST = 1e-15, 1e15


def fmicl_loss(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence,
    alpha: Scalar,
    gamma: Scalar,
    mu: Scalar | Literal["normalised"],
    similarity: str | Similarity,
    negatives: Negatives | Tensor,
    **options: Unpack[ComputeOptions],
) -> Tensor | None:
    """`fmicl.functional.fmicl_loss` of a batch on one process; None where this path doesn't apply."""
    if not _applies(x, y, negatives, alpha, gamma, mu):
        return None
    try:
        loss = _fmicl(divergence, alpha, gamma, mu, similarity, negatives, x.shape[1], **options)
    except TypeError:  # an argument without a hash
        return None
    return None if loss is None else loss.apply(x, y)


def infonce_loss(
    x: Tensor,
    y: Tensor,
    temperature: Scalar,
    negatives: Negatives | Tensor,
    decoupled: bool,
    **options: Unpack[ComputeOptions],
) -> Tensor | None:
    """`fmicl.functional.infonce_loss` of a batch on one process; None where this path doesn't apply."""
    if not _applies(x, y, negatives, temperature):
        return None
    loss = _infonce(temperature, negatives, decoupled, **options)
    return None if loss is None else loss.apply(x, y)


def _applies(x: Tensor, y: Tensor, negatives: Negatives | Tensor, *numbers: Scalar | str) -> bool:
    """Whether the input is a valid batch of one process, with settings that are numbers."""
    return (
        isinstance(x, Tensor)
        and isinstance(y, Tensor)
        and x.dim() == 2
        and x.shape == y.shape
        and len(x) > 1
        and x.shape[1] > 0
        and x.dtype in _TYPES
        and x.dtype == y.dtype
        and x.device == y.device
        and x.device.type in ("cpu", "cuda")
        and isinstance(negatives, str)
        and not any(isinstance(number, Tensor) for number in numbers)
        and not in_transforms()
        and not torch.compiler.is_compiling()
        and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    )


@dataclass(frozen=True)
class _Loss(ABC):
    """A loss of two views with its settings, which are checked.

    Attributes:
        negatives: "anchor", "both" or "cross".
        options: how sums are computed.
    """

    negatives: str
    options: ComputeOptions = field(default_factory=ComputeOptions)

    def apply(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The loss of this batch; None where it takes the composed one."""
        kernel = self.options.get("kernel", "auto")
        if x.is_cuda or kernel == "triton":
            return None
        if autocast_enabled(x.device.type):
            with torch.autocast(x.device.type, enabled=False):
                return self.apply(x, y)
        if matmul_precision("cpu") != EXACT:
            with exact_matmul(x.device):
                return _apply(x, y, self)
        return _apply(x, y, self)

    @abstractmethod
    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        """The loss; adds its gradient in the unit rows to views.gradient, and sets that in their distances."""

    @abstractmethod
    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss by plain autograd."""


@functools.lru_cache(maxsize=256)
def _fmicl(
    divergence: DivergenceName | Divergence,
    alpha: float,
    gamma: float,
    mu: float | Literal["normalised"],
    similarity: str | Similarity,
    negatives: Negatives,
    d: int,
    **options: Unpack[ComputeOptions],
) -> _FMICL | None:
    """The checked loss; None if its critic isn't the Gaussian one of a closed form."""
    check_options(**options)
    divergence = make_divergence(divergence)
    if type(divergence) not in _CLOSED_FORMS or negatives not in ("anchor", "both", "cross"):
        return None
    if any(isinstance(value, Tensor) for value in vars(divergence).values()):
        return None  # learned
    require_positive_scalar("alpha", alpha)
    form = make_similarity(similarity, gamma, mu)
    if type(form) is not Gaussian or isinstance(form.gamma, Tensor) or isinstance(form.mu, Tensor):
        return None
    if options.get("normalised") or options.get("kernel") == "reference":
        return None
    return _FMICL(negatives, options, form.critic(divergence, d), float(alpha))


@functools.lru_cache(maxsize=256)
def _infonce(
    temperature: float, negatives: Negatives, decoupled: bool, **options: Unpack[ComputeOptions]
) -> _InfoNCE | None:
    """The checked loss; None if its exponentials need their maximum."""
    check_options(**options)
    require_positive_scalar("temperature", temperature)
    scale = 1 / temperature
    if negatives not in ("anchor", "both", "cross") or not tiled.is_moderate(scale, torch.float32):
        return None
    if options.get("normalised") or options.get("kernel") == "reference":
        return None
    return _InfoNCE(negatives, options, scale, bool(decoupled))


@dataclass(frozen=True)
class _FMICL(_Loss):
    """f-MICL with the Gaussian similarity."""

    critic: Critic = field(kw_only=False, default=None)  # type: ignore[assignment]
    alpha: float = 1.0

    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        critic, n = self.critic, views.n
        scale = float(critic.scale)
        r = critic.at_distance(views.distances)
        alignment = critic.divergence.score(r).sum()
        if gradient:  # dr/d(distance) = -scale / 2
            views.pull(critic.divergence.score_slope(r).mul_(scale / (2 * n)))
        count = (4 if self.negatives == "both" else 1) * n * (n - 1)
        weight = self.alpha / count
        total = self._negatives(views, gradient, weight)
        return torch.sub(total * weight, alignment, alpha=1 / n).float()

    def _negatives(self, views: _Views, gradient: bool, weight: float) -> Tensor:
        x, y, critic = views.x, views.y, self.critic
        grad_x, grad_y = (views.grad_x, views.grad_y) if gradient else (None, None)
        if self.negatives == "cross":
            return tiled.accumulate_pairs(x, y, critic, 0, grad_x, grad_y, weight)
        total = tiled.accumulate_pairs(x, None, critic, 0, grad_x, None, weight)
        if self.negatives == "both":
            total = total + tiled.accumulate_pairs(y, None, critic, 0, grad_y, None, weight)
            total = total + 2 * tiled.accumulate_pairs(x, y, critic, 0, grad_x, grad_y, 2 * weight)
        return total

    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        from fmicl.losses import functional

        critic = self.critic
        gamma = float(critic.scale) / 2
        return functional.fmicl_terms(
            x, y, critic.divergence, alpha=self.alpha, gamma=gamma, mu=math.exp(critic.offset + critic.scale),
            negatives=self.negatives, kernel="reference",
        ).total()  # type: ignore[arg-type]  # fmt: skip


@dataclass(frozen=True)
class _InfoNCE(_Loss):
    """InfoNCE at a temperature at which no exponential leaves float32."""

    scale: float = 2.0
    decoupled: bool = False

    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        n, scale = views.n, self.scale
        if self.negatives == "both":  # every view is an anchor: rows x_1 ... x_N y_1 ... y_N
            rows, columns, skips, anchors = views.unit, None, (0, n), 2 * n
        elif self.negatives == "anchor":
            rows, columns, skips, anchors = views.x, None, (0,), n
        else:
            rows, columns, skips, anchors = views.x, views.y, (0,), n
        others, kept = tiled.sums_of_exponentials(rows, columns, scale, skips, gradient)
        positive = views.distances.mul(-scale / 2).add_(scale)
        if self.negatives == "both":
            positive = positive.repeat(2)
        # log(e^positive + others) - positive, or log(others) - positive
        own = positive.exp()
        denominator = others if self.decoupled else others + own
        loss = torch.sub(denominator.log().sum(), positive.sum()) / anchors
        if gradient:
            weights = denominator.reciprocal_().div_(anchors)
            pull = others * weights if not self.decoupled else torch.full_like(others, 1 / anchors)
            pull = pull.view(2, n).sum(dim=0) if self.negatives == "both" else pull
            views.pull(pull.mul_(scale / 2))
            grad_rows = views.gradient if self.negatives == "both" else views.grad_x
            grad_columns = views.grad_y if self.negatives == "cross" else None
            tiled.exponential_gradient(rows, columns, scale, skips, kept, weights, grad_rows, grad_columns)
        return loss

    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        from fmicl.losses import functional

        return functional.infonce_loss(
            x, y, temperature=1 / self.scale, negatives=self.negatives, decoupled=self.decoupled, kernel="reference"
        )  # type: ignore[arg-type]


class _Views:
    """Unit rows of two views, and the gradient of a loss in them, on a CPU.

    Attributes:
        unit: x_1 ... x_N y_1 ... y_N, (2 N, d), float32.
        lengths: of the raw rows, (2 N, 1).
        distances: |x_i - y_i|^2, (N,).
        gradient: in the unit rows, (2 N, d).
    """

    def __init__(self, unit: Tensor, lengths: Tensor) -> None:
        self.n, self.unit, self.lengths = len(unit) // 2, unit, lengths
        self.x, self.y = unit[: self.n], unit[self.n :]
        self.gradient = torch.empty_like(unit)
        self.grad_x, self.grad_y = self.gradient[: self.n], self.gradient[self.n :]
        torch.sub(self.x, self.y, out=self.grad_x)
        self.distances: Tensor = torch.linalg.vector_norm(self.grad_x, dim=1).square_()

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> _Views | None:
        """Normalise two views; None if a row's length has too small or too large a square, or is no number."""
        rows = torch.cat((x, y))
        rows = rows if rows.dtype == torch.float32 else rows.float()
        lengths: Tensor = torch.linalg.vector_norm(rows, dim=1, keepdim=True)
        shortest, longest = torch.aminmax(lengths)
        if not (shortest.item() > _SHORTEST and longest.item() < _LONGEST):
            return None
        return cls(rows.div_(lengths), lengths)

    def pull(self, slope: Tensor) -> None:
        """Set the gradient to that of the distances, slope_i |x_i - y_i|^2, (N,)."""
        self.grad_x.mul_(slope.mul_(2).unsqueeze(1))
        torch.neg(self.grad_x, out=self.grad_y)


def _apply(x: Tensor, y: Tensor, loss: _Loss) -> Tensor | None:
    value: Tensor | None = _Whole.apply(x, y, loss)
    return value


class _Whole(torch.autograd.Function):
    """A loss of raw embeddings and its gradient, on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, loss: _Loss) -> Tensor | None:
        views = _Views.of(x, y)
        if views is None:
            return None
        gradient = ctx.needs_input_grad[0] or ctx.needs_input_grad[1]
        value = loss.evaluate(views, gradient)
        if gradient:
            ctx.save_for_backward(x, y)
            ctx.loss, ctx.views = loss, views
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
            inputs = ctx.saved_tensors
            wanted = [value for value in inputs if value.requires_grad]
            value = ctx.loss.composed(*inputs)
            found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True))
            by_x, by_y = (next(found) if value.requires_grad else None for value in inputs)
            return by_x, by_y, None
        views = ctx.views
        # onto the tangent space: (g - u (u.g)) / |row|
        along = torch.linalg.vecdot(views.gradient, views.unit).unsqueeze(1)
        found = torch.addcmul(views.gradient, views.unit, along, value=-1).mul_(grad / views.lengths)
        ...
