"""Onto the unit sphere and back, and the distances of two views, with their gradients of any order."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fmicl
from fmicl import kernels
from fmicl.kernels import Kernel
from fmicl.utils.numerics import normalise
from unit_rows import needs_triton, rows


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(5, 3), (40, 24), (3, 300)])
def test_onto_the_sphere_and_back(n: int, d: int, dtype: torch.dtype) -> None:
    """Unit rows, distances and gradients are those of plain operations; zeros, tiny and huge rows included."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, d, generator=generator).to(dtype) for _ in range(2))
    x[0], y[1] = 0.0, 0.0
    x[2], y[2] = 1e-30 * x[2], 1e30 * y[2]
    given = [value.clone().requires_grad_() for value in (x, y)]
    plain = [value.double().requires_grad_() for value in (x, y)]
    seen = kernels.normalise_pairs(given[0], given[1])
    unit = [normalise(value) for value in plain]
    expected = (*unit, (unit[0] - unit[1]).square().sum(dim=-1))
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)
    weights = [torch.randn(value.shape, generator=generator) for value in seen]
    tolerance = 1e-5 if dtype == torch.float32 else 5e-3
    for used in ((0, 1, 2), (0,), (2,)):
        found = torch.autograd.grad([seen[i] for i in used], given, [weights[i] for i in used], retain_graph=True)
        true = torch.autograd.grad(
            [expected[i] for i in used], plain, [weights[i].double() for i in used],
            retain_graph=True, materialize_grads=True,
        )  # fmt: skip
        for value, one, other in zip((x, y), found, true, strict=True):
            length = value.double().norm(dim=1, keepdim=True)  # rows of 1e-30 have gradients of 1e30
            length = torch.where(length > 0, length, 1.0)
            torch.testing.assert_close(one.double() * length, other * length, rtol=tolerance, atol=3 * tolerance)


@needs_triton
def test_a_loss_by_way_of_the_kernel_can_be_differentiated_twice() -> None:
    x, y = (value.clone().requires_grad_() for value in (3 * rows(6, 4), 2 * rows(6, 4, 1)))
    second = []
    for kernel in ("triton", "reference"):
        value = fmicl.FMICLLoss("js", kernel=kernel, precision="high")(x, y)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        second.append(torch.autograd.grad(slope.square().sum(), (x, y)))
    for mine, theirs in zip(*second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_one_view_that_learns_is_enough_to_differentiate_twice(kernel: Kernel) -> None:
    """As with a momentum encoder, whose keys have no gradient."""
    x, y = 3 * rows(6, 4), 2 * rows(6, 4, 1)
    loss = fmicl.FMICLLoss("js", kernel=kernel, precision="high")
    for swapped in (False, True):
        leaf, fixed = x.clone().requires_grad_(), y.clone()
        value = loss(fixed, leaf) if swapped else loss(leaf, fixed)
        (slope,) = torch.autograd.grad(value, leaf, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), leaf)
        exact = x.double().requires_grad_()
        plain = fmicl.FMICLLoss("js", kernel="reference")
        value = plain(y.double(), exact) if swapped else plain(exact, y.double())
        (slope,) = torch.autograd.grad(value, exact, create_graph=True)
        (wanted,) = torch.autograd.grad(slope.square().sum(), exact)
        torch.testing.assert_close(second.double(), wanted, rtol=1e-3, atol=1e-5)


@needs_triton
def test_a_view_that_nothing_flows_back_to_can_be_differentiated_too() -> None:
    x, y = rows(6, 4).requires_grad_(), rows(6, 4, 1)
    _, other, _ = kernels.normalise_pairs(x, y)
    (slope,) = torch.autograd.grad(other.sum(), x, create_graph=True, materialize_grads=True)
    assert not bool(slope.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_distances_add_to_a_gradient_where_it_is(dtype: torch.dtype, keep: bool, fused: bool) -> None:
    """No second gradient of all rows is made, unless somebody still needs the first one."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 3, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    factor = torch.randn(5, 3, generator=generator).to(dtype)
    one, _, distances = kernels.pair_distances(x, y, fused)
    places: list[int] = []
    sent: list[Tensor] = []

    def look(gradient: Tensor) -> None:
        places.append(gradient.data_ptr())
        if keep:
            sent.append(gradient)

    one.register_hook(look)
    ((one * factor).sum() + 2 * distances.sum()).backward(retain_graph=keep)
    slope = 4 * (x.detach().float() - y.detach().float())
    assert x.grad is not None
    assert y.grad is not None
    torch.testing.assert_close(x.grad, (factor.float() + slope).to(dtype))
    torch.testing.assert_close(y.grad, (-slope).to(dtype))
    assert (places == [x.grad.data_ptr()]) is not keep
    if keep:
        torch.testing.assert_close(sent[0], factor)


def test_a_gradient_that_is_one_number_for_all_rows_is_left_alone() -> None:
    x, y = torch.ones(4, 2, requires_grad=True), torch.zeros(4, 2)
    one, _, distances = kernels.pair_distances(x, y)
    (one.sum() + distances.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((4, 2), 3.0))
