"""Exact f-mutual information of Gaussians and on the sphere, against closed forms, other quadratures and samples."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special

import fmicl
from fmicl.information import (
    CosineLaw,
    GaussianCopula,
    correlations_for,
    fit_gamma,
    gaussian_information,
    largest_bound,
    largest_information,
    sphere_information,
)
from fmicl.information.gaussian import _LogRatioLaw
from fmicl.information.limits import matching_information
from fmicl.information.sphere import linear_fit, log_ratio_bins

F64 = torch.float64


@pytest.mark.parametrize("rho", [[0.3], [0.5, 0.3], [0.4] * 20])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "jeffrey", "squared_hellinger", "pearson"])
def test_quadrature_agrees_with_closed_forms(name: str, rho: list[float]) -> None:
    law = _LogRatioLaw(torch.tensor(rho, dtype=F64))
    assert law.quadrature(fmicl.divergence(name)) == pytest.approx(gaussian_information(rho, name), rel=1e-9)


@pytest.mark.parametrize("name", ["js", "vlc"])
@pytest.mark.parametrize("rho", [0.2, 0.8])
def test_one_pair_agrees_with_a_double_integral(name: str, rho: float) -> None:
    """With s = (a + b) / sqrt 2 and t = (a - b) / sqrt 2, by SciPy."""
    kind = fmicl.divergence(name)

    def integrand(t: float, s: float) -> float:
        r = -0.5 * math.log(1 - rho**2) + s**2 * rho / (2 * (1 + rho)) - t**2 * rho / (2 * (1 - rho))
        u = torch.tensor(r, dtype=F64).exp()
        return float(kind.f(u)) * math.exp(-(s**2 + t**2) / 2) / (2 * math.pi)

    expected = 4 * integrate.dblquad(integrand, 0, 9, 0, 9, epsabs=1e-6, epsrel=1e-5)[0]
    assert gaussian_information([rho], name) == pytest.approx(expected, abs=2e-5)


def test_an_own_f_agrees_with_the_catalogue() -> None:
    mine = fmicl.Divergence.from_generator(lambda u: (u.sqrt() - 1) ** 2, name="mine")
    assert gaussian_information([0.3], mine) == pytest.approx(
        gaussian_information([0.3], "squared_hellinger"), rel=1e-6
    )


def test_integrals_that_diverge_are_infinite_or_refused() -> None:
    assert gaussian_information([0.6], "neyman") == math.inf
    assert gaussian_information([0.6], fmicl.divergence("tsallis", order=3.0)) == math.inf
    with pytest.raises(ValueError, match="converge"):
        gaussian_information([0.9], fmicl.Divergence.from_generator(lambda u: (u**4 - 1) / 3, name="steep"))
    with pytest.raises(ValueError, match="correlations"):
        gaussian_information([1.0])


@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(-0.95, 0.95), min_size=1, max_size=4), st.sampled_from(["kl", "js", "vlc", "pearson"]))
def test_information_is_between_0_and_its_supremum_and_grows_with_pairs(rho: list[float], name: str) -> None:
    whole, part = gaussian_information(rho, name), gaussian_information(rho[:-1] or [0.0], name)
    assert -1e-9 <= part <= whole + 1e-9 <= largest_information(name) + 1e-8


def test_correlations_for() -> None:
    for nats in (2.0, 10.0):
        assert gaussian_information(correlations_for(nats, 20)) == pytest.approx(nats)


def test_copula_of_gaussian_samples_is_the_true_ratio() -> None:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, 100_000, 2, generator=generator, dtype=F64)
    y = torch.stack([0.6 * x[:, 0] + 0.8 * noise[:, 0], noise[:, 1]], dim=1) @ torch.tensor(
        [[2.0, 1], [0, 3]], dtype=F64
    )
    copula = GaussianCopula.fit(x, y)
    assert len(copula.correlations) == 1, "the second pair is independent"
    assert copula.information() == pytest.approx(gaussian_information([0.6]), abs=0.01)
    a, b = x[:5, 0], (0.6 * x[:5, 0] + 0.8 * noise[:5, 0])
    truth = -0.5 * math.log(0.64) + (1.2 * a * b - 0.36 * (a**2 + b**2)) / (2 * 0.64)
    torch.testing.assert_close(copula.log_ratio(x[:5], y[:5]), truth, atol=0.05, rtol=0.05)
    torch.testing.assert_close(copula.all_pairs(x[:5], y[:5]).diagonal(), copula.log_ratio(x[:5], y[:5]))


def test_copula_of_independent_samples_in_high_dimension_has_no_information() -> None:
    """Without the correction, 50 x 50 columns of 1,000 samples have about 50 * 50 / 2000 = 1.25 nats."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, 1000, 50, generator=generator)
    assert GaussianCopula.fit(x, y).information() < 0.05


