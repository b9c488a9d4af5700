r"""The paper's assumption on the sphere: exact f-mutual information, and tests of it from positive pairs.

Assumption 4 of the paper: for x and y uniform on the unit sphere in R^d the density ratio is a Gaussian kernel of their
distance, that is :math:`u = e^{2 \gamma c} / Z` with c = x . y. So x given y has a von Mises-Fisher distribution of
concentration :math:`\kappa = 2 \gamma`, and the cosines of positive pairs have the density

.. math:: p(c) \propto (1 - c^2)^{(d - 3) / 2} \, e^{\kappa c}, \qquad -1 \le c \le 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.special import log_hyp0f1

GRID = 8193
"""Points of the grid over angles."""


class CosineLaw:
    """The law of the cosine of a positive pair in d dimensions, with concentration kappa = 2 gamma.

    Args:
        dimensions: d, at least 2.
        gamma: of the Gaussian kernel e^(-gamma |x - y|^2); 0 is independence, and negative values are allowed.

    Raises:
        ValueError: d is below 2, or gamma is not finite.

    Example:
        >>> law = CosineLaw(3, 1.0)              # in three dimensions p(c) = e^(2c) / sinh 2
        >>> round(law.mean, 6) == round(1 / math.tanh(2.0) - 1 / 2.0, 6)
        True
    """

    def __init__(self, dimensions: int, gamma: float) -> None:
        if dimensions < 2 or not math.isfinite(gamma):
            raise ValueError(f"needs at least 2 dimensions and a finite gamma, got {dimensions} and {gamma}")
        self.dimensions, self.gamma = dimensions, float(gamma)
        angles = torch.linspace(0, math.pi, GRID, dtype=torch.float64)
        self.cosines = torch.cos(angles)
        # the density of the angle is sin^(d-2) e^(kappa c); in two dimensions it does not vanish at the ends
        log_sine = torch.log(torch.sin(angles).clamp(min=1e-300))
        weight = (dimensions - 2) * log_sine if dimensions > 2 else torch.zeros_like(angles)
        log_density = weight + 2 * self.gamma * self.cosines
        rule = torch.ones_like(angles)  # Gregory's: the trapezoid rule with an error of fourth order
        rule[:3] = torch.tensor([3 / 8, 7 / 6, 23 / 24])
        rule[-3:] = rule[:3].flip(0)
        self.weights = torch.softmax(log_density + rule.log(), dim=0)
        # the integral over c is in closed form: log E_uniform[e^(kappa c)]
        self.log_normaliser = log_hyp0f1(dimensions / 2, self.gamma**2)

    @property
    def mean(self) -> float:
        """The expected cosine."""
        return float((self.weights * self.cosines).sum())

    @property
    def variance(self) -> float:
        """The variance of the cosine."""
        return float((self.weights * (self.cosines - self.mean).square()).sum())

    def log_ratio(self, cosines: Tensor) -> Tensor:
        """Log density ratios of pairs with these cosines."""
        return 2 * self.gamma * cosines - self.log_normaliser

    def cdf(self, cosines: Tensor) -> Tensor:
        """Distribution function, by linear interpolation in the angle."""
        # the grid runs from c = 1 down; mass between neighbours by the trapezoid rule
        below = self.weights.flip(0).cumsum(0) - self.weights.flip(0) / 2
        position = (math.pi - torch.acos(cosines.double().clamp(-1, 1))) * (GRID - 1) / math.pi
        left = position.floor().clamp(0, GRID - 2).long()
        share = position - left
        return (below[left] * (1 - share) + below[left + 1] * share).clamp(0, 1)

    def sample(self, number: int, generator: torch.Generator) -> Tensor:
        """Cosines drawn from the law, (number,) float64, by inversion on the grid."""
        below = self.weights.flip(0).cumsum(0) - self.weights.flip(0) / 2
        uniform = torch.rand(number, generator=generator, dtype=torch.float64) * float(below[-1])
        right = torch.searchsorted(below, uniform).clamp(1, GRID - 1)
        low, high = below[right - 1], below[right]
        share = (uniform - low) / (high - low).clamp(min=1e-300)
        return -torch.cos((right - 1 + share.clamp(0, 1)) * math.pi / (GRID - 1))


def sphere_information(dimensions: int, gamma: float, divergence: DivergenceName | Divergence = "kl") -> float:
    r"""Exact f-mutual information under the paper's assumption, by one-dimensional quadrature.

    .. math:: I_f = E_c[f(e^{2 \gamma c} / Z)], \qquad c \text{ the cosine of independent uniform vectors},
        \quad Z = {}_0F_1(d/2; \gamma^2)

    Example:
        >>> sphere_information(128, 0.0, "js")
        0.0
        >>> round(sphere_information(3, 1.0, "kl"), 6)       # kappa (coth kappa - 1/kappa) - log(sinh kappa / kappa)
        0.479409
    """
    divergence = make_divergence(divergence)
    if gamma == 0:
        CosineLaw(dimensions, gamma)
        return 0.0
    joint, independent = CosineLaw(dimensions, gamma), CosineLaw(dimensions, 0.0)
    r = joint.log_ratio(joint.cosines)
    # half by each law (balance heuristic): neither f(u) alone nor f(u)/u is of moderate size everywhere
    summand = torch.sigmoid(r) * divergence.score(r) - torch.sigmoid(-r) * divergence.penalty(r)
    return float(((joint.weights + independent.weights) * summand).sum())


class GammaFit(NamedTuple):
    """Maximum-likelihood gamma of cosines, and the test of the law.

    Attributes:
        gamma: the estimate.
        low: lower end of its 95 % interval, by the Fisher information.
        high: upper end.
        statistic: Kolmogorov-Smirnov distance of the cosines to the fitted law.
        p_value: share of samples of the fitted law, each fitted anew, with at least this distance.
    """

    gamma: float
    low: float
    high: float
    statistic: float
    p_value: float


def fit_gamma(cosines: Tensor, dimensions: int, *, resamples: int = 200, seed: int = 0) -> GammaFit:
    """Fit gamma to the cosines of positive pairs, and test the fit by a parametric bootstrap.

    The law is an exponential family in c: the maximum of the likelihood is where the expected cosine is the mean one.

    Args:
        cosines: (N,), in [-1, 1].
        dimensions: of the sphere's space.
        resamples: of the parametric bootstrap; the smallest p-value is 1 / (resamples + 1).
        seed: of the resamples.

    Raises:
        ValueError: there are fewer than 10 cosines, or values out of range.

    Example:
        >>> drawn = CosineLaw(16, 5.0).sample(2000, torch.Generator().manual_seed(0))
        >>> fit = fit_gamma(drawn, 16, resamples=50)
        >>> fit.low < 5.0 < fit.high, fit.p_value > 0.05
        (True, True)
    """
    cosines = cosines.detach().cpu().double().flatten()
    if len(cosines) < 10 or not bool((cosines.abs() <= 1 + 1e-6).all()):
        raise ValueError(f"needs at least 10 cosines in [-1, 1], got {len(cosines)} with {_range(cosines)}")
    cosines = cosines.clamp(-1, 1)
    n = len(cosines)
    law = _matching(float(cosines.mean()), dimensions)
    error = 1.96 / (2 * math.sqrt(n * max(law.variance, 1e-300)))
    statistic = _distance(cosines, law)
    generator = torch.Generator().manual_seed(seed)
    exceeding = 0
    for _ in range(resamples):
        drawn = law.sample(n, generator)
        exceeding += _distance(drawn, _matching(float(drawn.mean()), dimensions, start=law.gamma)) >= statistic
    p_value = (1 + exceeding) / (1 + resamples)
    return GammaFit(law.gamma, law.gamma - error, law.gamma + error, statistic, p_value)


def _matching(mean: float, dimensions: int, start: float | None = None) -> CosineLaw:
    """The law with this expected cosine, by Newton's method on its gamma."""
    mean = min(max(mean, -1 + 1e-9), 1 - 1e-9)
    # Banerjee et al. (2005): kappa is about m (d - m^2) / (1 - m^2)
    gamma = mean * (dimensions - mean**2) / (1 - mean**2) / 2 if start is None else start
    for _ in range(50):
        law = CosineLaw(dimensions, gamma)
        step = (mean - law.mean) / (2 * max(law.variance, 1e-300))
        gamma += step
        if abs(step) <= 1e-9 * max(1.0, abs(gamma)):
            break
    return CosineLaw(dimensions, gamma)


