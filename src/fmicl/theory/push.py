"""The balance of repulsion and attraction: the push of negatives relative to the pull of positives."""

from __future__ import annotations

import math

import torch

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive


@torch.no_grad()
def push(divergence: DivergenceName | Divergence, alpha: float = 40.0, gamma: float = 1.0, mu: float = 1.0) -> float:
    r"""Push of orthogonal negatives, relative to the pull of a positive pair that coincides.

    Both are slopes of the loss in the inner product. With h(r) = f*(f'(e^r)), whose slope is e^r times that of
    f'(e^r), the push is

    .. math:: \alpha\, \mu\, h'(\log\mu - 2\gamma) / h'(\log\mu) ,

    for KL alpha mu e^(-2 gamma). (In InfoNCE, and with KL's optimal shift, a normaliser makes it 1.) If negatives have
    a gradient, a push above 1 trades alignment for uniformity. If they have none (a queue, or the keys of a momentum
    encoder), they don't move away, and embeddings collapse; docs/reproduction.md has runs of both kinds. A small push
    guarantees nothing: near negatives may push up to alpha mu times as hard as a pair pulls, which for steep penalties
    (Tsallis) or a large gamma is far more than the push of orthogonal ones.

    Args:
        divergence: a name or a `Divergence`.
        alpha: weight of the negatives.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.

    Raises:
        ValueError: an argument is out of range, or f is piecewise linear, so that pairs neither push nor pull.

    Example:
        >>> round(push("kl"), 2), round(push("pearson"), 2)
        (5.41, 0.73)
        >>> round(push("js", alpha=4.2), 2)
        1.0
    """
    divergence = make_divergence(divergence)
    require_positive("alpha", alpha)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    if divergence.piecewise_linear:
        raise ValueError(f"{divergence.name}: f is piecewise linear, so pairs neither push nor pull")
    orthogonal, equal = divergence.penalty_slope(
        torch.tensor([math.log(mu) - 2 * gamma, math.log(mu)], dtype=torch.float64)
    )
    return float(alpha * mu * (orthogonal / equal))


def balanced_alpha(divergence: DivergenceName | Divergence, gamma: float = 1.0, mu: float = 1.0) -> float:
    """The alpha at which orthogonal negatives push as hard as a positive pair that coincides pulls: 1 / push(alpha=1).

    For KL it is e^(2 gamma) / mu, for Pearson e^(4 gamma) / mu, for Tsallis e^(2 a gamma) / mu, for squared Hellinger
    e^gamma / mu, for JS (1 + e^(2 gamma) / mu) / (1 + mu). A loss with `alpha="auto"` takes the alpha at which the
    pairs of its batch balance, which is this one if they are orthogonal and coincide.

    Args:
        divergence: a name or a `Divergence`.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.

    Raises:
        ValueError: an argument is out of range, or f is piecewise linear.

    Example:
        >>> [round(balanced_alpha(name), 2) for name in ("kl", "js", "pearson", "squared_hellinger", "tsallis")]
        [7.39, 4.19, 54.6, 2.72, 403.43]
    """
    return 1 / push(divergence, 1.0, gamma, mu)