# --- the sphere ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dimensions", "gamma"), [(2, 0.5), (3, 1.0), (16, 5.0), (128, 40.0)])
def test_kl_on_the_sphere_is_the_von_mises_fisher_entropy(dimensions: int, gamma: float) -> None:
    kappa, order = 2 * gamma, dimensions / 2 - 1
    mean = special.ive(order + 1, kappa) / special.ive(order, kappa)
    log_z = special.gammaln(dimensions / 2) - order * math.log(kappa / 2) + math.log(special.ive(order, kappa)) + kappa
    assert CosineLaw(dimensions, gamma).mean == pytest.approx(mean, rel=1e-9)
    assert sphere_information(dimensions, gamma, "kl") == pytest.approx(kappa * mean - log_z, rel=1e-8)


@pytest.mark.parametrize("name", ["js", "squared_hellinger", "vlc", "pearson"])
def test_information_on_the_sphere_agrees_with_scipy(name: str) -> None:
    """In three dimensions the cosine of independent vectors is uniform on [-1, 1]."""
    kind, z = fmicl.divergence(name), math.sinh(2.0) / 2.0
    value = integrate.quad(lambda c: float(kind.f(torch.tensor(math.exp(2 * c) / z, dtype=F64))) / 2, -1, 1)[0]
    assert sphere_information(3, 1.0, name) == pytest.approx(value, rel=1e-8)


def test_gamma_is_found_and_a_wrong_law_is_rejected() -> None:
    generator = torch.Generator().manual_seed(1)
    right = fit_gamma(CosineLaw(32, 10.0).sample(1000, generator), 32, resamples=60)
    assert right.low < 10 < right.high
    assert right.p_value > 0.05
    mixture = torch.cat([CosineLaw(32, gamma).sample(500, generator) for gamma in (2.0, 30.0)])
    assert fit_gamma(mixture, 32, resamples=60).p_value < 0.05
    with pytest.raises(ValueError, match="10"):
        fit_gamma(torch.zeros(3), 32)


def test_p_values_of_true_laws_are_uniform() -> None:
    generator = torch.Generator().manual_seed(2)
    values = [fit_gamma(CosineLaw(8, 3.0).sample(100, generator), 8, resamples=19).p_value for _ in range(30)]
    assert 0.38 < sum(values) / len(values) < 0.68  # a mean of 0.525, with a standard error of 0.053


def test_the_density_ratio_by_histograms_has_slope_two_gamma() -> None:
    generator = torch.Generator().manual_seed(3)
    bins = log_ratio_bins(CosineLaw(8, 2.0).sample(50_000, generator), CosineLaw(8, 0.0).sample(50_000, generator))
    fit = linear_fit(bins.cosines, bins.log_ratios, 1 / bins.errors.square())
    assert fit.slope == pytest.approx(4.0, rel=0.03)
    assert fit.r_squared > 0.99


# --- limits ----------------------------------------------------------------------------------------------------------


def test_limits() -> None:
    table = torch.eye(50, dtype=F64) / 50
    for name in ("kl", "js", "squared_hellinger", "vlc", "pearson"):
        expected = float(fmicl.information.f_mutual_information(table, name))
        assert matching_information(name, 50) == pytest.approx(expected)
    assert largest_bound("kl", 1000) == pytest.approx(math.log(1000 / math.log(20)))
    assert largest_bound("vlc", 1000) > 0.99 * largest_information("vlc")
    with pytest.raises(ValueError, match="samples"):
        largest_bound("kl", 1)
