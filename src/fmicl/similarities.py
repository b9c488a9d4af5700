r"""What the log density ratio of two embeddings on the unit sphere is taken to be.

Every similarity here is a function of the inner product c = x.y of unit vectors, and hands a divergence
an affine function of it, z = offset + scale * c:

    Gaussian   z = r = log(mu) - gamma |x - y|^2 = log(mu) - 2 gamma + 2 gamma c      u = e^r is the f-Gaussian kernel
    Cosine     z = v = c / temperature                                                a free critic, as in f-GAN

`similarity.critic(divergence, d)` joins the two: what a pair with inner product c scores and costs.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fmicl.checks import require_positive
from fmicl.divergences import Divergence
from fmicl.special import log_hyp0f1

__all__ = ["Cosine", "Critic", "Gaussian", "Similarity", "log_mu", "require_curved"]


def require_curved(divergence: Divergence) -> None:
    """Refuse a divergence that no encoder can learn by.

    Raises:
        ValueError: its f is made of straight pieces.
    """
    if divergence.straight:
        raise ValueError(
            f"{divergence.name}: f is made of straight pieces (f'' = 0 between its kinks), so that a loss of it has no "
            "gradient to learn by; fmicl.estimators.f_mutual_information takes it"
        )


@dataclass(frozen=True)
class Critic:
    """A divergence bound to a similarity: scalar functions of z = offset + scale * c, with c = x.y.

    Attributes:
        divergence: the f-divergence.
        offset: of z.
        scale: of z; positive.
        free: True if z is a free critic value that `divergence.activation` maps into the domain (cosine),
            False if z is the log density ratio itself (Gaussian).
    """

    divergence: Divergence
    offset: float
    scale: float
    free: bool

    def __post_init__(self) -> None:
        require_curved(self.divergence)

    def z(self, c: Tensor) -> Tensor:
        """The affine function of the inner product."""
        return self.offset + self.scale * c

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """z of each row of x with the same row of y, both (N, d) and of unit length: (N,).

        By the squared distance, since 1 - c = |x - y|^2 / 2 loses no digits for pairs that are close.
        """
        return self.at_distance((x - y).square().sum(dim=-1))

    def at_distance(self, squared: Tensor) -> Tensor:
        """z of two points of the sphere at this squared distance."""
        return (self.offset + self.scale) - self.scale / 2 * squared

    def score(self, z: Tensor) -> Tensor:
        """T(z), what a positive pair earns."""
        return self.divergence.activation(z) if self.free else self.divergence.score(z)

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z)), what a negative pair costs."""
        return self.divergence.activated_penalty(z) if self.free else self.divergence.penalty(z)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z. They may be one tensor, and z may be overwritten."""
        if self.free:
            return self.divergence.activated_penalty(z), self.divergence.activated_penalty_slope(z)
        return self.divergence.penalty_and_slope(z)


class Similarity(ABC):
    """How two embeddings on the unit sphere are compared."""

    @abstractmethod
    def critic(self, divergence: Divergence, d: int) -> Critic:
        """What a pair of d-dimensional unit vectors scores and costs under this divergence."""


@dataclass(frozen=True)
class Gaussian(Similarity):
    r"""The f-Gaussian similarity: u = mu exp(-gamma |x - y|^2), gamma = 1 / (2 sigma^2).

    Args:
        gamma: inverse width of the kernel, as in scikit-learn's RBF kernel. A temperature tau on the
            inner product is gamma = 1 / (2 tau).
        mu: scale of the density ratio, or "normalised" for the one that makes u a density ratio on the
            sphere (see `log_mu`).

    Example:
        >>> import torch, fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("kl"), d=2)
        >>> x, y = torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 1.0]])
        >>> critic.pairs(x, y)
        tensor([-2.])
    """

    gamma: float = 1.0
    mu: float | Literal["normalised"] = 1.0

    def __post_init__(self) -> None:
        require_positive("gamma", self.gamma)
        if isinstance(self.mu, str):
            if self.mu != "normalised":
                raise ValueError(f"mu is a positive number or 'normalised', got {self.mu!r}")
        else:
            require_positive("mu", self.mu)

    def log_mu(self, d: int) -> float:
        """log(mu), which depends on the dimension where mu is "normalised"."""
        return log_mu(self.gamma, d) if isinstance(self.mu, str) else math.log(self.mu)

    def critic(self, divergence: Divergence, d: int) -> Critic:
        """z = r, the log density ratio."""
        return Critic(divergence, self.log_mu(d) - 2 * self.gamma, 2 * self.gamma, free=False)


@dataclass(frozen=True)
class Cosine(Similarity):
    """The cosine critic v = x.y / temperature, put into the conjugate's domain by an output activation.

    Args:
        temperature: smaller is sharper; SimCLR takes 0.5 on CIFAR-10.

    Example:
        >>> import torch, fmicl
        >>> critic = fmicl.Cosine(temperature=0.5).critic(fmicl.divergence("js"), d=2)
        >>> bool(critic.score(critic.z(torch.tensor(1.0))) < fmicl.divergence("js").supremum)
        True
    """

    temperature: float = 0.5

    def __post_init__(self) -> None:
        require_positive("temperature", self.temperature)

    def critic(self, divergence: Divergence, d: int) -> Critic:  # noqa: ARG002
        """z = v, a free critic."""
        return Critic(divergence, 0.0, 1 / self.temperature, free=True)


def log_mu(gamma: float, d: int) -> float:
    r"""Logarithm of the mu that makes u = mu exp(-gamma |x - y|^2) a density ratio on the sphere in R^d.

    With y given, u must integrate to one over uniform x: E[exp(-gamma |x - y|^2)] = 1 / mu. With k = 2 gamma
    this is mu = exp(k) C, 1/C = Gamma(d/2) (2/k)^(d/2-1) I_(d/2-1)(k) = 0F1(; d/2; (k/2)^2).

    Args:
        gamma: inverse width of the Gaussian kernel.
        d: dimension of the space whose unit sphere it is, at least 2.

    Returns:
        log mu, right to about 1e-10 for d up to 8192 and k up to 1e4.

    Example:
        >>> import math
        >>> k = 2.0  # in three dimensions the normaliser is sinh(k) / k
        >>> abs(log_mu(1.0, d=3) - (k - math.log(math.sinh(k) / k))) < 1e-12
        True
    """
    require_positive("gamma", gamma)
    if d < 2:
        raise ValueError(f"mu='normalised' needs embeddings of dimension 2 or more, got d={d}")
    # torch.compile warns of a cache that it passes by; what it compiles has the number in it
    series = log_hyp0f1.__wrapped__ if torch.compiler.is_dynamo_compiling() else log_hyp0f1
    return 2 * gamma - series(d / 2, gamma * gamma)
