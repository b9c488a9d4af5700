"""Tiled pairwise sums in plain torch: any device and dtype, memory bounded by a few tiles.

The penalty has no normaliser, so one visit to a tile of z gives its contributions to loss and gradient: 4 N^2 d
operations in all. For x with itself only the tiles on and above the diagonal are visited, each for its rows and its
columns: 3 N^2 d.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from fmicl.kernels.backend import Normaliser, PairFunction, is_moderate
from fmicl.utils.numerics import exact_matmul

# Rows and columns of a tile: large enough for the full rate of matrix products, small enough that the few arrays of
# its size stay in a core's cache (CPU) or are a small part of the memory (GPU).
_CPU_TILE = 768
_GPU_TILE = 4096
_KEPT = 8  # tiles whose terms are kept for the backward pass on a CPU: 18 MiB, and faster than computing them again

_KEPT_TERMS = 2**24  # of sums of exponentials, likewise: 64 MiB

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


def is_one_tile(x: Tensor, columns: Tensor) -> bool:
    """Whether the matrix of all pairs is a single tile."""
    return max(x.shape[0], columns.shape[0]) <= _tile(x)


class _Tiles:
    """Tiles of z = offset + scale * x columns^T, written to one reused buffer; columns=None is x itself.

    Iteration yields (rows, columns, z): two slices and a tile, of x with itself only on and above the diagonal.
    """

    def __init__(self, x: Tensor, columns: Tensor | None, offset: float, scale: float) -> None:
        self.x = x.contiguous()
        self.columns = self.x if columns is None else columns.contiguous()
        self.symmetric, self.size = columns is None, _tile(x)
        self.offset = x.new_full((), offset)  # on the device, as CUDA graph capture allows no copy from the CPU
        self.scale, self.beta = scale, int(offset != 0)

    @functools.cached_property
    def buffer(self) -> Tensor:
        """Memory of a tile."""
        return self.x.new_empty(min(len(self.x), self.size) * min(len(self.columns), self.size))

    def __iter__(self) -> Iterator[tuple[slice, slice, Tensor]]:
        if max(len(self.x), len(self.columns)) <= self.size:  # a small batch: slicing takes longer than its products
            z = torch.addmm(self.offset, self.x, self.columns.T, beta=self.beta, alpha=self.scale)
            yield slice(0, len(self.x)), slice(0, len(self.columns)), z
            return
        for rows, columns in self.places():
            a, b = self.x[rows], self.columns[columns]
            out = self.buffer[: len(a) * len(b)].view(len(a), len(b))
            yield rows, columns, torch.addmm(self.offset, a, b.T, beta=self.beta, alpha=self.scale, out=out)

    def places(self) -> Iterator[tuple[slice, slice]]:
        """Rows and columns of each tile."""
        n, m = len(self.x), len(self.columns)
        for i in range(0, n, self.size):
            for j in range(i if self.symmetric else 0, m, self.size):
                yield slice(i, min(i + self.size, n)), slice(j, min(j + self.size, m))


def _skipped(tile: Tensor, skip: int | None, rows: slice, columns: slice, paired: bool = False) -> list[Tensor]:
    """Entries with j = i + skip of a tile, as views; both views of the sample if paired."""
    if skip is None:
        return []
    offset = rows.start + skip - columns.start
    found = [tile.diagonal(offset)] if _meets(tile, offset) else []
    if paired:  # rows.start and offset are even: also the next column of even rows, and the previous one of odd rows
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
    return accumulate_pairs(x, columns, function, skip, grad, None), grad


@_exact
def pair_both(x: Tensor, columns: Tensor, function: PairFunction, skip: int | None) -> tuple[Tensor, Tensor, Tensor]:
    """sum_ij penalty(z_ij), and its gradients in the rows and in the columns, from the same tiles."""
    grad_x, grad_columns = torch.zeros_like(x), torch.zeros_like(columns)
    return accumulate_pairs(x, columns, function, skip, grad_x, grad_columns), grad_x, grad_columns


@_exact
def pair_symmetric(x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
    """sum_{i != j} penalty(z_ij) of x with itself, and its gradient: tiles above the diagonal count twice."""
    grad = torch.zeros_like(x, memory_format=torch.contiguous_format) if gradient else None
    return accumulate_pairs(x, None, function, 0, grad, None), grad


def accumulate_pairs(
    x: Tensor,
    columns: Tensor | None,
    function: PairFunction,
    skip: int | None,
    grad_x: Tensor | None,
    grad_columns: Tensor | None,
    weight: float = 1.0,
) -> Tensor:
    """sum_ij penalty(z_ij), a float64 scalar; weight times its gradients are added to the given tensors.

    To be called without autograd and with exact matrix products.

    Args:
        x: rows, (N, d).
        columns: (M, d); None is x with itself, whose gradient is that of rows and columns.
        function: penalty of a pair.
        skip: leave out the pairs j = i + skip; 0 or None for x with itself.
        grad_x: (N, d), or None for the sum alone.
        grad_columns: (M, d), or None.
        weight: factor of the gradients.
    """
    offset, scale = _numbers(function)
    symmetric = columns is None
    factor = (2 if symmetric else 1) * weight * scale
    other = x if columns is None else columns
    if is_one_tile(x, other):  # without the time that tiles take in Python
        z = torch.addmm(x.new_full((), offset), x, other.T, beta=int(offset != 0), alpha=scale)
        everything = slice(0, x.shape[0]), slice(0, other.shape[0])
        total, slope = _evaluate(function, z, grad_x is not None, skip, *everything)
        if grad_x is not None and slope is not None:
            grad_x.addmm_(slope, other, alpha=factor)
            if grad_columns is not None:
                grad_columns.addmm_(slope.T, x, alpha=factor)
        return total if x.device.type == "mps" else total.double()
    tiles = _Tiles(x, columns, offset, scale)
    summed: Tensor | None = None
    for i, j, z in tiles:
        value, slope = _evaluate(function, z, grad_x is not None, skip, i, j)
        value = value.double() if x.device.type != "mps" else value
        mirrored = symmetric and i != j  # both orders of a pair: slope x_j for row i, and slope x_i for row j
        value = 2 * value if mirrored else value
        summed = value if summed is None else summed + value
        if grad_x is not None and slope is not None:
            grad_x[i].addmm_(slope, tiles.columns[j], alpha=factor)
            if mirrored:
                grad_x[j].addmm_(slope.T, tiles.x[i], alpha=factor)
            elif grad_columns is not None:
                grad_columns[j].addmm_(slope.T, tiles.x[i], alpha=factor)
    assert summed is not None
    return summed


@_exact
def pair_parameters(
    x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, parameters: Sequence[Tensor]
) -> list[Tensor]:
    """Gradient of sum_ij penalty(z_ij) in the parameters of the penalty, by automatic differentiation of each tile."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for i, j, z in _Tiles(x, columns, *_numbers(function)):
        counted = torch.ones_like(z)
        for skipped in _skipped(counted, skip, i, j):
            skipped.zero_()
        for skipped in _skipped(z, skip, i, j):
            skipped.fill_(function.offset)  # the penalty of a sample with itself may overflow
        with torch.enable_grad():
            values = function.penalty(z)
        # the graph may reach beyond this tile, into expressions that were computed once: keep it
        shares = torch.autograd.grad(values, list(parameters), counted, retain_graph=True, allow_unused=True)
        for sum_, share in zip(total, shares, strict=True):
            if share is not None:
                sum_ += share
    return total


