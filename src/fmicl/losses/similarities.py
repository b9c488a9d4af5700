r"""Similarities: models of the log density ratio of two embeddings on the unit sphere.

A similarity is an affine function z = offset + scale * c of the inner product c = x.y of unit vectors:

    Gaussian   z = r = log(mu) - gamma |x - y|^2 = log(mu) - 2 gamma + 2 gamma c      u = e^r is the f-Gaussian kernel
    Cosine     z = v = c / temperature                                                a free critic, as in f-GAN,
                                                                                      or T itself, as in the paper
    Fitted     z = c, r = h(c)                                                        h increasing, fitted to a run

`similarity.critic(divergence, d)` binds a divergence to it: score and penalty of a pair with inner product c.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmicl.divergences import Divergence
from fmicl.divergences.critic import Critic
from fmicl.divergences.special import log_hyp0f1
from fmicl.utils.learnable import Scalar, log, require_positive_scalar
from fmicl.utils.validation import require_positive


class Similarity(ABC):
    """Comparison of two embeddings on the unit sphere."""

    @abstractmethod
    def critic(self, divergence: Divergence, d: int) -> Critic:
        """Score and penalty of a pair of d-dimensional unit vectors under this divergence."""


@dataclass(frozen=True)
class Gaussian(Similarity):
    r"""The f-Gaussian similarity: u = mu exp(-gamma |x - y|^2), gamma = 1 / (2 sigma^2).

    Args:
        gamma: inverse width of the kernel, as in scikit-learn's RBF kernel. A temperature tau of the inner product is
            gamma = 1 / (2 tau).
        mu: scale of the density ratio, or "normalised" for the one that makes u a density ratio on the sphere
            (see `log_mu`).

    Both may be tensors with a gradient: a learned scale and bias of the log density ratio.

    Example:
        >>> import torch, fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("kl"), d=2)
        >>> x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> critic.pairs(x, y)
        tensor([-2.])
    """

    gamma: Scalar = 1.0
    mu: Scalar | Literal["normalised"] = 1.0

    def __post_init__(self) -> None:
        require_positive_scalar("gamma", self.gamma)
        if isinstance(self.mu, str):
            if self.mu != "normalised":
                raise ValueError(f"mu must be a positive number or 'normalised', got {self.mu!r}")
        else:
            require_positive_scalar("mu", self.mu)

    def log_mu(self, d: int) -> Scalar:
        """log(mu); it depends on the dimension if mu is "normalised"."""
        return log_mu(self.gamma, d) if isinstance(self.mu, str) else log(self.mu)

    def critic(self, divergence: Divergence, d: int) -> Critic:
        """z = r, the log density ratio."""
        return Critic(divergence, self.log_mu(d) - 2 * self.gamma, 2 * self.gamma, free=False)


@dataclass(frozen=True)
class Cosine(Similarity):
    r"""The cosine critic v = x.y / temperature, with or without an output activation.

    The paper (Table 4) takes the cosine as the critic itself, T = x.y: `activation="identity"` at temperature 1, with
    the loss -mean T(x_i, y_i) + alpha mean f*(T). It is not the default, since f* is infinite above f'(inf): JS allows
    no T above log 2, squared Hellinger, VLC and Neyman none above 1, reverse KL none above 0. There the loss is
    infinite and a run stops. The slope of f* is infinite at that end, which close negatives reach: the paper's VLC
    fails (10.00 %, chance). The default, f-GAN's output activation, keeps every value in the domain; where f'(inf) is
    infinite (KL, Pearson, Tsallis, Jeffrey) the two are the same.

    Args:
        temperature: smaller is sharper; SimCLR takes 0.5 on CIFAR-10. A tensor may have a gradient.
        activation: "f_gan" (`Divergence.activation`) or "identity".

    Example:
        >>> import torch, fmicl
        >>> critic = fmicl.Cosine(temperature=0.5).critic(fmicl.divergence("js"), d=2)
        >>> bool(critic.score(critic.z(torch.tensor(1.0))) < fmicl.divergence("js").supremum)
        True
        >>> paper = fmicl.Cosine(temperature=1.0, activation="identity").critic(fmicl.divergence("js"), d=2)
        >>> paper.score(torch.tensor(0.9)), paper.penalty(torch.tensor([0.6, 0.7]))      # log 2 is 0.693
        (tensor(0.9000), tensor([1.7266,    inf]))
    """

    temperature: Scalar = 0.5
    activation: Literal["f_gan", "identity"] = "f_gan"

    def __post_init__(self) -> None:
        require_positive_scalar("temperature", self.temperature)
        if self.activation not in ("f_gan", "identity"):
            raise ValueError(f"activation must be 'f_gan' or 'identity', got {self.activation!r}")

    def critic(self, divergence: Divergence, d: int) -> Critic:  # noqa: ARG002
        """z = v, a free critic."""
        return Critic(divergence, 0.0, 1 / self.temperature, free=True, activated=self.activation == "f_gan")


@dataclass(frozen=True)
class Fitted(Similarity):
    r"""An increasing function of the cosine as log density ratio, fitted to the positive pairs of a run.

    .. math:: r = h(c) = a + m_0 c + \sum_{k \ge 1} (m_k - m_{k-1}) \, w \log(1 + e^{(c - t_k) / w}), \qquad
        h'(c) = m_0 + \sum_{k \ge 1} (m_k - m_{k-1}) \, \sigma((c - t_k) / w) > 0

    a smooth broken line with slope m_k between the knots t_k and t_(k+1): for embeddings of which the paper's
    assumption, that h is linear, does not hold (`fmicl check-assumption`). Beyond the knots it is a straight line. It
    is constant in training. The tiled and the dense kernel compute it, at the cost of one softplus for each knot.

    Args:
        intercept: a.
        slopes: m_0, m_1, ..., positive.
        knots: t_1 < t_2 < ..., one fewer than slopes.
        width: w, over which one slope goes over into the next.

    Example:
        >>> import fmicl
        >>> bent = Fitted(0.0, slopes=(1.0, 3.0), knots=(0.0,), width=0.05)      # slope 1 below 0, and 3 above
        >>> bent.log_ratio(torch.tensor([-1.0, 1.0])).round(decimals=3)
        tensor([-1.,  3.])
        >>> loss = fmicl.FMICLLoss("js", alpha=2.0, similarity=bent)
    """

    intercept: float
    slopes: tuple[float, ...]
    knots: tuple[float, ...] = ()
    width: float = 0.1

    def __post_init__(self) -> None:
        if len(self.slopes) != len(self.knots) + 1:
            raise ValueError(f"there is one slope more than knots, got {len(self.slopes)} and {len(self.knots)}")
        if not all(0 < slope < math.inf for slope in self.slopes) or not math.isfinite(self.intercept):
            raise ValueError(f"slopes must be positive and everything finite, got {self.intercept} and {self.slopes}")
        if not all(before < after for before, after in pairwise(self.knots)):
            raise ValueError(f"knots must increase, got {self.knots}")
        require_positive("width", self.width)

    @classmethod
    def fit(
        cls, cosines: Sequence[float], log_ratios: Sequence[float], weights: Sequence[float], *, pieces: int = 8
    ) -> Fitted:
        """Weighted least squares over increasing functions, with slopes of at least a twentieth of the mean slope.

        Args:
            cosines: centres of bins.
            log_ratios: log density ratio of positive and independent pairs in each.
            weights: inverse variances of these.
            pieces: slopes at most; there are three bins for each at least.

        Raises:
            ValueError: there are fewer than 3 bins, or the log ratio does not increase on the whole.

        Example:
            >>> c = torch.linspace(-1, 1, 41).tolist()
            >>> found = Fitted.fit(c, [2 * v - 1 for v in c], [1.0] * 41)
            >>> found.log_ratio(torch.tensor([-1.0, 0.0, 1.0])).round(decimals=3)
            tensor([-3., -1.,  1.])
        """
        c, r, v = (torch.tensor(values, dtype=torch.float64) for values in (cosines, log_ratios, weights))
        if len(c) < 3 or not len(c) == len(r) == len(v):
            raise ValueError(f"needs at least 3 bins with as many values each, got {len(c)}, {len(r)} and {len(v)}")
        v = v / v.sum()
        mean_c, mean_r = float(v @ c), float(v @ r)
        variance = float(v @ (c - mean_c).square())
        slope = float(v @ ((c - mean_c) * (r - mean_r))) / variance if variance > 0 else 0.0
        if not slope > 0:
            raise ValueError(f"the log density ratio must increase with the cosine, but its mean slope is {slope:.3g}")
        pieces = max(1, min(pieces, len(c) // 3))
        low, high = float(c.min()), float(c.max())
        step = (high - low) / pieces
        knots = [low + step * k for k in range(1, pieces)]
        width = step / 4
        bends = [width * F.softplus((c - knot) / width) for knot in knots]
        columns = [before - after for before, after in pairwise([c, *bends, torch.zeros_like(c)])]
        design = torch.stack([column - v @ column for column in columns], dim=1)
        # a little smoothness keeps slopes apart from bins that hardly count
        differences = torch.diff(torch.eye(pieces, dtype=torch.float64), dim=0)
        system = design.T @ (v.unsqueeze(1) * design) + 1e-4 * variance * differences.T @ differences
        target = design.T @ (v * (r - mean_r))
        slopes = _bounded_least_squares(system, target, slope / 20)
        intercept = mean_r - float(torch.stack([v @ column for column in columns]) @ slopes)
        return cls(intercept, tuple(slopes.tolist()), tuple(knots), width)

    @classmethod
    def read(cls, path: Path) -> Fitted:
        """Fit to the density ratio in the assumption.json of `fmicl check-assumption`, or of a run folder.

        Raises:
            FileNotFoundError: there is none.
            ValueError: it has no density ratio, or one that doesn't increase.
        """
        file = path / "assumption.json" if path.is_dir() else path
        if not file.is_file():
            raise FileNotFoundError(f"there is no {file}: `fmicl check-assumption RUN` writes it")
        try:
            bins = json.loads(file.read_text(encoding="utf-8"))["density_ratio"]
            names = ("cosines", "log_ratios", "errors", "joint", "independent")
            rows = list(zip(*(bins[name] for name in names), strict=True))
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} has no density ratio of `fmicl check-assumption`: {error}") from error
        kept = [(c, r, 1 / e**2) for c, r, e, joint, independent in rows if min(joint, independent) >= _FEWEST]
        c, r, v = ([row[k] for row in kept] for k in range(3))
        return cls.fit(c, r, v)

    def log_ratio(self, c: Tensor) -> Tensor:
        """h(c)."""
        r = self.intercept + self.slopes[0] * c
        for (before, after), knot in zip(pairwise(self.slopes), self.knots, strict=True):
            r = r + (after - before) * self.width * F.softplus((c - knot) / self.width)
        return r

    def slope(self, c: Tensor) -> Tensor:
        """h'(c)."""
        found = torch.full_like(c, self.slopes[0])
        for (before, after), knot in zip(pairwise(self.slopes), self.knots, strict=True):
            found = found + (after - before) * torch.sigmoid((c - knot) / self.width)
        return found

    def critic(self, divergence: Divergence, d: int) -> Critic:  # noqa: ARG002
        """z = c, of which r = h(c) is the log density ratio."""
        return FittedCritic(divergence, 0.0, 1.0, free=False, similarity=self)


