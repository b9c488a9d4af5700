"""Closed forms of shifted critics: against the general form in float64, and their range in float32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fmicl
from fmicl.divergences.shifted import ShiftedCritic
from two_views import F64, NAMES

GAMMAS = [0.5, 1.0, 5.0, 20.0]


class General(ShiftedCritic):
    """Without the closed form."""

    form = None


def shifted(name: str, gamma: float, s: float, z: Tensor) -> tuple[ShiftedCritic, ShiftedCritic]:
    critic = fmicl.Gaussian(gamma).critic(fmicl.divergence(name), 64)
    arguments = critic, z.max().double(), torch.tensor(s, dtype=F64), 1e-6
    return ShiftedCritic(*arguments), General(*arguments)


def values(gamma: float) -> Tensor:
    """z of pairs with random cosines, and of some that are as close as the closest one."""
    cosines = torch.randn(500, 3, generator=torch.Generator().manual_seed(0)) / 8
    cosines[:2] = cosines.max()
    return 2 * gamma * (cosines - 1)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("s", [-4.0, 0.0, 3.0])
@pytest.mark.parametrize("gamma", GAMMAS)
@pytest.mark.parametrize("name", NAMES)
def test_agrees_with_the_general_form(name: str, gamma: float, s: float, dtype: torch.dtype) -> None:
    z = values(gamma).to(dtype)
    seen, true = shifted(name, gamma, s, z)
    exact = z.double().requires_grad_()
    penalty = true.penalty(exact)
    (slope,) = torch.autograd.grad(penalty.sum(), exact)
    bound = 5e-7 if dtype == torch.float32 else 1e-13
    found = (seen.penalty(z), *seen.penalty_and_slope(z.clone()), seen.ratio(z))
    for value, wanted in zip(found, (penalty, penalty, slope, true.ratio(z.double())), strict=True):
        assert value.dtype == dtype
        # a penalty near 0 is the difference of numbers near 1
        assert float((value.double() - wanted).detach().norm()) <= bound * (float(wanted.detach().norm()) + 10)
    general = true.penalty_and_slope(z.double())[1]
    assert float((general - slope).norm()) <= 1e-13 * float(slope.norm())


@pytest.mark.parametrize("name", NAMES)
def test_is_differentiable_by_autograd(name: str) -> None:
    """As the dense reference needs it; ties count as the closest pair, whose slope they have."""
    z = values(1.0).double().requires_grad_()
    seen, _ = shifted(name, 1.0, 0.5, z.detach())
    (slope,) = torch.autograd.grad(seen.penalty(z).sum(), z)
    torch.testing.assert_close(slope, seen.penalty_and_slope(z.detach().clone())[1])


def test_ranges_and_types_without_a_form() -> None:
    """What overflows in float32, T = z, a learned scale, and f of a subclass."""

    class Mine(fmicl.divergences.JS):
        """Another type."""

    z = torch.zeros((), dtype=F64)
    gamma = torch.tensor(2.0, requires_grad=True)
    with_form = [("neyman", 10.0), ("reverse_kl", 20.0), ("tsallis", 100.0), ("vlc", 100.0)]
    for name, width in with_form:
        assert ShiftedCritic(fmicl.Gaussian(width).critic(fmicl.divergence(name), 8), z, z).form is not None
    without = [
        fmicl.Gaussian(11.0).critic(fmicl.divergence("neyman"), 8),
        fmicl.Gaussian(21.0).critic(fmicl.divergence("reverse_kl"), 8),
        fmicl.Gaussian(1.0, 1e20).critic(fmicl.divergence("tsallis"), 8),
        fmicl.Gaussian(gamma).critic(fmicl.divergence("js"), 8),
        fmicl.Cosine().critic(fmicl.divergence("pearson"), 8),
        fmicl.Gaussian().critic(Mine(), 8),
        fmicl.Gaussian().critic(fmicl.divergence("kl"), 8),
    ]
    for critic in without:
        assert ShiftedCritic(critic, z, z).form is None


@pytest.mark.parametrize("name", ["js", "jeffrey", "kl"])
def test_large_tiles_are_evaluated_in_parts(name: str) -> None:
    z = -torch.rand(300, 400, generator=torch.Generator().manual_seed(0))
    seen, _ = shifted(name, 1.0, 0.5, z)
    rows = [seen.penalty_and_slope(row.clone()) for row in z]
    penalty, slope = seen.penalty_and_slope(z.clone())
    torch.testing.assert_close((penalty, slope), tuple(torch.stack(each) for each in zip(*rows, strict=True)))
    torch.testing.assert_close(seen.ratio(z), torch.stack([seen.ratio(row) for row in z]))
