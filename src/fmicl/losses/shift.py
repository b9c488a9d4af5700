r"""The optimal Donsker-Varadhan shift.

The lower bound of f-mutual information with a critic T holds for T - v as well, for any v. The best one,

    sup_v  E_pos[T] - v - alpha E_neg[f*(T - v)] ,

is concave in v, with slope alpha E_neg[(f*)'(T - v)] - 1. For KL the maximiser is v = log(alpha E_neg[e^(T-1)]); for
the others it is the root of that slope, found here. By the envelope theorem the gradient of the maximum in the
embeddings is that of the bound at fixed v.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmicl.divergences import KL
from fmicl.divergences.critic import Critic
from fmicl.kernels.backend import PairFunction
from fmicl.kernels.transforms import in_transforms, is_capturing
from fmicl.losses.pairing import Pairs

__all__ = ["ShiftedCritic", "optimal_shift", "optimally_shifted", "shift_from_histogram"]

_CANDIDATES, _ROUNDS = 64, 12  # divide the range, which may be as wide as e^40, into 64^12 parts
_ROUNDING = 1e-6  # of an inner product, which may lie above its bin by as much


def optimally_shifted(pairs: Pairs, critic: Critic, alpha: float) -> Tensor:
    """min_v v + alpha E_neg[f*(T - v)]: f-MICL's uniformity term with the optimal shift.

    KL has it in closed form. The others need several passes over the pairs, and are differentiable once. While a CUDA
    graph is captured, v comes from a histogram instead (`shift_from_histogram`).

    Raises:
        ValueError: no finite v is optimal, or the divergence isn't KL and the call is within a transform of torch.func.
    """
    if type(critic.divergence) is KL:  # not a subclass, which may compute something else
        # v* = log(alpha E[e^(T-1)]), at which alpha E[f*(T - v*)] = 1
        constant = critic.offset - (1.0 if critic.free else 0.0)
        return math.log(alpha) + constant + 1 + pairs.log_mean_exp(critic.scale)
    if in_transforms():
        raise ValueError(
            f"within torch.func shift='optimal' works with kl alone, got {critic.divergence.name}: the search for v "
            "depends on values. torch.autograd gives a first derivative"
        )
    if torch.compiler.is_dynamo_compiling():  # which can't trace the search either
        from fmicl.utils.compilation import run_eager

        shifted: Tensor = run_eager(optimally_shifted, pairs, critic, alpha)
        return shifted
    v: float | Tensor
    if is_capturing(pairs.x) and pairs.world.size == 1 and pairs.labelled is None:
        v = shift_from_histogram(critic, alpha, pairs.count_cosines()).to(pairs.dtype)
    else:
        v = optimal_shift(critic, alpha, pairs.detached().global_mean, precision=4 * torch.finfo(pairs.dtype).eps)
    uniformity: Tensor = _DifferentiableOnce.apply(v + alpha * pairs.mean(ShiftedCritic(critic, v)))
    return uniformity


@dataclass(frozen=True)
class ShiftedCritic:
    """The penalty f*(T(z) - v) of a negative pair, at fixed v."""

    critic: Critic
    v: float | Tensor

    @property
    def offset(self) -> float:
        """The critic's."""
        return self.critic.offset

    @property
    def scale(self) -> float:
        """The critic's."""
        return self.critic.scale

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z) - v)."""
        return self.critic.divergence.conjugate(self.critic.score(z) - self.v)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, by automatic differentiation."""

        def total(value: Tensor) -> tuple[Tensor, Tensor]:
            penalty = self.penalty(value)
            return penalty.sum(), penalty

        slope, penalty = torch.func.grad(total, has_aux=True)(z)
        return penalty, slope


@dataclass(frozen=True)
class _Attained(ShiftedCritic):
    """(f*)'(T(z) - v), the density ratio at which f* is attained: minus the derivative of the penalty in v."""

    def penalty(self, z: Tensor) -> Tensor:
        return self.critic.divergence.conjugate_derivative(self.critic.score(z) - self.v)


