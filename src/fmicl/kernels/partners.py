"""Two views as they are, and how far apart each two rows are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmicl.kernels.autograd import used_once
from fmicl.kernels.transforms import is_batched

__all__ = ["apart"]

_ENTRIES = 2**20  # of rows that are widened at a time


def apart(x: Tensor, y: Tensor, fused: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """x and y themselves, and |x_i - y_i|^2, (N,), in float32 or more.

    Whoever uses these in the place of x and y has the distances' gradient added to what else flows back to them, in
    place and a few rows at a time: for many rows, copies of them all would be most of a loss's memory.

    Args:
        x: (N, d).
        y: (N, d).
        fused: by Triton's programs, see `fmicl.kernels.sphere_suits`.

    Example:
        >>> apart(torch.tensor([[3.0, 0.0]]), torch.tensor([[0.0, 4.0]]))[2]
        tensor([25.])
    """
    one, other, distances = _Apart.apply(x, y, fused)
    return one, other, distances


class _Apart(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, fused: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        ctx.fused = fused
        if fused:
            from fmicl.kernels import sphere

            return x.view_as(x), y.view_as(y), sphere.distances(x, y)
        parts = zip(*_in_parts(x, y), strict=True)
        return x.view_as(x), y.view_as(y), torch.cat([_between(a, b).square().sum(dim=-1) for a, b in parts])

    @staticmethod
    def backward(ctx: Any, *given: Tensor | None) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        by_distance = given[2]
        if by_distance is None:
            return *given[:2], None
        found: list[Tensor | None] = []
        for own, other, sent, wanted in zip((x, y), (y, x), given[:2], ctx.needs_input_grad[:2], strict=True):
            found.append(_with_slopes(own, other, sent, by_distance, ctx.fused) if wanted else None)
        return *found, None


def _with_slopes(own: Tensor, other: Tensor, sent: Tensor | None, by_distance: Tensor, fused: bool) -> Tensor:
    """What was sent to a view, and the gradient of its distances to the other one."""
    # with create_graph=True it must be differentiable, and of several gradients at once nothing may be changed in place
    if torch.is_grad_enabled() or is_batched(by_distance):
        slope = (2 * by_distance.unsqueeze(-1) * _between(own, other)).to(own.dtype)
        return slope if sent is None else sent + slope
    if sent is None:
        total = torch.zeros_like(own, memory_format=torch.contiguous_format)
    else:
        total = sent if used_once(sent) and sent.is_contiguous() else sent.clone(memory_format=torch.contiguous_format)
    if fused:
        from fmicl.kernels import sphere

        sphere.add_slopes(total, own, other, by_distance)
        return total
    size = len(_in_parts(own)[0][0])
    for part, a, b, g in zip(*_in_parts(total, own, other), by_distance.split(size), strict=True):
        part += 2 * g.unsqueeze(-1) * _between(a, b)
    return total


def _in_parts(*rows: Tensor) -> list[tuple[Tensor, ...]]:
    return [value.split(max(1, _ENTRIES // value.shape[1])) for value in rows]


def _between(a: Tensor, b: Tensor) -> Tensor:
    """a - b, of half precision in float32."""
    wide = torch.promote_types(a.dtype, torch.float32)
    return a.to(wide) - b.to(wide)
