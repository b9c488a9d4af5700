r"""Contrastive objectives as pure functions of two views' embeddings.

x and y are (N, d): row i of each is the embedding of one view of sample i. All of them

- put the embeddings onto the unit sphere, unless told `normalised=True`;
- compute in float32 at least, whatever autocast says: the exponentials need it and the cost is in the matrix product;
- are minimised, and return a scalar.

Where the negatives come from, for every objective:

    "anchor"   x_i against x_j, j != i                       the f-MICL paper's algorithm
    "cross"    x_i against y_j, j != i
    "both"     every view against every view of other samples   SimCLR's choice
    (M, d)     x_i against each row of a tensor, such as MoCo's queue
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, NamedTuple, ParamSpec, TypeVar, Unpack

import torch
from torch import Tensor

from fmicl.divergences import KL, Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic
from fmicl.kernels import Square
from fmicl.kernels.transforms import in_transforms, is_capturing
from fmicl.losses.pairing import Options, Pairs
from fmicl.losses.shift import ShiftedCritic, differentiable_once, optimal_shift, shift_of_counts
from fmicl.losses.similarities import Cosine, Gaussian, Similarity
from fmicl.utils.numerics import normalise
from fmicl.utils.validation import Negatives, require_positive, require_power, require_shift

__all__ = [
    "Negatives",
    "Terms",
    "align_uniform_loss",
    "fmicl_loss",
    "fmicl_terms",
    "infonce_loss",
    "make_similarity",
    "normalise",
    "spectral_contrastive_loss",
    "sum_terms",
    "terms_of_pairs",
]


P = ParamSpec("P")
R = TypeVar("R")


class Terms(NamedTuple):
    """The two parts of the f-MICL loss, loss = alignment + uniformity.

    Attributes:
        alignment: -E_pos[f'(u)], small when the views of a sample agree.
        uniformity: alpha E_neg[f*(f'(u))], plus the shift v where there is one; small when samples are spread out.
    """

    alignment: Tensor
    uniformity: Tensor


def fmicl_loss(
    x: Tensor,
    y: Tensor,
    divergence: str | Divergence = "kl",
    *,
    alpha: float = 40.0,
    gamma: float = 1.0,
    mu: float | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    **options: Unpack[Options],
) -> Tensor:
    r"""The f-MICL loss, minus a lower bound of the f-mutual information between the views.

    .. math::
        L = -\Big( \frac{1}{N} \sum_i f'(u(x_i, y_i)) - \alpha\, \mathrm{mean}_{neg}\, f^*(f'(u)) \Big), \quad
        u(x, y) = \mu\, e^{-\gamma |x - y|^2}

    KL with `shift="optimal"` is alignment and uniformity (`align_uniform_loss` of weight 1 / gamma), alpha and mu being
    but constants, and as an objective never above InfoNCE with `decoupled=True` plus the log of its number of
    negatives; Pearson is the spectral loss with a Gaussian in place of the inner product.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`.
        alpha: weight of the negative term.
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised".
        similarity: "gaussian", "cosine", or a `Similarity` (then gamma and mu are its own business).
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        shift: "optimal" maximises the bound over T - v as well (Donsker-Varadhan), for KL by the same single pass over
            the pairs, for the others by several more, which find v; None leaves v = 0.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Returns:
        The loss, a scalar.

    Raises:
        ValueError: for shapes, types or settings that can't be meant; it names what was seen.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> fmicl_loss(x, y, "js", alpha=40.0).shape
        torch.Size([])
    """
    return sum_terms(
        fmicl_terms(
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
        )
    )


def sum_terms(terms: Terms) -> Tensor:
    """The loss that two terms make."""
    return terms.alignment + terms.uniformity


def _in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autocast: under it the inner products would be rounded to half precision.

    Where it is met by torch.compile, the dense reference is compiled too, and the other kernels run as they are.
    """

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_dynamo_compiling() and kwargs.get("kernel") != "reference" and not in_transforms():
            from fmicl.utils.compilation import as_written

            result: R = as_written(wrapped, *args, **kwargs)
            return result
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        device = next((tensor.device.type for tensor in tensors), "cpu")
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@_in_full_precision
def fmicl_terms(
    x: Tensor,
    y: Tensor,
    divergence: str | Divergence = "kl",
    *,
    alpha: float = 40.0,
    gamma: float = 1.0,
    mu: float | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    **options: Unpack[Options],
) -> Terms:
    """The two terms of `fmicl_loss`, for logging; same arguments.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> terms = fmicl_terms(x, y, "kl")
        >>> torch.equal(terms.alignment + terms.uniformity, fmicl_loss(x, y, "kl"))
        True
    """
    divergence = make_divergence(divergence)
    require_positive("alpha", alpha)
    require_shift(shift)
    similarity = make_similarity(similarity, gamma, mu)
    pairs = Pairs.prepare(x, y, negatives, **options)
    return terms_of_pairs(pairs, similarity.critic(divergence, x.shape[1]), alpha, shift)


def terms_of_pairs(pairs: Pairs, critic: Critic, alpha: float, shift: Literal["optimal"] | None) -> Terms:
    """The two terms of f-MICL on a batch that is ready, whatever its negatives are."""
    alignment = -pairs.mean_of_rows(critic.score(critic.at_distance(pairs.squared_distances())))
    if shift is None:
        return Terms(alignment, alpha * pairs.mean(critic))
    if type(critic.divergence) is KL:  # of a subclass nothing is known
        # v* = log(alpha E[e^(T-1)]), at which alpha E[f*(T - v*)] = 1
        constant = critic.offset - (1.0 if critic.free else 0.0)
        return Terms(alignment, math.log(alpha) + constant + 1 + pairs.log_mean_exp(critic.scale))
    if in_transforms():
        raise ValueError(
            f"shift='optimal' goes through torch.func with {KL.name} alone, got {critic.divergence.name}: its v is "
            "found by looking at numbers. torch.autograd will do for a first derivative"
        )
    if torch.compiler.is_dynamo_compiling():  # which can't look at numbers either
        from fmicl.utils.compilation import as_written

        terms: Terms = as_written(terms_of_pairs, pairs, critic, alpha, shift)
        return terms
    v: float | Tensor
    if is_capturing(pairs.x) and pairs.world.size == 1:
        v = shift_of_counts(critic, alpha, pairs.count_cosines()).to(pairs.dtype)
    else:
        v = optimal_shift(critic, alpha, pairs.detached().global_mean, precision=4 * torch.finfo(pairs.dtype).eps)
    uniformity = v + alpha * pairs.mean(ShiftedCritic(critic, v))
    why = f"the gradient of shift='optimal' holds v fixed; only {KL.name} has it in closed form"
    return Terms(alignment, differentiable_once(uniformity, why))


@_in_full_precision
def infonce_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.5,
    negatives: Negatives | Tensor = "both",
    decoupled: bool = False,
    **options: Unpack[Options],
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
        decoupled: leave the positive out of the denominator; the f-MICL paper writes InfoNCE so.
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

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
    positive = positive.repeat_interleave(len(others) // len(positive))  # "both": of x_i, and of y_i
    denominator = others if decoupled else torch.logaddexp(positive, others)
    return pairs.mean_of_rows(denominator - positive)


@_in_full_precision
def align_uniform_loss(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 2.0,
    power: float = 2.0,
    weight: float = 1.0,
    negatives: Negatives | Tensor = "anchor",
    **options: Unpack[Options],
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
        power: of the distance in the alignment term (their alpha), at least 1.
        weight: of the uniformity term.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> align_uniform_loss(x, x, gamma=2.0)      # aligned; the two samples are sqrt(2) apart
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


@_in_full_precision
def spectral_contrastive_loss(
    x: Tensor,
    y: Tensor,
    *,
    mu: float = 1.0,
    negatives: Negatives | Tensor = "cross",
    **options: Unpack[Options],
) -> Tensor:
    r"""The spectral contrastive loss (HaoChen et al., 2021) on the sphere of radius sqrt(mu).

    .. math::
        L = -2 \mu\, \mathrm{mean}_i\, x_i \cdot y_i + \mu^2\, \mathrm{mean}_{neg} (x_i \cdot y_j)^2

    It is Pearson's -(E_pos[f'(u)] - E_neg[f*(f'(u))]) at u = mu x.y, less its constant 1.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        mu: squared radius.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        options: how it is computed: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.Options`).

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


def make_similarity(
    similarity: str | Similarity, gamma: float = 1.0, mu: float | Literal["normalised"] = 1.0
) -> Similarity:
    """The similarity that the settings of `fmicl_loss` mean.

    Example:
        >>> make_similarity("cosine", gamma=5.0)
        Cosine(temperature=0.1)
    """
    gaussian = Gaussian(gamma, mu)  # checks both numbers
    if similarity == "gaussian":
        return gaussian
    if isinstance(similarity, Similarity):
        usual = Gaussian()
        given = [f"gamma={gamma!r}"] * (gamma != usual.gamma) + [f"mu={mu!r}"] * (mu != usual.mu)
        if given:
            raise ValueError(f"{similarity!r} has its own settings; leave out {' and '.join(given)}")
        return similarity
    if similarity == "cosine":
        if mu != 1.0:
            raise ValueError(f"the cosine similarity has no mu, got mu={mu!r}; only similarity='gaussian' does")
        return Cosine(temperature=1 / (2 * gamma))
    raise ValueError(f"similarity is 'gaussian', 'cosine' or a Similarity, got {similarity!r}")
