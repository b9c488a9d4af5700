"""The estimation error of the f-MICL objective on a batch."""

from __future__ import annotations

import math

import torch

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive


def estimation_error(
    divergence: DivergenceName | Divergence,
    n: int,
    delta: float,
    gamma: float = 1.0,
    mu: float = 1.0,
    alpha: float = 1.0,
    log_class_size: float = 0.0,
) -> float:
    r"""Bound of the deviation of the objective on n samples from its expectation, with probability 1 - delta.

    The paper's theorem, with the weight alpha of the negatives:

    .. math::
        2 R_n(\mathcal T) + 2 \alpha \mu \big(E_x R_n(\mathcal T_x) + \tfrac1n \sum_j R_{n-1}(\mathcal T_{x_j})\big)
        + (r_T + 2 \alpha r_f) \sqrt{\log(6 / \delta) / (2 (n - 1))} ,

    where r_T is the range of T = f'(u) and r_f that of f*(f'(u)) over u from mu e^(-4 gamma) to mu, and R are the
    Rademacher complexities of the critics of a class of encoders. By default this is the last term alone: it holds for
    one encoder, fixed before the n samples were drawn, and not for one that was trained on them.

    For a finite class of K encoders that doesn't depend on the samples, such as K runs of which the best on these
    samples is taken, Massart's lemma bounds each complexity by r_T sqrt(log K / (2 n)); `log_class_size` = log K adds
    these terms. p parameters of b bits are a class of log K = p b log 2: for networks the bound says nothing until
    n is far larger than p.

    Args:
        divergence: a name or a `Divergence`.
        n: number of samples, at least 2.
        delta: probability that the bound fails, between 0 and 1.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.
        alpha: weight of the negatives.
        log_class_size: natural logarithm of the number of encoders for which the bound holds at once.

    Raises:
        ValueError: an argument is out of range.

    Example:
        >>> round(estimation_error("kl", n=512, delta=0.05), 4)
        0.4082
        >>> round(estimation_error("kl", n=512, delta=0.05, alpha=40.0), 2)
        5.65
        >>> round(estimation_error("kl", n=512, delta=0.05, log_class_size=math.log(10)), 2)    # the best of ten runs
        1.55
    """
    divergence = make_divergence(divergence)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    require_positive("alpha", alpha)
    if n < 2:
        raise ValueError(f"estimation_error needs at least two samples, got n={n}")
    if not 0 < delta < 1:
        raise ValueError(f"delta must be a probability between 0 and 1, got delta={delta!r}")
    if not 0 <= log_class_size < math.inf:
        raise ValueError(f"log_class_size is the logarithm of a number of encoders, got {log_class_size!r}")
    # score and penalty both increase with r, so their ranges are differences of their end values
    ends = torch.tensor([math.log(mu) - 4 * gamma, math.log(mu)], dtype=torch.float64)
    range_t = float(divergence.score(ends).diff())
    range_f = float(divergence.penalty(ends).diff())

    def complexity(samples: int) -> float:
        """Massart: values within r_T / 2 of their centre."""
        return range_t * math.sqrt(log_class_size / (2 * samples))

    # mu is the Lipschitz constant of f* on the range of T: (f*)'(f'(u)) = u <= mu
    uniform = 2 * complexity(n) + 2 * alpha * mu * (complexity(n) + complexity(n - 1))
    return uniform + (range_t + 2 * alpha * range_f) * math.sqrt(math.log(6 / delta) / (2 * (n - 1)))
