"""The estimation error of the f-MICL objective on a batch."""

from __future__ import annotations

import math

import torch

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive

__all__ = ["estimation_error"]


def estimation_error(
    divergence: DivergenceName | Divergence,
    n: int,
    delta: float,
    gamma: float = 1.0,
    mu: float = 1.0,
    alpha: float = 1.0,
) -> float:
    r"""Bound of the deviation of the objective on n samples from its expectation, with probability 1 - delta.

    The paper's deviation term (r_T + 2 alpha r_f) sqrt(log(6 / delta) / (2 (n - 1))), where r_T is the range of f'(u)
    and r_f that of f*(f'(u)) over u from mu e^(-4 gamma) to mu. The paper has it for alpha = 1; a weight of the
    negatives scales their range.

    Args:
        divergence: a name or a `Divergence`.
        n: number of samples, at least 2.
        delta: probability that the bound fails, between 0 and 1.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.
        alpha: weight of the negatives.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(estimation_error("kl", n=512, delta=0.05), 4)
        0.4082
        >>> round(estimation_error("kl", n=512, delta=0.05, alpha=40.0), 2)
        5.65
    """
    divergence = make_divergence(divergence)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    require_positive("alpha", alpha)
    if n < 2:
        raise ValueError(f"estimation_error needs at least two samples, got n={n}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be a probability between 0 and 1, got delta={delta!r}")
    # score and penalty both increase with r, so their ranges are differences of their end values
    ends = torch.tensor([math.log(mu) - 4 * gamma, math.log(mu)], dtype=torch.float64)
    range_t = float(divergence.score(ends).diff())
    range_f = float(divergence.penalty(ends).diff())
    return (range_t + 2 * alpha * range_f) * math.sqrt(math.log(6 / delta) / (2 * (n - 1)))
