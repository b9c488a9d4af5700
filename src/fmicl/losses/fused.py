"""Fused losses: one autograd function from raw embeddings to the loss, with the gradient computed in the same pass.

At the batch sizes of most training loops a loss takes as long as the calls that it consists of, not as their
arithmetic. Here f-MICL and InfoNCE are evaluated without a graph of small operations, and settings are checked once. On
a CPU that is some thirty calls of torch, with CUDA four or five launches of Triton kernels (`fmicl.kernels.views`).

`fmicl_loss` and `infonce_loss` return None where this doesn't apply: `fmicl.functional` then composes the loss of its
parts, with the same value. That is so for learned scalars, divergences without closed forms, float64, labels, explicit
negatives, several processes, and within torch.func.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any, Literal, Unpack

import torch
import torch.distributed as dist
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic
from fmicl.kernels import tiled
from fmicl.kernels.backend import is_moderate
from fmicl.kernels.lowering import lower_score
from fmicl.kernels.transforms import in_transforms, is_batched
from fmicl.losses.pairing import ComputeOptions, check_options
from fmicl.losses.similarities import Gaussian, Similarity, make_similarity
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.numerics import EXACT, autocast_enabled, exact_matmul, matmul_precision
from fmicl.utils.triton import interpreting, triton_runs_on
from fmicl.utils.validation import Negatives

_HALF = (torch.bfloat16, torch.float16)
# Lengths of rows whose squares float32 represents with all of its digits.
_SHORTEST, _LONGEST = 1e-15, 1e15
_LONGEST_ROW = 4096  # entries that one Triton program holds


def fmicl_loss(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence,
    alpha: Scalar | Literal["auto"],
    gamma: Scalar,
    mu: Scalar | Literal["normalised"],
    similarity: str | Similarity,
    negatives: Negatives | Tensor,
    **options: Unpack[ComputeOptions],
) -> Tensor | None:
    """`fmicl.functional.fmicl_loss` of a batch on one process; None where this path doesn't apply."""
    if isinstance(alpha, str) or not _applies(x, y, negatives, alpha, gamma, mu):
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
    try:
        loss = _infonce(temperature, negatives, decoupled, **options)
    except TypeError:
        return None
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
        and (x.dtype == torch.float32 or x.dtype in _HALF)
        and x.dtype == y.dtype
        and x.device == y.device
        and (x.is_cuda or x.is_cpu)
        and isinstance(negatives, str)
        and not any(isinstance(number, Tensor) for number in numbers)
        and not in_transforms()
        and not torch.compiler.is_compiling()
        and not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)
    )


@functools.lru_cache(maxsize=256, typed=True)
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
    kind = make_divergence(divergence)
    require_positive_scalar("alpha", alpha)
    form = make_similarity(similarity, gamma, mu)
    if not _supports(negatives, options) or lower_score(kind) is None:
        return None
    if type(form) is not Gaussian or isinstance(form.gamma, Tensor) or isinstance(form.mu, Tensor):
        return None
    arguments = {"alpha": alpha, "gamma": gamma, "mu": mu, "similarity": similarity}
    return _FMICL(negatives, options, arguments, form.critic(kind, d), float(alpha))


@functools.lru_cache(maxsize=256, typed=True)
def _infonce(
    temperature: float, negatives: Negatives, decoupled: bool, **options: Unpack[ComputeOptions]
) -> _InfoNCE | None:
    """The checked loss."""
    check_options(**options)
    require_positive_scalar("temperature", temperature)
    return _InfoNCE(negatives, options, temperature, bool(decoupled)) if _supports(negatives, options) else None


def _supports(negatives: str, options: ComputeOptions) -> bool:
    return (
        negatives in ("anchor", "both", "cross")
        and not options.get("normalised")
        and options.get("kernel") != "reference"
    )


