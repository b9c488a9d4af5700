"""Tiled pairwise sums in plain torch: any device and dtype, memory bounded by a few tiles.

The penalty has no normaliser, so one visit to a tile of z gives its contributions to loss and gradient: 4 N^2 d
operations in all. For x with itself only the tiles on and above the diagonal are visited, each for its rows and its
columns: 3 N^2 d.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from fmicl.kernels.backend import Normaliser, PairFunction
from fmicl.utils.numerics import exact_matmul

__all__ = [
    "count_cosines",
    "logsumexp_both",
    "logsumexp_gradient",
    "logsumexp_rows",
    "logsumexp_symmetric",
    "logsumexp_with_terms",
    "pair_both",
    "pair_rows",
    "pair_symmetric",
]

# Rows and columns of a tile: large enough for the full rate of matrix products, small enough that the few arrays of
# its size stay in a core's cache (CPU) or are a small part of the memory (GPU).
_CPU_TILE = 768
_GPU_TILE = 4096
_KEPT = 8  # tiles whose terms are kept for the backward pass on a CPU: 18 MiB, and faster than computing them again

P = ParamSpec("P")
R = TypeVar("R")


def _exact(function: Callable[P, R]) -> Callable[P, R]:
    """Run without autograd and with exact matrix products, where training lets torch round float32 to TF32."""

    @functools.wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        x = args[0] if args else kwargs["x"]
        assert isinstance(x, Tensor)
        with torch.no_grad(), exact_matmul(x.device):
            return function(*args, **kwargs)

    return wrapped


def _tile(x: Tensor) -> int:
    return _CPU_TILE if x.device.type == "cpu" else _GPU_TILE


def _spans(n: int, tile: int) -> Iterator[tuple[int, int]]:
    for start in range(0, n, tile):
        yield start, min(n, start + tile)


class _Tiles:
    """z = offset + scale * a b^T, written to one reused buffer."""

    def __init__(self, x: Tensor, columns: Tensor, offset: float, scale: float) -> None:
        self.buffer = x.new_empty(min(len(x), _tile(x)) * min(len(columns), _tile(x)))
        self.offset = x.new_full((), offset)  # on the device, as CUDA graph capture allows no copy from the CPU
        self.scale, self.beta = scale, int(offset != 0)

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        out = self.buffer[: len(a) * len(b)].view(len(a), len(b))
        return torch.addmm(self.offset, a, b.T, beta=self.beta, alpha=self.scale, out=out)


def _skipped(tile: Tensor, skip: int | None, row: int, column: int, paired: bool = False) -> list[Tensor]:
    """Entries with j = i + skip of a tile at (row, column), as views; both views of the sample if paired."""
    if skip is None:
        return []
    offset = row + skip - column
    found = [tile.diagonal(offset)] if _meets(tile, offset) else []
    if paired:  # row and offset are even: also the next column of even rows, and the previous one of odd rows
        found += [tile.diagonal(offset + 1)[max(0, -offset - 1) % 2 :: 2]] if _meets(tile, offset + 1) else []
        found += [tile.diagonal(offset - 1)[(max(0, 1 - offset) + 1) % 2 :: 2]] if _meets(tile, offset - 1) else []
    return found


def _meets(tile: Tensor, offset: int) -> bool:
    return -tile.shape[0] < offset < tile.shape[1]


def cast_for_exchange(rows: Tensor) -> Tensor:
    """Rows in full precision."""
    return rows


@_exact
def pair_rows(
    x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, gradient: bool
) -> tuple[Tensor, Tensor | None]:
    """sum_ij penalty(z_ij), and its gradient in the rows x."""
    grad = torch.zeros_like(x) if gradient else None
    return _rectangle(x, columns, function, skip, grad, None), grad


@_exact
def pair_both(x: Tensor, columns: Tensor, function: PairFunction, skip: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """sum_ij penalty(z_ij), and its gradients in the rows and in the columns, from the same tiles."""
    grad_x, grad_columns = torch.zeros_like(x), torch.zeros_like(columns)
    return _rectangle(x, columns, function, skip, grad_x, grad_columns), grad_x, grad_columns


def _rectangle(
    x: Tensor,
    columns: Tensor,
    function: PairFunction,
    skip: int | None,
    grad_x: Tensor | None,
    grad_columns: Tensor | None,
) -> Tensor:
    """The sum over all tiles; gradients are added to what is given."""
    x, columns = x.contiguous(), columns.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, columns, function.offset, function.scale)
    total = _zero(x)
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(columns), tile):
            a, b = x[i:i_end], columns[j:j_end]
            value, slope = _evaluate(function, tiles(a, b), grad_x is not None, skip, i, j)
            total += value
            if grad_x is not None and slope is not None:
                grad_x[i:i_end].addmm_(slope, b, alpha=function.scale)
                if grad_columns is not None:
                    grad_columns[j:j_end].addmm_(slope.T, a, alpha=function.scale)
    return total


def _zero(x: Tensor) -> Tensor:
    """A float64 scalar, where the device has them."""
    return torch.zeros((), dtype=torch.float32 if x.device.type == "mps" else torch.float64, device=x.device)


@_exact
def pair_symmetric(x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """sum_{i != j} penalty(z_ij) of x with itself, and its gradient: tiles above the diagonal count twice."""
    x = x.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, x, function.offset, function.scale)
    total = _zero(x)
    grad = torch.zeros_like(x) if gradient else None
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(x), tile):
            if j < i:
                continue
            a, b = x[i:i_end], x[j:j_end]
            value, slope = _evaluate(function, tiles(a, b), gradient, 0, i, j)
            total += value if i == j else 2 * value
            if grad is not None and slope is not None:
                # both orders of a pair: 2 slope x_j for row i, and 2 slope x_i for row j
                grad[i:i_end].addmm_(slope, b, alpha=2 * function.scale)
                if i != j:
                    grad[j:j_end].addmm_(slope.T, a, alpha=2 * function.scale)
    return total, grad


def _evaluate(
    function: PairFunction, z: Tensor, gradient: bool, skip: int | None, row: int, column: int
) -> tuple[Tensor, Tensor | None]:
    """Sum of a tile's penalties, and its slopes, without the skipped pairs."""
    if gradient:
        penalty, slope = function.penalty_and_slope(z)
    else:
        penalty, slope = function.penalty(z), None
    for values in (penalty, slope):
        if values is not None:
            for skipped in _skipped(values, skip, row, column):
                skipped.zero_()
    return penalty.sum(), slope


