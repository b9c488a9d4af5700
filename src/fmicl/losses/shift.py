r"""The optimal Donsker-Varadhan shift.

The lower bound of f-mutual information with a critic T holds for T - v as well, for any v. The best one,

    sup_v  E_pos[T] - v - alpha E_neg[f*(T - v)] ,

is concave in v, with slope alpha E_neg[(f*)'(T - v)] - 1. For KL the maximiser is v = log(alpha E_neg[e^(T-1)]); for
the others it is the root of that slope, found here. By the envelope theorem the gradient of the maximum, in the
embeddings and in what is learned, is that of the bound at fixed v.

T may be as large as e^80 (reverse KL at gamma = 20), and v is about as large as T of the closest negative pair, while
T - v is of the order of f'(1 / alpha). So it is not computed by subtraction. With z_0 the largest z of a negative
pair, v = T(z_0) - f'(e^s), and

    T(z) - v = (T(z) - T(z_0)) + f'(e^s) ,

whose first part has a closed form without cancellation. The unknown is s, the log density ratio that (f*)' attains at
the closest pair: it lies between log(1 / alpha), if all pairs are equally close, and log(M / alpha), if one of M pairs
counts alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmicl.divergences import KL, Divergence
from fmicl.divergences.critic import Critic
from fmicl.kernels import all_max
from fmicl.kernels.backend import PairFunction
from fmicl.kernels.transforms import in_transforms, is_capturing
from fmicl.losses.pairing import Pairs
from fmicl.utils.learnable import Scalar, log

_PASSES = 60  # over the pairs, at most
_CAPTURED_PASSES = 14  # in a CUDA graph, where no value can be tested: more than almost any search needs
_ROUNDING = 4  # units in the last place of offset and scale, by which z of two equally close pairs may differ
_LOST = 1e-3  # relative error of (f*)' from which a shift counts as unresolved


def optimally_shifted(pairs: Pairs, critic: Critic, alpha: Scalar) -> Tensor:
    """min_v v + alpha E_neg[f*(T - v)]: f-MICL's uniformity term with the optimal shift.

    KL has it in closed form. The others need several passes over the pairs, and are differentiable once.

    Raises:
        ValueError: no finite v is optimal, or rounding hides it, or the divergence isn't KL and the call is within a
            transform of torch.func.
    """
    if type(critic.divergence) is KL:  # not a subclass, which may compute something else
        # v* = log(alpha E[e^(T-1)]), at which alpha E[f*(T - v*)] = 1
        constant = critic.offset - (1.0 if critic.free else 0.0)
        return log(alpha) + constant + 1 + pairs.log_mean_exp(critic.scale)
    if in_transforms():
        raise ValueError(
            f"within torch.func shift='optimal' works with kl alone, got {critic.divergence.name}: the search for v "
            "depends on values. torch.autograd gives a first derivative"
        )
    with torch.no_grad():
        closest = _wide(critic.z(pairs.largest_cosine()))
        rounding = torch.finfo(pairs.dtype).eps
        number = all_max(torch.full_like(closest, float(pairs.count())), pairs.world)
        start = ShiftedCritic(critic, closest, closest, _ROUNDING * rounding)
        found = optimal_shift(
            start, alpha, pairs.detached().global_mean, number,
            precision=max(4 * rounding, 1e-12), capturing=is_capturing(pairs.x),
        )  # fmt: skip
    uniformity = differentiable_once(
        found.shift() + alpha * pairs.mean(found), "the gradient of shift='optimal' holds v fixed"
    )
    return uniformity.to(pairs.dtype)


def differentiable_once(value: Tensor, why: str) -> Tensor:
    """The value, with an error where a second derivative would be wrong, and the reason."""
    once: Tensor = _DifferentiableOnce.apply(value, why)
    return once


@dataclass(frozen=True)
class ShiftedCritic:
    """The penalty f*(T(z) - v) of a negative pair, at fixed v. It computes in float64 where the device has it.

    Attributes:
        critic: gives T.
        closest: the largest z of a negative pair, a scalar.
        log_ratio: s with v = T(closest) - f'(e^s), a scalar.
        rounding: z may be wrong by this much relative to offset and scale. Pairs that are as close to the closest one
            count as equally close: only so the two orders of a pair, whose products round differently, weigh the same.
    """

    critic: Critic
    closest: Tensor
    log_ratio: Tensor
    rounding: float = 0.0

    @property
    def offset(self) -> Scalar:
        """The critic's."""
        return self.critic.offset

    @property
    def scale(self) -> Scalar:
        """The critic's."""
        return self.critic.scale

    def shift(self) -> Tensor:
        """v = T(closest) - f'(e^s)."""
        return self.critic.score(self.closest) - self.critic.divergence.score(self.log_ratio)

    def shifted_score(self, z: Tensor) -> Tensor:
        """T(z) - v, without the difference of large numbers."""
        offset, scale = (torch.zeros_like(self.closest) + value for value in (self.offset, self.scale))
        tie = self.closest - self.rounding * (offset.abs() + scale.abs())
        z = z + torch.where(z >= tie, self.closest - z, 0.0).detach()
        return self.critic.score_difference(z, self.closest) + self.critic.divergence.score(self.log_ratio)

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z) - v)."""
        return self.critic.divergence.conjugate(self.shifted_score(_wide(z))).to(z.dtype)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, by automatic differentiation."""

        def total(value: Tensor) -> tuple[Tensor, Tensor]:
            penalty = self.critic.divergence.conjugate(self.shifted_score(value))
            return penalty.sum(), penalty

        slope, penalty = torch.func.grad(total, has_aux=True)(_wide(z))
        return penalty.to(z.dtype), slope.to(z.dtype)