class _Loss(ABC):
    """A loss of two views with its settings, which are checked.

    Args:
        negatives: "anchor", "both" or "cross".
        options: how sums are computed.

    Attributes:
        plans: of Triton's launches, by shape and type of the input; None where Triton can't run.
        supports_cpu: whether `evaluate` may be called.
    """

    supports_cpu: bool = True

    def __init__(self, negatives: Negatives, options: ComputeOptions) -> None:
        self.negatives, self.options = negatives, options
        self.kernel, self.precision = options.get("kernel", "auto"), options.get("precision", "auto")
        self.plans: dict[Any, Any] = {}

    def apply(self, x: Tensor, y: Tensor) -> Tensor | None:
        """The loss of this batch; None where it takes the composed one."""
        wanted = (x.requires_grad, y.requires_grad) if torch.is_grad_enabled() else (False, False)
        if x.is_cuda or self.kernel == "triton":
            return self._by_triton(x, y, wanted)
        if autocast_enabled("cpu"):
            with torch.autocast("cpu", enabled=False):
                return self.apply(x, y)
        views = _Views.of(x.detach(), y.detach()) if self.supports_cpu else None
        if views is None:
            return None
        with nullcontext() if matmul_precision("cpu") in (EXACT, "none") else exact_matmul(x.device):
            loss: Tensor = _FusedLoss.apply(x, y, self, _CPUPlan(self, views, wanted))
        return loss

    def _by_triton(self, x: Tensor, y: Tensor, wanted: tuple[bool, bool]) -> Tensor | None:
        key = (x.shape, x.dtype, x.device, wanted)
        if key not in self.plans:
            self.plans[key] = self._plan(x, wanted)
        plan = self.plans[key]
        if plan is None:
            return None
        # kernels read whole rows by aligned addresses
        rows = torch.contiguous_format
        x, y = (v if v.is_contiguous() and v.data_ptr() % 16 == 0 else v.clone(memory_format=rows) for v in (x, y))
        loss: Tensor = _FusedLoss.apply(x, y, self, plan)
        return loss

    def _plan(self, x: Tensor, wanted: tuple[bool, bool]) -> Any:
        runs = triton_runs_on(x.device) or (self.kernel == "triton" and interpreting() and x.is_cpu)
        if self.kernel not in ("auto", "triton") or not runs or x.shape[1] > _LONGEST_ROW:
            return None
        from fmicl.kernels.views import ViewLossPlan

        loss = self.lowered()
        fast = self.precision == "fast" or (self.precision == "auto" and x.dtype in _HALF)
        return loss and ViewLossPlan(loss, len(x), x.shape[1], x.device, fast, wanted)

    @abstractmethod
    def lowered(self) -> Any:
        """The loss as `fmicl.kernels.views.ViewLoss`; None if Triton has no program for it."""

    @abstractmethod
    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        """The loss; with `gradient`, sets views.gradient to its gradient in the unit rows."""

    @abstractmethod
    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        """The loss by plain autograd."""


class _FMICL(_Loss):
    """f-MICL with the Gaussian similarity."""

    def __init__(
        self, negatives: Negatives, options: ComputeOptions, arguments: dict[str, Any], critic: Critic, alpha: float
    ) -> None:
        super().__init__(negatives, options)
        self.arguments, self.critic, self.alpha = arguments, critic, alpha

    def lowered(self) -> Any:
        from fmicl.kernels.views import ViewLoss

        return ViewLoss.fmicl(self.critic, self.alpha, self.negatives)

    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        critic, n = self.critic, views.n
        difference = views.x - views.y
        r = critic.at_distance(difference.square().sum(dim=1))
        alignment = critic.divergence.score(r).sum()
        grad_x = grad_y = None
        if gradient:  # dr/d(distance) = -scale / 2, and the distance's gradient is twice the difference
            grad_x, grad_y = views.new_gradient()
            slope = critic.divergence.score_slope(r).mul_(float(critic.scale) / n)
            torch.mul(difference, slope.unsqueeze(1), out=grad_x)
            torch.neg(grad_x, out=grad_y)
        count = (4 if self.negatives == "both" else 1) * n * (n - 1)
        weight = self.alpha / count
        total = self._negatives(views.x, views.y, grad_x, grad_y, weight)
        return torch.sub(total * weight, alignment, alpha=1 / n).float()

    def _negatives(self, x: Tensor, y: Tensor, grad_x: Tensor | None, grad_y: Tensor | None, weight: float) -> Tensor:
        critic = self.critic
        if self.negatives == "cross":
            return tiled.accumulate_pairs(x, y, critic, 0, grad_x, grad_y, weight)
        total = tiled.accumulate_pairs(x, None, critic, 0, grad_x, None, weight)
        if self.negatives == "both":
            total = total + tiled.accumulate_pairs(y, None, critic, 0, grad_y, None, weight)
            total = total + 2 * tiled.accumulate_pairs(x, y, critic, 0, grad_x, grad_y, 2 * weight)
        return total

    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        from fmicl.losses import functional

        return functional.fmicl_terms(
            x, y, self.critic.divergence, negatives=self.negatives, kernel="reference", **self.arguments
        ).total()


