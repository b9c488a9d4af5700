"""Normalisation of positive pairs and their squared distances, with gradients of any order."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import fmicl
from devices import TRITON_DEVICE
from fmicl import kernels
from fmicl.kernels import Kernel
from fmicl.utils.numerics import normalise
from unit_rows import rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n", "d"), [(5, 3), (40, 24), (3, 300)])
def test_normalise_pairs(n: int, d: int, dtype: torch.dtype) -> None:
    """Unit rows, distances and gradients of plain operations; also of zero, tiny and huge rows."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(n, d, generator=generator).to(TRITON_DEVICE, dtype) for _ in range(2))
    x[0], y[1] = 0.0, 0.0
    x[2], y[2] = 1e-30 * x[2], 1e30 * y[2]
    given = [value.clone().requires_grad_() for value in (x, y)]
    plain = [value.double().requires_grad_() for value in (x, y)]
    seen = kernels.normalise_pairs(given[0], given[1])
    unit = [normalise(value) for value in plain]
    zero = sum((value == 0).all(dim=1).double() for value in plain)  # a zero row is orthogonal to every other
    expected = (*unit, (unit[0] - unit[1]).square().sum(dim=-1) + zero)
    for mine, theirs in zip(seen, expected, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=1e-5, atol=1e-6)
    weights = [torch.randn(value.shape, generator=generator).to(TRITON_DEVICE) for value in seen]
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


def test_double_backward() -> None:
    x, y = (value.to(TRITON_DEVICE).requires_grad_() for value in (3 * rows(6, 4), 2 * rows(6, 4, 1)))
    second = []
    for kernel in ("triton", "reference"):
        value = fmicl.FMICLLoss("js", kernel=kernel, precision="high")(x, y)
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        second.append(torch.autograd.grad(slope.square().sum(), (x, y)))
    for mine, theirs in zip(*second, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("kernel", ["triton", "reference"])
def test_double_backward_of_one_view(kernel: Kernel) -> None:
    """As with a momentum encoder, whose keys have no gradient."""
    x, y = (value.to(TRITON_DEVICE) for value in (3 * rows(6, 4), 2 * rows(6, 4, 1)))
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


@pytest.mark.parametrize("function", [kernels.pair_sum, kernels.row_logsumexp])
def test_differentiable_gradient_where_columns_depend_on_rows(function: Callable[..., Tensor]) -> None:
    critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=4)
    found = []
    for kernel in ("tiled", "reference"):
        x = rows(6, 4).requires_grad_()
        how = critic if function is kernels.pair_sum else 2.0
        total = function(x, x.square(), how, kernel=kernel).sum()
        found.append(torch.autograd.grad(total, x, create_graph=True)[0])
    torch.testing.assert_close(*found)


def test_double_backward_of_an_unused_view() -> None:
    x, y = rows(6, 4).to(TRITON_DEVICE).requires_grad_(), rows(6, 4, 1).to(TRITON_DEVICE)
    _, other, _ = kernels.normalise_pairs(x, y)
    (slope,) = torch.autograd.grad(other.sum(), x, create_graph=True, materialize_grads=True)
    assert not bool(slope.any())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_distance_gradient_is_added_in_place(dtype: torch.dtype, keep: bool, fused: bool) -> None:
    """No second gradient of all rows is allocated, unless the graph is retained."""
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 3, generator=generator).to(TRITON_DEVICE, dtype).requires_grad_() for _ in range(2))
    factor = torch.randn(5, 3, generator=generator).to(TRITON_DEVICE, dtype)
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


def test_expanded_gradient_is_not_changed_in_place() -> None:
    x, y = torch.ones(4, 2, requires_grad=True), torch.zeros(4, 2)
    one, _, distances = kernels.pair_distances(x, y)
    (one.sum() + distances.sum()).backward()
    torch.testing.assert_close(x.grad, torch.full((4, 2), 3.0))
