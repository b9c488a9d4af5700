"""Two views onto the sphere, with their distances, and distances of views that are there: one kernel each way."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fmicl.kernels import sphere_device as device
from fmicl.utils.numerics import normalise
from fmicl.utils.triton import launch

__all__ = ["add_slopes", "distances", "onto_sphere"]


def onto_sphere(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unit rows of x and y, (N, d) float32, and the squared distances |x_i - y_i|^2 of these, (N,).

    Args:
        x: (N, d), on a CUDA device; float32, bfloat16 or float16.
        y: likewise.
    """
    one, other, distances = _OntoSphere.apply(x.contiguous(), y.contiguous())
    return one, other, distances


class _OntoSphere(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        n, d = x.shape
        one, other = torch.empty(2, n, d, dtype=torch.float32, device=x.device).unbind()
        factors = torch.empty(2, n, dtype=torch.float32, device=x.device)
        distances = torch.empty(n, dtype=torch.float32, device=x.device)
        launch(device.onto_sphere, (n,))(x, y, one, other, factors, distances, n, d, **_shape(d))
        ctx.save_for_backward(x, y, factors)
        return one, other, distances

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
        x, y, factors = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: by operations that can be differentiated again
            return _differentiable(x, y, gradients)
        n, d = x.shape
        x_grad, y_grad = torch.empty_like(x), torch.empty_like(y)
        by_x, by_y, by_distance = (None if value is None else value.contiguous() for value in gradients)
        launch(device.from_sphere, (n,))(
            x, y, factors, x if by_x is None else by_x, y if by_y is None else by_y,
            factors if by_distance is None else by_distance, x_grad, y_grad, n, d,
            X=by_x is not None, Y=by_y is not None, DISTANCE=by_distance is not None, **_shape(d),
        )  # fmt: skip
        return x_grad, y_grad


def _differentiable(x: Tensor, y: Tensor, gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, Tensor | None]:
    one, other = normalise(x.float()), normalise(y.float())
    outputs = zip((one, other, (one - other).square().sum(dim=-1)), gradients, strict=True)
    known = [(output, given) for output, given in outputs if given is not None and output.requires_grad]
    if not known:  # of two views one may be fixed, and so may be what was made of it
        return None, None
    found = iter(
        torch.autograd.grad(
            [output for output, _ in known],
            [value for value in (x, y) if value.requires_grad],
            [given for _, given in known],
            create_graph=True,
            materialize_grads=True,
        )
    )
    return next(found) if x.requires_grad else None, next(found) if y.requires_grad else None


def distances(x: Tensor, y: Tensor) -> Tensor:
    """|x_i - y_i|^2 in float32, (N,); arguments as in `onto_sphere`, and no gradient."""
    n, d = x.shape
    result = torch.empty(n, dtype=torch.float32, device=x.device)
    launch(device.distances, (n,))(x.contiguous(), y.contiguous(), result, d, **_shape(d))
    return result


def add_slopes(total: Tensor, x: Tensor, y: Tensor, by_distance: Tensor) -> None:
    """total_i += 2 by_distance_i (x_i - y_i), in place; total is contiguous and of x's shape."""
    n, d = x.shape
    launch(device.add_slopes, (n,))(total, x.contiguous(), y.contiguous(), by_distance.contiguous(), d, **_shape(d))


def _shape(d: int) -> dict[str, int]:
    block = max(16, 1 << (d - 1).bit_length())
    return {"BD": block, "num_warps": 1 if block <= 256 else 4}
