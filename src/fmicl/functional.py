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
from typing import Literal, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fmicl import kernels
from fmicl.checks import Negatives, require_mode, require_positive, require_power, require_shift
from fmicl.divergences import KL, Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.kernels import PairFunction
from fmicl.shift import ShiftedCritic, optimal_shift
from fmicl.similarities import Cosine, Gaussian, Similarity

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


class _Block(NamedTuple):
    """Pairs of rows with columns, without j = i + skip, counted `weight` times (2 for a symmetric pair of blocks)."""

    rows: Tensor
    columns: Tensor
    skip: int | None
    weight: int = 1

    def pairs(self) -> int:
        skipped = 0 if self.skip is None else len(self.rows)
        return self.weight * (len(self.rows) * len(self.columns) - skipped)


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
    normalised: bool = False,
) -> Tensor:
    r"""The f-MICL loss, minus a lower bound of the f-mutual information between the views.

    .. math::
        L = -\Big( \frac{1}{N} \sum_i f'(u(x_i, y_i)) - \alpha\, \mathrm{mean}_{neg}\, f^*(f'(u)) \Big), \quad
        u(x, y) = \mu\, e^{-\gamma |x - y|^2}

    KL with `shift="optimal"` is alignment and uniformity (`align_uniform_loss`), and never above InfoNCE as an
    objective; Pearson is the spectral loss with a Gaussian in place of the inner product.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`.
        alpha: weight of the negative term.
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised".
        similarity: "gaussian", "cosine", or a `Similarity` (then gamma and mu are its own business).
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        shift: "optimal" maximises the bound over T - v as well (Donsker-Varadhan); None leaves v = 0.
        normalised: True if x, y and explicit negatives have unit length already.

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
            normalised=normalised,
        )
    )


def sum_terms(terms: Terms) -> Tensor:
    """The loss that two terms make."""
    return terms.alignment + terms.uniformity


def _in_full_precision(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autocast: under it the inner products would be rounded to half precision."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        device = next((arg.device.type for arg in args if isinstance(arg, Tensor)), "cpu")
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
    normalised: bool = False,
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
    x, y, explicit = _embeddings(x, y, negatives, normalised)
    critic = make_similarity(similarity, gamma, mu).critic(divergence, x.shape[1])
    blocks = _blocks(x, y, negatives, explicit)
    alignment = -critic.score(critic.pairs(x, y)).mean()
    if shift is None:
        return Terms(alignment, alpha * _mean(blocks, critic))
    if isinstance(divergence, KL):
        # v* = log(alpha E[e^(T-1)]), at which alpha E[f*(T - v*)] = 1
        constant = critic.offset - (1.0 if critic.free else 0.0)
        return Terms(alignment, math.log(alpha) + constant + 1 + _log_mean_exp(blocks, critic.scale))
    v = optimal_shift(critic, alpha, lambda function: _mean(blocks, function))
    return Terms(alignment, v + alpha * _mean(blocks, ShiftedCritic(critic, v)))


@_in_full_precision
def infonce_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: float = 0.5,
    negatives: Negatives | Tensor = "both",
    decoupled: bool = False,
    normalised: bool = False,
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
        normalised: True if the embeddings have unit length already.

    Example:
        >>> import torch
        >>> x = torch.eye(4)
        >>> loss = infonce_loss(x, x, temperature=1.0)      # six negatives at 0 and the positive at 1
        >>> torch.isclose(loss, torch.tensor(1 + 6 / torch.e).log())
        tensor(True)
    """
    require_positive("temperature", temperature)
    x, y, explicit = _embeddings(x, y, negatives, normalised)
    scale = 1 / temperature
    positive = scale - scale / 2 * (x - y).square().sum(dim=-1)
    rows: list[Tensor] = []
    for block in _blocks(x, y, negatives, explicit):
        rows.append(kernels.row_logsumexp(block.rows, block.columns, scale, block.skip))
        if block.weight == 2:  # the same pairs seen from the columns
            rows.append(kernels.row_logsumexp(block.columns, block.rows, scale, block.skip))
    if isinstance(negatives, str) and negatives == "both":
        within_x, within_y, x_to_y, y_to_x = rows
        others = torch.cat([torch.logaddexp(within_x, x_to_y), torch.logaddexp(within_y, y_to_x)])
        positive = torch.cat([positive, positive])
    else:
        (others,) = rows
    denominator = others if decoupled else torch.logaddexp(positive, others)
    return (denominator - positive).mean()


