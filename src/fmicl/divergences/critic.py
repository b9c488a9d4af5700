"""Critics: a divergence bound to an affine function of the inner product of two embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fmicl.divergences.base import Divergence, as_real
from fmicl.utils.learnable import Scalar


def require_curved(divergence: Divergence) -> None:
    """Raise ValueError for a divergence whose loss has no gradient: its f is piecewise linear."""
    if divergence.piecewise_linear:
        raise ValueError(
            f"{divergence.name}: f is piecewise linear (f'' = 0), so its loss has no gradient to train with; "
            "fmicl.information.f_mutual_information accepts it"
        )


def require_finite_at_zero(divergence: Divergence, user: str) -> Divergence:
    """Return a divergence whose f(0) is finite, as is then the divergence from a distribution without some outcomes.

    Raises:
        ValueError: f(0) is infinite; the message names the user.

    Example:
        >>> from fmicl import divergence
        >>> require_finite_at_zero(divergence("js"), "rotation prediction").name
        'js'
    """
    if not bool(divergence.f(0.0).isfinite()):
        raise ValueError(
            f"{user} needs a divergence with a finite f(0), but that of {divergence.name} is infinite: take kl or js"
        )
    return divergence


@dataclass(frozen=True)
class Critic:
    """A divergence bound to a similarity: scalar functions of z = offset + scale * c, with c = x.y.

    Attributes:
        divergence: the f-divergence.
        offset: z at c = 0; a tensor if it is learned.
        scale: slope of z, positive; likewise.
        free: True if z is a free critic value that `divergence.activation` maps into the domain (cosine),
            False if z is the log density ratio itself (Gaussian).
        activated: False if T is z itself, without the activation, for a free critic.
    """

    divergence: Divergence
    offset: Scalar
    scale: Scalar
    free: bool
    activated: bool = True

    def __post_init__(self) -> None:
        require_curved(self.divergence)

    def z(self, c: Tensor) -> Tensor:
        """The affine function of the inner product."""
        return self.offset + self.scale * c

    def pairs(self, x: Tensor, y: Tensor) -> Tensor:
        """z of each row of x with the same row of y, both (N, d) and of unit length: (N,).

        Computed from the squared distance: 1 - c = |x - y|^2 / 2 loses no digits for close pairs.
        """
        return self.at_distance((x - y).square().sum(dim=-1))

    def at_distance(self, squared: Tensor) -> Tensor:
        """z of two unit vectors at this squared distance."""
        return (self.offset + self.scale) - self.scale / 2 * squared

    @property
    def direct(self) -> bool:
        """Whether z is T itself, which may lie above the domain of f*."""
        return self.free and (not self.activated or self.divergence.supremum == math.inf)

    def score(self, z: Tensor) -> Tensor:
        """T(z), the reward of a positive pair."""
        return as_real(z) if self.direct else self.divergence.score(z)

    def score_slope(self, z: Tensor) -> Tensor:
        """T'(z)."""
        return torch.ones_like(z) if self.direct else self.divergence.score_slope(z)

    def score_difference(self, z: Tensor, reference: Tensor) -> Tensor:
        """T(z) - T(reference), without cancellation."""
        return z - reference if self.direct else self.divergence.score_difference(z, reference)

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z)), the cost of a negative pair; +inf above the domain of f*."""
        return self.divergence.conjugate(z) if self.direct else self.divergence.penalty(z)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z. May return one tensor twice, and may overwrite z."""
        if self.direct:
            return self.divergence.conjugate(z), self.divergence.conjugate_derivative(z)
        return self.divergence.penalty_and_slope(z)
