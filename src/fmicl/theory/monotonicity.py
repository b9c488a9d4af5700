r"""Uniformity of large batches, N > d + 1: complete monotonicity and universally optimal configurations.

A regular simplex of N points needs N <= d + 1. For more points, Cohn and Kumar ("Universally optimal distribution of
points on spheres", 2007) name configurations that minimise the energy sum_{i != j} h(|x_i - x_j|^2) for *every* h that
is completely monotone on (0, 4], (-1)^k h^(k) >= 0 for k = 1, 2, ...: regular polygons, cross-polytopes (N = 2d, plus
and minus an orthonormal basis), the icosahedron and every other sharp configuration. With
h(t) = penalty(log mu - gamma t),

    (-1)^k h^(k)(t) = gamma^k penalty^(k)(r)   at r = log mu - gamma t ,

so the question is whether all derivatives of the penalty in r are non-negative.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fmicl.divergences import KL, Divergence, Jeffrey, Pearson, ReverseKL, SquaredHellinger, Tsallis, Weighted
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive

# penalties that are constants plus non-negative multiples of r and of e^(a r), a > 0: every derivative is non-negative
_PROVED = {KL, Jeffrey, Pearson, ReverseKL, SquaredHellinger, Tsallis}
_POINTS = 257


@dataclass(frozen=True)
class Monotonicity:
    """How far (-1)^k h^(k) >= 0 holds on [0, 4].

    Attributes:
        complete: True if it is proved for every k: then universally optimal configurations minimise the negatives'
            cost, whatever gamma and mu are. False is no proof of the contrary, unless `order` is below `checked`.
        order: it holds for k = 1, ..., order among those that were checked.
        checked: largest k that was checked.
    """

    complete: bool
    order: int
    checked: int


def monotonicity(divergence: str | Divergence, gamma: float = 1.0, mu: float = 1.0, checked: int = 6) -> Monotonicity:
    """Certify complete monotonicity of h(t) = penalty(log mu - gamma t), the cost of negatives at squared distance t.

    It holds for KL (mu e^(-gamma t)), Pearson (the same with 2 gamma), Tsallis, squared Hellinger, Jeffrey and, not
    strictly, reverse KL, for all gamma and mu. It fails for Neyman, which is concave, and for JS and VLC, at every
    gamma and mu: log(1 + u) = u - u^2 / 2 + ... and u^2 / (1 + u)^2 have coefficients of both signs in u = e^r, and for
    every u > 0 some derivative in r is negative. Order 2 is the convexity that `uniformity` certifies, and all that
    N <= d + 1 needs.

    Args:
        divergence: a name or a `Divergence`.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.
        checked: largest derivative that is evaluated, at 257 points in float64 by automatic differentiation, for
            divergences without a proof.

    Raises:
        ValueError: the divergence is unknown, or a number is out of range.

    Example:
        >>> monotonicity("kl").complete, monotonicity("js").complete, monotonicity("js").order
        (True, False, 3)
    """
    divergence = make_divergence(divergence)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    if checked < 1:
        raise ValueError(f"checked must be a derivative of order 1 or more, got checked={checked}")
    base = divergence
    while type(base) is Weighted:
        base = base.base
    if type(base) in _PROVED:
        return Monotonicity(True, checked, checked)
    r = math.log(mu) - gamma * torch.linspace(0, 4, _POINTS, dtype=torch.float64)
    derivative: Callable[[Tensor], Tensor] = divergence.penalty_slope
    for k in range(1, checked + 1):
        values = derivative(r)
        if bool((values < -1e-12 * values.abs().max()).any()):
            return Monotonicity(False, k - 1, checked)
        derivative = _derivative(derivative)
    return Monotonicity(False, checked, checked)


def _derivative(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return torch.func.grad(lambda r: function(r).sum())
