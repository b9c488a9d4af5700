"""Skewed divergences: the mixture, RenyiCL, bounded variance, certificates, gradients, the option."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fmicl
from fmicl.config import recipe
from fmicl.information import f_mutual_information
from two_views import F64, MODES, NAMES, batch, queue, unit

FINITE = ["kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc"]  # f(0)


@pytest.mark.parametrize("name", FINITE)
@given(
    joint=st.lists(st.floats(0.0, 1.0), min_size=6, max_size=6).filter(lambda values: sum(values) > 0.1),
    beta=st.floats(1e-6, 0.99),
)
@settings(deadline=None, max_examples=30)
def test_it_is_the_divergence_from_the_mixture(name: str, joint: list[float], beta: float) -> None:
    kind = fmicl.divergence(name)
    p = torch.tensor(joint, dtype=F64).reshape(2, 3) / sum(joint)
    q = p.sum(0, keepdim=True) * p.sum(1, keepdim=True)
    m = beta * p + (1 - beta) * q
    expected = torch.where(m > 0, m * kind.f(p / torch.where(m > 0, m, 1.0)), 0.0).sum()
    found = f_mutual_information(p, kind.skew(beta))
    assert float(found) == pytest.approx(float(expected), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", NAMES)
def test_its_bound_is_that_of_f_with_negatives_from_the_mixture(name: str) -> None:
    kind, beta = fmicl.divergence(name), 0.2
    positive, negative = torch.randn(2, 50, dtype=F64, generator=torch.Generator().manual_seed(0))
    rho, rho_negative = (r - torch.log(beta * r.exp() + 1 - beta) for r in (positive, negative))
    mixture = beta * kind.penalty(rho).mean() + (1 - beta) * kind.penalty(rho_negative).mean()
    skewed = kind.skew(beta)
    found = skewed.score(positive).mean() - skewed.penalty(negative).mean()
    torch.testing.assert_close(found, kind.score(rho).mean() - mixture)


@pytest.mark.parametrize("beta", [1e-4, 0.05, 0.3])
@pytest.mark.parametrize("order", [1.0, 1.5, 2.0, 4.0])
def test_renyicl_is_one_case(order: float, beta: float) -> None:
    """Where its critic models log w of the mixture, at the best scale c: KL, or Tsallis of its order."""
    x, y = batch(6, 4)
    x = x + 0.3 * y
    cosines = unit(x) @ unit(y).T
    positive, negative = 2.0 * cosines.diagonal(), 2.0 * cosines[~torch.eye(6, dtype=torch.bool)]
    loss = fmicl.RenyiLoss(order, beta, temperature=0.5)(x, y)
    mixture = beta * (order * positive).exp().mean() + (1 - beta) * (order * negative).exp().mean()
    c = ((order - 1) * positive).exp().mean() / mixture
    w_positive, w_negative = c * positive.exp(), c * negative.exp()
    assert float(torch.cat([w_positive, w_negative]).max()) < 1 / beta
    r_positive, r_negative = ((1 - beta) * w / (1 - beta * w) for w in (w_positive, w_negative))
    base = fmicl.divergence("kl") if order == 1 else fmicl.divergence("tsallis", order=order)
    kind = base.skew(beta)
    bound = float(kind.score(r_positive.log()).mean() - kind.penalty(r_negative.log()).mean())
    expected = -bound if order == 1 else -math.log(1 + (order - 1) * bound) / (order * (order - 1))
    assert float(loss) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("name", ["kl", "pearson", "tsallis"])
def test_the_variance_of_the_bound_is_bounded(name: str) -> None:
    """Gaussians in 20 dimensions whose information grows, the true ratio as critic, 50 batches of 500."""
    generator = torch.Generator().manual_seed(0)

    def variance(kind: fmicl.Divergence, nats: float) -> float:
        """Of the bound, times the number of samples."""
        rho = math.sqrt(1 - math.exp(-nats / 10))
        x, noise = torch.randn(2, 50, 500, 20, dtype=F64, generator=generator)
        y = rho * x + math.sqrt(1 - rho**2) * noise

        def log_ratio(a: Tensor, b: Tensor) -> Tensor:
            rest = 1 - rho**2
            return ((2 * rho * a * b - rho**2 * (a**2 + b**2)) / (2 * rest) - 0.5 * math.log(rest)).sum(-1)

        bounds = kind.score(log_ratio(x, y)).mean(1) - kind.penalty(log_ratio(x, y.roll(1, dims=1))).mean(1)
        return 500 * float(bounds.var())

    kind, beta = fmicl.divergence(name), 0.1
    r = torch.linspace(-60, 60, 10_001, dtype=F64)
    w, skewed = r.exp() / (beta * r.exp() + 1 - beta), kind.skew(beta)
    # E_p[T^2] = E_m[w T^2] is at most the largest w T^2, and a variance a quarter of the squared range
    most = float((w * skewed.score(r).square()).max() + skewed.penalty(r)[[0, -1]].diff().square() / 4)
    plain, bounded = ([variance(each, nats) for nats in (0.5, 2.0, 8.0, 20.0)] for each in (kind, skewed))
    assert max(bounded) < most < max(plain)


@pytest.mark.parametrize("beta", [0.01, 0.2, 0.49, 0.6])
@pytest.mark.parametrize("mu", [0.5, 1.0, 3.0])
@pytest.mark.parametrize(("name", "curvature"), [("kl", 1.0), ("pearson", 2.0), ("squared_hellinger", 0.5)])
def test_certificates(name: str, curvature: float, mu: float, beta: float) -> None:
    """penalty'' / penalty' is C (1 - beta w) - beta w for a power of order C: positive for u < C (1 - beta) / beta."""
    kind = fmicl.divergence(name).skew(beta)
    expected = "strictly convex" if mu < curvature * (1 - beta) / beta else "not convex"
    assert fmicl.theory.uniformity(kind, mu=mu).kind == expected


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_the_loss_in_every_kernel(name: str, mode: str) -> None:
    kind = fmicl.divergence(name).skew(0.1)
    negatives = "anchor" if mode == "explicit" else mode
    found = []
    for kernel in ("tiled", "reference"):
        x, y = (view.requires_grad_() for view in batch(9, 4))
        explicit = [queue(5, 4).requires_grad_()] if mode == "explicit" else []
        value = fmicl.FMICLLoss(kind, 3.0, 0.8, 1.2, negatives=negatives, kernel=kernel)(x, y, *explicit)  # type: ignore[arg-type]
        found.append([value, *torch.autograd.grad(value, [x, y, *explicit])])
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", ["kl", "vlc"])
def test_derivatives_of_the_loss(name: str) -> None:
    """Twice, and by torch.func."""
    loss = fmicl.FMICLLoss(fmicl.divergence(name).skew(0.3), alpha=2.0)
    x, y = (view.requires_grad_() for view in batch(4, 3))
    assert torch.autograd.gradcheck(loss, (x, y))
    assert torch.autograd.gradgradcheck(loss, (x, y))
    (expected,) = torch.autograd.grad(loss(x, y), x)
    torch.testing.assert_close(torch.func.grad(loss)(x.detach(), y.detach()), expected)
    hessian = torch.func.hessian(loss)(x.detach(), y.detach())
    assert hessian.shape == (4, 3, 4, 3)
    torch.testing.assert_close(hessian.reshape(12, 12), hessian.reshape(12, 12).T)


