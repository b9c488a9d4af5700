r"""Contrastive objectives as pure functions of the embeddings of two views.

x and y are (N, d): row i of each is the embedding of one view of sample i. `fmicl_loss` documents the arguments that
functions share. All of them

- normalise the embeddings to unit length, unless `normalised=True` (Barlow Twins, VICReg and RPC leave them as is);
- compute in float32 or wider, whatever autocast says: the exponentials need it, and the cost is in the matrix product;
- take alpha, gamma, mu, temperature and weight as numbers, or as tensors without dimensions that may have a gradient;
- return a scalar to be minimised.

A zero row has no direction. It stays zero, and counts as orthogonal to every row, as a positive and as a negative.

The negatives of a contrastive objective are one of

    "anchor"   x_i against x_j, j != i                          the f-MICL paper's algorithm
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
from torch.nn import functional as F

from fmicl.divergences import JS, KL, Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic, require_finite_at_zero
from fmicl.kernels import Square
from fmicl.kernels.transforms import in_transforms
from fmicl.losses import fused
from fmicl.losses.balance import balanced_uniformity, require_alpha
from fmicl.losses.pairing import ComputeOptions, Pairs
from fmicl.losses.shift import optimally_shifted
from fmicl.losses.similarities import FittedCritic, Similarity, make_similarity
from fmicl.losses.statistics import batch_covariance, centre, off_diagonal_squares, prepare_views, standardise
from fmicl.losses.targets import Chunk, LabelledPairs, LabelNegatives, Targets, make_targets, masked_logsumexp
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.numerics import autocast_enabled, to_float64
from fmicl.utils.validation import (
    Negatives,
    require_at_least_zero,
    require_positive,
    require_power,
    require_skew,
)

__all__ = [
    "Terms",
    "align_uniform_loss",
    "barlow_twins_loss",
    "dcl_loss",
    "dhel_loss",
    "fmicl_loss",
    "fmicl_terms",
    "fmicl_terms_of_pairs",
    "icon_loss",
    "infonce_loss",
    "renyi_loss",
    "rpc_loss",
    "siglip_loss",
    "spectral_contrastive_loss",
    "vicreg_loss",
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


def _operator(function: Callable[P, R]) -> Callable[P, R]:
    """Let torch.compile see a loss as an operator (`fmicl.losses.operator`), but for the dense reference.

    That is traced, unless its shift is to be found by a search.
    """
    name = function.__name__  # torch.compile would take that of a decorator's wrapper

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_dynamo_compiling() or in_transforms():
            return function(*args, **kwargs)
        if kwargs.get("kernel") == "reference" and kwargs.get("shift") is None:
            return function(*args, **kwargs)
        from fmicl.losses.operator import call_operator

        found = call_operator(name, args, kwargs)
        if found is None:
            from fmicl.utils.compilation import run_eager

            result: R = run_eager(function, *args, **kwargs)
            return result
        return Terms(*found) if len(found) == 2 else found[0]  # type: ignore[return-value]

    return wrapped


def _without_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Disable autocast, which would round the inner products to half precision."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        devices = [value.device.type for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        device = devices[0] if devices else "cpu"
        if not autocast_enabled(device):
            return function(*args, **kwargs)
        with torch.autocast(device, enabled=False):
            return function(*args, **kwargs)

    return wrapped


@_operator
def fmicl_loss(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence = "kl",
    *,
    alpha: Scalar | Literal["auto"] = 40.0,
    gamma: Scalar = 1.0,
    mu: Scalar | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    label_negatives: LabelNegatives = "all",
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
        alpha: weight of the negative term; "auto" balances push and pull in each batch (`fmicl.losses.balance`).
        gamma: inverse width of the Gaussian kernel; for the cosine similarity, temperature = 1 / (2 gamma).
        mu: scale of the density ratio, or "normalised".
        similarity: "gaussian", "cosine", "cosine_identity", or a `Similarity`, which has its own gamma and mu.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        shift: "optimal" maximises the bound over T - v as well (Donsker-Varadhan). For KL that takes no further pass
            over the pairs, for the others several, to find v. None leaves v = 0.
        labels: classes of the samples, (N,) whole numbers, negative where unknown; or (N, K), several labels of each or
            probabilities of classes. E_pos is then the mean over all anchors, and for each over all second views of its
            class (with "both", over all other views of its class).
        targets: weights (N, N) of second views j as positives of anchors i, dense or sparse (`fmicl.losses.targets`).
        label_negatives: "all" other samples are negatives, as in the product of the marginals, or "other_classes" only.
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
    if shift is None and labels is None and targets is None and label_negatives == "all":
        loss = fused.fmicl_loss(x, y, divergence, alpha, gamma, mu, similarity, negatives, **options)
        if loss is not None:
            return loss
    return fmicl_terms(
        x, y, divergence, alpha=alpha, gamma=gamma, mu=mu, similarity=similarity, negatives=negatives, shift=shift,
        labels=labels, targets=targets, label_negatives=label_negatives, **options,
    ).total()  # fmt: skip


@_operator
@_without_autocast
def fmicl_terms(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence = "kl",
    *,
    alpha: Scalar | Literal["auto"] = 40.0,
    gamma: Scalar = 1.0,
    mu: Scalar | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    shift: Literal["optimal"] | None = None,
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    label_negatives: LabelNegatives = "all",
    **options: Unpack[ComputeOptions],
) -> Terms:
    """The two terms of `fmicl_loss`, for logging; same arguments.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> torch.isclose(fmicl_terms(x, y, "kl").total(), fmicl_loss(x, y, "kl"))
        tensor(True)
    """
    divergence = make_divergence(divergence)
    require_alpha(alpha, shift)
    similarity = make_similarity(similarity, gamma, mu)
    if shift is not None and type(divergence) is not KL and options.get("precision", "auto") == "auto":
        options["precision"] = "high"  # the weights of the closest pairs are sensitive to rounding
    pairs = Pairs.prepare(
        x, y, negatives, targets=make_targets(labels, targets), label_negatives=label_negatives, **options
    )
    return fmicl_terms_of_pairs(pairs, similarity.critic(divergence, x.shape[1]), alpha, shift)


def fmicl_terms_of_pairs(
    pairs: Pairs, critic: Critic, alpha: Scalar | Literal["auto"], shift: Literal["optimal"] | None
) -> Terms:
    """The two terms of f-MICL for a prepared batch, with any negatives.

    Raises:
        ValueError: a fitted similarity with an optimal shift or alpha "auto", which need r affine in the cosine.
    """
    if isinstance(critic, FittedCritic) and (shift is not None or isinstance(alpha, str)):
        raise ValueError(f"a fitted similarity takes a number as alpha and no shift, got alpha={alpha}, shift={shift}")
    alignment = -pairs.mean_of_rows(pairs.scores(critic))
    if isinstance(alpha, str):
        return Terms(alignment, balanced_uniformity(pairs, critic))
    return Terms(alignment, alpha * pairs.mean(critic) if shift is None else optimally_shifted(pairs, critic, alpha))


@_operator
def infonce_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: Scalar = 0.5,
    negatives: Negatives | Tensor = "both",
    decoupled: bool = False,
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    label_negatives: LabelNegatives = "all",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""InfoNCE: the cross entropy of finding an anchor's own positive among its negatives.

    .. math::
        L = -\mathrm{mean}_i \log \frac{e^{x_i \cdot y_i / \tau}}
            {e^{x_i \cdot y_i / \tau} + \sum_j e^{x_i \cdot n_j / \tau}}

    With "both" every view is an anchor in turn: SimCLR's NT-Xent. With explicit negatives it is MoCo's loss, with
    "cross" one direction of CLIP's. With labels it is the mean over an anchor's positives; "both" is then SupCon's
    L_out (Khosla et al., 2020), whose denominator has all other views, and with `label_negatives="other_classes"`
    SINCERE (Feeney and Hughes, 2023), whose denominator has one positive and the other classes.

    Args:
        temperature: tau.
        decoupled: leave the positive out of the denominator, as the f-MICL paper writes InfoNCE.
        x, y, negatives, labels, targets, label_negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.eye(4)
        >>> loss = infonce_loss(x, x, temperature=1.0)      # six negatives at 0 and the positive at 1
        >>> torch.isclose(loss, torch.tensor(1 + 6 / torch.e).log())
        tensor(True)
    """
    if labels is None and targets is None and label_negatives == "all":
        loss = fused.infonce_loss(x, y, temperature, negatives, decoupled, **options)
        if loss is not None:
            return loss
    chosen = make_targets(labels, targets)
    return _composed_infonce(x, y, temperature, negatives, decoupled, chosen, label_negatives, **options)


