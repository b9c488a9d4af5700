r"""Uniformity certificates: which divergences spread embeddings out.

`python -m fmicl.theory` prints the table of certificates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

from fmicl.divergences import Divergence, DivergenceName, list_divergences
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive

_POINTS = 4097
Kind = Literal["strictly convex", "convex", "not convex"]


@dataclass(frozen=True)
class Uniformity:
    """Convexity of h(t) = penalty(log mu - gamma t), the cost of a negative pair at squared distance t.

    Attributes:
        kind: "strictly convex" (the batch of N <= d + 1 that minimises it is a regular simplex: uniformity), "convex"
            (a simplex is one minimiser among others), or "not convex" (no guarantee; negatives may collapse).
        curvature: smallest h''(t) on [0, 4]; a second difference where h has a jump or a kink.
        at: the t where it lies.
    """

    kind: Kind
    curvature: float
    at: float


@torch.no_grad()
def uniformity(divergence: DivergenceName | Divergence, gamma: float = 1.0, mu: float = 1.0) -> Uniformity:
    r"""Certify the paper's condition for uniformity, h convex on [0, 4], by its curvature.

    The theorem is for batches of N <= d + 1, as only these have a regular simplex. (The paper says that its experiments
    always satisfy this; with batches of 1024 and d = 512, ImageNet's don't, nor do the recipes `digits` and `imagenet`
    here.) For larger batches see `monotonicity`.

    With u = mu e^(-gamma t), h''(t) = gamma^2 (2 u^2 f''(u) + u^3 f'''(u)). Strict means h'' > 0 everywhere. It is
    evaluated at 4097 points in float64. For the nine closed forms its sign is exact at each of them, for any gamma and
    mu. For a divergence derived from f by automatic differentiation, a curvature within rounding of zero, relative to
    h', counts as zero.

    Args:
        divergence: a name or a `Divergence`.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.

    Raises:
        ValueError: the divergence is unknown, or a number is out of range.

    Example:
        >>> uniformity("kl").kind, uniformity("reverse_kl").kind, uniformity("neyman").kind
        ('strictly convex', 'convex', 'not convex')
        >>> uniformity("vlc", mu=1.9).kind, uniformity("vlc", mu=2.1).kind
        ('strictly convex', 'not convex')
    """
    divergence = make_divergence(divergence)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    t = torch.linspace(0, 4, _POINTS, dtype=torch.float64)  # squared distances on the unit sphere
    r = math.log(mu) - gamma * t
    # The sign comes from h'' / h', which stays an ordinary number where both underflow. Below e^-700 u underflows too;
    # no closed form changes its sign there.
    ratio = divergence.relative_curvature(r.clamp(min=-700)).clone()
    curvature = (ratio * divergence.penalty_slope(r)).clone()
    if not divergence.closed_form:
        # A kink of f is a jump of the penalty, which derivatives at points miss but differences show.
        step = float(t[1] - t[0])
        values = divergence.penalty(r)
        second = (values[2:] - 2 * values[1:-1] + values[:-2]) / step**2 / gamma**2
        visible = 0.5 * curvature.abs().max() + 1e-3 * (1 + values.abs().max()) / step
        jump = ((second - curvature[1:-1]).abs() > visible) & (second < curvature[1:-1])
        curvature[1:-1] = torch.where(jump, second, curvature[1:-1])
        ratio[1:-1] = torch.where(jump, -1.0, ratio[1:-1])
    kind: Kind = "convex"
    if bool((ratio < 0).any()):
        kind = "not convex"
    elif bool((ratio > 0).all()):
        kind = "strictly convex"
    lowest = int(curvature.argmin())
    return Uniformity(kind, gamma**2 * float(curvature[lowest]), float(t[lowest]))


def table(gamma: float = 1.0, mu: float = 1.0) -> str:
    """The uniformity certificates of all registered divergences, as a Markdown table.

    Example:
        >>> print(table().splitlines()[0])
        | divergence | f(u) | h(t) on [0, 4] | smallest h'' | at t |
    """
    lines = ["| divergence | f(u) | h(t) on [0, 4] | smallest h'' | at t |", "|---|---|---|---|---|"]
    for name in list_divergences():
        kind = make_divergence(name)
        certificate = uniformity(kind, gamma, mu)
        lines.append(
            f"| `{name}` | {kind.formula} | {certificate.kind} | {certificate.curvature:.3g} | {certificate.at:g} |"
        )
    return "\n".join(lines)
