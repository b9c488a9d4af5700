"""RealNVP on known densities, and the tests of the Gaussian kernel on pairs that follow it and on pairs that don't."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fmicl.information import CosineLaw
from fmicl.information.assumption import check_assumption, flow_bins
from fmicl.information.flow import Prior, RealNVP, fit_flow
from fmicl.utils.numerics import normalise

F64 = torch.float64


def sphere_pairs(number: int, dimensions: int, cosines: Tensor, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uniform x, and y at these cosines in random directions."""
    generator = torch.Generator().manual_seed(seed)
    x, other = (normalise(torch.randn(number, dimensions, generator=generator, dtype=F64)) for _ in range(2))
    orthogonal = normalise(other - (other * x).sum(dim=1, keepdim=True) * x)
    return x, cosines.unsqueeze(1) * x + (1 - cosines.square()).sqrt().unsqueeze(1) * orthogonal


@pytest.mark.parametrize("prior", ["gaussian", "uniform"])
def test_the_flow_is_a_density(prior: Prior) -> None:
    """It inverts, its log determinant is autograd's, and it integrates to 1, whatever its weights."""
    torch.manual_seed(0)
    flow = RealNVP(2, blocks=2, hidden=8, prior=prior).double()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(5, 2, dtype=F64)
    z, log_det = flow.transform(x)
    torch.testing.assert_close(flow.inverse(z), x)
    jacobians = torch.stack(
        [torch.autograd.functional.jacobian(lambda v: flow.transform(v[None])[0][0], row) for row in x]
    )
    torch.testing.assert_close(log_det, jacobians.det().abs().log())
    side = torch.linspace(-25, 25, 1001, dtype=F64)
    with torch.no_grad():
        total = flow.log_density(torch.cartesian_prod(side, side)).exp().sum() * 0.05**2
    assert float(total) == pytest.approx(1.0, abs=5e-3)


def test_the_flow_learns_a_known_density() -> None:
    """A correlated Gaussian pushed through a bend: held-out likelihood near the true one, density near the truth."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 1500, generator=generator)
    x = torch.stack([a, 0.5 * b + 0.5 * a.square()], dim=1)
    truth = -0.5 * (a.square() + b.square()) - math.log(2 * math.pi) - math.log(0.5)
    flow = fit_flow(x[:1200], blocks=2, hidden=24, steps=250, batch_size=128, learning_rate=5e-3)
    with torch.no_grad():
        found = flow.log_density(x[1200:])
    assert float((truth[1200:] - found).mean()) < 0.12
    assert float(torch.corrcoef(torch.stack([found, truth[1200:]]))[0, 1]) > 0.95
    plain = torch.distributions.MultivariateNormal(x.mean(0), x.T.cov()).log_prob(x[1200:])
    assert float(found.mean()) > float(plain.mean()) + 0.2, "better than a Gaussian"


def test_the_flow_refuses_what_it_can_not_fit() -> None:
    with pytest.raises(ValueError, match="20"):
        fit_flow(torch.zeros(3, 2))
    with pytest.raises(ValueError, match="prior"):
        RealNVP(2, prior="laplace")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="columns"):
        RealNVP(1)


def test_pairs_that_follow_the_assumption_pass() -> None:
    gamma, n, d = 2.0, 1000, 4
    x, y = sphere_pairs(n, d, CosineLaw(d, gamma).sample(n, torch.Generator().manual_seed(1)))
    check = check_assumption(x, y, flow_steps=60)
    assert check.gamma.low < gamma < check.gamma.high
    assert check.gamma.p_value > 0.05
    assert check.ratio_fit.slope == pytest.approx(2 * gamma, rel=0.1)
    assert check.ratio_fit.r_squared > 0.95
    assert all(flow.fit.slope < 0 for flow in check.flows)
    assert "agree" in check.verdict[-1]


def test_pairs_that_do_not_are_rejected() -> None:
    """Half of the pairs are independent, half nearly equal: the log ratio is flat, then steep."""
    n, d = 1000, 4
    generator = torch.Generator().manual_seed(2)
    cosines = torch.cat([CosineLaw(d, gamma).sample(n // 2, generator) for gamma in (0.0, 100.0)])
    check = check_assumption(*sphere_pairs(n, d, cosines), flow_steps=4)
    assert check.gamma.p_value < 0.05
    assert check.ratio_fit.r_squared < 0.9
    assert "does not hold" in check.verdict[-1]


def test_bins_hold_all_held_out_pairs() -> None:
    x, y = sphere_pairs(200, 3, CosineLaw(3, 1.0).sample(200, torch.Generator().manual_seed(0)))
    found = flow_bins(x, y, steps=4, bins=10)
    assert sum(found.counts) == 50
    assert found.squared_distances == sorted(found.squared_distances)


def test_wrong_pairs() -> None:
    with pytest.raises(ValueError, match="shape"):
        check_assumption(torch.zeros(200, 3), torch.zeros(200, 4))
    with pytest.raises(ValueError, match="100"):
        check_assumption(torch.randn(50, 3), torch.randn(50, 3))