@_in_full_precision
def align_uniform_loss(
    x: Tensor,
    y: Tensor,
    *,
    gamma: float = 2.0,
    power: float = 2.0,
    weight: float = 1.0,
    negatives: Negatives | Tensor = "anchor",
    normalised: bool = False,
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
        normalised: True if the embeddings have unit length already.

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> align_uniform_loss(x, x, gamma=2.0)      # aligned; the two samples are sqrt(2) apart
        tensor(-4.)
    """
    require_positive("gamma", gamma)
    require_positive("weight", weight)
    require_power(power)
    x, y, explicit = _embeddings(x, y, negatives, normalised)
    distance = torch.linalg.vector_norm(x - y, dim=-1)
    alignment = ((x - y).square().sum(dim=-1) if power == 2 else distance.pow(power)).mean()
    uniformity = _log_mean_exp(_blocks(x, y, negatives, explicit), 2 * gamma) - 2 * gamma
    return alignment + weight * uniformity


@_in_full_precision
def spectral_contrastive_loss(
    x: Tensor,
    y: Tensor,
    *,
    mu: float = 1.0,
    negatives: Negatives | Tensor = "cross",
    normalised: bool = False,
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
        normalised: True if the embeddings have unit length already.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> spectral_contrastive_loss(x, x)
        tensor(-2.)
    """
    require_positive("mu", mu)
    x, y, explicit = _embeddings(x, y, negatives, normalised)
    alignment = -2 * mu * (x * y).sum(dim=-1).mean()
    return alignment + _mean(_blocks(x, y, negatives, explicit), _Square(mu))


class _Square:
    """z^2 with z = mu x.y, the spectral loss's penalty."""

    offset = 0.0

    def __init__(self, mu: float) -> None:
        self.scale = mu

    def penalty(self, z: Tensor) -> Tensor:
        return z.square()

    def penalty_slope(self, z: Tensor) -> Tensor:
        return 2 * z


def normalise(x: Tensor) -> Tensor:
    """Rows of x divided by their length. A zero row stays zero, with a finite gradient.

    Example:
        >>> import torch
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)


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
        if gaussian != Gaussian():
            raise ValueError(f"{similarity!r} has its own settings; leave out gamma={gamma!r} and mu={mu!r}")
        return similarity
    if similarity == "cosine":
        if mu != 1.0:
            raise ValueError(f"the cosine similarity has no mu, got mu={mu!r}; only similarity='gaussian' does")
        return Cosine(temperature=1 / (2 * gamma))
    raise ValueError(f"similarity is 'gaussian', 'cosine' or a Similarity, got {similarity!r}")


def _embeddings(
    x: Tensor, y: Tensor, negatives: str | Tensor, normalised: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Check the input, widen half precision and put everything onto the unit sphere."""
    named = {"x": x, "y": y}
    if isinstance(negatives, Tensor):
        named["negatives"] = negatives
    else:
        require_mode(negatives)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor of embeddings (N, d), got {type(value).__name__}")
        if value.dim() != 2:
            raise ValueError(f"{name} must have two dimensions (N, d), got shape {tuple(value.shape)}")
        if not value.is_floating_point():
            raise ValueError(f"{name} must be of a floating-point type, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device} but x is on {x.device}")
    if x.shape != y.shape:
        raise ValueError(
            f"x and y must have the same shape, one row for each sample; got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if x.shape[1] == 0:
        raise ValueError(f"embeddings need at least one dimension, got shape {tuple(x.shape)}")
    if isinstance(negatives, Tensor):
        if negatives.shape[1] != x.shape[1] or len(negatives) == 0 or len(x) == 0:
            raise ValueError(
                f"explicit negatives must be (M, d) with M > 0 and x's d; got {tuple(negatives.shape)} "
                f"for x of shape {tuple(x.shape)}"
            )
    elif len(x) < 2:
        raise ValueError(f"negatives={negatives!r} needs at least two samples in a batch, got shape {tuple(x.shape)}")
    dtype = functools.reduce(torch.promote_types, (value.dtype for value in named.values()), torch.float32)
    wide = [value.to(dtype) for value in named.values()]
    ready = wide if normalised else [normalise(value) for value in wide]
    return ready[0], ready[1], ready[2] if len(ready) == 3 else None


def _blocks(x: Tensor, y: Tensor, negatives: str | Tensor, explicit: Tensor | None) -> list[_Block]:
    """Which rows meet which columns."""
    if explicit is not None:
        return [_Block(x, explicit, None)]
    if negatives == "anchor":
        return [_Block(x, x, 0)]
    if negatives == "cross":
        return [_Block(x, y, 0)]
    return [_Block(x, x, 0), _Block(y, y, 0), _Block(x, y, 0, weight=2)]


def _mean(blocks: list[_Block], function: PairFunction) -> Tensor:
    """Average of a pair function over all negatives."""
    totals = [block.weight * kernels.pair_sum(block.rows, block.columns, function, block.skip) for block in blocks]
    return torch.stack(totals).sum() / sum(block.pairs() for block in blocks)


def _log_mean_exp(blocks: list[_Block], scale: float) -> Tensor:
    """log mean exp(scale * c) over all negatives."""
    totals = [
        math.log(block.weight) + kernels.row_logsumexp(block.rows, block.columns, scale, block.skip).logsumexp(dim=0)
        for block in blocks
    ]
    return torch.stack(totals).logsumexp(dim=0) - math.log(sum(block.pairs() for block in blocks))