class _InfoNCE(_Loss):
    """InfoNCE; on a CPU, at temperatures at which no exponential leaves float32."""

    def __init__(self, negatives: Negatives, options: ComputeOptions, temperature: float, decoupled: bool) -> None:
        super().__init__(negatives, options)
        self.temperature, self.scale, self.decoupled = temperature, 1 / temperature, decoupled
        self.supports_cpu = is_moderate(self.scale, torch.float32)

    def lowered(self) -> Any:
        from fmicl.kernels.views import ViewLoss

        return ViewLoss.infonce(self.scale, self.negatives, self.decoupled)

    def evaluate(self, views: _Views, gradient: bool) -> Tensor:
        n, scale = views.n, self.scale
        both, cross = self.negatives == "both", self.negatives == "cross"
        rows = views.unit if both else views.x  # with both, every view is an anchor: x_1 ... x_N y_1 ... y_N
        columns = views.y if cross else rows
        if tiled.is_one_tile(rows, columns):
            return self._small(views, rows, columns, gradient)
        others, kept = tiled.sums_of_exponentials(
            rows, columns if cross else None, scale, (0, n, -n) if both else (0,), gradient
        )
        own = (views.x * views.y).sum(dim=1).mul_(scale).exp_()
        loss, weights, pull = self._of_sums(others.view(-1, n), own, gradient)
        if gradient:
            grad_x, grad_y = views.new_gradient(scale / len(rows))
            torch.mul(views.y, pull.unsqueeze(1), out=grad_x)
            torch.mul(views.x, pull.unsqueeze(1), out=grad_y)
            tiled.exponential_gradient(
                rows, columns if cross else None, scale, (0, n, -n) if both else (0,), kept, weights.view(-1),
                views.gradient if both else grad_x, grad_y if cross else None,
            )  # fmt: skip
        return loss

    def _of_sums(self, others: Tensor, own: Tensor, gradient: bool) -> tuple[Tensor, Tensor, Tensor]:
        """The loss of sums of exponentials (1 or 2, N) with their positives (N,), and weights in its gradient.

        Times scale / number of anchors, these are the weights of the exponentials, shaped like others, and of the
        products of the positive pairs, (N,).
        """
        ratio = others / own  # log(1 + others / own) keeps the digits of a small loss
        loss = (ratio.log() if self.decoupled else ratio.log1p()).mean()
        if not gradient:
            return loss, others, own
        if self.decoupled:
            return loss, others.reciprocal(), torch.full_like(own, -float(len(others)))
        weights = (others + own).reciprocal_()
        return loss, weights, torch.mul(others, weights, out=ratio).sum(dim=0).neg_()

    def _small(self, views: _Views, rows: Tensor, columns: Tensor, gradient: bool) -> Tensor:
        """With all exponentials in one matrix, whose entries of the positive pairs become their weights."""
        n, scale = views.n, self.scale
        terms = torch.mm(rows * scale, columns.T).exp_()
        if self.negatives == "both":
            # [a, b, i] is the product of view a and view b of sample i
            same = terms.view(2, n, 2, n).diagonal(0, 1, 3)
            own = same[0, 1].clone()
        else:
            same = terms.diagonal()
            own = same.clone() if self.negatives == "cross" else (views.x * views.y).sum(dim=1).mul_(scale).exp_()
        same.zero_()
        loss, weights, pull = self._of_sums(terms.sum(dim=1).view(-1, n), own, gradient)
        if not gradient:
            return loss
        by_row = weights.view(-1, 1)
        if self.negatives == "both":
            terms.mul_(by_row + weights.view(-1))  # as row and as column
            same.copy_(pull)  # what it adds along a row itself has no part in the gradient on the sphere
            views.gradient, views.factor = terms @ rows, scale / (2 * n)
            return loss
        grad_x, grad_y = views.new_gradient(scale / n)
        if self.negatives == "cross":
            terms.mul_(by_row)
            same.copy_(pull)
            torch.mm(terms, columns, out=grad_x)
            torch.mm(terms.T, rows, out=grad_y)
            return loss
        torch.mul(views.y, pull.unsqueeze(1), out=grad_x)
        torch.mul(views.x, pull.unsqueeze(1), out=grad_y)
        grad_x.addmm_(terms.mul_(by_row + weights.view(-1)), rows)
        return loss

    def composed(self, x: Tensor, y: Tensor) -> Tensor:
        from fmicl.losses import functional

        return functional.infonce_loss(
            x, y, temperature=self.temperature, negatives=self.negatives, decoupled=self.decoupled, kernel="reference"
        )


