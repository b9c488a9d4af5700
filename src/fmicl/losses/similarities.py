r"""Similarities: models of the log density ratio of two embeddings on the unit sphere.

A similarity is an affine function z = offset + scale * c of the inner product c = x.y of unit vectors:

    Gaussian   z = r = log(mu) - gamma |x - y|^2 = log(mu) - 2 gamma + 2 gamma c      u = e^r is the f-Gaussian kernel
    Cosine     z = v = c / temperature                                                a free critic, as in f-GAN,
                                                                                      or T itself, as in the paper

`similarity.critic(divergence, d)` binds a divergence to it: score and penalty of a pair with inner product c.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from fmicl.divergences import Divergence
from fmicl.divergences.critic import Critic
from fmicl.divergences.special import log_hyp0f1
from fmicl.utils.learnable import Scalar, log, require_positive_scalar
from fmicl.utils.validation import require_positive

__all__ = ["Cosine", "Gaussian", "Similarity", "log_mu", "make_similarity"]


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