_FEWEST = 5
"""Pairs that a bin needs to count, as in `fmicl.information.assumption`."""


def _bounded_least_squares(system: Tensor, target: Tensor, floor: float) -> Tensor:
    """The m >= floor that minimises m'Am / 2 - b'm, a convex problem, by coordinate descent."""
    found = torch.full_like(target, floor)
    for _ in range(2000):
        before = found.clone()
        for k in range(len(found)):
            rest = target[k] - system[k] @ found + system[k, k] * found[k]
            found[k] = torch.clamp(rest / system[k, k], min=floor)
        if bool((found - before).abs().max() <= 1e-12 * found.abs().max()):
            break
    return found


@dataclass(frozen=True)
class FittedCritic(Critic):
    """Score and penalty of r = h(c), as functions of z = c."""

    similarity: Fitted = Fitted(0.0, (1.0,))

    def score(self, z: Tensor) -> Tensor:
        """T at h(z)."""
        return self.divergence.score(self.similarity.log_ratio(z))

    def score_slope(self, z: Tensor) -> Tensor:
        """T'(h(z)) h'(z)."""
        return self.divergence.score_slope(self.similarity.log_ratio(z)) * self.similarity.slope(z)

    def score_difference(self, z: Tensor, reference: Tensor) -> Tensor:
        """T(h(z)) - T(h(reference))."""
        return self.divergence.score_difference(*(self.similarity.log_ratio(value) for value in (z, reference)))

    def penalty(self, z: Tensor) -> Tensor:
        """The penalty at h(z)."""
        return self.divergence.penalty(self.similarity.log_ratio(z))

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, by the chain rule."""
        penalty, slope = self.divergence.penalty_and_slope(self.similarity.log_ratio(z))
        return penalty, slope * self.similarity.slope(z)


@overload
def log_mu(gamma: float, d: int) -> float: ...
@overload
def log_mu(gamma: Scalar, d: int) -> Scalar: ...


def log_mu(gamma: Scalar, d: int) -> Scalar:
    r"""Logarithm of the mu that makes u = mu exp(-gamma |x - y|^2) a density ratio on the sphere in R^d.

    For any y, u must integrate to one over uniform x: E[exp(-gamma |x - y|^2)] = 1 / mu. With k = 2 gamma this is
    mu = exp(k) C, 1/C = Gamma(d/2) (2/k)^(d/2-1) I_(d/2-1)(k) = 0F1(; d/2; (k/2)^2).

    Args:
        gamma: inverse width of the Gaussian kernel. The value of a tensor is read on the host.
        d: dimension of the embeddings, at least 2.

    Returns:
        log mu, with an error of about 1e-10 for d up to 8192 and k up to 1e4.

    Example:
        >>> import math
        >>> k = 2.0  # in three dimensions the normaliser is sinh(k) / k
        >>> abs(log_mu(1.0, d=3) - (k - math.log(math.sinh(k) / k))) < 1e-12
        True
    """
    if isinstance(gamma, Tensor):
        found: Tensor = _LogMu.apply(gamma, d)
        return found
    require_positive("gamma", gamma)
    if d < 2:
        raise ValueError(f"mu='normalised' needs embeddings of dimension 2 or more, got d={d}")
    # torch.compile warns of caches that it ignores; the compiled code has the number as a constant
    series = log_hyp0f1.__wrapped__ if torch.compiler.is_dynamo_compiling() else log_hyp0f1
    return 2 * gamma - series(d / 2, gamma * gamma)


class _LogMu(torch.autograd.Function):
    """`log_mu` of a learned gamma; d 0F1(; b; z) / dz = 0F1(; b + 1; z) / b."""

    @staticmethod
    def forward(ctx: Any, gamma: Tensor, d: int) -> Tensor:
        width, order = float(gamma), d / 2
        square = width * width
        value = log_mu(width, d)
        ctx.slope = 2 - 2 * width * math.exp(log_hyp0f1(order + 1, square) - log_hyp0f1(order, square)) / order
        return torch.full_like(gamma, value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.slope * grad, None


def make_similarity(
    similarity: str | Similarity, gamma: Scalar = 1.0, mu: Scalar | Literal["normalised"] = 1.0
) -> Similarity:
    """The similarity that the arguments of `fmicl_loss` describe.

    Raises:
        ValueError: an argument is invalid, or the similarity doesn't have it.

    Example:
        >>> make_similarity("cosine", gamma=5.0)
        Cosine(temperature=0.1, activation='f_gan')
        >>> make_similarity("cosine_identity", gamma=0.5)               # the paper's: T = x.y
        Cosine(temperature=1.0, activation='identity')
    """
    gaussian = Gaussian(gamma, mu)  # checks both numbers
    if similarity == "gaussian":
        return gaussian
    if isinstance(similarity, Similarity):
        default = Gaussian()
        values = (("gamma", gamma, default.gamma), ("mu", mu, default.mu))
        given = [f"{name}={value!r}" for name, value, usual in values if isinstance(value, Tensor) or value != usual]
        if given:
            raise ValueError(f"{similarity!r} has its own settings; leave out {' and '.join(given)}")
        return similarity
    if similarity in ("cosine", "cosine_identity"):
        if isinstance(mu, Tensor) or mu != 1.0:
            raise ValueError(f"the cosine similarity has no mu, got mu={mu!r}; only similarity='gaussian' does")
        return Cosine(1 / (2 * gamma), "f_gan" if similarity == "cosine" else "identity")
    raise ValueError(f"similarity must be 'gaussian', 'cosine', 'cosine_identity' or a Similarity, got {similarity!r}")
