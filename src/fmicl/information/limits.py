r"""Limits of lower bounds from samples (McAllester and Stratos, 2020), for KL and for bounded f.

A lower bound of D_f(p, q) from N samples of each, right with probability 1 - delta whatever p and q are, can be fooled:
replace q by (1 - 1/K) q + p / K. N samples contain none of p's part with probability about e^(-N/K), so for
K = N / log(1/delta) the bound may not exceed what is true then, which is at most

.. math:: I_f(K) = \frac1K f(K) + \Big(1 - \frac1K\Big) f(0).

For KL this is log K, the limit of log N. It is the information of K equally frequent pairs, too: N samples of those are
all distinct, and look like a continuous distribution, with probability about e^(-N^2 / 2K). So a bound of I_f from N
joint samples alone can't exceed I_f(K) with K = N^2 / (2 log(1/delta)), for KL about 2 log N.

If f(0) and f'(inf) are finite (JS, squared Hellinger, VLC), I_f(K) tends to the largest information there is,
f(0) + f'(inf), as K grows: for them the argument excludes almost nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.information.estimation import Estimate

FEW_SAMPLES = 100
"""Below this number of samples, no estimate is to be relied on."""


def largest_information(divergence: DivergenceName | Divergence) -> float:
    r"""The supremum of the f-mutual information, f(0) + f'(inf): infinite for KL, 2 log 2 for JS as f is written here.

    Example:
        >>> round(largest_information("js"), 4), largest_information("squared_hellinger"), largest_information("kl")
        (1.3863, 2.0, inf)
    """
    divergence = make_divergence(divergence)
    return float(divergence.f(torch.tensor(0.0, dtype=torch.float64))) + divergence.supremum


def matching_information(divergence: DivergenceName | Divergence, atoms: float) -> float:
    """The f-mutual information of K equally frequent pairs, f(K) / K + (1 - 1/K) f(0).

    Example:
        >>> round(matching_information("kl", 100), 4) == round(math.log(100), 4)
        True
    """
    divergence = make_divergence(divergence)
    k = torch.tensor(float(atoms), dtype=torch.float64)
    return float(divergence.f(k) / k + (1 - 1 / k) * divergence.f(torch.zeros_like(k)))


def largest_bound(
    divergence: DivergenceName | Divergence, samples: int, confidence: float = 0.95, *, joint_only: bool = False
) -> float:
    r"""What no distribution-free lower bound from N samples may exceed at this confidence.

    Args:
        divergence: a name or a `Divergence`.
        samples: N.
        confidence: 1 - delta.
        joint_only: whether the N samples are of the joint distribution, whose marginals give the independent one:
            K = N^2 / (2 log(1/delta)); False: N samples of both, K = N / log(1/delta).

    Raises:
        ValueError: fewer than 2 samples, or a confidence out of range.

    Example:
        >>> round(largest_bound("kl", 1000), 2), round(largest_bound("kl", 1000, joint_only=True), 2)
        (5.81, 12.03)
        >>> round(largest_bound("js", 1000) / largest_information("js"), 3)
        0.985
    """
    if samples < 2 or not 0 < confidence < 1:
        raise ValueError(f"needs at least 2 samples and a confidence in (0, 1), got {samples} and {confidence}")
    exponent = -math.log(1 - confidence)
    return matching_information(divergence, max(1.0, samples**2 / (2 * exponent) if joint_only else samples / exponent))


def warnings_of(divergence: Divergence, estimates: Mapping[str, Estimate], samples: int) -> list[str]:
    """What a user should know before quoting these: too few samples, beyond the limit, still learning, disagreement.

    Example:
        >>> low, high = Estimate(1.0, 0.9, 1.1, 1.0, 1.0, 1.0), Estimate(2.0, 1.9, 2.1, 2.0, 2.0, 2.0)
        >>> len(warnings_of(make_divergence("kl"), {"nwj": low, "infonce": high}, 5000))
        1
    """
    found = []
    if samples < FEW_SAMPLES:
        found.append(f"{samples} samples are too few for any claim: {FEW_SAMPLES} are the least")
    values = [each.value for each in estimates.values() if math.isfinite(each.value)]
    broken = [name for name, each in estimates.items() if not math.isfinite(each.value)]
    if broken:
        found.append(f"{', '.join(broken)} gave no finite estimate: a few independent pairs dominate its mean")
    limit = matching_information(divergence, samples)
    bounded = math.isfinite(largest_information(divergence))
    if values and not bounded and max(values) > limit:
        found.append(
            f"an estimate of {max(values):.2f} is above {limit:.2f}, the information of {samples} pairs that never "
            "repeat: from so few samples it rests on the critic's form, not on the samples alone"
        )
    learning = [f"{name} by {each.held_out - each.half:.2f}" for name, each in estimates.items() if _learning(each)]
    if learning:
        found.append(
            f"critics of all samples are above those of half as many ({', '.join(learning)}) by more than variance "
            "explains: they have not found the whole dependence yet, and the upper end rests on how fast they learn"
        )
    names = list(estimates)
    apart = [
        (a, b)
        for i, a in enumerate(names)
        for b in names[i + 1 :]
        if estimates[a].low > estimates[b].high or estimates[b].low > estimates[a].high
    ]
    if apart:
        pairs = ", ".join(f"{a} and {b}" for a, b in apart)
        found.append(f"the intervals of {pairs} are disjoint: at least one is biased, so trust none of them blindly")
    return found


def _learning(found: Estimate) -> bool:
    """Whether more samples gain more than chance, and than in-sample optimism: twice a right critic's gain."""
    gain = found.held_out - found.half
    return gain > found.in_sample - found.held_out > 0 and gain > found.value - found.low
