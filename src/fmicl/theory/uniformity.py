r"""The paper's theory as code: which divergences spread embeddings out, and how well a batch estimates the bound.

`python -m fmicl.theory` prints the table of certificates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fmicl.divergences import Divergence, list_divergences
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.validation import require_positive

__all__ = ["Uniformity", "estimation_error", "push", "simplex", "table", "uniformity"]

_LARGEST_SQUARED_DISTANCE = 4.0  # on the unit sphere
_POINTS = 4097


@dataclass(frozen=True)
class Uniformity:
    """Whether h(t) = penalty(log mu - gamma t), the cost of a negative pair at squared distance t, is convex.

    Attributes:
        kind: "strictly convex" (the batch that minimises it is a regular simplex: uniformity), "convex"
            (a simplex is one minimiser among others), or "not convex" (no guarantee; negatives may collapse).
        curvature: smallest h''(t) on [0, 4]; a second difference where h has a jump or a kink.
        at: the t where it lies.
    """

    kind: Literal["strictly convex", "convex", "not convex"]
    curvature: float
    at: float


def uniformity(divergence: str | Divergence, gamma: float = 1.0, mu: float = 1.0) -> Uniformity:
    r"""Certify the paper's condition for uniformity, h convex on [0, 4], by its curvature.

    With u = mu e^(-gamma t), h''(t) = gamma^2 (2 u^2 f''(u) + u^3 f'''(u)). Strict means h'' > 0 everywhere.
    It is evaluated at 4097 points in float64. For the nine closed forms its sign is exact at each of them, for any
    gamma and mu. For a divergence that is derived from f by automatic differentiation, a curvature within rounding
    of zero, measured against h', counts as zero.

    Args:
        divergence: a name or a `Divergence`, a user's own included.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.

    Example:
        >>> uniformity("kl").kind, uniformity("reverse_kl").kind, uniformity("neyman").kind
        ('strictly convex', 'convex', 'not convex')
        >>> uniformity("vlc", mu=1.9).kind, uniformity("vlc", mu=2.1).kind
        ('strictly convex', 'not convex')
    """
    divergence = make_divergence(divergence)
    require_positive("gamma", gamma)
    require_positive("mu", mu)
    t = torch.linspace(0, _LARGEST_SQUARED_DISTANCE, _POINTS, dtype=torch.float64)
    r = math.log(mu) - gamma * t
    # Signs are read off h'' / h', which stays an ordinary number where both underflow. Below e^-700 even u does; no
    # closed form changes its sign there.
    ratio = divergence.relative_curvature(r.clamp(min=-700)).clone()
    curvature = (ratio * divergence.penalty_slope(r)).clone()
    if not divergence.closed_form:
        # An f with a kink has a penalty with a jump, which derivatives at points don't see but differences do.
        step = float(t[1] - t[0])
        values = divergence.penalty(r)
        second = (values[2:] - 2 * values[1:-1] + values[:-2]) / step**2 / gamma**2
        visible = 0.5 * curvature.abs().max() + 1e-3 * (1 + values.abs().max()) / step
        jump = ((second - curvature[1:-1]).abs() > visible) & (second < curvature[1:-1])
        curvature[1:-1] = torch.where(jump, second, curvature[1:-1])
        ratio[1:-1] = torch.where(jump, -1.0, ratio[1:-1])
    kind: Literal["strictly convex", "convex", "not convex"] = "convex"
    if bool((ratio < 0).any()):
        kind = "not convex"
    elif bool((ratio > 0).all()):
        kind = "strictly convex"
    lowest = int(curvature.argmin())
    return Uniformity(kind, gamma**2 * float(curvature[lowest]), float(t[lowest]))


def simplex(n: int, d: int) -> Tensor:
    """The regular simplex: n unit vectors in R^d with inner products -1 / (n - 1), the most uniform batch there is.

    Args:
        n: number of vertices, at least 2.
        d: dimension, at least n - 1.

    Returns:
        The vertices, (n, d), in float64.

    Example:
        >>> vertices = simplex(3, 2)
        >>> torch.allclose(vertices @ vertices.T, 1.5 * torch.eye(3, dtype=torch.float64) - 0.5)
        True
    """
    if n < 2:
        raise ValueError(f"a simplex needs at least two vertices, got n={n}")
    if d < n - 1:
        raise ValueError(f"a regular simplex of n={n} vertices needs dimension d >= {n - 1}, got d={d}")
    # Vertex k: the height that the earlier vertices leave, along axis k; the later ones share what remains.
    vertices = torch.zeros(n, d, dtype=torch.float64)
    inner = -1 / (n - 1)
    for k in range(n - 1):
        height = math.sqrt(1 - float(vertices[k, :k].square().sum()))
        vertices[k, k] = height
        rest = (inner - float((vertices[k, :k] * vertices[k + 1, :k]).sum())) / height
        vertices[k + 1 :, k] = rest
    return vertices


def estimation_error(
    divergence: str | Divergence, n: int, delta: float, gamma: float = 1.0, mu: float = 1.0, alpha: float = 1.0
) -> float:
    r"""How far the objective on n samples may lie from its expectation, with probability 1 - delta.

    The paper's deviation term (r_T + 2 alpha r_f) sqrt(log(6 / delta) / (2 (n - 1))), where r_T is the range of f'(u)
    and r_f that of f*(f'(u)) over u from mu e^(-4 gamma) to mu. The paper has it for alpha = 1; the weight of the
    negatives makes their range so much larger.

    Args:
        divergence: a name or a `Divergence`.
        n: number of samples, at least 2.
        delta: probability that the bound fails, between 0 and 1.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.
        alpha: weight of the negatives.

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
        raise ValueError(f"delta is a probability between 0 and 1, got delta={delta!r}")
    # score and penalty both increase with r, so their ranges are differences of their end values
    ends = torch.tensor([math.log(mu) - _LARGEST_SQUARED_DISTANCE * gamma, math.log(mu)], dtype=torch.float64)
    range_t = float(divergence.score(ends).diff())
    range_f = float(divergence.penalty(ends).diff())
    return (range_t + 2 * alpha * range_f) * math.sqrt(math.log(6 / delta) / (2 * (n - 1)))


def push(divergence: str | Divergence, alpha: float = 40.0, gamma: float = 1.0, mu: float = 1.0) -> float:
    r"""How hard negatives at right angles push, in units of how hard a pair that has met pulls.

    Both are slopes of the loss in the inner product. With h(r) = f*(f'(e^r)), whose slope is e^r times that of
    f'(e^r), the push is

    .. math:: \alpha\, \mu\, h'(\log\mu - 2\gamma) / h'(\log\mu) ,

    for KL alpha mu e^(-2 gamma). (In InfoNCE, and with KL's optimal shift, a normaliser makes it 1.) Where negatives
    have a gradient, more than 1 buys uniformity with alignment. Where they don't (a queue, or the keys of a momentum
    encoder), it is a force that nothing gives way to, and embeddings collapse; runs of both kinds are in
    docs/reproduction.md. A small push is no promise: near pairs may push up to alpha mu times as hard as a pair pulls,
    which for steep penalties (Tsallis) or a large gamma is far more than those at right angles.

    Args:
        divergence: a name or a `Divergence`.
        alpha: weight of the negatives.
        gamma: inverse width of the Gaussian kernel.
        mu: scale of the density ratio.

    Raises:
        ValueError: if f is made of straight pieces, so that nothing pushes or pulls.

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
    if divergence.straight:
        raise ValueError(f"{divergence.name}: f is made of straight pieces, so that no pair pushes or pulls")
    apart, met = divergence.penalty_slope(torch.tensor([math.log(mu) - 2 * gamma, math.log(mu)], dtype=torch.float64))
    return float(alpha * mu * (apart / met))


def table(gamma: float = 1.0, mu: float = 1.0) -> str:
    """All divergences with their certificate of uniformity, as a Markdown table.

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
