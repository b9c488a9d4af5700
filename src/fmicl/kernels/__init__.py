"""Pairwise sums over embeddings: the expensive part of a contrastive loss, in three interchangeable implementations.

    reference   one dense matrix, plain autograd; differentiable any number of times
    tiled       any device and dtype, memory bounded by a few tiles, loss and gradient in one pass
    triton      CUDA: tensor cores, float32 accumulation, loss and gradient in one pass

They share one interface (`fmicl.kernels.backend`) and agree to rounding. "auto" selects triton on a CUDA device where
it supports the pair function, and tiled otherwise.

All are deterministic: on one machine, the same input gives the same bits of loss and gradient, since no sum is atomic.
They run under `torch.use_deterministic_algorithms(True)`; on a GPU, torch then needs CUBLAS_WORKSPACE_CONFIG=:4096:8 in
the environment for the matrix products of tiled and reference.
"""

from __future__ import annotations

import importlib.util
from typing import Literal, cast

import torch
from torch import Tensor

from fmicl.kernels import autograd, reference, tiled
from fmicl.kernels.backend import Backend, PairFunction, Square
from fmicl.kernels.exchange import World, all_logsumexp, all_max, all_sum, gather_with_gradient, world_of
from fmicl.kernels.parameters import fold_scalars, fold_scale, has_learnable_scalars
from fmicl.kernels.positives import can_fuse_positives, normalise_pairs, pair_distances
from fmicl.utils.learnable import Scalar
from fmicl.utils.numerics import to_float32
from fmicl.utils.triton import interpreting, triton_runs_on

__all__ = [
    "Kernel",
    "PairFunction",
    "Precision",
    "Square",
    "World",
    "all_logsumexp",
    "all_max",
    "all_sum",
    "can_fuse_positives",
    "largest_cosine",
    "normalise_pairs",
    "pair_distances",
    "pair_sum",
    "require_kernel",
    "row_logsumexp",
    "world_of",
]

_TILED = cast(Backend, tiled)
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
    """sum_ij function.penalty(offset + scale * x_i.o_j), differentiable in x, other and what the function learns.

    Offset and scale may be tensors with a gradient, and so may what the penalty depends on (see
    `fmicl.kernels.parameters`). Their gradient is that of the returned sum over this process's rows.

    Args:
        x: unit rows of this process, (N, d).
        other: unit columns, (M, d); None pairs x with itself, at lower cost.
        function: penalty of a pair.
        skip: leave out the pairs j = i + skip, with rows numbered over all processes.
        kernel: which implementation.
        fast: let the Triton kernel round embeddings and slopes to bfloat16.
        world: the processes whose columns take part; None is this process alone.

    Returns:
        The sum over this process's rows, a scalar.

    Raises:
        ValueError: x is paired with itself and skip is neither 0 nor None, or the kernel can't run.

    Example:
        >>> import torch, fmicl
        >>> x = torch.eye(3)
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("kl"), d=3)
        >>> total = pair_sum(x, None, critic, skip=0)               # six pairs at squared distance 2
        >>> torch.isclose(total, 6 * torch.tensor(-2.0).exp())
        tensor(True)
    """
    if other is None and skip not in (0, None):
        raise ValueError(f"x with itself supports skip=0 or None, got skip={skip}; pass x as `other` for other offsets")
    world = world or World(0, (len(x),))
    if kernel != "reference" and has_learnable_scalars(function):
        x, other, function = fold_scalars(x, x if other is None else other, function, fast)
    backend = _backend(kernel, x, function, fast)
    if backend in (None, _TILED):
        x, other = to_float32(x), None if other is None else to_float32(other)
    if backend is None:
        columns = gather_with_gradient(x if other is None else other, world)
        return reference.pair_sum(x, columns, function, None if skip is None else skip + world.first)
    return autograd.pair_sum(x, other, function, skip, backend, world)


