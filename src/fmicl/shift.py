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

    def excess(v: float) -> float:
        """log(alpha E_neg[(f*)'(T - v)]): decreasing in v, zero at the optimum; for KL a straight line."""
        attained = alpha * float(mean(_Attained(critic, v)))
        return math.log(attained) if attained > 0 else -math.inf

    # If every T were t, v = t - f'(1 / alpha). As (f*)' increases, the true v lies between the least and the
    # largest of these, and T between its values at c = -1 and c = 1. Double precision: T may be as large as e^80.
    ends = torch.tensor([critic.offset - critic.scale, critic.offset + critic.scale], dtype=torch.float64)
    target = float(critic.divergence.derivative(torch.tensor(1 / alpha, dtype=torch.float64)))
    low, high = (float(t) - target for t in critic.score(ends))
    if not (math.isfinite(low) and math.isfinite(high)):
        raise ValueError(
            f"shift='optimal': no finite shift for {critic.divergence.name} with alpha={alpha:g}; "
            f"T lies between {float(critic.score(ends)[0]):g} and {float(critic.score(ends)[1]):g}"
        )
    at_low, at_high = excess(low), excess(high)
    for _ in range(200):
        width = high - low
        if width <= precision * max(1.0, abs(low), abs(high)):
            break
        middle = low + width / 2
        if math.isfinite(at_low) and math.isfinite(at_high) and at_low > at_high:
            # false position; kept off the ends, so that both of them move and the bracket closes
            guess = low + width * at_low / (at_low - at_high)
            margin = 1e-3 * width
            v = min(max(guess, low + margin), high - margin)
        else:
            v = middle
        at_v = excess(v)
        if abs(at_v) <= precision:
            return v
        low, at_low, high, at_high = (v, at_v, high, at_high) if at_v > 0 else (low, at_low, v, at_v)
        if high - low > width / 2:  # a poor step is followed by a bisection: never slower than twice that
            middle = low + (high - low) / 2
            at_middle = excess(middle)
            if at_middle > 0:
                low, at_low = middle, at_middle
            else:
                high, at_high = middle, at_middle
    return high  # where f* is finite for every pair; at the lower end one may lie above its domain


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
