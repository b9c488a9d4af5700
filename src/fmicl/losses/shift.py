r"""The Donsker-Varadhan shift: a lower bound of f-mutual information, maximised over T - v too.

    sup_v  E_pos[T] - v - alpha E_neg[f*(T - v)]

is concave in v, with slope alpha E_neg[(f*)'(T - v)] - 1. For KL the maximiser is v = log(alpha E_neg[e^(T-1)]);
for the others it is the root of that slope, found here. By the envelope theorem the gradient of the maximum in
the embeddings is that of the bound at v held fixed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmicl.divergences.critic import Critic
from fmicl.kernels.backend import PairFunction

__all__ = ["ShiftedCritic", "differentiable_once", "optimal_shift", "shift_of_counts"]

_CANDIDATES, _ROUNDS = 64, 12  # of the range, 64^12 parts: it may be as wide as e^40
_ABOVE = 1e-6  # how far an inner product may lie above its part, by rounding


@dataclass(frozen=True)
class ShiftedCritic:
    """The cost f*(T(z) - v) of a negative pair, with v held fixed."""

    critic: Critic
    v: float | Tensor

    @property
    def offset(self) -> float:
        """As the critic's."""
        return self.critic.offset

    @property
    def scale(self) -> float:
        """As the critic's."""
        return self.critic.scale

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z) - v)."""
        return self.critic.divergence.conjugate(self.critic.score(z) - self.v)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The cost and its derivative in z, by automatic differentiation."""

        def total(value: Tensor) -> tuple[Tensor, Tensor]:
            penalty = self.penalty(value)
            return penalty.sum(), penalty

        slope, penalty = torch.func.grad(total, has_aux=True)(z)
        return penalty, slope


@dataclass(frozen=True)
class _Attained(ShiftedCritic):
    """(f*)'(T(z) - v), the density ratio at which f* is attained: minus the derivative of the cost in v."""

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
        precision: relative rounding of these averages; nearer than that no root can be told.

    Returns:
        v as a number; the gradient does not need its dependence on the embeddings.

    Raises:
        ValueError: if no finite v is optimal, as for an f whose f' never takes the value f'(1 / alpha).
    """
    target, (low, v, high) = _range(critic, alpha)

    def derivative(u: float) -> float:
        return float(critic.divergence.derivative(torch.tensor(u, dtype=torch.float64)))

    # The mean of T - v in the sense of (f*)', f'(E_neg[(f*)'(T - v)]), is f'(1 / alpha) at the optimum. In v it is
    # nearly a straight line of slope -1 (if all T were alike, and for KL, exactly): the secant needs few passes.
    points: list[tuple[float, float]] = []
    least, most = low, high
    last, before_last = math.inf, math.inf  # how long the steps were
    for _ in range(200):
        attained = float(mean(_Attained(critic, v)))
        if attained > 0 and abs(math.log(alpha * attained)) <= precision:
            return v
        low, high = (low, v) if alpha * attained <= 1 else (v, high)
        nearest = precision * max(1.0, abs(v))  # that two v can be told apart
        if high - low <= nearest:
            break
        points = [*points[-1:], (v, derivative(attained) - target if 0 < attained < math.inf else math.nan)]
        step = _secant(points)
        if abs(step) < nearest:  # beyond the root, so that it is known from both sides
            step = nearest if v == low else -nearest
        # A step that isn't half as long as the one before the last gets nowhere, or only from one side.
        if not (low < v + step < high and abs(step) <= before_last / 2):
            longer = math.copysign(2 * max(abs(step), last), step)
            # From one side, on beyond the root by longer and longer steps: the other end of the range may be far off.
            beyond = (low == least or high == most) and low < v + longer < high
            step = longer if beyond else low + (high - low) / 2 - v
        last, before_last = abs(step), last
        v += step
    return high  # where f* is finite for every pair; at the lower end one may lie above its domain


@torch.no_grad()
def shift_of_counts(critic: Critic, alpha: float, counts: Tensor) -> Tensor:
    """That v from how many negatives have their c in each of equal parts of [-1, 1], without a look at any value.

    A CUDA graph that is being recorded has no other way: Python can't know there when a search has ended. Every c is
    taken for the upper end of its part, so v is a little too large: that leaves every pair in the domain of f*, and as
    any v does, it gives a lower bound, which at its maximum is off by about the square of what v is.

    Args:
        critic: gives T and f*.
        alpha: weight of the negative term.
        counts: (parts,), float64.

    Returns:
        v, a float64 scalar on their device.

    Raises:
        ValueError: as `optimal_shift`.

    Example:
        >>> import fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=3)
        >>> right_angles = critic.z(torch.zeros(6, dtype=torch.float64))
        >>> exact = optimal_shift(critic, 40.0, lambda function: function.penalty(right_angles).mean())
        >>> counts = torch.histc(torch.zeros(6, dtype=torch.float64), 1000, -1, 1)
        >>> round(float(shift_of_counts(critic, 40.0, counts)) - exact, 3)
        0.004
    """
    _, (low, _, high) = _range(critic, alpha)
    parts, device = len(counts), counts.device
    ends = torch.linspace(-1, 1, parts + 1, dtype=torch.float64, device=device)[1:] + _ABOVE
    scores, share = critic.score(critic.z(ends)), counts / counts.sum()
    steps = torch.linspace(0, 1, _CANDIDATES, dtype=torch.float64, device=device)
    start, end = (torch.full((), value, dtype=torch.float64, device=device) for value in (low, high))
    for _ in range(_ROUNDS):
        v = torch.lerp(start, end, steps)
        ratios = critic.divergence.conjugate_derivative(scores - v[:, None])
        attained = torch.where(share > 0, share * ratios, 0.0).sum(dim=1)
        # It falls with v: the first v at which it is enough, and the one before. At the end of the range it always is.
        enough = torch.cat([(alpha * attained <= 1)[:-1], steps[-1:] > 0])
        place = enough.to(torch.int32).argmax(dim=0, keepdim=True)
        start, end = (v.gather(0, index.clamp(min=0)).squeeze(0) for index in (place - 1, place))
    return end


def _range(critic: Critic, alpha: float) -> tuple[float, tuple[float, float, float]]:
    """f'(1 / alpha), and where v may lie: its least value, that of negatives at right angles, and its largest.

    If every T were t, v would be t - f'(1 / alpha). As (f*)' increases, the true v lies between the least and the
    largest of these, and T between its values at c = -1 and c = 1. Double precision: T may be as large as e^80.

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
    @staticmethod
    def forward(ctx: Any, value: Tensor, why: str) -> Tensor:
        ctx.why = why
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"this loss can't be differentiated twice: {ctx.why}")
        return grad, None


def differentiable_once(value: Tensor, why: str) -> Tensor:
    """The value, with an error instead of a wrong number for who differentiates it twice."""
    result: Tensor = _DifferentiableOnce.apply(value, why)
    return result
