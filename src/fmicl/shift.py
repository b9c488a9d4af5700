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

from fmicl.kernels.contract import PairFunction
from fmicl.similarities import Critic

__all__ = ["ShiftedCritic", "differentiable_once", "optimal_shift"]


@dataclass(frozen=True)
class ShiftedCritic:
    """The cost f*(T(z) - v) of a negative pair, with v held fixed."""

    critic: Critic
    v: float

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

    def derivative(u: float) -> float:
        return float(critic.divergence.derivative(torch.tensor(u, dtype=torch.float64)))

    # If every T were t, v = t - f'(1 / alpha). As (f*)' increases, the true v lies between the least and the
    # largest of these, and T between its values at c = -1 and c = 1. Double precision: T may be as large as e^80.
    places = [critic.offset - critic.scale, critic.offset, critic.offset + critic.scale]
    target = derivative(1 / alpha)
    low, v, high = (float(t) - target for t in critic.score(torch.tensor(places, dtype=torch.float64)))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"shift='optimal': no finite shift for {critic.divergence.name} with alpha={alpha:g}; "
            f"T lies between {low + target:g} and {high + target:g}"
        )
    # The mean of T - v in the sense of (f*)', f'(E_neg[(f*)'(T - v)]), is f'(1 / alpha) at the optimum. In v it is
    # nearly a straight line of slope -1 (if all T were alike, and for KL, exactly): the secant needs few passes.
    points: list[tuple[float, float]] = []
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
            step = low + (high - low) / 2 - v
        last, before_last = abs(step), last
        v += step
    return high  # where f* is finite for every pair; at the lower end one may lie above its domain


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