def _numbers(function: PairFunction) -> tuple[float, float]:
    """Offset and scale, which are numbers here."""
    assert not isinstance(function.offset, Tensor)
    assert not isinstance(function.scale, Tensor)
    return function.offset, function.scale


def _evaluate(
    function: PairFunction, z: Tensor, gradient: bool, skip: int | None, rows: slice, columns: slice
) -> tuple[Tensor, Tensor | None]:
    """Sum of a tile's penalties, and its slopes, without the skipped pairs."""
    if gradient:
        penalty, slope = function.penalty_and_slope(z)
    else:
        penalty, slope = function.penalty(z), None
    for values in (penalty,) if slope is None or slope is penalty else (penalty, slope):
        for skipped in _skipped(values, skip, rows, columns):
            skipped.zero_()
    return penalty.sum(), slope


@_exact
def largest_cosine(x: Tensor, columns: Tensor, skip: int | None) -> Tensor:
    """The largest inner product x_i.o_j, a scalar; -inf if every pair is skipped. CUDA graphs can capture it."""
    largest = x.new_full((), -torch.inf)
    for i, j, z in _Tiles(x, columns, 0.0, 1.0):
        for skipped in _skipped(z, skip, i, j):
            skipped.fill_(-torch.inf)
        largest = torch.maximum(largest, z.max())
    return largest


