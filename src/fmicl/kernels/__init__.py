"""Sums over all pairs of embeddings: the one heavy computation of a contrastive loss.

Three implementations of one contract (`fmicl.kernels.contract`) that agree:

    reference   one dense matrix, plain autograd; differentiable any number of times
    tiled       any device and type, memory bounded by a few tiles, loss and gradient in one pass
    triton      CUDA: tensor cores, float32 accumulation, loss and gradient in one pass

"auto" takes triton on a CUDA device for what it knows and is the faster at, and tiled otherwise: for float32 rows of
more than 128 dimensions, say.

All are deterministic: on one machine the same input gives the same bits of loss and gradient, as nothing is added
atomically. They run under `torch.use_deterministic_algorithms(True)`; on a GPU torch then wants
CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment, for the matrix products of tiled and reference.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, cast

import torch
from torch import Tensor

from fmicl.kernels import autograd, reference, tiled
from fmicl.kernels.columns import World, all_logsumexp, all_sum, gather_differentiably, world_of
from fmicl.kernels.contract import Backend, PairFunction, Square
from fmicl.kernels.partners import apart
from fmicl.utils.numerics import to_float32
from fmicl.utils.triton import interpreting, triton_runs_on

__all__ = [
    "Kernel",
    "PairFunction",
    "Precision",
    "Square",
    "World",
    "all_logsumexp",
    "all_sum",
    "apart",
    "count_cosines",
    "onto_sphere",
    "pair_sum",
    "require_kernel",
    "row_logsumexp",
    "sphere_suits",
    "world_of",
]

_TILED = cast(Backend, tiled)
_LONGEST_ROW = 4096  # entries that a program of `fmicl.kernels.sphere` holds
Kernel = Literal["auto", "reference", "tiled", "triton"]
Precision = Literal["auto", "fast", "high"]


def pair_sum(
    x: Tensor,
    other: Tensor | None,
    function: PairFunction,
    skip: int | None = None,
    *,
    kernel: Kernel = "auto",
    fast: bool = False,
    world: World | None = None,
) -> Tensor:
    """sum_ij function.penalty(offset + scale * x_i.o_j), differentiable in x and other.

    Args:
        x: unit rows of this process, (N, d).
        other: unit columns, (M, d); None is x itself, at less cost.
        function: what a pair costs.
        skip: leave out the pairs j = i + skip, in the order of all processes' rows.
        kernel: which implementation.
        fast: let the Triton kernel round embeddings and slopes to bfloat16.
        world: of which processes the columns are; None asks nobody.

    Returns:
        The sum over this process's rows, a scalar.

    Raises:
        ValueError: x against itself is to leave out other pairs than each row with itself.

    Example:
        >>> import torch, fmicl
        >>> x = torch.eye(3)
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("kl"), d=3)
        >>> total = pair_sum(x, None, critic, skip=0)               # six pairs at squared distance 2
        >>> torch.isclose(total, 6 * torch.tensor(-2.0).exp())
        tensor(True)
    """
    if other is None and skip not in (0, None):
        raise ValueError(
            f"of x against itself, skip=0 or None can be left out, got skip={skip}; give x as `other` for other pairs"
        )
    world = world or World(0, (len(x),))
    backend = _backend(kernel, x, function, fast)
    if backend in (None, _TILED):
        x, other = to_float32(x), None if other is None else to_float32(other)
    if backend is None:
        columns = gather_differentiably(x if other is None else other, world)
        return reference.pair_sum(x, columns, function, None if skip is None else skip + world.first)
    return autograd.pair_sum(x, other, function, skip, backend, world)


def row_logsumexp(
    x: Tensor,
    other: Tensor | None,
    scale: float,
    skip: int | None = None,
    *,
    kernel: Kernel = "auto",
    fast: bool = False,
    world: World | None = None,
    paired: bool = False,
) -> Tensor:
    """log sum_j exp(scale * x_i.o_j) for each row of this process; arguments as in `pair_sum`.

    With `paired`, x is the two views of each sample in turn, x_0 y_0 x_1 y_1 ..., against itself, and skip=0 leaves out
    both views of a row's own sample.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> row_logsumexp(x, None, scale=2.0, skip=0)              # two others, each at inner product 0
        tensor([0.6931, 0.6931, 0.6931])
    """
    world = world or World(0, (len(x),))
    if paired and (other is not None or skip not in (0, None) or any(size % 2 for size in world.sizes)):
        raise ValueError(
            "paired rows are two views of each sample, against themselves: an even number of them, and skip=0 or None; "
            f"got {'other columns' if other is not None else f'{world.sizes} rows'} and skip={skip}"
        )
    backend = _backend(kernel, x, None, fast)
    if backend in (None, _TILED):
        x, other = to_float32(x), None if other is None else to_float32(other)
    if backend is None:
        columns = gather_differentiably(x if other is None else other, world)
        return reference.row_logsumexp(x, columns, scale, None if skip is None else skip + world.first, paired)
    return autograd.row_logsumexp(x, other, scale, skip, paired, backend, world)


def count_cosines(x: Tensor, other: Tensor | None, skip: int | None = None, bins: int = 8192) -> Tensor:
    """How many inner products x_i.o_j of this process lie in each of so many parts of [-1, 1]; without a gradient.

    Args:
        x: unit rows, (N, d).
        other: unit columns, (M, d); None is x itself.
        skip: leave out the pairs j = i + skip.
        bins: how many parts.

    Returns:
        (bins,), float64.

    Example:
        >>> import torch
        >>> count_cosines(torch.eye(3), None, skip=0, bins=3)       # six pairs at 0
        tensor([0., 6., 0.], dtype=torch.float64)
    """
    x, columns = to_float32(x.detach()), to_float32((x if other is None else other).detach())
    return tiled.count_cosines(x, columns, skip, bins)


def sphere_suits(x: Tensor, y: Tensor, kernel: Kernel) -> bool:
    """Whether `onto_sphere` can take these rows: on a GPU, where no other kernel was asked for."""
    if kernel not in ("auto", "triton") or x.shape[1] > _LONGEST_ROW or torch.float64 in (x.dtype, y.dtype):
        return False
    if triton_runs_on(x.device):
        return True
    if kernel != "triton" or importlib.util.find_spec("triton") is None:
        return False
    return interpreting()


def onto_sphere(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows of x and y, float32, and the squared distances of these, where it `sphere_suits`."""
    from fmicl.kernels import sphere

    return sphere.onto_sphere(x, y)