@_exact
def count_cosines(x: Tensor, columns: Tensor, skip: int | None, bins: int) -> Tensor:
    """Histogram of the inner products x_i.o_j over [-1, 1]: (bins,), float64. CUDA graphs can capture it."""
    x, columns = x.contiguous(), columns.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, columns, 0.0, 1.0)
    counts = _zero(x).expand(bins).clone()
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(columns), tile):
            cosines = tiles(x[i:i_end], columns[j:j_end]).clamp_(-1, 1)
            for skipped in _skipped(cosines, skip, i, j):
                skipped.fill_(2.0)  # outside of the histogram
            counts += torch.histc(cosines, bins, -1, 1)
    return counts


@_exact
def logsumexp_rows(x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False) -> Tensor:
    """log sum_j exp(scale x_i.o_j), by a running sum, and a running maximum where needed."""
    x, columns = x.contiguous(), columns.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, columns, 0.0, scale)
    total = x.new_zeros(len(x))
    if _moderate(scale, x.dtype):
        for i, i_end in _spans(len(x), tile):
            for j, j_end in _spans(len(columns), tile):
                total[i:i_end] += _terms(tiles(x[i:i_end], columns[j:j_end]), skip, i, j, paired).sum(dim=1)
        return total.log()
    peak = x.new_full((len(x),), -torch.inf)
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(columns), tile):
            z = tiles(x[i:i_end], columns[j:j_end])
            for skipped in _skipped(z, skip, i, j, paired):
                skipped.fill_(-torch.inf)
            higher = torch.maximum(peak[i:i_end], z.amax(dim=1))
            # the maximum is -inf, and can't be subtracted, for a row whose pairs so far were all skipped
            shift = torch.where(higher == -torch.inf, 0.0, higher)
            share = z.sub_(shift[:, None]).exp_().sum(dim=1)
            total[i:i_end] = total[i:i_end] * torch.exp(peak[i:i_end] - shift) + share
            peak[i:i_end] = higher
    return peak + total.log()


def _moderate(scale: float, dtype: torch.dtype) -> bool:
    """Whether e^z of unit rows neither overflows nor underflows, so that no maximum must be subtracted from z first.

    Half of the exponent's range is left for rows that aren't exactly unit and for sums of many terms.
    """
    return abs(scale) < -math.log(torch.finfo(dtype).tiny) / 2