@_exact
def logsumexp_rows(x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False) -> Tensor:
    """log sum_j exp(scale x_i.o_j), by a running sum, and a running maximum where needed."""
    tiles = _Tiles(x, columns, 0.0, scale)
    total = x.new_zeros(len(x))
    if is_moderate(scale, x.dtype):
        for i, j, z in tiles:
            total[i] += _terms(z, skip, i, j, paired).sum(dim=1)
        return total.log()
    peak = x.new_full((len(x),), -torch.inf)
    for i, j, z in tiles:
        for skipped in _skipped(z, skip, i, j, paired):
            skipped.fill_(-torch.inf)
        higher = torch.maximum(peak[i], z.amax(dim=1))
        # the maximum is -inf, and can't be subtracted, for a row whose pairs so far were all skipped
        shift = torch.where(higher == -torch.inf, 0.0, higher)
        share = z.sub_(shift[:, None]).exp_().sum(dim=1)
        total[i] = total[i] * torch.exp(peak[i] - shift) + share
        peak[i] = higher
    return peak + total.log()


def _terms(z: Tensor, skip: int | None, rows: slice, columns: slice, paired: bool) -> Tensor:
    """e^z in place, 0 for skipped pairs."""
    z.exp_()
    for skipped in _skipped(z, skip, rows, columns, paired):
        skipped.zero_()
    return z


@_exact
def logsumexp_with_terms(
    x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
) -> tuple[Tensor, Tensor, Tensor] | None:
    """Log-sum-exps with their terms and sums, for a matrix of a few tiles on a CPU."""
    if x.device.type != "cpu" or len(x) * len(columns) > _KEPT * _CPU_TILE**2 or not is_moderate(scale, x.dtype):
        return None
    z = torch.addmm(x.new_zeros(()), x, columns.T, beta=0, alpha=scale)
    terms = _terms(z, skip, slice(0, len(x)), slice(0, len(columns)), paired)
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
    if rows is None and others is None:
        raise ValueError("a gradient needs normalisers of rows, of columns or of both; got neither")
    tiles = _Tiles(x, columns, 0.0, scale)
    weigh = _SoftmaxWeights(tiles, scale, rows, others)
    grad = torch.zeros_like(tiles.x)
    for i, j, z in tiles:
        weight = weigh(z, i, j)
        for skipped in _skipped(weight, skip, i, j, paired):
            skipped.zero_()
        grad[i].addmm_(weight, tiles.columns[j], alpha=scale)
    return grad


class _SoftmaxWeights:
    """g_i e^(z_ij - L_i) [rows] + g_j e^(z_ij - L_j) [others] of a tile, in place.

    Where the scale `is_moderate`, e^z (g_i e^-L_i + g_j e^-L_j): one exponential a pair.
    """

    def __init__(self, tiles: _Tiles, scale: float, rows: Normaliser | None, others: Normaliser | None) -> None:
        self.rows, self.others = rows, others
        self.shares: tuple[Tensor | None, Tensor | None] | None = None
        if is_moderate(scale, tiles.x.dtype):
            of_rows = None if rows is None else rows.shares()
            of_others = of_rows if others is rows else None if others is None else others.shares()
            self.shares = of_rows, of_others
        self.spare = tiles.x if rows is None or others is None else torch.empty_like(tiles.buffer)

    def __call__(self, z: Tensor, i: slice, j: slice) -> Tensor:
        rows, others = self.rows, self.others
        out = z if rows is None or others is None else self.spare[: z.numel()].view_as(z)
        if self.shares is not None:
            of_rows, of_others = self.shares
            z.exp_()
            if of_others is None:
                assert of_rows is not None
                return z.mul_(of_rows[i, None])
            return z.mul_(of_others[j] if of_rows is None else torch.add(of_rows[i, None], of_others[j], out=out))
        by_column = None
        if others is not None:
            by_column = torch.sub(z, others.value[j], out=out).exp_().mul_(others.gradient[j])
        if rows is None:
            assert by_column is not None
            return by_column
        weight = z.sub_(rows.value[i, None]).exp_().mul_(rows.gradient[i, None])
        return weight if by_column is None else weight.add_(by_column)


@_exact
def logsumexp_symmetric(x: Tensor, scale: float, skip: int | None, rows: Normaliser, paired: bool = False) -> Tensor:
    """Gradient in x of the log-sum-exps of x with itself: tiles above the diagonal count for rows and columns."""
    tiles = _Tiles(x, None, 0.0, scale)
    weigh = _SoftmaxWeights(tiles, scale, rows, rows)
    grad = torch.zeros_like(tiles.x)
    for i, j, z in tiles:
        weight = weigh(z, i, j)
        for skipped in _skipped(weight, skip, i, j, paired):
            skipped.zero_()
        grad[i].addmm_(weight, tiles.x[j], alpha=scale)
        if i != j:
            grad[j].addmm_(weight.T, tiles.x[i], alpha=scale)
    return grad


