"""The pairwise sums on a CUDA GPU: which program of `fmicl.kernels.device` runs, in which shape.

Nothing here adds atomically: every output has one owner, so the same input gives the same bits.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fmicl.divergences import KL, Divergence, Jeffrey, Pearson, Tsallis, Weighted
from fmicl.kernels import device
from fmicl.kernels.contract import Normaliser, PairFunction, Square
from fmicl.similarities import Critic

__all__ = ["Lowered", "TritonBackend", "interpreting", "lower"]

_NO_SKIP = 2**30  # no column is that far from its row
_SIDE = 4096  # of the tile whose slopes are written: 32 MiB in bfloat16, within the L2 cache of a large GPU


def interpreting() -> bool:
    """Whether Triton runs its programs on the CPU, for tests."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


class Lowered(NamedTuple):
    """A pair function as the GPU knows it: gain * kind(offset + scale c) + constant."""

    kind: str
    offset: float
    scale: float
    order: float = 2.0
    gain: float = 1.0
    constant: float = 0.0


def lower(function: PairFunction) -> Lowered | None:
    """The GPU's form of a pair function; None if it has none (a user's own divergence, a shift)."""
    if isinstance(function, Square):
        return Lowered("square", function.offset, function.scale)
    if not isinstance(function, Critic):
        return None
    return _lower_divergence(function.divergence, function)


def _lower_divergence(divergence: Divergence, critic: Critic) -> Lowered | None:
    offset, scale = critic.offset, critic.scale
    if isinstance(divergence, Weighted):
        inner = _lower_divergence(divergence.base, critic)
        if inner is None:
            return None
        # a free critic of an unbounded divergence is the conjugate, which only gains alpha; otherwise r moves as well
        moved = 0.0 if critic.free and divergence.supremum == math.inf else math.log(divergence.alpha)
        return inner._replace(
            offset=inner.offset - moved,
            gain=divergence.alpha * inner.gain,
            constant=divergence.alpha * inner.constant + divergence.constant,
        )
    if not divergence.closed_form:
        return None
    order = divergence.order if isinstance(divergence, Tsallis) else 2.0
    if critic.free and isinstance(divergence, KL):
        return Lowered("kl", offset - 1, scale)
    if critic.free and isinstance(divergence, (Pearson, Tsallis, Jeffrey)):
        return Lowered(f"free_{divergence.name}", offset, scale, order)
    return Lowered(divergence.name, offset, scale, order)