@torch.no_grad()
def optimal_shift(
    critic: Critic, alpha: float, mean: Callable[[PairFunction], Tensor], precision: float = 1e-14
) -> float:
    """The v that maximises E_pos[T] - v - alpha E_neg[f*(T - v)].

    Args:
        critic: gives T and f*; z = offset + scale * c with c in [-1, 1].
        alpha: weight of the negative term.
        mean: average of a pair function over the negatives. Each call is a pass over all pairs.
        precision: relative rounding error of these averages, which limits that of the root.

    Returns:
        v as a number; the gradient does not need its dependence on the embeddings.

    Raises:
        ValueError: no finite v is optimal, as for an f whose f' never takes the value f'(1 / alpha).
    """
    target, (low, v, high) = _range(critic, alpha)

    def derivative(u: float) -> float:
        return float(critic.divergence.derivative(torch.tensor(u, dtype=torch.float64)))

    # f'(E_neg[(f*)'(T - v)]), a generalised mean of T - v, is f'(1 / alpha) at the optimum. In v it is nearly a line of
    # slope -1 (exactly so if all T are equal, and for KL): the secant method needs few passes.
    points: list[tuple[float, float]] = []
    least, most = low, high
    last, before_last = math.inf, math.inf  # lengths of the steps
    for _ in range(200):
        attained = float(mean(_Attained(critic, v)))
        if attained > 0 and abs(math.log(alpha * attained)) <= precision:
            return v
        low, high = (low, v) if alpha * attained <= 1 else (v, high)
        nearest = precision * max(1.0, abs(v))  # smallest difference of two v that makes a difference
        if high - low <= nearest:
            break
        points = [*points[-1:], (v, derivative(attained) - target if 0 < attained < math.inf else math.nan)]
        step = _secant(points)
        if abs(step) < nearest:  # step beyond the root, to bracket it
            step = nearest if v == low else -nearest
        # Bisect if a step leaves the bracket, or isn't half as long as the one before the last: slow, or one-sided.
        if not (low < v + step < high and abs(step) <= before_last / 2):
            longer = math.copysign(2 * max(abs(step), last), step)
            # From one side, on beyond the root by longer and longer steps: the other end of the range may be far off.
            beyond = (low == least or high == most) and low < v + longer < high
            step = longer if beyond else low + (high - low) / 2 - v
        last, before_last = abs(step), last
        v += step
    return high  # f* is finite for every pair there; at the lower end one may lie above its domain


@torch.no_grad()
def shift_from_histogram(critic: Critic, alpha: float, counts: Tensor) -> Tensor:
    """The optimal v from a histogram of the inner products, without reading values on the host.

    While a CUDA graph is captured Python can't test whether a search has converged. Every inner product counts as the
    upper end of its bin, so v is a little too large: every pair stays in the domain of f*, and the bound remains a
    lower bound, with an error of about the square of that of v.

    Args:
        critic: gives T and f*.
        alpha: weight of the negative term.
        counts: number of negatives in equal bins of [-1, 1], (bins,), float64.

    Returns:
        v, a float64 scalar on the device of `counts`.

    Raises:
        ValueError: as `optimal_shift`.

    Example:
        >>> import fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=3)
        >>> right_angles = critic.z(torch.zeros(6, dtype=torch.float64))
        >>> exact = optimal_shift(critic, 40.0, lambda function: function.penalty(right_angles).mean())
        >>> counts = torch.histc(torch.zeros(6, dtype=torch.float64), 1000, -1, 1)
        >>> round(float(shift_from_histogram(critic, 40.0, counts)) - exact, 3)
        0.004
    """
    _, (low, _, high) = _range(critic, alpha)
    bins, device = len(counts), counts.device
    ends = torch.linspace(-1, 1, bins + 1, dtype=torch.float64, device=device)[1:] + _ROUNDING
    scores, share = critic.score(critic.z(ends)), counts / counts.sum()
    steps = torch.linspace(0, 1, _CANDIDATES, dtype=torch.float64, device=device)
    start, end = (torch.full((), value, dtype=torch.float64, device=device) for value in (low, high))
    for _ in range(_ROUNDS):
        v = torch.lerp(start, end, steps)
        ratios = critic.divergence.conjugate_derivative(scores - v[:, None])
        attained = torch.where(share > 0, share * ratios, 0.0).sum(dim=1)
        # It falls with v: take the first v with alpha * attained <= 1, and the one before; the last v always has it.
        enough = torch.cat([(alpha * attained <= 1)[:-1], steps[-1:] > 0])
        place = enough.to(torch.int32).argmax(dim=0, keepdim=True)
        start, end = (v.gather(0, index.clamp(min=0)).squeeze(0) for index in (place - 1, place))
    return end


def _range(critic: Critic, alpha: float) -> tuple[float, tuple[float, float, float]]:
    """f'(1 / alpha), and the range of v: its least value, that of orthogonal negatives, and its largest.

    If every T were t, v would be t - f'(1 / alpha). As (f*)' increases, the true v lies between the least and the
    largest of these, and T between its values at c = -1 and c = 1. In double precision, as T may be as large as e^80.

    Raises:
        ValueError: no finite v is optimal.
    """
    places = [critic.offset - critic.scale, critic.offset, critic.offset + critic.scale]
    target = float(critic.divergence.derivative(torch.tensor(1 / alpha, dtype=torch.float64)))
    low, v, high = (float(t) - target for t in critic.score(torch.tensor(places, dtype=torch.float64)))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"shift='optimal': no finite shift for {critic.divergence.name} with alpha={alpha:g}; "
            f"T lies between {low + target:g} and {high + target:g}"
        )
    return target, (low, v, high)


def _secant(points: list[tuple[float, float]]) -> float:
    """The step from the last of some points (v, h) to the root of h; from a single one along slope -1."""
    (before, h_before), (v, h) = points[0], points[-1]
    slope = (h - h_before) / (v - before) if v != before else -1.0
    return -h / (slope if slope < 0 else -1.0)


class _DifferentiableOnce(torch.autograd.Function):
    """The identity, which raises an error where a second derivative would be wrong."""

    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:  # noqa: ARG004
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # noqa: ARG004
        if torch.is_grad_enabled():
            raise RuntimeError(
                "this loss can't be differentiated twice: the gradient of shift='optimal' holds v fixed; only kl has "
                "it in closed form"
            )
        return grad
