"""Positive pairs: normalisation of two views and the squared distances between them.

Both come with gradients that save memory traffic. The fused versions are Triton kernels, which read each row once.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

from fmicl.kernels.transforms import frees_graph, is_batched
from fmicl.utils.numerics import normalise
from fmicl.utils.triton import interpreting, launch, triton_runs_on

_LONGEST_ROW = 4096  # entries that one Triton program holds
_CHUNK = 2**20  # entries that are converted to float32 at a time


def can_fuse_positives(x: Tensor, y: Tensor, kernel: str) -> bool:
    """Whether Triton can process these rows: on a GPU, or in the interpreter where kernel="triton" asks for it."""
    if kernel not in ("auto", "triton") or x.shape[1] > _LONGEST_ROW or torch.float64 in (x.dtype, y.dtype):
        return False
    if triton_runs_on(x.device):
        return True
    return kernel == "triton" and interpreting() and importlib.util.find_spec("triton") is not None


def normalise_pairs(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows of x and y, (N, d) float32, and the squared distances between them, (N,); 2 if one of them is zero.

    Args:
        x: (N, d) float32, bfloat16 or float16, such that `can_fuse_positives`.
        y: likewise.
    """
    x_unit, y_unit, distances = _NormalisePairs.apply(x.contiguous(), y.contiguous())
    return x_unit, y_unit, distances


class _NormalisePairs(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        from fmicl.kernels import positives_device as device

        ctx.set_materialize_grads(False)
        n, d = x.shape
        x_unit, y_unit = torch.empty(2, n, d, dtype=torch.float32, device=x.device).unbind()
        factors = torch.empty(2, n, dtype=torch.float32, device=x.device)
        distances = torch.empty(n, dtype=torch.float32, device=x.device)
        launch(device.normalise_pairs, (n,))(x, y, x_unit, y_unit, factors, distances, n, d, **_shape(d))
        ctx.save_for_backward(x, y, factors)
        return x_unit, y_unit, distances

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, y, factors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
            return _differentiable_gradients(x, y, gradients)
        from fmicl.kernels import positives_device as device

        n, d = x.shape
        x_grad, y_grad = torch.empty_like(x), torch.empty_like(y)
        by_x, by_y, by_distance = (None if value is None else value.contiguous() for value in gradients)
        launch(device.normalise_pairs_gradient, (n,))(
            x, y, factors, x if by_x is None else by_x, y if by_y is None else by_y,
            factors if by_distance is None else by_distance, x_grad, y_grad, n, d,
            X=by_x is not None, Y=by_y is not None, DISTANCE=by_distance is not None, **_shape(d),
        )  # fmt: skip
        return x_grad, y_grad


def _differentiable_gradients(
    x: Tensor, y: Tensor, gradients: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients by plain torch operations, for double backward."""
    x, y = x.view_as(x), y.view_as(y)  # told apart, also where one is a function of the other
    x_unit, y_unit = normalise(x.float()), normalise(y.float())
    outputs = zip((x_unit, y_unit, (x_unit - y_unit).square().sum(dim=-1)), gradients, strict=True)
    used = [(output, given) for output, given in outputs if given is not None and output.requires_grad]
    if not used:  # gradients arrived only at outputs of a view without a gradient
        return None, None
    found = iter(
        torch.autograd.grad(
            [output for output, _ in used],
            [value for value in (x, y) if value.requires_grad],
            [given for _, given in used],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return next(found) if x.requires_grad else None, next(found) if y.requires_grad else None


def pair_distances(x: Tensor, y: Tensor, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x and y unchanged, and the squared distances |x_i - y_i|^2, (N,), in float32 or wider.

    Use the returned x and y in place of the arguments: the gradient of the distances is then added in place, in chunks
    of rows, to the gradient that flows back through them. For many rows, full copies would be most of a loss's memory.

    Args:
        x: (N, d).
        y: (N, d).
        fused: use Triton, where `can_fuse_positives`.

    Example:
        >>> pair_distances(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))[2]
        tensor([25.])
    """
    x, y, distances = _PairDistances.apply(x, y, fused)
    return x, y, distances


class _PairDistances(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.fused = fused
        if fused:
            from fmicl.kernels import positives_device as device

            n, d = x.shape
            distances = torch.empty(n, dtype=torch.float32, device=x.device)
            launch(device.distances, (n,))(x.contiguous(), y.contiguous(), distances, d, **_shape(d))
        else:
            chunks = zip(*_chunks(x, y), strict=True)
            distances = torch.cat([_difference(a, b).square().sum(dim=-1) for a, b in chunks])
        return x.view_as(x), y.view_as(y), distances

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        by_x, by_y, by_distance = gradients
        if by_distance is None:
            return by_x, by_y, None
        wants_x, wants_y, _ = ctx.needs_input_grad
        return (
            _add_distance_gradient(by_x, x, y, by_distance, ctx.fused) if wants_x else None,
            _add_distance_gradient(by_y, y, x, by_distance, ctx.fused) if wants_y else None,
            None,
        )


def _add_distance_gradient(incoming: Tensor | None, x: Tensor, y: Tensor, by_distance: Tensor, fused: bool) -> Tensor:
    """incoming + 2 by_distance (x - y), in place where that is safe."""
    # Out of place where the result must be differentiable (create_graph=True) or holds several gradients at once.
    if torch.is_grad_enabled() or is_batched(by_distance):
        slope = (2 * by_distance.unsqueeze(-1) * _difference(x, y)).to(x.dtype)
        return slope if incoming is None else incoming + slope
    if incoming is None:
        total = torch.zeros_like(x, memory_format=torch.contiguous_format)
    elif frees_graph(incoming) and incoming.is_contiguous():
        total = incoming
    else:
        total = incoming.clone(memory_format=torch.contiguous_format)
    if fused:
        from fmicl.kernels import positives_device as device

        n, d = x.shape
        arguments = (total, x.contiguous(), y.contiguous(), by_distance.contiguous(), d)
        launch(device.add_distance_gradient, (n,))(*arguments, **_shape(d))
        return total
    size = len(_chunks(x)[0][0])
    for part, a, b, g in zip(*_chunks(total, x, y), by_distance.split(size), strict=True):
        part += 2 * g.unsqueeze(-1) * _difference(a, b)
    return total


def _chunks(*rows: Tensor) -> list[tuple[Tensor, ...]]:
    return [value.split(max(1, _CHUNK // value.shape[1])) for value in rows]


def _difference(a: Tensor, b: Tensor) -> Tensor:
    """a - b in float32 or wider."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) - b.to(wide)


def _shape(d: int) -> dict[str, int]:
    block = max(16, 1 << (d - 1).bit_length())
    return {"BD": block, "num_warps": 1 if block <= 256 else 4}