class _Shape(NamedTuple):
    """Rows, columns and depth of a program's tile, and how many warps and stages of loads it has."""

    rows: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class TritonBackend:
    """`fmicl.kernels.contract.Backend` in Triton.

    Attributes:
        fast: round the embeddings, and the slopes that multiply them, to bfloat16; otherwise float32 throughout.
    """

    fast: bool

    def pair_rows(
        self, x: Tensor, columns: Tensor, function: PairFunction, skip: int | None, gradient: bool
    ) -> tuple[Tensor, Tensor | None]:
        """sum_ij penalty(z_ij), and its gradient in the rows x."""
        lowered = _require(function)
        x, columns = self._operand(x), self._operand(columns)
        total, grad = self._pairs(x, columns, lowered, skip, gradient, symmetric=False)
        count = len(x) * len(columns) - _skipped_pairs(len(x), len(columns), skip)
        return lowered.gain * total + lowered.constant * count, grad

    def pair_symmetric(self, x: Tensor, function: PairFunction, gradient: bool) -> tuple[Tensor, Tensor | None]:
        """sum_{i != j} penalty(z_ij) of x with itself, and its whole gradient."""
        lowered = _require(function)
        x = self._operand(x)
        total, grad = self._pairs(x, x, lowered, 0, gradient, symmetric=True)
        return lowered.gain * total + lowered.constant * len(x) * (len(x) - 1), grad

    def logsumexp_rows(self, x: Tensor, columns: Tensor, scale: float, skip: int | None) -> Tensor:
        """log sum_j exp(scale x_i.o_j)."""
        x, columns = self._operand(x), self._operand(columns)
        n, m, d = len(x), len(columns), x.shape[1]
        rows, width, depth = (64, 64, 32) if not self.fast else (128, 128, 64)
        blocks = _blocks(n, rows)
        parts, share = _split(blocks, m, width, x)
        result = torch.empty(parts, n, dtype=torch.float32, device=x.device)
        device.fused_logsumexp[(blocks, parts)](
            x, columns, result, n, m, d, scale, _NO_SKIP if skip is None else skip, share,
            BM=rows, BN=width, BK=depth, EVEN=d % depth == 0, SKIP=skip is not None, PRECISE=not self.fast,
            num_warps=8 if self.fast else 4, num_stages=3,
        )  # fmt: skip
        return result[0] if parts == 1 else result.logsumexp(dim=0)

    def logsumexp_gradient(
        self,
        x: Tensor,
        columns: Tensor,
        scale: float,
        skip: int | None,
        rows: Normaliser | None,
        others: Normaliser | None,
    ) -> Tensor:
        """What the gradient of log-sum-exps over rows, and over columns, sends to the rows x."""
        x, columns = self._operand(x), self._operand(columns)
        lowered = Lowered("softmax", 0.0, scale)
        _, grad = self._pairs(x, columns, lowered, skip, True, symmetric=False, rows=rows, others=others)
        assert grad is not None
        return grad

    def _operand(self, x: Tensor) -> Tensor:
        if not self.fast:
            return x.float().contiguous()
        rounded = x.to(torch.bfloat16).contiguous()
        return rounded.float() if interpreting() else rounded  # the interpreter has no bfloat16 products

    def _pairs(
        self,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        symmetric: bool,
        rows: Normaliser | None = None,
        others: Normaliser | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        shape = self._fused_shape(len(x), x.shape[1])
        if shape is not None:
            total, grad = self._fused(shape, x, columns, lowered, skip, gradient, rows, others)
            if grad is not None and symmetric:
                grad *= 2
        else:
            total, grad = self._two_steps(x, columns, lowered, skip, gradient, symmetric, rows, others)
        if grad is not None and lowered.gain != 1:
            grad *= lowered.gain
        return total, grad

    def _fused_shape(self, n: int, d: int) -> _Shape | None:
        """Tiles for which a block of rows and its gradient fit a multiprocessor; None if there are none."""
        if not self.fast:
            return _Shape(64, 32, 4, 2) if d <= 128 else None
        if d <= 64:
            return _Shape(128, 128, 8, 3)
        if d <= 128:
            return _Shape(128, 64, 4, 3)
        if d <= 256:
            return _Shape(128, 64, 8, 2)
        return _Shape(64, 64, 8, 2) if d <= 512 and n <= 8192 else None

    def _fused(
        self,
        shape: _Shape,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        rows: Normaliser | None,
        others: Normaliser | None,
    ) -> tuple[Tensor, Tensor | None]:
        n, m, d = len(x), len(columns), x.shape[1]
        padded = max(16, 1 << (d - 1).bit_length())
        blocks = _blocks(n, shape.rows)
        parts, share = _split(blocks, m, shape.columns, x)
        total = torch.zeros(parts, n, dtype=torch.float32, device=x.device)
        grad = torch.empty(parts, n, d, dtype=torch.float32, device=x.device) if gradient else total
        device.fused_pairs[(blocks, parts)](
            x, columns, grad, total, n, m, d, lowered.offset, lowered.scale, lowered.order,
            _NO_SKIP if skip is None else skip, share, *_normalisers(rows, others, total),
            KIND=lowered.kind, BY_ROW=rows is not None, BY_COLUMN=others is not None,
            BM=shape.rows, BN=shape.columns, BD=padded, EVEN=d == padded,
            SKIP=skip is not None, GRADIENT=gradient, PRECISE=not self.fast,
            num_warps=shape.warps, num_stages=shape.stages,
        )  # fmt: skip
        if not gradient:
            return total.sum(dtype=torch.float64), None
        return total.sum(dtype=torch.float64), grad[0] if parts == 1 else grad.sum(dim=0)

    def _two_steps(
        self,
        x: Tensor,
        columns: Tensor,
        lowered: Lowered,
        skip: int | None,
        gradient: bool,
        symmetric: bool,
        rows: Normaliser | None,
        others: Normaliser | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Slopes of a large tile into a buffer, then the products with it; above the diagonal only if symmetric."""
        n, m, d = len(x), len(columns), x.shape[1]
        side = _SIDE if self.fast else _SIDE // 2
        height, width, depth = (128, 256, 64) if self.fast else (64, 64, 32)
        weights = torch.empty(min(side, n), min(side, m), dtype=x.dtype, device=x.device)
        spans = [(i, j) for i in range(0, n, side) for j in range(0, m, side) if not symmetric or j >= i]
        programs = _blocks(min(side, n), height) * _blocks(min(side, m), width)
        totals = torch.zeros(len(spans), programs, dtype=torch.float32, device=x.device)
        counts = torch.ones(len(spans), 1, dtype=torch.float64)
        grad = torch.zeros(n, d, dtype=torch.float32, device=x.device) if gradient else None
        for index, (i, j) in enumerate(spans):
            a, b = x[i : i + side], columns[j : j + side]
            here = None if skip is None else i + skip - j
            if here is not None and not -len(a) < here < len(b):
                here = None
            both = symmetric and i != j
            counts[index] = 2 if both else 1
            tile = weights.view(-1)[: len(a) * len(b)]
            device.tile_weights[(_blocks(len(a), height) * _blocks(len(b), width),)](
                a, b, tile, totals[index], len(a), len(b), d, lowered.offset, lowered.scale, lowered.order,
                _NO_SKIP if here is None else here,
                *_normalisers(_part(rows, i, side), _part(others, j, side), totals),
                KIND=lowered.kind, BY_ROW=rows is not None, BY_COLUMN=others is not None,
                BM=height, BN=width, BK=depth, GROUP=8, EVEN=d % depth == 0,
                SKIP=here is not None, GRADIENT=gradient, PRECISE=not self.fast,
                num_warps=8 if self.fast else 4, num_stages=3,
            )  # fmt: skip
            if grad is None:
                continue
            wide = 256 if self.fast else 64
            grid = _blocks(d, wide) * (_blocks(len(a), height) + (_blocks(len(b), height) if both else 0))
            device.apply_weights[(grid,)](
                tile, a, b, grad[i : i + side], grad[j : j + side] if symmetric else grad, len(a), len(b), d,
                lowered.scale * (2 if symmetric else 1),
                BOTH=both, BM=height, BN=wide, BK=depth, PRECISE=not self.fast,
                num_warps=8 if self.fast else 4, num_stages=3,
            )  # fmt: skip
        total = (totals.to(torch.float64).sum(dim=1, keepdim=True) * counts.to(x.device)).sum()
        return total, grad


def _blocks(n: int, size: int) -> int:
    return -(-n // size)


def _split(blocks: int, m: int, width: int, x: Tensor) -> tuple[int, int]:
    """In how many parts the columns go, so that a small batch fills the GPU too; and the columns of each part."""
    processors = 4 if x.device.type == "cpu" else torch.cuda.get_device_properties(x.device).multi_processor_count
    parts = max(1, min(processors // blocks, _blocks(m, 4 * width), 16))
    share = _blocks(_blocks(m, parts), width) * width
    return _blocks(m, share), share


def _normalisers(rows: Normaliser | None, others: Normaliser | None, unused: Tensor) -> tuple[Any, ...]:
    pairs = (rows or (unused, unused), others or (unused, unused))
    return tuple(value.contiguous() for pair in pairs for value in pair)


def _part(normaliser: Normaliser | None, start: int, size: int) -> Normaliser | None:
    return normaliser and Normaliser(*(value[start : start + size] for value in normaliser))


def _skipped_pairs(n: int, m: int, skip: int | None) -> int:
    """How many i in [0, n) have i + skip in [0, m)."""
    return 0 if skip is None else max(0, min(n, m - skip) - max(0, -skip))


def _require(function: PairFunction) -> Lowered:
    lowered = lower(function)
    if lowered is None:
        raise ValueError(
            f"the Triton kernel has no program for {function!r}; kernel='auto' or 'tiled' computes it, on a GPU too"
        )
    return lowered
