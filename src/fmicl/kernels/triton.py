"""Triton backend of the pairwise sums: choice of kernels (`fmicl.kernels.device`) and tile shapes.

No sum is atomic: every output has one owner, so the same input gives the same bits.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from fmicl.kernels import device
from fmicl.kernels.backend import Normaliser, PairFunction, is_moderate
from fmicl.kernels.lowering import LOG2E, SOFTMAX_KINDS, Lowered, lower, lower_softmax
from fmicl.utils.triton import interpreting, launch, multiprocessors, shared_memory

_NO_SKIP = 2**30  # an offset that no pair has
_FUSED_DEPTH = 256  # largest d for which a block of rows and its gradient fit a multiprocessor
_FEW = 1024  # rows up to which smaller tiles use more of the GPU
_SIDE = 5632  # of the buffer of slopes: 60 MiB in bfloat16, about the L2 cache of a large GPU


class _Shape(NamedTuple):
    """Rows and columns of a program's tile, number of warps and of pipeline stages."""

    rows: int
    columns: int
    warps: int
    stages: int


class _Steps(NamedTuple):
    """Tiles of the two-step kernels: rows, columns, depth, side of the buffer, warps and stages."""

    rows: int
    columns: int
    depth: int
    side: int
    warps: int
    stages: int


class _LogSumExpTiles(NamedTuple):
    """Tile, depth of a step, whether rows are held, and parts of the columns with the columns of each."""

    shape: _Shape
    depth: int
    held: bool
    parts: int
    share: int


class LoweredNormaliser(NamedTuple):
    """A `Normaliser` as a softmax kind reads it: g 2^-v of each row or column, or v with g = 1 for "softmax_wide"."""

    value: Tensor


# Tuned on an H200 at N = 65,536. Kinds not listed need more warps, to keep registers from spilling.
_FUSED_128 = {
    "exp": _Shape(64, 128, 4, 3),
    "linear": _Shape(128, 64, 4, 3),
    "square": _Shape(128, 64, 4, 3),
    "jeffrey": _Shape(128, 64, 4, 3),
    "js": _Shape(64, 128, 4, 2),
    "js_below": _Shape(64, 128, 4, 3),
    "vlc": _Shape(64, 64, 4, 3),
    "vlc_below": _Shape(64, 64, 4, 3),
    "softmax": _Shape(128, 64, 4, 3),
    "softmax_wide": _Shape(64, 128, 4, 2),
}
_HELD = _Shape(128, 64, 8, 3)  # of a log-sum-exp that reads its rows once
# Bytes of shared memory that tiles take when compiled for GPUs before compute capability 9.0, which may have 99 KiB.
_FUSED_256_MEMORY, _FUSED_PRECISE_MEMORY, _LOGSUMEXP_PRECISE_MEMORY = 128 * 1024, 224 * 1024, 128 * 1024
_BELOW = ("js", "vlc")  # kinds with a faster one for z <= 0
_ROUNDING = 1e-6  # of an offset that cancels a scale