def require_kernel(kernel: str, precision: str) -> None:
    """Refuse a kernel or a precision that there isn't."""
    if kernel not in ("auto", "reference", "tiled", "triton"):
        raise ValueError(f"kernel is 'auto', 'reference', 'tiled' or 'triton', got {kernel!r}")
    if precision not in ("auto", "fast", "high"):
        raise ValueError(f"precision is 'auto', 'fast' or 'high', got {precision!r}")


def _backend(kernel: Kernel, x: Tensor, function: PairFunction | None, fast: bool) -> Backend | None:
    """The implementation to use; None is the dense reference."""
    if kernel == "reference":
        return None
    if kernel == "tiled" or (kernel == "auto" and not _triton_suits(x, function, fast)):
        return _TILED
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernel='triton' needs the package triton, which is not installed; kernel='auto' does without")
    from fmicl.kernels.triton import TritonBackend

    if x.device.type != "cuda" and not interpreting():
        raise ValueError(
            f"kernel='triton' needs a CUDA device, but the embeddings are on {x.device}; try kernel='auto'"
        )
    if x.dtype == torch.float64:
        raise ValueError("kernel='triton' computes in float32; for float64 take kernel='tiled' or 'reference'")
    return TritonBackend(fast)


def _triton_suits(x: Tensor, function: PairFunction | None, fast: bool) -> bool:
    if x.dtype == torch.float64 or not triton_runs_on(x.device):
        return False
    if not fast and x.shape[1] > 128:
        return False  # in float32 and for large d, cuBLAS on tiles is the faster one (benchmarks/README.md)
    from fmicl.kernels.lowering import lower

    return function is None or lower(function) is not None
