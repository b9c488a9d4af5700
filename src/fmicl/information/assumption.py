"""Is the paper's Assumption 4 true of these embeddings? Three tests of a Gaussian kernel on the sphere.

For positive pairs (x, y) on the unit sphere in R^d the assumption says that the joint density is proportional to
e^(-gamma |x - y|^2). It is tested by

- the paper's own experiment: the log density by a RealNVP flow against the squared distance, averaged in bins, should
  be a straight line;
- the law of the cosines, which follows from it (:mod:`fmicl.information.sphere`): fit of gamma, Kolmogorov-Smirnov
  test;
- the density ratio of positive and independent pairs against the cosine, without a model of it: its logarithm should be
  a straight line, of slope 2 gamma.

The first two need the embeddings to be uniform on the sphere, the third only that the ratio is a function of the
cosine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from fmicl.information.flow import Prior, fit_flow
from fmicl.information.sphere import CosineLaw, GammaFit, LinearFit, RatioBins, fit_gamma, linear_fit, log_ratio_bins
from fmicl.utils.numerics import normalise

STRAIGHT = 0.9
"""R^2 from which a line counts as straight."""
FEWEST = 5
"""Pairs that a bin needs to count."""
NOISE = 0.05
"""Standard deviation of the noise that gives features on the sphere a density in the space around it, relative to that
of a coordinate."""


@dataclass(frozen=True)
class FlowBins:
    """Mean log density by a flow in bins of the squared distance, with a weighted straight line through them."""

    prior: Prior
    squared_distances: list[float]
    log_densities: list[float]
    counts: list[int]
    fit: LinearFit


@dataclass(frozen=True)
class AssumptionCheck:
    """Results of the three tests.

    Attributes:
        pairs: positive pairs.
        dimensions: of the embeddings.
        flows: by prior, gaussian and uniform.
        gamma: fit to the cosines of positive pairs, and its test.
        ratio: nonparametric log density ratio by cosine.
        ratio_fit: the straight line through it; its slope is 2 gamma under the assumption.
        cosines: of the positive pairs, (N,).
    """

    pairs: int
    dimensions: int
    flows: list[FlowBins]
    gamma: GammaFit
    ratio: RatioBins
    ratio_fit: LinearFit
    cosines: Tensor

    @property
    def verdict(self) -> list[str]:
        """One line for each test, and what they say together."""
        lines = [
            f"RealNVP, {flow.prior} prior: log density against squared distance has slope {flow.fit.slope:.3g}, "
            f"R^2 = {flow.fit.r_squared:.3f}: {_is(flow.fit.r_squared >= STRAIGHT and flow.fit.slope < 0)}"
            for flow in self.flows
        ]
        fit = self.gamma
        lines.append(
            f"cosines of positive pairs: gamma = {fit.gamma:.3g} ({fit.low:.3g} to {fit.high:.3g}), Kolmogorov-Smirnov "
            f"distance {fit.statistic:.3f}, p = {fit.p_value:.3f}: {'not ' if fit.p_value > 0.05 else ''}rejected"
        )
        lines.append(
            f"density ratio against cosine: slope {self.ratio_fit.slope:.3g} (2 gamma = {2 * fit.gamma:.3g}), "
            f"R^2 = {self.ratio_fit.r_squared:.3f}: {_is(self.ratio_fit.r_squared >= STRAIGHT)}"
        )
        if fit.p_value > 0.05:
            lines.append("the cosines agree with the assumption")
        elif self.ratio_fit.r_squared >= STRAIGHT:
            lines.append(
                "the log ratio is close to linear in the cosine, but the law of the cosines is another: embeddings "
                "that are not uniform on the sphere explain this"
            )
        else:
            lines.append("the assumption does not hold: the log ratio is not linear in the cosine")
        return lines

    def record(self) -> dict[str, Any]:
        """Everything for a JSON file, without the cosines."""
        return {
            "pairs": self.pairs,
            "dimensions": self.dimensions,
            "flows": [asdict(flow) | {"fit": flow.fit._asdict()} for flow in self.flows],
            "gamma": self.gamma._asdict(),
            "density_ratio": {name: values.tolist() for name, values in self.ratio._asdict().items()},
            "density_ratio_fit": self.ratio_fit._asdict(),
            "verdict": self.verdict,
        }


def check_assumption(
    x: Tensor,
    y: Tensor,
    *,
    distinct: int | None = None,
    flow_steps: int = 1000,
    bins: int = 20,
    seed: int = 0,
    progress: Callable[[str], None] = lambda _: None,
) -> AssumptionCheck:
    """Test the assumption on embeddings (N, d) of positive pairs, which are scaled to unit length.

    Args:
        x: embeddings of the first views.
        y: embeddings of the second views.
        distinct: number of leading rows that are of different samples, for the test of the cosines (None: all).
        flow_steps: training steps of each flow at most.
        bins: of squared distances and of cosines.
        seed: of flows, independent pairs and resamples.
        progress: told what is being computed.

    Raises:
        ValueError: shapes differ, or there are fewer than 100 pairs.

    Example:
        >>> generator = torch.Generator().manual_seed(0)
        >>> x = torch.randn(200, 4, generator=generator)
        >>> check = check_assumption(x, x + torch.randn(200, 4, generator=generator), flow_steps=20)
        >>> len(check.verdict), check.dimensions
        (5, 4)
    """
    if x.dim() != 2 or x.shape != y.shape:
        raise ValueError(f"x and y must be (N, d) embeddings of the same shape, got {tuple(x.shape)}, {tuple(y.shape)}")
    if len(x) < 100:
        raise ValueError(f"{len(x)} positive pairs are too few for these tests: 100 are the least")
    x, y = (normalise(part.detach().cpu().double()) for part in (x, y))
    distinct = len(x) if distinct is None else distinct
    flows: list[FlowBins] = []
    priors: tuple[Prior, ...] = ("gaussian", "uniform")
    for prior in priors:
        progress(f"RealNVP with {prior} prior")
        flows.append(flow_bins(x, y, prior=prior, steps=flow_steps, bins=bins, seed=seed))
    progress("law of the cosines")
    cosines = 1 - (x - y).square().sum(dim=1) / 2
    gamma = fit_gamma(cosines[:distinct], x.shape[1], seed=seed)
    generator = torch.Generator().manual_seed(seed)
    # shifts by fewer than `distinct` rows of the first pass pair different samples
    first = torch.arange(distinct).repeat(64)
    second = (first + torch.randint(1, distinct, (64,), generator=generator).repeat_interleave(distinct)) % distinct
    independent = 1 - (x[first] - y[second]).square().sum(dim=1) / 2
    ratio = log_ratio_bins(cosines, independent, 2 * bins)
    keep = (ratio.joint >= FEWEST) & (ratio.independent >= FEWEST)
    if int(keep.sum()) < 3:
        keep = torch.ones_like(keep)
    fit = (
        linear_fit(ratio.cosines[keep], ratio.log_ratios[keep], 1 / ratio.errors[keep].square())
        if int(keep.sum()) >= 3
        else LinearFit(math.nan, math.nan, 0.0)  # positive and independent pairs have no cosines in common
    )
    return AssumptionCheck(len(x), x.shape[1], flows, gamma, ratio, fit, cosines)


def flow_bins(
    x: Tensor, y: Tensor, *, prior: Prior = "gaussian", steps: int = 1000, bins: int = 20, seed: int = 0
) -> FlowBins:
    """The paper's experiment: log density of pairs by a flow, averaged in bins of the squared distance.

    The flow is trained on three quarters of the pairs and evaluated on the others. Bins hold equally many pairs.
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.cat([x, y], dim=1).float()
    pairs = pairs + NOISE / math.sqrt(x.shape[1]) * torch.randn(pairs.shape, generator=generator)
    order = torch.randperm(len(pairs), generator=generator)
    held, train = order[: len(order) // 4], order[len(order) // 4 :]
    flow = fit_flow(pairs[train], prior=prior, steps=steps, seed=seed)
    with torch.no_grad():
        log_density = flow.log_density(pairs[held]).double()
    squared = (x - y).square().sum(dim=1)[held].double()
    rank = squared.argsort()
    parts = [part for part in rank.tensor_split(min(bins, max(3, len(rank) // FEWEST))) if len(part)]
    centres = torch.stack([squared[part].mean() for part in parts])
    means = torch.stack([log_density[part].mean() for part in parts])
    counts = [len(part) for part in parts]
    fit = linear_fit(centres, means, torch.tensor(counts))
    return FlowBins(prior, centres.tolist(), means.tolist(), counts, fit)


def _is(straight: bool) -> str:
    return "straight" if straight else "not straight"


def fitted_law(check: AssumptionCheck) -> CosineLaw:
    """The law of the cosines with the fitted gamma."""
    return CosineLaw(check.dimensions, check.gamma.gamma)
