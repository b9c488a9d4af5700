"""Functions of whole rows of inner products, in chunks of rows: memory for a few million products at a time.

The sums of `fmicl.kernels.tiled` and `fmicl.kernels.triton` weigh all pairs alike. A loss with labels weighs each pair
by the labels of its two samples, and may need a row's normaliser: a function of the row as a whole, which plain torch
evaluates and differentiates here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fmicl.kernels.reference import exact_products
from fmicl.utils.numerics import exact_matmul

RowFunction = Callable[[Tensor, slice], Tensor]
"""Inner products (n, M) of a chunk of rows, and which rows they are, to a number for each row (n,)."""

# Products of a chunk: few enough that its temporary arrays are small beside the rest of training.
_CPU_CHUNK = 2**20
_GPU_CHUNK = 2**25


def chunks_of_rows(n: int, columns: int, device: torch.device) -> Iterator[slice]:
    """Slices of n rows, each with about as many products as fit into a chunk.

    Example:
        >>> list(chunks_of_rows(5, 2**19, torch.device("cpu")))
        [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    size = max(1, (_CPU_CHUNK if device.type == "cpu" else _GPU_CHUNK) // columns)
    return (slice(first, min(first + size, n)) for first in range(0, n, size))


def row_map(
    x: Tensor, columns: Tensor, function: RowFunction, parameters: Sequence[Tensor] = (), *, dense: bool = False
) -> Tensor:
    """function(x columns^T), evaluated in chunks of rows: (N,), differentiable in x, columns and parameters.

    Args:
        x: rows, (N, d).
        columns: (M, d).
        function: of each row alone; it is evaluated again in the backward pass.
        parameters: leaf tensors with a gradient that the function depends on.
        dense: one N x M matrix and plain autograd, differentiable any number of times.

    Example:
        >>> x = torch.eye(3)
        >>> row_map(x, x, lambda products, rows: products.sum(dim=1))
        tensor([1., 1., 1.])
    """
    if dense:
        return function(exact_products(x, columns), slice(0, len(x)))
    rows: Tensor = _RowMap.apply(x, columns, function, *parameters)
    return rows


class _RowMap(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, columns: Tensor, function: RowFunction, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x, columns)
        ctx.function, ctx.parameters = function, parameters
        with exact_matmul(x.device):
            chunks = chunks_of_rows(len(x), len(columns), x.device)
            return torch.cat([function(x[rows] @ columns.T, rows) for rows in chunks])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, columns = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
            inputs = [x, columns, *ctx.parameters]
            wanted = [value for value in inputs if value.requires_grad]
            value = ctx.function(exact_products(x, columns), slice(0, len(x)))
            found = iter(torch.autograd.grad(value, wanted, grad, create_graph=True, materialize_grads=True))
            by_x, by_columns, *rest = (next(found) if value.requires_grad else None for value in inputs)
            return (by_x, by_columns, None, *rest)
        grad_x, grad_columns = torch.empty_like(x), torch.zeros_like(columns)
        grad_parameters = [torch.zeros_like(value) for value in ctx.parameters]
        with exact_matmul(x.device):
            for rows in chunks_of_rows(len(x), len(columns), x.device):
                products = (x[rows] @ columns.T).requires_grad_()
                with torch.enable_grad():
                    value = ctx.function(products, rows)
                slope, *others = torch.autograd.grad(
                    value, (products, *ctx.parameters), grad[rows], retain_graph=True, materialize_grads=True
                )  # what the function captures may have a graph of its own, which the next chunk needs too
                grad_x[rows] = slope @ columns
                grad_columns.addmm_(slope.T, x[rows])
                for total, share in zip(grad_parameters, others, strict=True):
                    total += share
        return (grad_x, grad_columns, None, *grad_parameters)