@_operator
@_without_autocast
def align_uniform_loss(
    x: Tensor,
    y: Tensor,
    *,
    gamma: Scalar = 2.0,
    power: float = 2.0,
    weight: Scalar = 1.0,
    negatives: Negatives | Tensor = "anchor",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""Alignment and uniformity (Wang and Isola, 2020).

    .. math::
        L = \mathrm{mean}_i |x_i - y_i|^{p} + w \log \mathrm{mean}_{neg} e^{-\gamma |x_i - x_j|^2}

    gamma times this with weight 1 / gamma and power 2 is `fmicl_loss` with KL, alpha = 1 and `shift="optimal"`.
    Wang and Isola average the uniformity of the two views: that is (L(x, y) + L(y, x)) / 2 with "anchor".

    Args:
        gamma: inverse width of the Gaussian kernel (their t).
        power: power of the distance in the alignment term (their alpha), at least 1.
        weight: weight of the uniformity term.
        x, y, negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.eye(2)
        >>> align_uniform_loss(x, x, gamma=2.0)      # aligned; the two samples are at distance sqrt(2)
        tensor(-4.)
    """
    require_positive_scalar("gamma", gamma)
    require_positive_scalar("weight", weight)
    require_power(power)
    pairs = Pairs.prepare(x, y, negatives, **options)
    distance = pairs.squared_distances() if power == 2 else pairs.lengths().pow(power)
    return pairs.mean_of_rows(distance) + weight * (pairs.log_mean_exp(2 * gamma) - 2 * gamma)


@_operator
@_without_autocast
def spectral_contrastive_loss(
    x: Tensor,
    y: Tensor,
    *,
    mu: Scalar = 1.0,
    negatives: Negatives | Tensor = "cross",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""The spectral contrastive loss (HaoChen et al., 2021) on the sphere of radius sqrt(mu).

    .. math::
        L = -2 \mu\, \mathrm{mean}_i\, x_i \cdot y_i + \mu^2\, \mathrm{mean}_{neg} (x_i \cdot y_j)^2

    It is Pearson's -(E_pos[f'(u)] - E_neg[f*(f'(u))]) at u = mu x.y, without its constant 1.

    Args:
        mu: squared radius.
        x, y, negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> spectral_contrastive_loss(x, x)
        tensor(-2.)
    """
    require_positive_scalar("mu", mu)
    pairs = Pairs.prepare(x, y, negatives, **options)
    alignment = -2 * mu * pairs.mean_of_rows(pairs.products())
    return alignment + pairs.mean(Square(mu))


@_operator
@_without_autocast
def dcl_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: Scalar = 0.1,
    negatives: Negatives | Tensor = "both",
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    label_negatives: LabelNegatives = "all",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""Decoupled contrastive learning (Yeh et al., 2022): InfoNCE without the positive in the denominator.

    .. math::
        L = \mathrm{mean}_i \Big( -x_i \cdot y_i / \tau + \log \sum_j e^{x_i \cdot n_j / \tau} \Big)

    It is `infonce_loss` with `decoupled=True`, and so, up to the log of the number of negatives, f-MICL with KL, a free
    critic and an optimal shift for each anchor; `fmicl_loss` with KL and `shift="optimal"` has one shift for all.

    Args:
        temperature: tau.
        x, y, negatives, labels, targets, label_negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.eye(4)
        >>> loss = dcl_loss(x, x, temperature=1.0)      # six negatives at 0 and the positive at 1
        >>> torch.isclose(loss, torch.tensor(6.0).log() - 1)
        tensor(True)
    """
    return infonce_loss(
        x, y, temperature=temperature, negatives=negatives, decoupled=True,
        labels=labels, targets=targets, label_negatives=label_negatives, **options,
    )  # fmt: skip


@_operator
@_without_autocast
def dhel_loss(
    x: Tensor,
    y: Tensor,
    *,
    temperature: Scalar = 0.3,
    both_views: bool = True,
    negatives: Tensor | None = None,
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""Decoupled hyperspherical energy loss (Koromilas et al., 2024): negatives of the anchor's own view alone.

    .. math::
        L = \mathrm{mean}_i \Big( -x_i \cdot y_i / \tau + \log \sum_{j \ne i} e^{x_i \cdot x_j / \tau}
            + \log \sum_{j \ne i} e^{y_i \cdot y_j / \tau} \Big)

    Without the last term (`both_views=False`) it is `dcl_loss` with "anchor", an upper bound of `fmicl_loss` with KL,
    `shift="optimal"` and the same negatives plus the log of their number.

    Args:
        temperature: tau.
        both_views: add the energy of the second views, as the authors do.
        negatives: explicit ones, (M, d), that replace the other anchors; there is no energy of second views then.
        x, y, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.eye(4)
        >>> loss = dhel_loss(x, x, temperature=1.0)      # three negatives at 0 in each view
        >>> torch.isclose(loss, 2 * torch.tensor(3.0).log() - 1)
        tensor(True)
    """
    require_positive_scalar("temperature", temperature)
    pairs = Pairs.prepare(x, y, "anchor" if negatives is None else negatives, **options)
    scale = 1 / temperature
    energy = pairs.row_logsumexp(scale)
    if both_views and negatives is None:
        energy = energy + pairs.of_second_views().row_logsumexp(scale)
    return pairs.mean_of_rows(energy - (scale - scale / 2 * pairs.squared_distances()))


@_operator
@_without_autocast
def icon_loss(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence = "kl",
    *,
    temperature: Scalar = 0.5,
    negatives: Negatives | Tensor = "both",
    labels: Tensor | None = None,
    targets: Tensor | None = None,
    label_negatives: LabelNegatives = "all",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""I-Con (Alshammari et al., 2025) with any f: the divergence of two conditional distributions for each anchor.

    .. math::
        L = \mathrm{mean}_i\, D_f\big(p(\cdot | i) \,\|\, q(\cdot | i)\big), \quad
        q(j | i) = \frac{e^{x_i \cdot y_j / \tau}}{e^{x_i \cdot y_i / \tau} + \sum_n e^{x_i \cdot n / \tau}}

    p(j | i) is 1 for the anchor's own positive, so D_f = q f(1 / q) + (1 - q) f(0) at q = q(i | i). With labels it is
    the share of j among the positives of i. With KL it is `infonce_loss`, minus the entropy of p if there are labels.
    With another f it is neither that nor `fmicl_loss`, which bounds the divergence of the joint distribution of both
    views from the product of its marginals: no identity ties the two.

    Args:
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`, with a finite f(0).
        temperature: tau.
        x, y, negatives, labels, targets, label_negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> torch.isclose(icon_loss(x, y, "kl"), infonce_loss(x, y, temperature=0.5))
        tensor(True)
    """
    divergence = make_divergence(divergence)
    require_finite_at_zero(divergence, "I-Con")
    require_positive_scalar("temperature", temperature)
    pairs = Pairs.prepare(
        x, y, negatives, targets=make_targets(labels, targets), label_negatives=label_negatives, **options
    )
    if pairs.labelled is not None:
        return pairs.mean_of_rows(_icon_rows(pairs.labelled, 1 / temperature, divergence))
    positive, others = _positive_and_others(pairs, 1 / temperature)
    return pairs.mean_of_rows(_divergence_from_point(divergence, torch.logaddexp(positive, others) - positive))


@_operator
@_without_autocast
def renyi_loss(
    x: Tensor,
    y: Tensor,
    *,
    order: float = 2.0,
    skew: float = 1 / 65536,
    temperature: Scalar = 0.5,
    negatives: Negatives | Tensor = "cross",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""RenyiCL (Lee and Shin, 2022): minus a variational bound of the skew Renyi divergence of order g and skew a.

    .. math::
        L = \frac{1}{g} \log \big( a\, E_{pos}[e^{g s}] + (1 - a)\, E_{neg}[e^{g s}] \big)
            - \frac{1}{g - 1} \log E_{pos}[e^{(g - 1) s}], \quad s = x \cdot y / \tau

    All in the log domain. Order 1 is the limit, with E_pos[s] as the second term: with skew 0 that is `fmicl_loss` with
    KL, alpha = 1 and `shift="optimal"`. Without skew, order g is an increasing function of f-MICL with Tsallis of that
    order and its best mu: if B is the largest bound over mu (alpha = 1), then
    L = -log(1 + (g - 1) B) / (g (g - 1)). With a skew, positives are mixed with the negatives of that bound.

    Args:
        order: g, positive.
        skew: a, in [0, 1); the authors' is 2^-16.
        temperature: tau.
        x, y, negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> kl = fmicl_loss(x, y, "kl", alpha=1.0, gamma=1.0, shift="optimal", negatives="cross")
        >>> torch.isclose(renyi_loss(x, y, order=1.0, skew=0.0, temperature=0.5), kl, atol=1e-5)
        tensor(True)
    """
    require_positive("order", order)
    require_positive_scalar("temperature", temperature)
    require_skew(skew)
    pairs = Pairs.prepare(x, y, negatives, **options)
    scale = 1 / temperature
    positive = scale - scale / 2 * pairs.squared_distances()
    mixture = math.log1p(-skew) + pairs.log_mean_exp(order * scale)
    if skew:
        mixture = torch.logaddexp(mixture, math.log(skew) + pairs.log_mean_exp_of_rows(order * positive))
    if order == 1:
        return mixture - pairs.mean_of_rows(positive)
    return mixture / order - pairs.log_mean_exp_of_rows((order - 1) * positive) / (order - 1)


@_operator
@_without_autocast
def rpc_loss(
    x: Tensor,
    y: Tensor,
    *,
    alpha: float = 1.0,
    beta: float = 0.005,
    gamma: float = 1.0,
    temperature: Scalar = 128.0,
    similarity: Literal["product", "cosine"] = "product",
    negatives: Negatives | Tensor = "both",
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""Relative predictive coding (Tsai et al., 2021).

    .. math::
        L = -\Big( E_{pos}[s] - \alpha E_{neg}[s] - \tfrac{\beta}{2} E_{pos}[s^2] - \tfrac{\gamma}{2} E_{neg}[s^2]
            \Big), \quad s = x \cdot y / \tau

    It is f-MICL's bound for the divergence f(u) = ((u - alpha)^2 / (beta u + gamma) - c) / 2, whose c makes f(1) = 0,
    with the critic s = (u - alpha) / (beta u + gamma): f'(u) = s - beta s^2 / 2, and
    f*(f'(u)) = alpha s + gamma s^2 / 2 + c / 2.
    With alpha = beta = gamma = 1 that f is half of Vincze-Le Cam's; with beta = 0, L is alpha / (2 gamma) times
    `fmicl_loss` with Pearson, this alpha and the cosine similarity of temperature tau alpha / (2 gamma).

    Args:
        alpha: weight of the negatives' s.
        beta: weight of the positives' s^2.
        gamma: weight of the negatives' s^2.
        temperature: tau.
        similarity: "product" of the embeddings as they are, as in the paper, or "cosine".
        x, y, negatives, options: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = 2 * torch.eye(3)
        >>> rpc_loss(x, x, alpha=1.0, beta=0.5, gamma=1.0, temperature=1.0)      # -(4 - 0.25 * 16)
        tensor(0.)
    """
    check_rpc(alpha, beta, gamma, temperature, similarity)
    if similarity == "product":
        options = {**options, "normalised": True}  # leave the embeddings as they are
    pairs = Pairs.prepare(x, y, negatives, **options)
    scale = 1 / temperature
    positive = scale * pairs.products()
    # alpha s + gamma s^2 / 2 = gamma / 2 (s + alpha / gamma)^2 - alpha^2 / (2 gamma)
    cost = gamma / 2 * pairs.mean(Square(scale, alpha / gamma)) - alpha**2 / (2 * gamma)
    return cost - pairs.mean_of_rows(positive - beta / 2 * positive.square())


@_operator
@_without_autocast
def siglip_loss(
    x: Tensor,
    y: Tensor,
    *,
    scale: Scalar = 10.0,
    bias: Scalar = -10.0,
    negatives: Tensor | None = None,
    **options: Unpack[ComputeOptions],
) -> Tensor:
    r"""SigLIP's pairwise sigmoid loss (Zhai et al., 2023).

    .. math::
        L = \frac{1}{N} \sum_i \Big( \log\big(1 + e^{-(t\, x_i \cdot y_i + b)}\big)
            + \sum_{j \ne i} \log\big(1 + e^{t\, x_i \cdot y_j + b}\big) \Big)

    It is f-MICL with JS: `fmicl_loss(x, y, "js", alpha=N - 1, gamma=t / 2, mu=e^(b + t), negatives="cross")` plus
    N log 2, as JS's score is log 2 - log(1 + e^-r), its penalty log(1 + e^r) - log 2, and r = b + t x.y.

    Args:
        scale: t; a tensor may have a gradient.
        bias: b, likewise.
        negatives: explicit ones, (M, d), that replace the other second views.
        x, y, options: as in `fmicl_loss`.

    Example:
        >>> import math, torch
        >>> x, y = torch.randn(8, 16), torch.randn(8, 16)
        >>> js = fmicl_loss(x, y, "js", alpha=7.0, gamma=5.0, mu=1.0, negatives="cross")
        >>> torch.isclose(siglip_loss(x, y, scale=10.0, bias=-10.0), js + 8 * math.log(2), atol=1e-5)
        tensor(True)
    """
    require_positive_scalar("scale", scale)
    pairs = Pairs.prepare(x, y, "cross" if negatives is None else negatives, **options)
    critic = Critic(JS(), bias, scale, free=False)
    positive = pairs.mean_of_rows(F.softplus(-critic.at_distance(pairs.squared_distances())))
    return positive + pairs.count() / pairs.world.total * (pairs.mean(critic) + math.log(2))


@_operator
@_without_autocast
def barlow_twins_loss(x: Tensor, y: Tensor, *, weight: float = 0.005, gather: bool = True) -> Tensor:
    r"""Barlow Twins (Zbontar et al., 2021).

    .. math::
        L = \sum_k (1 - C_{kk})^2 + w \sum_{k \ne l} C_{kl}^2, \quad
        C = \frac{1}{N} \sum_i \hat x_i \hat y_i^\top

    where each coordinate of x and y has mean 0 and variance 1 over the batch of all processes (with batch
    normalisation's 1e-5 added to the variance). Embeddings are not normalised to unit length, and there are no
    negatives.

    No identity ties it to f-MICL. What both have in common: the sum of all C_kl^2 is the mean over all pairs (i, j),
    also i = j, of (x_i.x_j)(y_i.y_j) of the standardised embeddings; were both views the same, that would be the
    spectral loss's cost of negatives, which is Pearson's.

    Args:
        weight: w, the weight of the off-diagonal terms.
        gather: take statistics over all processes, or with False over this one alone.
        x, y: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> round(float(barlow_twins_loss(x, x)), 6)      # uncorrelated, and equal in both views
        0.0
    """
    require_positive("weight", weight)
    x, y, world = prepare_views(x, y, gather)
    x, y = (standardise(view, world) for view in (x, y))
    correlation = batch_covariance(x, y, world)
    return (1 - correlation.diagonal()).square().sum() + weight * off_diagonal_squares(correlation)


@_operator
@_without_autocast
def vicreg_loss(
    x: Tensor,
    y: Tensor,
    *,
    variance: float = 25.0,
    invariance: float = 25.0,
    covariance: float = 1.0,
    gather: bool = True,
) -> Tensor:
    r"""VICReg (Bardes, Ponce and LeCun, 2022).

    .. math::
        L = \frac{\lambda}{N d} \sum_i |x_i - y_i|^2
            + \frac{\mu}{2 d} \sum_{z \in \{x, y\}} \sum_k \max\big(0, 1 - \sqrt{V_{kk}(z) + 10^{-4}}\big)
            + \frac{\nu}{d} \sum_{z \in \{x, y\}} \sum_{k \ne l} V_{kl}(z)^2

    with the covariance V(z) over the batch of all processes, of divisor N - 1. mu is `variance`, lambda `invariance`,
    nu `covariance`; the factor 1/2 is that of the authors' code. Embeddings are not normalised to unit length, and
    there are no negatives.

    No identity ties it to f-MICL. What both have in common: the sum of all V_kl^2 is (N / (N - 1))^2 times the mean
    over all pairs (i, j), also i = j, of (z_i.z_j)^2 of the centred embeddings: the spectral loss's cost of negatives,
    which is Pearson's.

    Args:
        variance: weight of the variance term.
        invariance: weight of the mean squared distance of the views.
        covariance: weight of the covariance term.
        gather: take statistics over all processes, or with False over this one alone.
        x, y: as in `fmicl_loss`.

    Example:
        >>> import torch
        >>> x = 2 * torch.tensor([[1.0, 1.0], [1.0, -1.0], [-1.0, 1.0], [-1.0, -1.0]])
        >>> vicreg_loss(x, x)      # the same views, of a large variance, uncorrelated
        tensor(0.)
    """
    for name, value in (("variance", variance), ("invariance", invariance), ("covariance", covariance)):
        require_positive(name, value)
    x, y, world = prepare_views(x, y, gather)
    distance = (x - y).square().sum() * (world.size / (world.total * x.shape[1]))
    loss = invariance * distance
    for centred in (centre(x, world), centre(y, world)):
        matrix = batch_covariance(centred, centred, world, correction=1)
        loss = loss + variance / 2 * torch.relu(1 - (matrix.diagonal() + 1e-4).sqrt()).mean()
        loss = loss + covariance / x.shape[1] * off_diagonal_squares(matrix)
    return loss


def check_rpc(alpha: float, beta: float, gamma: float, temperature: Scalar, similarity: str) -> None:
    """Raise ValueError for invalid settings of `rpc_loss`."""
    require_at_least_zero("alpha", alpha)
    require_at_least_zero("beta", beta)
    require_positive("gamma", gamma)
    require_positive_scalar("temperature", temperature)
    if similarity not in ("product", "cosine"):
        raise ValueError(f"similarity must be 'product' or 'cosine', got {similarity!r}")


@_without_autocast
def _composed_infonce(
    x: Tensor,
    y: Tensor,
    temperature: Scalar,
    negatives: Negatives | Tensor,
    decoupled: bool,
    targets: Targets | None,
    label_negatives: LabelNegatives,
    **options: Unpack[ComputeOptions],
) -> Tensor:
    require_positive_scalar("temperature", temperature)
    pairs = Pairs.prepare(x, y, negatives, targets=targets, label_negatives=label_negatives, **options)
    if pairs.labelled is not None:
        return pairs.mean_of_rows(_infonce_rows(pairs.labelled, 1 / temperature, decoupled))
    positive, others = _positive_and_others(pairs, 1 / temperature)
    denominator = others if decoupled else torch.logaddexp(positive, others)
    return pairs.mean_of_rows(denominator - positive)


def _positive_and_others(pairs: Pairs, scale: Scalar) -> tuple[Tensor, Tensor]:
    """scale * x_i.y_i and log sum_j exp(scale * x_i.n_j) of each anchor: (N,), or (2 N,) for "both"."""
    positive = scale - scale / 2 * pairs.squared_distances()
    others = pairs.row_logsumexp(scale)
    return positive.repeat_interleave(len(others) // len(positive)), others  # "both": once for x_i, once for y_i


def _infonce_rows(labelled: LabelledPairs, scale: Scalar, decoupled: bool) -> Tensor:
    """The mean over each anchor's positives of log(denominator) - logit; 0 without positives."""

    def rows(products: Tensor, chunk: Chunk) -> Tensor:
        logits = scale * products
        if decoupled or labelled.other_classes:
            others = masked_logsumexp(logits, chunk.negatives)[:, None]
            cost = others - logits if decoupled else F.softplus(others - logits)
        else:
            cost = masked_logsumexp(logits, chunk.negatives | (chunk.positives > 0))[:, None] - logits
        return (chunk.positives * cost).sum(dim=1)

    return labelled.map(rows)


def _icon_rows(labelled: LabelledPairs, scale: Scalar, divergence: Divergence) -> Tensor:
    """D_f(p || q) = sum_j q_j f(p_j / q_j) of each anchor; 0 without positives."""

    def rows(products: Tensor, chunk: Chunk) -> Tensor:
        mask = chunk.negatives | (chunk.positives > 0)
        logits = to_float64(scale * products)  # 1 / q and its square leave float32's range at small temperatures
        log_q = logits - masked_logsumexp(logits, mask)[:, None]
        p = chunk.positives.to(logits.dtype)
        positive = p > 0
        u = (torch.where(positive, p, 1.0).log() - log_q.masked_fill(~positive, 0.0)).exp()
        rest = log_q.exp().masked_fill(positive | ~mask, 0.0).sum(dim=1) * divergence.f(p.new_zeros(()))
        found = (p * divergence.f(u) / u).sum(dim=1) + rest
        return found.masked_fill(~positive.any(dim=1), 0.0).to(products.dtype)

    return labelled.map(rows)


def _divergence_from_point(divergence: Divergence, surprise: Tensor) -> Tensor:
    """D_f(p || q) = q f(1 / q) + (1 - q) f(0) of a p that is 1 at one outcome, at surprise = -log q: elementwise."""
    wide = to_float64(surprise)
    u = wide.exp()
    return (divergence.f(u) / u - torch.expm1(-wide) * divergence.f(wide.new_zeros(()))).to(surprise.dtype)