@_exact
def logsumexp_both(
    x: Tensor, columns: Tensor, scale: float, skip: int | None, rows: Normaliser
) -> tuple[Tensor, Tensor]:
    """Gradient of the rows' log-sum-exps in the rows and in the columns, from the same tiles."""
    tiles = _Tiles(x, columns, 0.0, scale)
    grad_x, grad_columns = torch.zeros_like(tiles.x), torch.zeros_like(tiles.columns)
    weigh = _SoftmaxWeights(tiles, scale, rows, None)
    for i, j, z in tiles:
        weight = weigh(z, i, j)
        for skipped in _skipped(weight, skip, i, j):
            skipped.zero_()
        grad_x[i].addmm_(weight, tiles.columns[j], alpha=scale)
        grad_columns[j].addmm_(weight.T, tiles.x[i], alpha=scale)
    return grad_x, grad_columns


class Exponentials(NamedTuple):
    """Sums of e^z of each row, and the terms themselves, tile by tile, where there are few enough to keep."""

    sums: Tensor
    tiles: list[Tensor] | None


def sums_of_exponentials(
    x: Tensor, columns: Tensor | None, scale: float, skips: Sequence[int], keep: bool
) -> Exponentials:
    """sum_j e^(scale x_i.o_j) of each row, without the pairs j = i + k for k in skips, where scale `is_moderate`.

    To be called without autograd and with exact matrix products.

    Args:
        x: rows, (N, d).
        columns: (M, d); None is x with itself: tiles on and above the diagonal serve both sides, and so do skips.
        scale: factor of the inner products.
        skips: diagonals to leave out; for x with itself, both k and -k.
        keep: keep the terms for `exponential_gradient`, if they take at most 64 MiB.
    """
    tiles = _Tiles(x, columns, 0.0, scale)
    n, m = len(tiles.x), len(tiles.columns)
    sums = x.new_zeros(n)
    keep = keep and n * m <= _KEPT_TERMS * (2 if columns is None else 1)
    kept: list[Tensor] = []
    alone = max(n, m) <= tiles.size  # a single tile is no shared buffer
    for i, j, z in tiles:
        z.exp_()
        for skip in skips:
            for skipped in _skipped(z, skip, i, j):
                skipped.zero_()
        sums[i] += z.sum(dim=1)
        if columns is None and i != j:
            sums[j] += z.sum(dim=0)
        if keep:
            kept.append(z if alone else z.clone())
    return Exponentials(sums, kept if keep else None)


def exponential_gradient(
    x: Tensor,
    columns: Tensor | None,
    scale: float,
    skips: Sequence[int],
    kept: list[Tensor] | None,
    weights: Tensor,
    grad_x: Tensor,
    grad_columns: Tensor | None,
) -> None:
    """Add the gradient of sum_i weights_i / scale sum_j e^(scale x_i.o_j) to the given tensors.

    It overwrites the kept terms.

    Args:
        x: rows, (N, d).
        columns: (M, d); None is x with itself.
        scale: factor of the inner products.
        skips: as in `sums_of_exponentials`.
        kept: its terms, or None to compute them again.
        weights: of the rows, (N,).
        grad_x: (N, d).
        grad_columns: (M, d), or None.
    """
    tiles = _Tiles(x, columns, 0.0, scale)
    for i, j, z in tiles if kept is None else _kept_tiles(tiles, kept):
        if kept is None:
            z.exp_()
            for skip in skips:
                for skipped in _skipped(z, skip, i, j):
                    skipped.zero_()
        if columns is None:  # as row and as column
            z.mul_(weights[i, None] + weights[j])
            grad_x[i].addmm_(z, tiles.x[j])
            if i != j:
                grad_x[j].addmm_(z.T, tiles.x[i])
            continue
        z.mul_(weights[i, None])
        grad_x[i].addmm_(z, tiles.columns[j])
        if grad_columns is not None:
            grad_columns[j].addmm_(z.T, tiles.x[i])


def _kept_tiles(tiles: _Tiles, kept: list[Tensor]) -> Iterator[tuple[slice, slice, Tensor]]:
    """The places of the tiles, with kept terms in place of new products."""
    for (i, j), terms in zip(tiles.places(), kept, strict=True):
        yield i, j, terms
