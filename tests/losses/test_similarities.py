"""The Gaussian's normalising constant against mpmath and integration; the cosine critic's domain."""

from __future__ import annotations

import math

import mpmath
import pytest
import torch
from scipy import integrate, special

import fmicl
from fmicl.divergences.special import log_lambert_w
from fmicl.losses.similarities import log_mu

F64 = torch.float64


@pytest.mark.parametrize("d", [2, 3, 4, 7, 64, 512, 2048, 8192])
@pytest.mark.parametrize("k", [1e-3, 0.1, 2.0, 40.0, 1e3, 1e4])
def test_log_mu_against_mpmath(d: int, k: float) -> None:
    with mpmath.workdps(50):
        order = mpmath.mpf(d) / 2 - 1
        inverse = mpmath.gamma(order + 1) * (2 / mpmath.mpf(k)) ** order * mpmath.besseli(order, mpmath.mpf(k))
        true = mpmath.mpf(k) - mpmath.log(inverse)
    assert log_mu(k / 2, d) == pytest.approx(float(true), abs=1e-8)


@pytest.mark.parametrize(("d", "gamma"), [(2, 1.0), (3, 0.5), (10, 4.0), (64, 20.0)])
def test_normalised_mu_makes_u_a_density_ratio(d: int, gamma: float) -> None:
    """E[u] = 1 for y uniform on the sphere; the cosine c of its angle to x has density ~ (1 - c^2)^((d-3)/2)."""
    log_area = special.gammaln(d / 2) - special.gammaln((d - 1) / 2) - 0.5 * math.log(math.pi)
    critic = fmicl.Gaussian(gamma, "normalised").critic(fmicl.divergence("kl"), d)

    def integrand(angle: float) -> float:
        r = critic.offset + critic.scale * math.cos(angle)
        return math.exp(r + log_area) * math.sin(angle) ** (d - 2)

    total, _ = integrate.quad(integrand, 0, math.pi, epsabs=1e-12, epsrel=1e-12, limit=200)
    assert total == pytest.approx(1, abs=1e-9)


def test_gaussian_is_the_kernel() -> None:
    x, y = torch.nn.functional.normalize(torch.randn(2, 6, 5, dtype=F64), dim=-1)
    critic = fmicl.Gaussian(gamma=0.7, mu=3.0).critic(fmicl.divergence("kl"), 5)
    expected = math.log(3.0) - 0.7 * (x - y).norm(dim=-1) ** 2
    torch.testing.assert_close(critic.pairs(x, y), expected)
    torch.testing.assert_close(critic.z((x * y).sum(-1)), expected)


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_cosine_never_leaves_the_domain(name: str) -> None:
    kind = fmicl.divergence(name)
    critic = fmicl.Cosine(temperature=0.05).critic(kind, 8)
    z = critic.z(torch.linspace(-1, 1, 201, dtype=F64))
    torch.testing.assert_close(z, torch.linspace(-20, 20, 201, dtype=F64))
    t = critic.score(z)
    assert (t <= kind.supremum).all()
    assert critic.penalty(z).isfinite().all()
    torch.testing.assert_close(critic.penalty(z), kind.conjugate(t), rtol=1e-5, atol=1e-8)
    assert (t.diff() >= -1e-15).all()  # increasing; bounded ones saturate, up to rounding


def test_activation_of_a_user_defined_divergence() -> None:
    mine = fmicl.Divergence.from_generator(lambda u: (u.sqrt() - 1) ** 2, name="mine")
    t = mine.activation(torch.linspace(-20, 20, 41, dtype=F64))
    assert (t <= mine.supremum).all()
    assert mine.activated_penalty(torch.linspace(-20, 20, 41, dtype=F64)).isfinite().all()


def test_log_lambert_w() -> None:
    z = torch.tensor([-1e4, -100.0, -1.0, 0.0, 1.0, 2.0, 100.0, 1e4], dtype=F64, requires_grad=True)
    root = log_lambert_w(z)
    torch.testing.assert_close(root.exp() + root, z, rtol=1e-14, atol=1e-14)
    for value in (-5.0, 0.3, 5.0, 300.0):
        expected = math.log(float(special.lambertw(math.exp(value)).real))
        assert float(log_lambert_w(torch.tensor(value, dtype=F64))) == pytest.approx(expected, abs=1e-13)
    small = torch.linspace(-3, 3, 7, dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(log_lambert_w, small)
    assert torch.autograd.gradgradcheck(log_lambert_w, small)


class TestPapersCosine:
    """T = x.y itself, without an activation (Table 4)."""

    @pytest.mark.parametrize("kernel", ["tiled", "reference"])
    @pytest.mark.parametrize("name", [name for name in fmicl.list_divergences() if name != "reverse_kl"])
    def test_is_the_conjugate_at_the_cosine(self, name: str, kernel: str) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.nn.functional.normalize(torch.randn(2, 5, 64, generator=generator, dtype=F64), dim=-1)
        x.requires_grad_()
        seen = fmicl.FMICLLoss(name, similarity="cosine_identity", gamma=0.5, kernel=kernel)(x, y)  # type: ignore[arg-type]
        unit = torch.nn.functional.normalize(x, dim=-1)
        others = (unit @ unit.T)[~torch.eye(5, dtype=torch.bool)]
        true = -(unit * y).sum(dim=1).mean() + 40 * fmicl.divergence(name).conjugate(others).mean()
        torch.testing.assert_close(seen, true)
        torch.testing.assert_close(*(torch.autograd.grad(value, x)[0] for value in (seen, true)), rtol=1e-7, atol=1e-7)

    @pytest.mark.parametrize("name", ["js", "squared_hellinger", "vlc", "neyman"])
    def test_is_infinite_above_the_domain(self, name: str) -> None:
        """Negatives that (nearly) coincide: what makes the paper's VLC fail. The default stays finite."""
        x = torch.nn.functional.normalize(torch.tensor([[1.0, 0.0], [1.0, 1e-4], [0.0, 1.0]]), dim=-1)
        paper = fmicl.FMICLLoss(name, similarity="cosine_identity", gamma=0.6)
        assert float(paper(x, x)) == math.inf
        assert bool(fmicl.FMICLLoss(name, similarity="cosine", gamma=0.6)(x, x).isfinite())

    def test_the_slope_of_vlc_grows_without_bound(self) -> None:
        critic = fmicl.Cosine(1.0, "identity").critic(fmicl.divergence("vlc"), 2)
        slopes = critic.penalty_and_slope(torch.tensor([0.9, 0.999, 0.99999], dtype=F64))[1]
        true = [2 / (1 - t) ** 0.5 - 1 for t in (0.9, 0.999, 0.99999)]
        torch.testing.assert_close(slopes, torch.tensor(true, dtype=F64))