@dataclass(frozen=True)
class _Attained(ShiftedCritic):
    """(f*)'(T(z) - v), the density ratio at which f* is attained: minus the derivative of the penalty in v."""

    def penalty(self, z: Tensor) -> Tensor:
        return self.critic.divergence.conjugate_derivative(self.shifted_score(_wide(z))).to(z.dtype)


@torch.no_grad()
def optimal_shift(
    start: ShiftedCritic,
    alpha: Scalar,
    mean: Callable[[PairFunction], Tensor],
    number: Tensor,
    precision: float = 1e-12,
    capturing: bool = False,
) -> ShiftedCritic:
    """The shift that maximises E_pos[T] - v - alpha E_neg[f*(T - v)].

    Args:
        start: the critic with its closest pair; its `log_ratio` is not used.
        alpha: weight of the negative term.
        mean: average of a pair function over the negatives. Each call is a pass over all pairs.
        number: of negatives, a scalar, or an upper bound of it.
        precision: relative rounding error of these averages, which limits that of the root.
        capturing: read no value on the host, as within a CUDA graph: a fixed number of passes, and no errors.

    Returns:
        The critic with the optimal `log_ratio`.

    Raises:
        ValueError: no finite v is optimal, as for an f whose f' never takes the value f'(1 / alpha), or rounding of T
            hides it, as for an f given as code with large scores.

    Example:
        >>> import fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=3)
        >>> z = critic.z(torch.zeros(6, dtype=torch.float64))           # six pairs, equally close
        >>> start, number = ShiftedCritic(critic, z[0], z[0]), torch.tensor(6.0, dtype=torch.float64)
        >>> found = optimal_shift(start, 40.0, lambda function: function.penalty(z).mean(), number)
        >>> torch.allclose(found.shift(), critic.score(z[0]) - critic.divergence.derivative(1 / 40))
        True
    """
    closest = start.closest
    weight = torch.log(torch.zeros_like(closest) + alpha)  # no copy from the host, which a CUDA graph can't capture
    low, high = -weight, torch.log(_wide(number)) - weight
    if not capturing:
        _require_finite(start, alpha, low)

    def at(s: Tensor) -> ShiftedCritic:
        return ShiftedCritic(start.critic, closest, s, start.rounding)

    def excess(s: Tensor) -> Tensor:
        """log(alpha E_neg[(f*)'(T - v)]), which increases with s; 0 at the optimum."""
        return weight + _wide(mean(_Attained(start.critic, closest, s, start.rounding))).log()

    # The excess has slope 1 in s if all pairs are equally close, if one counts alone, and for KL: few secant steps.
    s, before = low, torch.full_like(low, math.nan)
    value_before, best, best_value = before, low, torch.full_like(low, math.inf)
    step, step_before = (torch.full_like(low, math.inf) for _ in range(2))
    for _ in range(_CAPTURED_PASSES if capturing else _PASSES):
        value = excess(s)
        better = value.abs() < best_value.abs()
        best, best_value = torch.where(better, s, best), torch.where(better, value, best_value)
        low, high = torch.where(value <= 0, s, low), torch.where(value <= 0, high, s)
        done = (value.abs() <= precision) | (high - low <= precision * (1 + s.abs()))
        if not capturing and bool(done):
            break
        slope = (value - value_before) / (s - before)
        target = s - value / torch.where(slope > 0, slope, 1.0)  # NaN at first
        # bisect if a step leaves the bracket, or isn't half as long as the one before the last
        good = (target >= low) & (target <= high) & ((target - s).abs() <= step_before / 2)
        target = torch.where(done, s, torch.where(good, target, (low + high) / 2))
        step, step_before = (target - s).abs(), step
        s, before, value_before = target, s, value
    found = at(best)
    if not capturing:
        _require_resolved(found)
    return found


def _wide(x: Tensor) -> Tensor:
    """In float64, unless the device has none."""
    return x.float() if x.device.type == "mps" else x.double()


def _require_finite(start: ShiftedCritic, alpha: Scalar, log_ratio: Tensor) -> None:
    critic = start.critic
    farthest = _wide(torch.as_tensor(critic.offset - critic.scale, device=log_ratio.device))
    least, most, target = (
        float(value)
        for value in (critic.score(farthest), critic.score(start.closest), critic.divergence.score(log_ratio))
    )
    if not all(math.isfinite(value) for value in (least, most, target)):
        raise ValueError(
            f"shift='optimal': no finite shift for {critic.divergence.name} with alpha={float(alpha):g}; T lies "
            f"between {least:g} and {most:g}, and f'(1 / alpha) is {target:g}"
        )


def _require_resolved(found: ShiftedCritic) -> None:
    """Refuse a root that the rounding of T hides, where the difference of two scores has no closed form."""
    kind: Divergence = found.critic.divergence
    if type(kind)._score_difference is not Divergence._score_difference:
        return
    score = kind.score(found.log_ratio)
    error = 4 * torch.finfo(score.dtype).eps * found.critic.score(found.closest).abs()
    ratios = kind.conjugate_derivative(torch.stack([score, score - error]))
    if not bool(ratios[1] >= (1 - _LOST) * ratios[0]):
        raise ValueError(
            f"shift='optimal': rounding hides the shift of {kind.name}; T of the closest negatives is "
            f"{float(found.critic.score(found.closest)):g}, known to {float(error):.1g}. Lower gamma, or define "
            "_score_difference in a subclass of Divergence"
        )


class _DifferentiableOnce(torch.autograd.Function):
    """The identity, which raises an error where a second derivative would be wrong."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, why: str) -> Tensor:
        ctx.why = why
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(f"this loss can't be differentiated twice: {ctx.why}; only kl has it in closed form")
        return grad, None
