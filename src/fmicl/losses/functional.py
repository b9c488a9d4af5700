r"""Contrastive objectives as pure functions of the embeddings of two views.

x and y are (N, d): row i of each is the embedding of one view of sample i. All functions

- normalise the embeddings to unit length, unless `normalised=True`;
- compute in float32 or wider, whatever autocast says: the exponentials need it, and the cost is in the matrix product;
- return a scalar to be minimised.

The negatives of every objective are one of

    "anchor"   x_i against x_j, j != i                          the f-MICL paper's algorithm
    "cross"    x_i against y_j, j != i
    "both"     every view against every view of other samples   SimCLR's choice
    (M, d)     x_i against each row of a tensor, such as MoCo's queue
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic
from fmicl.kernels import Square
from fmicl.kernels.transforms import in_transforms
from fmicl.losses.pairing import ComputeOptions, Pairs
from fmicl.losses.shift import optimally_shifted
from fmicl.losses.similarities import Similarity, make_similarity
from fmicl.utils.numerics import autocast_enabled
from fmicl.utils.validation import Negatives, require_positive, require_power, require_shift

__all__ = [
    "Terms",
    "align_uniform_loss",
    "fmicl_loss",
    "fmicl_terms",
    "fmicl_terms_of_pairs",
    "infonce_loss",
    "spectral_contrastive_loss",
]

P = ParamSpec("P")
R = TypeVar("R")


class Terms(NamedTuple):
    """The two terms of the f-MICL loss.

    Attributes:
        alignment: -E_pos[f'(u)], small if the views of a sample agree.
        uniformity: alpha E_neg[f*(f'(u))], plus the shift v if there is one; small if samples are spread out.
    """

    alignment: Tensor
    uniformity: Tensor

    def total(self) -> Tensor:
        """The loss, alignment + uniformity."""
        return self.alignment + self.uniformity


def _without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast, which would round the inner products to half precision.

    torch.compile traces the dense reference only; with the other kernels the function runs eagerly.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() and kwargs.get("kernel") != "reference" and not in_transforms():
            from fmicl.utils.compilation import run_eager

            result: R = run_eager(wrapped, *args, **kwargs)
            return result
        devices = [value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = devices[0] if devices else "cpu"
        if not autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


def fmicl_loss(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence = "kl",
    *,
    alpha: float = 40.0,
    gamma: float = 1.0,
    mu: float | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""The f-MICL loss, minus a lower bound of the f-mutual information between the views.

    .. math::
        L = -\Big( \frac{1}{N} \sum_i f'(u(x_i, y_i)) - \alpha\, \mathrm{mean}_{neg}\, f^*(f'(u)) \Big), \quad
        u(x, y) = \mu\, e^{-\gamma |x - y|^2}

    KL with `shift="optimal"` is alignment and uniformity (`align_uniform_loss` of weight 1 / gamma), where alpha and mu
    are only constants; as an objective it is never above InfoNCE with `decoupled=True` plus the log of its number of
    negatives. Pearson is the spectral loss with a Gaussian in place of the inner product.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`.
        alpha: weight of the negative term.
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised".
        similarity: "gaussian", "cosine", or a `Similarity`, which has its own gamma and mu.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        shift: "optimal" maximises the bound over T - v as well (Donsker-Varadhan). For KL that takes no further pass
            over the pairs, for the others several, to find v. None leaves v = 0.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: shapes, types or settings are invalid; the message says what was seen.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> fmicl_loss(x, y, "js", alpha=40.0).shape
        torch.Size([])
    """
    return fmicl_terms(
        x,
        y,
        divergence,
        alpha=alpha,
        gamma=gamma,
        mu=mu,
        similarity=similarity,
        negatives=negatives,
        shift=shift,
        **options,
    ).total()


@_without_autocast
def fmicl_terms(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence = "kl",
    *,
    alpha: float = 40.0,
    gamma: float = 1.0,
    mu: float | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    **options: Unpack[ComputeOptions],
) -> Terms:
    """The two terms of `fmicl_loss`, for logging; same arguments.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> torch.equal(fmicl_terms(x, y, "kl").total(), fmicl_loss(x, y, "kl"))
        True
    """
    divergence = make_divergence(divergence)
    require_positive("alpha", alpha)
    require_shift(shift)
    similarity = make_similarity(similarity, gamma, mu)
    pairs = Pairs.prepare(x, y, negatives, **options)
    return fmicl_terms_of_pairs(pairs, similarity.critic(divergence, x.shape[1]), alpha, shift)


def fmicl_terms_of_pairs(pairs: Pairs, critic: Critic, alpha: float, shift: Literal["optimal"] | None) -> Terms:
    """The two terms of f-MICL for a prepared batch, with any negatives."""
    alignment = -pairs.mean_of_rows(critic.score(critic.at_distance(pairs.squared_distances())))
    return Terms(alignment, alpha * pairs.mean(critic) if shift is None else optimally_shifted(pairs, critic, alpha))


@_without_autocast
def infonce_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.5,
    negatives: Negatives | Tensor = "both",
    decoupled: bool = False,
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""InfoNCE: the cross entropy of finding an anchor's own positive among its negatives.

    .. math::
        L = -\mathrm{mean}_i \log \frac{e^{x_i \cdot y_i / \tau}}
            {e^{x_i \cdot y_i / \tau} + \sum_j e^{x_i \cdot n_j / \tau}}

    With "both" every view is an anchor in turn: SimCLR's NT-Xent. With explicit negatives it is MoCo's loss, with
    "cross" one direction of CLIP's.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        temperature: tau.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        decoupled: leave the positive out of the denominator, as the f-MICL paper writes InfoNCE.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch
        >>> x = torch.eye(4)
        >>> loss = infonce_loss(x, x, temperature=1.0)      # six negatives at 0 and the positive at 1
        >>> torch.isclose(loss, torch.tensor(1 + 6 / torch.e).log())
        tensor(True)
    """
    require_positive("temperature", temperature)
    pairs = Pairs.prepare(x, y, negatives, **options)
    scale = 1 / temperature
    positive = scale - scale / 2 * pairs.squared_distances()
    others = pairs.row_logsumexp(scale)
    positive = positive.repeat_interleave(len(others) // len(positive))  # "both": once for x_i, once for y_i
    denominator = others if decoupled else torch.logaddexp(positive, others)
    return pairs.mean_of_rows(denominator - positive)


@_without_autocast
def align_uniform_loss(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 2.0,
    power: float = 2.0,
    weight: float = 1.0,
    negatives: Negatives | Tensor = "anchor",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""Alignment and uniformity (Wang and Isola, 2020).

    .. math::
        L = \mathrm{mean}_i |x_i - y_i|^{p} + w \log \mathrm{mean}_{neg} e^{-\gamma |x_i - x_j|^2}

    gamma times this with weight 1 / gamma and power 2 is `fmicl_loss` with KL, alpha = 1 and `shift="optimal"`.
    Wang and Isola average the uniformity of the two views: that is (L(x, y) + L(y, x)) / 2 with "anchor".

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        gamma: inverse width of the Gaussian kernel (their t).
        power: power of the distance in the alignment term (their alpha), at least 1.
        weight: weight of the uniformity term.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> align_uniform_loss(x, x, gamma=2.0)      # aligned; the two samples are at distance sqrt(2)
        tensor(-4.)
    """
    require_positive("gamma", gamma)
    require_positive("weight", weight)
    require_power(power)
    pairs = Pairs.prepare(x, y, negatives, **options)
    if power == 2:
        distance = pairs.squared_distances()
    else:
        distance = torch.linalg.vector_norm(pairs.x.to(pairs.dtype) - pairs.y.to(pairs.dtype), dim=-1).pow(power)
    return pairs.mean_of_rows(distance) + weight * (pairs.log_mean_exp(2 * gamma) - 2 * gamma)


@_without_autocast
def spectral_contrastive_loss(
    x: Tensor,
    y: Tensor,
    *,
    mu: float = 1.0,
    negatives: Negatives | Tensor = "cross",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""The spectral contrastive loss (HaoChen et al., 2021) on the sphere of radius sqrt(mu).

    .. math::
        L = -2 \mu\, \mathrm{mean}_i\, x_i \cdot y_i + \mu^2\, \mathrm{mean}_{neg} (x_i \cdot y_j)^2

    It is Pearson's -(E_pos[f'(u)] - E_neg[f*(f'(u))]) at u = mu x.y, without its constant 1.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        mu: squared radius.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> spectral_contrastive_loss(x, x)
        tensor(-2.)
    """
    require_positive("mu", mu)
    pairs = Pairs.prepare(x, y, negatives, **options)
    alignment = -2 * mu * pairs.mean_of_rows((pairs.x.to(pairs.dtype) * pairs.y.to(pairs.dtype)).sum(dim=-1))
    return alignment + pairs.mean(Square(mu))
