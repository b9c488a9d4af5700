"""The contract that every implementation of the pairwise sums keeps.

With unit rows x_i of x (N, d) and o_j of other (M, d), and z_ij = offset + scale * x_i.o_j:

    pair_sum(x, other, function)       = sum_ij function.penalty(z_ij)                a scalar
    row_logsumexp(x, other, scale)     = log sum_j exp(scale * x_i.o_j)              (N,)

`skip=k` leaves out the pairs j = i + k (a sample with itself, or with its own other view); None leaves out none.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

__all__ = ["PairFunction"]


class PairFunction(Protocol):
    """A scalar function of the affine image z = offset + scale * c of an inner product c."""

    @property
    def offset(self) -> float:
        """Constant part of z."""

    @property
    def scale(self) -> float:
        """Factor of the inner product in z."""

    def penalty(self, z: Tensor) -> Tensor:
        """What a pair with this z costs, elementwise."""

    def penalty_slope(self, z: Tensor) -> Tensor:
        """Its derivative in z, elementwise."""