class _Views:
    """Unit rows of two views, and the gradient of a loss in them, on a CPU.

    Attributes:
        n: number of samples.
        unit: x_1 ... x_N y_1 ... y_N, (2 N, d), float32.
        x: its first half.
        y: its second half.
        lengths: of the raw rows, (2 N, 1).
        gradient: in the unit rows, (2 N, d), divided by `factor`. Its part along a row doesn't matter.
        factor: of the gradient.
    """

    def __init__(self, unit: Tensor, lengths: Tensor) -> None:
        self.n, self.unit, self.lengths = unit.shape[0] // 2, unit, lengths
        self.x, self.y = unit.view(2, self.n, -1).unbind()
        self.gradient, self.factor = unit, 1.0

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

    def new_gradient(self, factor: float = 1.0) -> tuple[Tensor, Tensor]:
        """The uninitialised gradients in x and in y, which are to be divided by the factor."""
        self.gradient, self.factor = torch.empty_like(self.unit), factor
        grad_x, grad_y = self.gradient.view(2, self.n, -1).unbind()
        return grad_x, grad_y

    def raw_gradient(self, grad: Tensor) -> Tensor:
        """The gradient in the raw rows, times grad: onto the tangent space, and divided by their lengths."""
        along = (self.gradient * self.unit).sum(dim=1, keepdim=True)
        tangent = torch.addcmul(self.gradient, self.unit, along, value=-1)
        return tangent.mul_(grad * self.factor / self.lengths)


class _CPUPlan:
    """The evaluation of a loss on a CPU, with the interface of `fmicl.kernels.views.ViewLossPlan`."""

    def __init__(self, loss: _Loss, views: _Views, wanted: tuple[bool, bool]) -> None:
        self.loss, self.views, self.wanted = loss, views, wanted

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, None]:  # noqa: ARG002
        """The loss; the views keep what the gradient needs."""
        return self.loss.evaluate(self.views, any(self.wanted)), None

    def backward(self, x: Tensor, y: Tensor, state: None, grad: Tensor) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """The gradients in x and y, times grad."""
        found = self.views.raw_gradient(grad).to(x.dtype)
        return found[: self.views.n], found[self.views.n :]


class _FusedLoss(torch.autograd.Function):
    """A loss of raw embeddings with its gradient, by the forward and backward of a plan."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, loss: _Loss, plan: Any) -> Tensor:
        value: Tensor
        value, state = plan.forward(x, y)
        if any(plan.wanted):
            ctx.save_for_backward(x, y)
            ctx.loss, ctx.plan, ctx.state = loss, plan, state
        return value

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        x_wanted, y_wanted, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():  # create_graph=True: by plain autograd
            inputs = [view.view_as(view) for view in (x, y)]  # told apart, also where y is a function of x
            wanted = [view for view, needed in zip(inputs, (x_wanted, y_wanted), strict=True) if needed]
            found = iter(torch.autograd.grad(ctx.loss.composed(*inputs), wanted, grad, create_graph=True))
            return next(found) if x_wanted else None, next(found) if y_wanted else None, None, None
        batched = is_batched(grad)
        by_x, by_y = ctx.plan.backward(x, y, ctx.state, torch.ones((), device=x.device) if batched else grad)
        if batched:
            by_x, by_y = by_x * grad, by_y * grad
        return by_x if x_wanted else None, by_y if y_wanted else None, None, None
