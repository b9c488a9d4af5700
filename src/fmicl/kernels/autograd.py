"""Autograd functions of the pairwise sums, for any backend and any number of processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fmicl.kernels import reference
from fmicl.kernels.backend import Backend, Normaliser, PairFunction
from fmicl.kernels.exchange import World, gather_rows, require_first_order, ring_exchange
from fmicl.kernels.parameters import penalty_parameters
from fmicl.kernels.transforms import frees_graph
from fmicl.utils.numerics import exact_matmul, to_float32


def pair_sum(
    x: Tensor, other: Tensor | None, function: PairFunction, skip: int | None, backend: Backend, world: World
) -> Tensor:
    """sum_ij penalty(z_ij) over this process's rows x and all processes' columns; other=None is x with itself.

    Also differentiable in the tensors that the penalty depends on.
    """
    total: Tensor = _PairSum.apply(x, other, function, skip, backend, world, *penalty_parameters(function, x))
    return total


def row_logsumexp(
    x: Tensor, other: Tensor | None, scale: float, skip: int | None, paired: bool, backend: Backend, world: World
) -> Tensor:
    """log sum_j exp(scale x_i.o_j) for this process's rows over all processes' columns; None is x with itself."""
    rows: Tensor = _RowLogSumExp.apply(x, other, scale, skip, paired, backend, world)
    return rows


def _shifted(skip: int | None, by: int) -> int | None:
    return None if skip is None else skip + by


class _PairSum(torch.autograd.Function):
    """One pass computes value and gradient, so the forward pass already has the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        function: PairFunction,
        skip: int | None,
        backend: Backend,
        world: World,
        *parameters: Tensor,
    ) -> Tensor:
        rows_wanted = ctx.needs_input_grad[0]
        grad_x: Tensor | None
        grad_other: Tensor | None = None
        if other is None and skip == 0 and world.size == 1:
            total, grad_x = backend.pair_symmetric(x, function, rows_wanted)
        elif other is not None and world.size == 1 and all(ctx.needs_input_grad[:2]):
            total, grad_x, grad_other = backend.pair_both(x, other, function, skip)
        else:
            total, grad_x = _over_columns(x, x if other is None else other, function, skip, rows_wanted, backend, world)
            if other is None:
                if grad_x is not None:
                    grad_x *= 2  # every pair is counted twice, once in each order
            elif ctx.needs_input_grad[1]:
                _, grad_other = _over_columns(other, x, function, skip, True, backend, world, mirrored=True)
        by_parameter = []
        if parameters:
            by_parameter = _over_columns_by_parameter(x, other, function, skip, parameters, backend, world)
        ctx.gradients = (grad_x, grad_other, *by_parameter)
        ctx.save_for_backward(x, other, *parameters)
        ctx.settings = (function, skip, world)
        ctx.types = tuple(None if value is None else value.dtype for value in (x, other, *parameters))
        return total.to(torch.promote_types(x.dtype, torch.float32))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this sum was freed; a second backward pass needs retain_graph=True")
        # Inputs are not checked for changes: they may have been overwritten since, as a queue is.
        found = zip(ctx.gradients, ctx.types, strict=True)
        if torch.is_grad_enabled():  # create_graph=True: the gradient itself must be differentiable
            x, other, *parameters = ctx.saved_tensors
            function, skip, world = ctx.settings
            require_first_order(world)
            by_x, by_other, *rest = _dense_gradients(
                lambda a, b: reference.pair_sum(a, b, function, skip), grad, x, other, *parameters
            )
            return (by_x, by_other, None, None, None, None, *rest)
        if frees_graph(grad):
            ctx.gradients = None  # autograd copies a gradient that has another reference
        by_x, by_other, *rest = (None if value is None else _scaled(value, grad, dtype) for value, dtype in found)
        return (by_x, by_other, None, None, None, None, *rest)


def all_columns(columns: Tensor, world: World, backend: Backend) -> Iterator[tuple[Tensor, int]]:
    """Columns of all processes, sent in the precision that the backend uses."""
    return ring_exchange(columns if world.size == 1 else backend.cast_for_exchange(columns), world)


