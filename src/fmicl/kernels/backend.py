"""Interface of the pairwise-sum backends.

With unit rows x_i of x (N, d), columns o_j (M, d) and z_ij = offset + scale * x_i.o_j, a backend computes

    pair_rows             sum_ij penalty(z_ij)  and its gradient in x
    pair_both             the same, with the gradient in the columns too
    pair_symmetric        the same for x with itself without the diagonal, each pair in both orders
    largest_cosine        max_ij x_i.o_j
    pair_parameters       gradient of the sum in tensors that the penalty itself depends on
    logsumexp_rows        log sum_j exp(scale * x_i.o_j)  for each row
    logsumexp_with_terms  the same together with its summands, where these are small enough to keep
    logsumexp_gradient    gradient of the log-sum-exps in the rows
    logsumexp_both        the same, with the gradient in the columns too
    logsumexp_symmetric   the same for x with itself, each pair in both orders

without autograd; `fmicl.kernels.autograd` makes them differentiable and `fmicl.kernels.exchange` provides the columns
of other processes. Sums are float64 scalars; gradients have x's dtype or float32, whichever is wider.

`skip=k` leaves out the pairs j = i + k (a sample with itself, or with its other view); None leaves out none. `paired`
rows are the two views of each sample in turn, x_0 y_0 x_1 y_1 ...: a skipped pair then skips both views of the sample.
k and the number of rows of each process must be even.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from fmicl.utils.learnable import Scalar


class PairFunction(Protocol):
    """A scalar function of the affine image z = offset + scale * c of an inner product c."""

    @property
    def offset(self) -> Scalar:
        """Constant part of z. Backends get numbers: `fmicl.kernels.parameters.fold_scalars` folds tensors."""

    @property
    def scale(self) -> Scalar:
        """Factor of the inner product in z; likewise."""

    def penalty(self, z: Tensor) -> Tensor:
        """Penalty of pairs with this z, elementwise."""

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Penalty and its derivative in z, elementwise. They may share one tensor, and z may be overwritten."""


@dataclass(frozen=True)
class Square:
    """z^2 with z = scale * c: the penalty of the spectral contrastive loss."""

    scale: Scalar
    offset: Scalar = 0.0

    def penalty(self, z: Tensor) -> Tensor:
        """z^2."""
        return z.square()

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """z^2 and 2 z."""
        return z.square(), 2 * z


class Normaliser(NamedTuple):
    """Log-sum-exp of each row (or column) and its incoming gradient: both (N,)."""

    value: Tensor
    gradient: Tensor

    def shares(self) -> Tensor:
        """g e^-L, which times e^z is a pair's weight, where the scale `is_moderate`."""
        return self.gradient * torch.exp(-self.value)


def is_moderate(scale: float, dtype: torch.dtype) -> bool:
    """Whether e^z of unit rows neither overflows nor underflows, so that no maximum must be subtracted from z first.

    Half of the exponent's range is left for rows that aren't exactly unit and for sums of many terms.
    """
    return abs(scale) < -math.log(torch.finfo(dtype).tiny) / 2


class Backend(Protocol):
    """One implementation of the pairwise sums."""

    def cast_for_exchange(self, rows: Tensor) -> Tensor:
        """Rows in the dtype in which they are sent to other processes, who use them as columns."""

    def pair_rows(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """sum_ij penalty(z_ij), and sum_j penalty'(z_ij) scale o_j for each i if asked."""

    def pair_both(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """sum_ij penalty(z_ij), and its gradients in the rows and in the columns."""

    def pair_symmetric(self, x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """sum_{i != j} penalty(z_ij) of x with itself, and its gradient in x."""

    def largest_cosine(self, x: Tensor, columns: Tensor, skip: int | None) -> Tensor:
        """max_ij x_i.o_j, a scalar; -inf if every pair is skipped."""

    def pair_parameters(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Gradient of sum_ij penalty(z_ij) in each of the leaf tensors that `function.penalty` depends on."""

    def logsumexp_rows(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
    ) -> Tensor:
        """log sum_j exp(scale x_i.o_j): (N,)."""

    def logsumexp_with_terms(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Log-sum-exps (N,), terms e^(z_ij - c_i) for some c_i (N, M), and the sum of each row's terms (N,).

        None where keeping the terms doesn't pay.
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
        """Gradient of the rows' log-sum-exps in the rows, (N, d), and in the columns, (M, d)."""

    def logsumexp_symmetric(
        self, x: Tensor, scale: float, skip: int | None, rows: Normaliser, paired: bool = False
    ) -> Tensor:
        """Gradient in x, as row and as column, of the log-sum-exps of x with itself; skip is 0 or None."""
