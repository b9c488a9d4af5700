"""Critics: a divergence bound to an affine function of the inner product of two embeddings."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fmicl.divergences.base import Divergence

__all__ = ["Critic", "require_curved"]


def require_curved(divergence: Divergence) -> None:
    """Refuse a divergence that no encoder can learn by.

    Raises:
        ValueError: its f is made of straight pieces.
    """
    if divergence.straight:
        raise ValueError(
            f"{divergence.name}: f is made of straight pieces (f'' = 0 between its kinks), so that a loss of it has no "
            "gradient to learn by; fmicl.information.f_mutual_information takes it"
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