def _distance(cosines: Tensor, law: CosineLaw) -> float:
    """Kolmogorov-Smirnov distance."""
    n = len(cosines)
    at = law.cdf(cosines.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return float(torch.maximum(steps[1:] - at, at - steps[:-1]).max())


class RatioBins(NamedTuple):
    """Log density ratio by bins of the cosine: centres (B,), log ratios (B,), their standard errors, pairs in each."""

    cosines: Tensor
    log_ratios: Tensor
    errors: Tensor
    joint: Tensor
    independent: Tensor


def log_ratio_bins(joint: Tensor, independent: Tensor, bins: int = 40) -> RatioBins:
    r"""Nonparametric log density ratio against the cosine: log of the ratio of two histograms.

    Under the paper's assumption it is :math:`2 \gamma c` plus a constant. Bins without pairs of either kind are left
    out: there the ratio is not known.

    Args:
        joint: cosines of positive pairs.
        independent: cosines of independent pairs.
        bins: equal bins between the smallest and the largest cosine of both.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> joint, independent = (CosineLaw(8, gamma).sample(20000, generator) for gamma in (1.0, 0.0))
        >>> found = log_ratio_bins(joint, independent)
        >>> fit = linear_fit(found.cosines, found.log_ratios, 1 / found.errors.square())
        >>> round(fit.slope)                         # 2 gamma
        2
    """
    joint, independent = joint.detach().cpu().double().flatten(), independent.detach().cpu().double().flatten()
    low = float(min(joint.min(), independent.min()))
    high = float(max(joint.max(), independent.max())) + 1e-12
    edges = torch.linspace(low, high, bins + 1, dtype=torch.float64)
    counts = [torch.histogram(values, edges).hist for values in (joint, independent)]
    keep = (counts[0] > 0) & (counts[1] > 0)
    first, second = counts[0][keep], counts[1][keep]
    ratios = torch.log(first / len(joint)) - torch.log(second / len(independent))
    centres = ((edges[1:] + edges[:-1]) / 2)[keep]
    return RatioBins(centres, ratios, (1 / first + 1 / second).sqrt(), first, second)


class LinearFit(NamedTuple):
    """A straight line by weighted least squares, and the share of variance that it explains."""

    slope: float
    intercept: float
    r_squared: float


def linear_fit(x: Tensor, y: Tensor, weights: Tensor | None = None) -> LinearFit:
    """Weighted least squares of y on x.

    Raises:
        ValueError: there are fewer than 3 points.

    Example:
        >>> linear_fit(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([1.0, 3.0, 5.0]))
        LinearFit(slope=2.0, intercept=1.0, r_squared=1.0)
    """
    if len(x) < 3:
        raise ValueError(f"a straight line needs at least 3 points, got {len(x)}")
    x, y = x.double(), y.double()
    w = torch.ones_like(x) if weights is None else weights.double()
    w = w / w.sum()
    mean_x, mean_y = (w * x).sum(), (w * y).sum()
    slope = (w * (x - mean_x) * (y - mean_y)).sum() / (w * (x - mean_x).square()).sum()
    intercept = mean_y - slope * mean_x
    rest, total = (w * (y - intercept - slope * x).square()).sum(), (w * (y - mean_y).square()).sum()
    return LinearFit(float(slope), float(intercept), float(1 - rest / total) if float(total) > 0 else 1.0)


def _range(values: Tensor) -> str:
    return f"values from {float(values.min()):g} to {float(values.max()):g}" if len(values) else "no values"
