"""The contract that every implementation of the pairwise sums keeps.

With unit rows x_i of x (N, d), columns o_j (M, d) and z_ij = offset + scale * x_i.o_j, a backend gives

    pair_rows           sum_ij penalty(z_ij)  and its gradient in x
    pair_both           the same, with the gradient in the columns too
    pair_symmetric      the same for x against itself without the diagonal, each pair seen from both sides
    logsumexp_rows      log sum_j exp(scale * x_i.o_j)  for each row
    logsumexp_kept      the same with what was summed up, where that is little enough to keep
    logsumexp_gradient  what the gradient of these logarithms sends to the rows
    logsumexp_both      the same, with what it sends to the columns
    logsumexp_symmetric the same for x against itself, each pair seen from both sides

as plain computations without autograd; `kernels.autograd` makes differentiable functions of them and
`kernels.columns` lets the columns come from other processes. Sums are float64 scalars, gradients have x's type or
float32, whichever is wider.

`skip=k` leaves out the pairs j = i + k (a sample with itself, or with its own other view); None leaves out none. Rows
that are `paired` are the two views of each sample in turn, x_0 y_0 x_1 y_1 ...: where one of a pair is left out, so is
the other. Then k, and the rows of each process, are even.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from torch import Tensor

__all__ = ["Backend", "Normaliser", "PairFunction", "Square"]


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

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, elementwise. They may be one tensor, and z may be overwritten."""


@dataclass(frozen=True)
class Square:
    """z^2 with z = scale * c: the spectral contrastive loss's penalty."""

    scale: float
    offset: float = 0.0

    def penalty(self, z: Tensor) -> Tensor:
        """z^2."""
        return z.square()

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z^2 and 2 z."""
        return z.square(), 2 * z


class Normaliser(NamedTuple):
    """A log-sum-exp of each row (or column), and the gradient that arrived at it: both (N,)."""

    value: Tensor
    gradient: Tensor


class Backend(Protocol):
    """One implementation of the contract."""

    def to_send(self, rows: Tensor) -> Tensor:
        """What another process needs to know of rows, to take them as columns."""

    def pair_rows(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """sum_ij penalty(z_ij), and sum_j penalty'(z_ij) scale o_j for each i if asked."""

    def pair_both(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """sum_ij penalty(z_ij), and its gradients in the rows and in the columns."""

    def pair_symmetric(self, x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """sum_{i != j} penalty(z_ij) of x with itself, and its whole gradient in x."""

    def logsumexp_rows(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
    ) -> Tensor:
        """log sum_j exp(scale x_i.o_j): (N,)."""

    def logsumexp_kept(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """The logarithms, (N,), with terms e^(z_ij - c_i) for some c, (N, M), and the sum of each row's terms, (N,).

        None where it is better not to keep them.
        """

    def logsumexp_gradient(
        self,
        x: Tensor,
        columns: Tensor,
        scale: float,
        skip: int | None,
        rows: Normaliser | None,
        others: Normaliser | None,
        paired: bool = False,
    ) -> Tensor:
        """sum_j (g_i e^(z_ij - L_i) [rows] + g_j e^(z_ij - L_j) [others]) scale o_j, z = scale x_i.o_j: (N, d)."""

    def logsumexp_both(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, rows: Normaliser
    ) -> tuple[Tensor, Tensor]:
        """What the gradient of log-sum-exps over rows sends to the rows and to the columns: (N, d) and (M, d)."""

    def logsumexp_symmetric(
        self, x: Tensor, scale: float, skip: int | None, rows: Normaliser, paired: bool = False
    ) -> Tensor:
        """What the gradient of log-sum-exps of x against itself sends to x, as row and as column; skip is 0 or None."""
