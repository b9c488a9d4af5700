r"""The optimal Donsker-Varadhan shift.

The lower bound of f-mutual information with a critic T holds for T - v as well, for any v. The best one,

    sup_v  E_pos[T] - v - alpha E_neg[f*(T - v)] ,

is concave in v, with slope alpha E_neg[(f*)'(T - v)] - 1. For KL the maximiser is v = log(alpha E_neg[e^(T-1)]); for
the others it is the root of that slope, found here. By the envelope theorem the gradient of the maximum, in the
embeddings and in what is learned, is that of the bound at fixed v.

v = T(z_0) - f'(e^s), with z_0 the largest z of a negative pair (`fmicl.divergences.shifted` says why). The unknown is
s, the log density ratio that (f*)' attains at the closest pair: it lies between log(1 / alpha), if all pairs are
equally close, and log(M / alpha), if one of M pairs counts alone.

The search starts with some of the pairs, whose cosines are kept. On a CPU these are all pairs of a batch that fits one
tile. Of larger batches the sample gives s to a few thousandths, and its slope: two passes over all pairs then do.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmicl.divergences import KL, Divergence
from fmicl.divergences.critic import Critic
from fmicl.divergences.shifted import AttainedRatio, ShiftedCritic, wide
from fmicl.kernels import all_max
from fmicl.kernels.backend import PairFunction
from fmicl.kernels.transforms import in_transforms, is_capturing
from fmicl.losses.pairing import Pairs, Sample
from fmicl.utils.learnable import Scalar, log
from fmicl.utils.triton import only_compiling

_PASSES = 60  # over the pairs, at most
# In a CUDA graph no value can be tested: more passes than almost any search needs, over a sample, over all pairs after
# that, and over all pairs where there is no sample.
_CAPTURED_SAMPLE_PASSES = 8
_CAPTURED_PASSES = 4
_CAPTURED_PASSES_ALONE = 14
_SAMPLE_PRECISION = 1e-3  # of the excess of a sample, which isn't that of all pairs
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
        detached = pairs.detached()
        sample = detached.sample(critic)
        if sample is not None and sample.complete:
            closest = wide(torch.stack([z.max() for z in sample.z]).max())
        else:
            unknown = torch.zeros((), dtype=pairs.dtype, device=pairs.x.device)
            closest = wide(critic.z(detached.largest_cosine(ShiftedCritic(critic, unknown, unknown))))
            if sample is not None:  # which isn't rounded to bfloat16
                sample = replace(sample, z=tuple(z.clamp(max=closest.to(z.dtype)) for z in sample.z))
        rounding = torch.finfo(pairs.dtype).eps
        number = all_max(torch.full_like(closest, float(pairs.count())), pairs.world)
        start = ShiftedCritic(critic, closest, closest, _ROUNDING * rounding)
        found = optimal_shift(
            start, alpha, detached.global_mean, number, sample,
            precision=max(4 * rounding, 1e-12), capturing=is_capturing(pairs.x) or only_compiling(),
        )  # fmt: skip
    uniformity = differentiable_once(
        found.shift() + alpha * pairs.mean(found), "the gradient of shift='optimal' holds v fixed"
    )
    return uniformity.to(pairs.dtype)


def differentiable_once(value: Tensor, why: str) -> Tensor:
    """The value, with an error where a second derivative would be wrong, and the reason."""
    once: Tensor = _DifferentiableOnce.apply(value, why)
    return once


@torch.no_grad()
def optimal_shift(
    start: ShiftedCritic,
    alpha: Scalar,
    mean: Callable[[PairFunction], Tensor],
    number: Tensor,
    sample: Sample | None = None,
    precision: float = 1e-12,
    capturing: bool = False,
) -> ShiftedCritic:
    """The shift that maximises E_pos[T] - v - alpha E_neg[f*(T - v)].

    Args:
        start: the critic with its closest pair; its `log_ratio` is not used.
        alpha: weight of the negative term.
        mean: average of a pair function over the negatives. Each call is a pass over all pairs.
        number: of negatives, a scalar, or an upper bound of it.
        sample: some of the negatives, where the search starts.
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
    low, high = -weight, torch.log(wide(number)) - weight
    if not capturing:
        _require_finite(start, alpha, low)

    def find(
        average: Callable[[PairFunction], Tensor], guess: _Root, passes: int, precision: float, share: Scalar = 0.0
    ) -> _Root:
        def excess(s: Tensor) -> Tensor:
            """log(alpha E_neg[(f*)'(T - v)]), which increases with s; 0 at the optimum."""
            ratio = wide(average(AttainedRatio(replace(start, log_ratio=s))))
            return weight + (ratio + share * s.exp()).log()

        if capturing:
            return _find_root(excess, guess, low, high, passes, precision, capturing)
        # one value is read in each pass, so the rest of the search may take numbers
        root = _find_root(
            lambda s: float(excess(torch.full_like(low, s))), _Root(*map(float, guess)), float(low), float(high),
            passes, precision, capturing,
        )  # fmt: skip
        return _Root(*(torch.full_like(low, value) for value in root))

    def passes(captured: int) -> int:
        return captured if capturing else _PASSES

    def sampled(function: PairFunction) -> Tensor:
        assert sample is not None
        return sample.mean(function.penalty)

    if sample is None:
        root = find(mean, _Root(low, torch.ones_like(low)), passes(_CAPTURED_PASSES_ALONE), precision)
    elif sample.complete:
        root = find(sampled, _guess(start, sample, low, high), passes(_CAPTURED_SAMPLE_PASSES), precision)
    else:
        # the closest pair, in both orders, may count for much, and the sample is unlikely to have it
        guess, share = _guess(start, sample, low, high), 2 / wide(number)
        root = find(sampled, guess, passes(_CAPTURED_SAMPLE_PASSES), _SAMPLE_PRECISION, share)
        root = find(mean, root, passes(_CAPTURED_PASSES), precision)
    found = replace(start, log_ratio=root.s)
    if not capturing:
        _require_resolved(found)
    return found