def _terms(z: Tensor, skip: int | None, row: int, column: int, paired: bool) -> Tensor:
    """e^z in place, 0 for skipped pairs."""
    z.exp_()
    for skipped in _skipped(z, skip, row, column, paired):
        skipped.zero_()
    return z


@_exact
def logsumexp_with_terms(
    x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-sum-exps with their terms and sums, for a matrix of a few tiles on a CPU."""
    if x.device.type != "cpu" or len(x) * len(columns) > _KEPT * _CPU_TILE**2 or not _moderate(scale, x.dtype):
        return None
    terms = _terms(torch.addmm(x.new_zeros(()), x, columns.T, beta=0, alpha=scale), skip, 0, 0, paired)
    total = terms.sum(dim=1)
    return total.log(), terms, total


@_exact
def logsumexp_gradient(
    x: Tensor,
    columns: Tensor,
    scale: float,
    skip: int | None,
    rows: Normaliser | None,
    others: Normaliser | None,
    paired: bool = False,
) -> Tensor:
    """Gradient in the rows x of log-sum-exps over rows and over columns."""
    x, columns = x.contiguous(), columns.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, columns, 0.0, scale)
    spare = torch.empty_like(tiles.buffer)
    grad = torch.zeros_like(x)
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(columns), tile):
            a, b = x[i:i_end], columns[j:j_end]
            z = tiles(a, b)
            second = None
            if rows is not None and others is not None:
                second = torch.sub(z, others.value[None, j:j_end], out=spare[: z.numel()].view_as(z))
                second.exp_().mul_(others.gradient[None, j:j_end])
            value, factor = (
                (rows.value[i:i_end, None], rows.gradient[i:i_end, None])
                if rows is not None
                else _columns_of(others, j, j_end)
            )
            weight = z.sub_(value).exp_().mul_(factor)
            if second is not None:
                weight += second
            for skipped in _skipped(weight, skip, i, j, paired):
                skipped.zero_()
            grad[i:i_end].addmm_(weight, b, alpha=scale)
    return grad


def _columns_of(others: Normaliser | None, start: int, end: int) -> tuple[Tensor, Tensor]:
    if others is None:
        raise ValueError("a gradient needs normalisers of rows, of columns or of both; got neither")
    return others.value[None, start:end], others.gradient[None, start:end]


@_exact
def logsumexp_symmetric(x: Tensor, scale: float, skip: int | None, rows: Normaliser, paired: bool = False) -> Tensor:
    """Gradient in x of the log-sum-exps of x with itself: tiles above the diagonal count for rows and columns."""
    x = x.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, x, 0.0, scale)
    spare = torch.empty_like(tiles.buffer)
    grad = torch.zeros_like(x)
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(x), tile):
            if j < i:
                continue
            a, b = x[i:i_end], x[j:j_end]
            z = tiles(a, b)
            by_column = torch.sub(z, rows.value[None, j:j_end], out=spare[: z.numel()].view_as(z))
            by_column.exp_().mul_(rows.gradient[None, j:j_end])
            weight = z.sub_(rows.value[i:i_end, None]).exp_().mul_(rows.gradient[i:i_end, None]).add_(by_column)
            for skipped in _skipped(weight, skip, i, j, paired):
                skipped.zero_()
            grad[i:i_end].addmm_(weight, b, alpha=scale)
            if i != j:
                grad[j:j_end].addmm_(weight.T, a, alpha=scale)
    return grad


@_exact
def logsumexp_both(
    x: Tensor, columns: Tensor, scale: float, skip: int | None, rows: Normaliser
) -> tuple[Tensor, Tensor]:
    """Gradient of the rows' log-sum-exps in the rows and in the columns, from the same tiles."""
    x, columns = x.contiguous(), columns.contiguous()
    tile = _tile(x)
    tiles = _Tiles(x, columns, 0.0, scale)
    grad_x, grad_columns = torch.zeros_like(x), torch.zeros_like(columns)
    for i, i_end in _spans(len(x), tile):
        for j, j_end in _spans(len(columns), tile):
            a, b = x[i:i_end], columns[j:j_end]
            weight = tiles(a, b).sub_(rows.value[i:i_end, None]).exp_().mul_(rows.gradient[i:i_end, None])
            for skipped in _skipped(weight, skip, i, j):
                skipped.zero_()
            grad_x[i:i_end].addmm_(weight, b, alpha=scale)
            grad_columns[j:j_end].addmm_(weight.T, a, alpha=scale)
    return grad_x, grad_columns
