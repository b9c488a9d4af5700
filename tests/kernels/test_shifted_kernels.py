"""Triton programs of shifted critics: against the dense reference in float64, at given shifts."""

from __future__ import annotations

import pytest
import torch

import fmicl
from devices import TRITON_DEVICE
from fmicl.divergences.shifted import AttainedRatio, ShiftedCritic
from fmicl.kernels import reference
from fmicl.kernels.lowering import lower
from fmicl.kernels.triton import TritonBackend
from two_views import F64, NAMES
from unit_rows import rows

OTHERS = [name for name in NAMES if name != "kl"]  # whose optimal shift has a closed form


@pytest.mark.parametrize("gamma", [0.5, 1.0, 5.0, 20.0])
@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("d", [16, 200])
def test_agrees_with_float64(name: str, gamma: float, d: int) -> None:
    """Both algorithms, sizes that are no multiple of a tile, with and without skipped pairs."""
    x, other = rows(70, d).to(TRITON_DEVICE), rows(45, d, 1).to(TRITON_DEVICE)
    critic = fmicl.Gaussian(gamma).critic(fmicl.divergence(name), d)
    closest = critic.z(torch.cat([(x @ x.T).triu(1).flatten(), (x @ other.T).flatten()]).max()).double()
    shifted = ShiftedCritic(critic, closest, torch.full_like(closest, -1.0), 1e-6)
    backend = TritonBackend(False)
    if (name, gamma) == ("neyman", 20.0):  # e^(2 gamma |x - y|^2) overflows
        assert lower(shifted) is None
        return
    assert lower(shifted) is not None
    for columns in (None, other):
        exact = x.double().requires_grad_()
        total = reference.pair_sum(exact, exact if columns is None else columns.double(), shifted, 0)
        (slope,) = torch.autograd.grad(total, exact)
        if columns is None:
            seen, gradient = backend.pair_symmetric(x, shifted, True)
            ratios, none = backend.pair_symmetric(x, AttainedRatio(shifted), False)
        else:
            seen, gradient = backend.pair_rows(x, columns, shifted, 0, True)
            ratios, none = backend.pair_rows(x, columns, AttainedRatio(shifted), 0, False)
        assert none is None
        assert gradient is not None
        assert float((seen - total).abs()) <= 1e-5 * (1 + float(total.abs()))
        assert float((gradient.double() - slope).norm()) <= 2e-4 * float(slope.norm())
        with torch.no_grad():
            attained = reference.pair_sum(
                exact, exact if columns is None else columns.double(), AttainedRatio(shifted), 0
            )
        assert float((ratios - attained).abs()) <= 2e-4 * float(attained)


@pytest.mark.parametrize("name", OTHERS)
def test_in_bfloat16(name: str) -> None:
    x = rows(70, 16).to(TRITON_DEVICE).bfloat16().float()  # so that only the kernel's own error is seen
    critic = fmicl.Gaussian(2.0).critic(fmicl.divergence(name), 16)
    closest = critic.z((x @ x.T).triu(1).max()).double()
    shifted = ShiftedCritic(critic, closest, torch.full_like(closest, -1.0), 1e-6)
    exact = x.double().requires_grad_()
    total = reference.pair_sum(exact, exact, shifted, 0)
    (slope,) = torch.autograd.grad(total, exact)
    seen, gradient = TritonBackend(True).pair_symmetric(x, shifted, True)
    assert gradient is not None
    assert float((seen - total).abs()) <= 1e-4 * float(total.abs())
    assert float((gradient.double() - slope).norm()) <= 1e-2 * float(slope.norm())


def test_what_has_no_program() -> None:
    """A critic T = z, and an f that isn't of the catalogue."""
    z = torch.zeros((), dtype=F64)
    mine = fmicl.Divergence.from_generator(lambda u: (u - 1) ** 2, name="mine")
    for critic in (fmicl.Cosine().critic(fmicl.divergence("pearson"), 8), fmicl.Gaussian().critic(mine, 8)):
        for function in (ShiftedCritic(critic, z, z), AttainedRatio(ShiftedCritic(critic, z, z))):
            assert lower(function) is None
            with pytest.raises(ValueError, match="no program"):
                TritonBackend(False).pair_symmetric(rows(9, 8), function, False)