def _over_columns(
    rows: Tensor,
    columns: Tensor,
    function: PairFunction,
    skip: int | None,
    gradient: bool,
    backend: Backend,
    world: World,
    mirrored: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Rows of this process with the columns of all; `mirrored` if rows and columns swap their roles in `skip`."""
    total: Tensor | None = None
    grad: Tensor | None = None
    if world.size > 1:
        rows = to_float32(rows)  # so that contributions of all processes are added in float32
    for part, first in all_columns(columns, world, backend):
        signed = None if skip is None else (-skip if mirrored else skip)
        value, share = backend.pair_rows(rows, part, function, _shifted(signed, world.first - first), gradient)
        total = value if total is None else total + value
        grad = share if grad is None or share is None else grad.add_(share)
    assert total is not None
    return total, grad


def _over_columns_by_parameter(
    x: Tensor,
    other: Tensor | None,
    function: PairFunction,
    skip: int | None,
    parameters: Sequence[Tensor],
    backend: Backend,
    world: World,
) -> list[Tensor]:
    """Gradient of this process's sum in the parameters of the penalty."""
    total = [torch.zeros_like(parameter) for parameter in parameters]
    for part, first in all_columns(x if other is None else other, world, backend):
        shares = backend.pair_parameters(x, part, function, _shifted(skip, world.first - first), parameters)
        for sum_, share in zip(total, shares, strict=True):
            sum_ += share
    return total


class _RowLogSumExp(torch.autograd.Function):
    """Values in one pass and the gradient in a second, since it needs every row's normaliser.

    For a small matrix the terms are kept, and the gradient is their product with the other side.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        other: Tensor | None,
        scale: float,
        skip: int | None,
        paired: bool,
        backend: Backend,
        world: World,
    ) -> Tensor:
        result: Tensor | None = None
        ctx.settings = (scale, skip, paired, backend, world)
        if world.size == 1 and any(ctx.needs_input_grad[:2]):
            found = backend.logsumexp_with_terms(x, x if other is None else other, scale, skip, paired)
            if found is not None:
                ctx.save_for_backward(x, other, *found)
                return found[0]
        for part, first in all_columns(x if other is None else other, world, backend):
            rows = backend.logsumexp_rows(x, part, scale, _shifted(skip, world.first - first), paired)
            result = rows if result is None else torch.logaddexp(result, rows)
        assert result is not None
        ctx.save_for_backward(x, other, result)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, other, result, *kept = ctx.saved_tensors
        scale, skip, paired, backend, world = ctx.settings
        none = (None, None, None, None, None)
        if torch.is_grad_enabled():
            require_first_order(world)
            grads = _dense_gradients(lambda a, b: reference.row_logsumexp(a, b, scale, skip, paired), grad, x, other)
            return (*grads, *none)
        if kept:
            terms, total = kept
            factor = scale * grad / torch.where(total > 0, total, 1.0)  # a row may have no pairs
            return (*_from_terms(terms, factor, x, other, ctx.needs_input_grad), *none)
        own = Normaliser(result, grad.contiguous())
        everyone = Normaliser(gather_rows(own.value, world), gather_rows(own.gradient, world))

        def gradient(rows: Tensor, columns: Tensor, as_row: bool, as_column: bool, signed: int | None) -> Tensor:
            total: Tensor | None = None
            if world.size > 1:
                rows = to_float32(rows)
            for part, first in all_columns(columns, world, backend):
                others = None
                if as_column:
                    others = Normaliser(*(value[first : first + len(part)] for value in everyone))
                share = backend.logsumexp_gradient(
                    rows, part, scale, _shifted(signed, world.first - first), own if as_row else None, others, paired
                )
                total = share if total is None else total.add_(share)
            assert total is not None
            return total

        if other is None:
            if skip not in (0, None):
                raise ValueError(f"x with itself supports skip=0 or None, got skip={skip}")
            if world.size == 1:
                return backend.logsumexp_symmetric(x, scale, skip, own, paired), None, *none
            return gradient(x, x, True, True, skip), None, *none
        if world.size == 1 and all(ctx.needs_input_grad[:2]):
            return (*backend.logsumexp_both(x, other, scale, skip, own), *none)
        grad_x = gradient(x, other, True, False, skip) if ctx.needs_input_grad[0] else None
        mirrored = None if skip is None else -skip
        grad_other = gradient(other, x, False, True, mirrored) if ctx.needs_input_grad[1] else None
        return grad_x, grad_other, *none


def _from_terms(
    terms: Tensor, factor: Tensor, x: Tensor, other: Tensor | None, wanted: tuple[bool, ...]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients in x and other of log-sum-exps whose terms were kept."""
    with exact_matmul(x.device):
        weight = terms.mul_(factor[:, None]) if frees_graph(factor) else terms * factor[:, None]
        if other is None:
            return (weight @ x).addmm_(weight.T, x), None
        return weight @ other if wanted[0] else None, weight.T @ x if wanted[1] else None


def _dense_gradients(
    function: Callable[[Tensor, Tensor], Tensor], grad: Tensor, x: Tensor, other: Tensor | None, *parameters: Tensor
) -> tuple[Tensor | None, ...]:
    """Differentiable gradients by the dense reference, for double backward."""
    with torch.enable_grad():  # views are told apart, also where one input is a function of another
        rows, columns = x.view_as(x), None if other is None else other.view_as(other)
        value = function(rows, rows if columns is None else columns)
    given = (rows, columns, *parameters)
    inputs = [value for value in given if value is not None and value.requires_grad]
    found = iter(torch.autograd.grad(value, inputs, grad, create_graph=True, allow_unused=True))
    return tuple(next(found) if value is not None and value.requires_grad else None for value in given)


def _scaled(value: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """value * factor in the given dtype; in place or in one pass where safe, as gradients may be most of the memory."""
    if not frees_graph(factor):
        return (value * factor).to(dtype)
    if value.dtype == dtype:
        return value.mul_(factor)
    return torch.mul(value, factor, out=torch.empty_like(value, dtype=dtype))