def test_a_base_with_a_parameter() -> None:
    x, y = batch(9, 4)
    for shift in (None, "optimal"):
        order = nn.Parameter(torch.tensor(1.5, dtype=F64))
        loss = fmicl.FMICLLoss(fmicl.divergence("tsallis", order=order).skew(0.2), alpha=2.0, shift=shift)
        assert list(loss.parameters()) == [order]
        (seen,) = torch.autograd.grad(loss(x, y), order)
        ends = []
        for step in (1e-5, -1e-5):
            with torch.no_grad():
                order.add_(step)
                ends.append(float(loss(x, y)))
                order.sub_(step)
        assert float(seen) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-5)


@pytest.mark.parametrize("name", ["kl", "js", "pearson"])
def test_no_shift_does_better(name: str) -> None:
    x, y = batch()
    kind = fmicl.divergence(name).skew(0.1)
    best = -float(fmicl.FMICLLoss(kind, alpha=5.0, shift="optimal")(x, y))
    critic = fmicl.Gaussian().critic(kind, 4)
    positive = critic.score(critic.pairs(unit(x), unit(y)))
    negative = critic.score(critic.z((unit(x) @ unit(x).T)[~torch.eye(len(x), dtype=torch.bool)]))
    v = torch.linspace(-3, 3, 2001, dtype=F64)
    bounds = positive.mean() - v - 5.0 * kind.conjugate(negative - v[:, None]).mean(dim=1)
    assert best == pytest.approx(float(bounds.max()), abs=1e-4)
    assert best >= float(bounds.max()) - 1e-12


def test_extremes_of_the_conjugate() -> None:
    for kind in (fmicl.divergence(name).skew(0.1) for name in NAMES):
        t = torch.tensor([-1e30, -1e4, kind.supremum - 1e-9, kind.supremum], dtype=F64)
        value, u = kind.conjugate(t), kind.conjugate_derivative(t)
        assert not value.isnan().any()
        assert bool((u.diff() >= 0).all())
        if type(kind.base).__name__ not in ("ReverseKL", "Jeffrey"):  # type: ignore[attr-defined]
            assert float(value[-1]) == pytest.approx(0.9 * float(kind.base.penalty(-math.log(0.1))), rel=1e-6)  # type: ignore[attr-defined]


def test_name_and_limits() -> None:
    kind = fmicl.divergence("pearson").skew(0.25)
    assert repr(kind) == "Pearson().skew(0.25)"
    assert kind.name == "pearson[skew=0.25]"
    assert kind.supremum == 0.25 * 3.0**2
    assert "(u-1)^2" in kind.formula
    assert kind == fmicl.divergence("pearson").skew(0.25) != fmicl.divergence("pearson").skew(0.5)
    assert fmicl.divergence("kl").skew(0.0) == fmicl.divergence("kl")
    assert fmicl.Divergence.from_generator(lambda u: (u - 1).abs()).skew(0.1).piecewise_linear
    for beta in (-0.1, 1.0, math.nan):
        with pytest.raises(ValueError, match=r"skew must lie in \[0, 1\)"):
            fmicl.divergence("kl").skew(beta)


def test_the_option() -> None:
    settings = recipe("digits", divergence="tsallis", skew=0.1)
    context = settings.objective_context()
    assert "Tsallis(order=3.0).skew(0.1)" in repr(settings.objective_options.build(context))
    assert settings.arguments() == ["--divergence", "tsallis", "--skew", "0.1"]
    assert settings.hash != recipe("digits", divergence="tsallis").hash
    assert recipe("digits", skew=0.0).hash == recipe("digits").hash
    with pytest.raises(ValueError, match="skew"):
        recipe("digits", skew=1.0)
    # only without skew does KL with the optimal shift have no alpha
    assert "alpha" in recipe("digits", alpha=3.0, shift="optimal").unused()
    assert "alpha" not in recipe("digits", alpha=3.0, shift="optimal", skew=0.1).unused()
    assert "skew" in recipe("digits", objective="infonce", skew=0.1).unused()