class _Root(NamedTuple):
    """A root, and the slope of the function there, or guesses of both: numbers, or scalars on a device."""

    s: Any
    slope: Any


def _guess(start: ShiftedCritic, sample: Sample, low: Tensor, high: Tensor) -> _Root:
    """The root if (f*)' were linear: f'(1 / alpha) is the mean of T - v. If that isn't in the bracket, its lower end.

    There the slope is 1, as it is for KL.
    """
    critic, kind = start.critic, start.critic.divergence
    behind = sample.mean(lambda z: critic.score_difference(z, start.closest.to(z.dtype)))
    s = kind.conjugate_derivative(kind.score(low) - wide(behind)).log()
    slope = kind.score_slope(s) / kind.score_slope(low)
    valid = (s > low) & (s < high) & (slope > 0) & slope.isfinite()
    return _Root(torch.where(valid, s, low), torch.where(valid, slope, 1.0))


def _find_root(
    function: Callable[[Any], Any], guess: _Root, low: Any, high: Any, passes: int, precision: float, capturing: bool
) -> _Root:
    """Root between low and high of an increasing function, by secant steps and bisection; `passes` if `capturing`.

    It takes numbers, or scalars on a device, of which no value is read if `capturing`.
    """
    s, slope = guess
    before = value_before = math.nan
    best, best_value, step, step_before = s, math.inf, math.inf, math.inf
    for _ in range(passes):
        value = function(s)
        better = abs(value) < best_value
        best, best_value = _where(better, s, best), _where(better, abs(value), best_value)
        low, high = _where(value <= 0, s, low), _where(value <= 0, high, s)
        measured = _ratio(value - value_before, s - before)  # NaN at first
        slope = _where((measured > 0) & (measured < math.inf), measured, slope)
        done = (abs(value) <= precision) | (high - low <= precision * (1 + abs(s)))
        # bisect if a step leaves the bracket, or isn't half as long as the one before the last
        target = s - value / slope
        good = (target >= low) & (target <= high) & (abs(target - s) <= step_before / 2)
        target = _where(done, best, _where(good, target, (low + high) / 2))
        # the error of a secant step: its length by the relative error of the slope, which the last step shows
        accurate = (abs(value * (s - before)) <= precision) & (value * value <= precision * abs(value_before))
        if not capturing and (done | (good & accurate)):
            break
        step, step_before = abs(target - s), step
        s, before, value_before = target, s, value
    return _Root(target, slope)


def _where(condition: Any, a: Any, b: Any) -> Any:
    return torch.where(condition, a, b) if isinstance(condition, Tensor) else a if condition else b


def _ratio(a: Any, b: Any) -> Any:
    """a / b, NaN or infinite for b = 0."""
    return a / b if isinstance(b, Tensor) or b else math.nan


def _require_finite(start: ShiftedCritic, alpha: Scalar, log_ratio: Tensor) -> None:
    critic = start.critic
    farthest = wide(torch.as_tensor(critic.offset - critic.scale, device=log_ratio.device))
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
