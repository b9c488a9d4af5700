"""Dense reference of the pairwise sums: one N x M matrix and plain autograd. The other backends are tested against it.

Only the inner products are a custom autograd function, so that derivatives of every order use exact products.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fmicl.kernels.backend import PairFunction
from fmicl.utils.learnable import Scalar
from fmicl.utils.numerics import exact_matmul


def pair_sum(x: Tensor, other: Tensor, function: PairFunction, skip: int | None = None) -> Tensor:
    """sum_ij function.penalty(offset + scale * x_i.o_j), without the pairs j = i + skip."""
    z = function.offset + function.scale * exact_products(x, other)
    if skip is None:
        return function.penalty(z).sum()
    skipped = _skipped(x, other, skip)
    # Mask before the penalty too: that of a sample with itself may overflow, and its gradient be NaN.
    values = function.penalty(torch.where(skipped, function.offset, z))
    return values.masked_fill(skipped, 0.0).sum()


def row_logsumexp(x: Tensor, other: Tensor, scale: Scalar, skip: int | None = None, paired: bool = False) -> Tensor:
    """log sum_j exp(scale * x_i.o_j) for each row i, without the pairs j = i + skip (see `fmicl.kernels.backend`)."""
    logits = scale * exact_products(x, other)
    if skip is not None:
        logits = logits.masked_fill(_skipped(x, other, skip, paired), -math.inf)
    return logits.logsumexp(dim=1)


def _skipped(x: Tensor, other: Tensor, skip: int, paired: bool = False) -> Tensor:
    if paired:
        row, column = (torch.arange(len(value), device=x.device) for value in (x, other))
        return (row[:, None] + skip) // 2 == column[None, :] // 2
    return torch.ones(len(x), len(other), dtype=torch.bool, device=x.device).triu(skip).tril(skip)


def exact_products(a: Tensor, b: Tensor) -> Tensor:
    """a b^T with `fmicl.utils.numerics.exact_matmul`; under torch.compile in torch's current precision."""
    if torch.compiler.is_compiling():  # it can't trace functions with a custom jvp
        return a @ b.T
    products: Tensor = _Products.apply(a, b)
    return products


class _Products(torch.autograd.Function):
    """a b^T, whose derivatives of every order are products by this function again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(a: Tensor, b: Tensor) -> Tensor:
        with exact_matmul(a.device):
            return a @ b.T

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:  # noqa: ARG004 (torch's name)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        a, b = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        return exact_products(grad, b.T) if wanted[0] else None, exact_products(grad.T, a.T) if wanted[1] else None

    @staticmethod
    def jvp(ctx: Any, a_tangent: Tensor, b_tangent: Tensor) -> Tensor:
        a, b = ctx.saved_tensors
        return exact_products(a_tangent, b) + exact_products(a, b_tangent)