def row_logsumexp(
    x: Tensor,
    other: Tensor | None,
    scale: Scalar,
    skip: int | None = None,
    *,
    kernel: Kernel = "auto",
    fast: bool = False,
    world: World | None = None,
    paired: bool = False,
) -> Tensor:
    """log sum_j exp(scale * x_i.o_j) for each row of this process, (N,); arguments as in `pair_sum`.

    The scale may be a tensor with a gradient.

    With `paired`, x holds the two views of each sample in turn, x_0 y_0 x_1 y_1 ..., and is paired with itself; skip=0
    then leaves out both views of a row's own sample.

    Raises:
        ValueError: `paired` with other columns, another skip or an odd number of rows, or the kernel can't run.

    Example:
        >>> import torch
        >>> x = torch.eye(3)
        >>> row_logsumexp(x, None, scale=2.0, skip=0)              # two others, each at inner product 0
        tensor([0.6931, 0.6931, 0.6931])
    """
    world = world or World(0, (len(x),))
    if paired and (other is not None or skip not in (0, None) or any(size % 2 for size in world.sizes)):
        raise ValueError(
            "paired=True needs an even number of rows (two views of each sample), other=None and skip=0 or None; "
            f"got {'other columns' if other is not None else f'{world.sizes} rows'} and skip={skip}"
        )
    backend = _backend(kernel, x, None, fast)
    if backend in (None, _TILED):
        x, other = to_float32(x), None if other is None else to_float32(other)
    if backend is None:
        columns = gather_with_gradient(x if other is None else other, world)
        return reference.row_logsumexp(x, columns, scale, None if skip is None else skip + world.first, paired)
    if isinstance(scale, Tensor):
        x, scale = fold_scale(x, scale, with_itself=other is None)
    return autograd.row_logsumexp(x, other, scale, skip, paired, backend, world)


def largest_cosine(
    x: Tensor,
    other: Tensor | None,
    function: PairFunction,
    skip: int | None = None,
    *,
    kernel: Kernel = "auto",
    fast: bool = False,
    world: World | None = None,
) -> Tensor:
    """The largest inner product of this process's rows with all columns, a scalar; not differentiable.

    It is rounded as in `pair_sum` of this function, whose arguments these are.

    Example:
        >>> import torch, fmicl
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=3)
        >>> largest_cosine(torch.eye(3), None, critic, skip=0)
        tensor(0.)
    """
    world = world or World(0, (len(x),))
    backend = _backend(kernel, x, function, fast) or _TILED
    x, columns = x.detach(), (x if other is None else other).detach()
    if backend is _TILED:
        x, columns = to_float32(x), to_float32(columns)
    parts = [
        backend.largest_cosine(x, part, None if skip is None else skip + world.first - first)
        for part, first in autograd.all_columns(columns, world, backend)
    ]
    return torch.stack(parts).max()


def require_kernel(kernel: str, precision: str) -> None:
    """Raise ValueError for an unknown kernel or precision."""
    if kernel not in ("auto", "reference", "tiled", "triton"):
        raise ValueError(f"kernel is 'auto', 'reference', 'tiled' or 'triton', got {kernel!r}")
    if precision not in ("auto", "fast", "high"):
        raise ValueError(f"precision is 'auto', 'fast' or 'high', got {precision!r}")


def _backend(kernel: Kernel, x: Tensor, function: PairFunction | None, fast: bool) -> Backend | None:
    """The implementation to use; None is the dense reference."""
    if kernel == "reference":
        return None
    if kernel == "tiled" or (kernel == "auto" and not _prefers_triton(x, function)):
        return _TILED
    if importlib.util.find_spec("triton") is None:
        raise ValueError("kernel='triton' needs the package triton, which is not installed; use kernel='auto'")
    from fmicl.kernels.triton import TritonBackend

    if x.device.type != "cuda" and not interpreting():
        raise ValueError(
            f"kernel='triton' needs a CUDA device, but the embeddings are on {x.device}; use kernel='auto'"
        )
    if x.dtype == torch.float64:
        raise ValueError("kernel='triton' computes in float32; for float64 use kernel='tiled' or 'reference'")
    return TritonBackend(fast)


def _prefers_triton(x: Tensor, function: PairFunction | None) -> bool:
    if x.dtype == torch.float64 or not triton_runs_on(x.device):
        return False
    from fmicl.kernels.lowering import lower

    return function is None or lower(function) is not None