@dataclass(frozen=True)
class TritonBackend:
    """The Triton implementation of `fmicl.kernels.backend.Backend`.

    Attributes:
        fast: round embeddings and slopes to bfloat16; otherwise float32 throughout.
    """

    fast: bool

    def cast_for_exchange(self, rows: Tensor) -> Tensor:
        """Rows in the dtype of the products: half the bytes if `fast`."""
        return self._operand_type(rows)

    def pair_rows(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """sum_ij penalty(z_ij), and its gradient in the rows x."""
        lowered = _require_lowered(function)
        total, grad = self.lowered_pairs(x, columns, lowered, skip, gradient)
        return _with_constant(total, lowered, len(x), len(columns), skip), grad

    def pair_both(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Both gradients: from one buffer of slopes for large d, otherwise in one pass each.

        A single fused pass for both sides was slower than two.
        """
        if self.shares_slopes(x):
            lowered = _require_lowered(function)
            total, *gradients = self.lowered_both(x, columns, lowered, skip, None)
            return _with_constant(total, lowered, len(x), len(columns), skip), gradients[0], gradients[1]
        total, grad_x = self.pair_rows(x, columns, function, skip, True)
        _, grad_columns = self.pair_rows(columns, x, function, None if skip is None else -skip, True)
        assert grad_x is not None
        assert grad_columns is not None
        return total, grad_x, grad_columns

    def pair_symmetric(self, x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """sum_{i != j} penalty(z_ij) of x with itself, and its gradient."""
        lowered = _require_lowered(function)
        total, grad = self.lowered_pairs(x, None, lowered._replace(slope=2 * lowered.slope), 0, gradient)
        return _with_constant(total, lowered, len(x), len(x), 0), grad

    def largest_cosine(self, x: Tensor, columns: Tensor, skip: int | None) -> Tensor:
        """The largest inner product x_i.o_j, with the rounding of the other sums; -inf if every pair is skipped."""
        total, _ = self.lowered_pairs(x, columns, Lowered("largest", 0.0, 1.0, slope=0.0), skip, False)
        return total

    def pair_parameters(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, parameters: Sequence[Tensor]
    ) -> list[Tensor]:
        """Refused: a penalty with parameters has no Triton program.

        Raises:
            ValueError: always.
        """
        del x, columns, skip, parameters
        raise _no_program(function)

    def logsumexp_rows(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, paired: bool = False
    ) -> Tensor:
        """log sum_j exp(scale x_i.o_j)."""
        tiles = self.logsumexp_tiles(len(x), len(columns), x.shape[1], x.device)
        result = torch.empty(tiles.parts, len(x), dtype=torch.float32, device=x.device)
        self.write_logsumexp(x, columns, LOG2E * scale, skip, paired, tiles, result, math.log(2))
        return result[0] if tiles.parts == 1 else result.logsumexp(dim=0)

    def logsumexp_tiles(self, n: int, m: int, d: int, device: torch.device) -> _LogSumExpTiles:
        """Tiles of the log-sum-exps of n rows with m columns."""
        d = -(-d // 16) * 16
        held = self.fast and d <= _FUSED_DEPTH
        fits = self.fast or shared_memory(device) >= _LOGSUMEXP_PRECISE_MEMORY
        shape = _HELD if held else _Shape(128, 128, 8, 3) if fits else _Shape(64, 64, 4, 3)
        depth = 1 << (d - 1).bit_length() if held else 64 if self.fast else 32
        return _LogSumExpTiles(shape, depth, held, *_split(_blocks(n, shape.rows), m, shape.columns, device))

    def write_logsumexp(
        self,
        x: Tensor,
        columns: Tensor,
        scale: float,
        skip: int | None,
        paired: bool,
        tiles: _LogSumExpTiles,
        result: Tensor,
        unit: float,
    ) -> None:
        """unit * log2 sum_j 2^(scale x_i.o_j) over each part of the columns, into `result`: (parts, N)."""
        x, columns = self._operand(x), self._operand(columns)
        n, m, d = len(x), len(columns), x.shape[1]
        shape, depth = tiles.shape, tiles.depth
        launch(device.fused_logsumexp, (_blocks(n, shape.rows), tiles.parts))(
            _descriptor(x, shape.rows, depth), _descriptor(columns, shape.columns, depth), result, n, m, d,
            scale, _NO_SKIP if skip is None else skip, tiles.share, unit,
            BM=shape.rows, BN=shape.columns, BK=depth, HELD=tiles.held, SKIP=skip is not None, PAIRED=paired,
            MODERATE=is_moderate(scale / LOG2E, torch.float32), PRECISE=not self.fast,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip

    def logsumexp_with_terms(self, *_: object) -> None:
        """None: writing the terms takes longer than computing them again."""

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
        """Gradient in the rows x of log-sum-exps over rows and over columns."""
        lowered = lower_softmax(scale)
        _, grad = self.lowered_pairs(x, columns, lowered, skip, True, rows, others, paired)
        assert grad is not None
        return grad

    def logsumexp_both(
        self, x: Tensor, columns: Tensor, scale: float, skip: int | None, rows: Normaliser
    ) -> tuple[Tensor, Tensor]:
        """Gradient of the rows' log-sum-exps in the rows and in the columns."""
        if self.shares_slopes(x):
            lowered = lower_softmax(scale)
            _, grad_x, grad_columns = self.lowered_both(x, columns, lowered, skip, rows)
            return grad_x, grad_columns
        mirrored = None if skip is None else -skip
        return (
            self.logsumexp_gradient(x, columns, scale, skip, rows, None),
            self.logsumexp_gradient(columns, x, scale, mirrored, None, rows),
        )

    def logsumexp_symmetric(
        self, x: Tensor, scale: float, skip: int | None, rows: Normaliser, paired: bool = False
    ) -> Tensor:
        """Gradient in x of the log-sum-exps of x with itself."""
        lowered = lower_softmax(scale)
        _, grad = self.lowered_pairs(x, None, lowered, skip, True, rows, rows, paired)
        assert grad is not None
        return grad

    def shares_slopes(self, x: Tensor) -> bool:
        """Whether the gradients of rows and columns use one buffer of slopes."""
        return self.fast and x.shape[1] > _FUSED_DEPTH

    def lowered_both(
        self,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        rows: Normaliser | LoweredNormaliser | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Sum without the constant, and gradients of rows and of columns by one buffer of slopes."""
        width, lowered = x.shape[1], self._of_range(lowered)
        total, grad_x, grad_columns = self._two_steps(
            self._operand(x), self._operand(columns), lowered, skip, True, False, rows, None, both=True
        )
        assert grad_x is not None
        assert grad_columns is not None
        return total, grad_x[:, :width], grad_columns[:, :width]

    def lowered_pairs(
        self,
        x: Tensor,
        columns: Tensor | None,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        rows: Normaliser | LoweredNormaliser | None = None,
        others: Normaliser | LoweredNormaliser | None = None,
        paired: bool = False,
        dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Sum without the constant, and gradient in this type or a wider one; columns=None is x itself."""
        width, lowered = x.shape[1], self._of_range(lowered)
        if dtype is None:
            # A gradient in bfloat16 is written as such; in float16 it could overflow before it is scaled.
            dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
        x = self._operand(x)
        other = x if columns is None else self._operand(columns)
        shape = self._fused_shape(x.shape[1], lowered.kind, x.device)
        if shape is not None:
            total, grad = self._fused(shape, x, other, lowered, skip, gradient, rows, others, dtype, paired)
        else:
            total, grad, _ = self._two_steps(
                x, other, lowered, skip, gradient, columns is None, rows, others, paired=paired
            )
        return total, grad if grad is None or grad.shape[1] == width else grad[:, :width]

    def _operand(self, x: Tensor) -> Tensor:
        """x in the dtype of the products, aligned for tensor descriptors: 16 bytes, with d a multiple of 16."""
        x = self._operand_type(x)
        if self.fast and interpreting():
            x = x.float()  # the interpreter can't multiply bfloat16 matrices
        if x.shape[1] % 16:
            x = torch.nn.functional.pad(x, (0, -x.shape[1] % 16))
        x = x.contiguous()
        return x.clone() if x.data_ptr() % 16 else x

    def _operand_type(self, x: Tensor) -> Tensor:
        return x.to(torch.bfloat16 if self.fast else torch.float32)

    def _of_range(self, lowered: Lowered) -> Lowered:
        """With the kind for z <= 0, where unit rows have no other z, as with mu = 1."""
        below = lowered.offset + abs(lowered.scale) <= _ROUNDING * abs(lowered.scale)
        if self.fast and below and lowered.kind in _BELOW:
            return lowered._replace(kind=f"{lowered.kind}_below")
        return lowered

    def _fused_shape(self, d: int, kind: str, device: torch.device) -> _Shape | None:
        """Tile for which a block of rows and its gradient fit a multiprocessor; None if there is none."""
        if not self.fast:
            return _Shape(128, 64, 8, 2) if d <= 128 and shared_memory(device) >= _FUSED_PRECISE_MEMORY else None
        if d <= 128:
            return _FUSED_128.get(kind, _Shape(128, 64, 8, 3))
        if d <= _FUSED_DEPTH and shared_memory(device) >= _FUSED_256_MEMORY:
            return _Shape(128, 64, 8, 4 if kind == "exp" else 3)
        return None

    def _fused(
        self,
        shape: _Shape,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        rows: Normaliser | LoweredNormaliser | None,
        others: Normaliser | LoweredNormaliser | None,
        dtype: torch.dtype,
        paired: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """Single pass with the rows' gradient in registers, written as `dtype`."""
        n, m, d = len(x), len(columns), x.shape[1]
        padded = 1 << (d - 1).bit_length()
        blocks = _blocks(n, shape.rows)
        parts, share = _split(blocks, m, shape.columns, x.device)
        total = torch.empty(parts, n, dtype=torch.float32, device=x.device)
        grad = torch.empty(parts, n, d, dtype=dtype, device=x.device) if gradient else total
        vectors, by_row = _vectors(lowered, rows, others, total)
        launch(device.fused_pairs, (blocks, parts))(
            _descriptor(x, shape.rows, padded), _descriptor(columns, shape.columns, padded), grad, total, n, m, d,
            lowered.offset, lowered.scale, lowered.order, lowered.gain, lowered.slope,
            _NO_SKIP if skip is None else skip, share, *vectors,
            KIND=lowered.kind, BY_ROW=by_row, BY_COLUMN=others is not None,
            BM=shape.rows, BN=shape.columns, BD=padded,
            SKIP=skip is not None, PAIRED=paired, GRADIENT=gradient, PRECISE=not self.fast,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        summed = _summed(total, lowered)
        if not gradient:
            return summed, None
        return summed, grad[0] if parts == 1 else grad.sum(dim=0)

    def _steps(self, n: int) -> _Steps:
        # three tiles up to 8,192 rows, since launches take longer than the work, and then as many as the cache needs
        side = min(_SIDE, 2048 if n <= 4096 else 4096 if n <= 8192 else _SIDE)
        if not self.fast:
            return _Steps(128, 64, 32, side, 8, 3)
        return _Steps(64, 64, 64, side, 4, 3) if n <= _FEW else _Steps(128, 128, 64, side, 4, 3)

    def _two_steps(
        self,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        symmetric: bool,
        rows: Normaliser | LoweredNormaliser | None,
        others: Normaliser | LoweredNormaliser | None,
        both: bool = False,
        paired: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Two steps per large tile: slopes into a buffer, then products with it; if symmetric, only above the diagonal.

        `both` adds the columns' gradient.
        """
        n, m, d = len(x), len(columns), x.shape[1]
        step = self._steps(max(n, m))
        spans = [(i, j) for i in range(0, n, step.side) for j in range(0, m, step.side) if not symmetric or j >= i]
        spans.sort(key=lambda span: symmetric and span[0] != span[1])  # the diagonal first
        programs = [
            _blocks(min(step.side, n - i), step.rows) * _blocks(min(step.side, m - j), step.columns) for i, j in spans
        ]
        totals = torch.empty(sum(programs), dtype=torch.float32, device=x.device)
        height = _blocks(min(step.side, n), step.rows) * step.rows
        width = _blocks(min(step.side, m), step.columns) * step.columns
        weights = torch.empty(height, width, dtype=x.dtype, device=x.device) if gradient else x
        grad = torch.empty(n, d, dtype=torch.float32, device=x.device) if gradient else None
        mirrored = torch.empty(m, d, dtype=torch.float32, device=x.device) if both else grad
        describe = functools.cache(_descriptor)
        x_rows, other_rows = _descriptor(x, step.rows, step.depth), _descriptor(columns, step.columns, step.depth)
        written, read, read_transposed = (
            _descriptor(weights, step.rows, step.columns),
            _descriptor(weights, step.rows, step.depth),
            _descriptor(weights, step.depth, step.rows),
        )
        vectors, by_row = _vectors(lowered, rows, others, totals)
        options = {"num_warps": step.warps, "num_stages": step.stages, "PRECISE": not self.fast, "SIDE": step.side}
        before = itertools.accumulate(programs, initial=0)
        for (i, j), number, total0 in zip(spans, programs, before, strict=False):
            tall, wide = min(step.side, n - i), min(step.side, m - j)
            two_sides = both or (symmetric and i != j)
            # pairs above the diagonal also count for those below it
            weight = 2 * lowered.gain if symmetric and i != j else lowered.gain
            launch(device.tile_weights, (number,))(
                x_rows, other_rows, written, totals, total0, i, j, n, m, d,
                lowered.offset, lowered.scale, lowered.order, weight, _NO_SKIP if skip is None else skip, *vectors,
                KIND=lowered.kind, BY_ROW=by_row, BY_COLUMN=others is not None,
                BM=step.rows, BN=step.columns, BK=step.depth, GROUP=8, PAIRED=paired, GRADIENT=gradient,
                **options,
            )  # fmt: skip
            if grad is None:
                continue
            tiles = _blocks(tall, step.rows) + (_blocks(wide, step.rows) if two_sides else 0)
            # the first write to an output overwrites it
            row_fresh, column_fresh = (i == j, False) if symmetric else (j == 0, i == 0)
            few = self.fast and tiles * _blocks(d, step.columns) < multiprocessors(x.device)
            across = 64 if few else step.columns
            launch(device.apply_weights, (tiles * _blocks(d, across),))(
                read, read_transposed, describe(x, step.depth, across), describe(columns, step.depth, across),
                grad, mirrored, i, j, n, m, d, lowered.slope, int(row_fresh), int(column_fresh),
                BOTH=two_sides, BM=step.rows, BN=across, BK=step.depth, **options,
            )  # fmt: skip
        return _summed(totals, lowered), grad, mirrored if both else None


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _descriptor(matrix: Tensor, rows: int, columns: int) -> Any:
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def _split(blocks: int, m: int, width: int, device: torch.device) -> tuple[int, int]:
    """Number of parts of the columns, so that a small batch fills the GPU too, and columns of each part."""
    parts = max(1, min(multiprocessors(device) // blocks, _blocks(m, 4 * width), 16))
    share = _blocks(_blocks(m, parts), width) * width
    return _blocks(m, share), share


def _vectors(
    lowered: Lowered,
    rows: Normaliser | LoweredNormaliser | None,
    others: Normaliser | LoweredNormaliser | None,
    unused: Tensor,
) -> tuple[tuple[Tensor, ...], bool]:
    """The vectors that a kernel reads, and whether it reads the first ones.

    These are values in units of log 2, and gradients, of rows and of columns; for "softmax" their `shares`; or the
    scalars of a shifted kind.
    """
    if lowered.scalars is not None:
        return (lowered.scalars, unused, unused, unused), True
    of_rows = _of_side(lowered.kind, rows, unused)
    of_columns = of_rows if others is rows else _of_side(lowered.kind, others, unused)
    return (*of_rows, *of_columns), rows is not None


def _of_side(kind: str, given: Normaliser | LoweredNormaliser | None, unused: Tensor) -> tuple[Tensor, Tensor]:
    if given is None:
        return unused, unused
    if isinstance(given, LoweredNormaliser):
        return given.value, unused if kind == "softmax" else torch.ones_like(given.value)
    if kind == "softmax":
        return given.shares().float(), unused
    return (LOG2E * given.value).float(), given.gradient.contiguous()


def _summed(totals: Tensor, lowered: Lowered) -> Tensor:
    """Sum in float64, or the largest; a softmax has no total."""
    if lowered.kind == "largest":
        return totals.max()
    return totals if lowered.kind in SOFTMAX_KINDS else totals.sum(dtype=torch.float64)


def _with_constant(total: Tensor, lowered: Lowered, n: int, m: int, skip: int | None) -> Tensor:
    """The sum with each pair's constant added."""
    return total + lowered.constant * (n * m - _skipped_pairs(n, m, skip)) if lowered.constant else total


def _skipped_pairs(n: int, m: int, skip: int | None) -> int:
    """Number of i in [0, n) with i + skip in [0, m)."""
    return 0 if skip is None else max(0, min(n, m - skip) - max(0, -skip))


def _require_lowered(function: PairFunction) -> Lowered:
    lowered = lower(function)
    if lowered is None:
        raise _no_program(function)
    return lowered


def _no_program(function: PairFunction) -> ValueError:
    return ValueError(
        f"the Triton backend has no program for {function!r}; kernel='auto' or 'tiled' supports it, also on a GPU"
    )
