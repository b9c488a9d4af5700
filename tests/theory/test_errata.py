"""Mathematical entries of docs/errata.md: the printed form fails, the corrected one holds."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl import theory
from fmicl.losses.similarities import log_mu

F64 = torch.float64
STRICT = ["kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc"]


def cost(name: str, t: Tensor | float, gamma: float = 1.0) -> Tensor:
    """h(t), the cost of a negative pair at squared distance t."""
    return fmicl.divergence(name).penalty(-gamma * torch.as_tensor(t, dtype=F64))


def squared_distances(points: Tensor) -> Tensor:
    return 2 - 2 * points @ points.T


def off_diagonal(matrix: Tensor) -> Tensor:
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)]


# ---- the Jensen step of the theorem on uniformity


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(STRICT), st.integers(2, 9), st.integers(0, 3), st.floats(0.2, 3.0), st.integers(0, 2**31))
def test_the_lower_bound_over_distinct_pairs_is_attained_by_the_simplex(
    name: str, n: int, extra: int, gamma: float, seed: int
) -> None:
    bound = float(cost(name, 2 * n / (n - 1), gamma))
    vertices = theory.simplex(n, n - 1 + extra)
    assert float(off_diagonal(cost(name, squared_distances(vertices), gamma)).mean()) == pytest.approx(bound, rel=1e-9)
    random = torch.randn(n, n - 1 + extra, dtype=F64, generator=torch.Generator().manual_seed(seed))
    points = torch.nn.functional.normalize(random, dim=1)
    assert float(off_diagonal(cost(name, squared_distances(points), gamma)).mean()) >= bound - 1e-12


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("n", [2, 3, 8, 512])
def test_the_printed_lower_bound_over_all_pairs_is_never_attained(name: str, n: int) -> None:
    """With i = j the distances are 0 and 2N / (N - 1), so Jensen's inequality is strict, at the simplex too."""
    vertices = theory.simplex(n, n - 1)
    printed = float(cost(name, 2.0))
    assert float(cost(name, squared_distances(vertices)).mean()) > printed + 1e-4
    assert float(off_diagonal(cost(name, squared_distances(vertices))).mean()) < printed


# ---- the constant mu of the Gaussian kernel


@pytest.mark.parametrize(("d", "gamma"), [(2, 1.0), (3, 0.5), (10, 1.0), (512, 1.0)])
def test_c_is_one_under_the_uniform_measure(d: int, gamma: float) -> None:
    """The marginal density is C E_y[exp(k x.y)] = 1, with k = 1 / sigma^2 = 2 gamma; mu is e^k C, as `log_mu` has it.

    With c = 1 / area, as printed, the density ratio would not have mean 1 but area^2.
    """
    k = 2 * gamma
    angle = torch.linspace(0, math.pi, 200_001, dtype=F64)
    log_weight = (d - 2) * angle.sin().clamp(min=1e-300).log()
    log_weight = log_weight - log_weight.logsumexp(0)  # of the uniform measure, by the angle between x and y
    log_c = -(log_weight + k * angle.cos()).logsumexp(0)
    assert float((log_weight + log_c + k * angle.cos()).logsumexp(0)) == pytest.approx(0, abs=1e-9)
    assert k + float(log_c) == pytest.approx(log_mu(gamma, d), abs=1e-4)
    log_area = math.log(2) + d / 2 * math.log(math.pi) - math.lgamma(d / 2)
    printed = k + float(log_c) + 2 * log_area
    log_mean = float((log_weight + printed - gamma * (2 - 2 * angle.cos())).logsumexp(0))
    assert log_mean == pytest.approx(2 * log_area, abs=1e-6 * abs(log_area))
    assert abs(log_mean) > 1


# ---- a shift as a weight


@pytest.mark.parametrize("name", ["kl", "js", "pearson", "squared_hellinger", "vlc"])
def test_a_shift_is_a_weight_of_the_negatives_for_kl_alone(name: str) -> None:
    divergence = fmicl.divergence(name)
    t = divergence.derivative(torch.tensor([0.3, 0.6, 0.9], dtype=F64))
    ratio = divergence.conjugate(t - 0.5) / divergence.conjugate(t)
    proportional = bool(torch.allclose(ratio, ratio[:1].expand(3), rtol=1e-6))
    assert proportional == (name == "kl")
    if proportional:
        torch.testing.assert_close(ratio, torch.full((3,), math.exp(-0.5), dtype=F64))


# ---- divergences without the theorem's condition


def batches(n: int = 8) -> dict[str, Tensor]:
    one = torch.eye(n, dtype=F64)[:1]
    sign = torch.tensor([1.0, -1.0], dtype=F64).repeat(n // 2)[:, None]
    return {"constant": one.expand(n, n), "antipodal": sign * one, "simplex": theory.simplex(n, n)}


def losses(name: str) -> dict[str, float]:
    """Loss at the paper's alpha of batches whose positive pairs coincide."""
    loss = fmicl.FMICLLoss(name, alpha=40.0)
    return {batch: float(loss(x, x)) for batch, x in batches().items()}


def test_constant_features_are_no_minimum_of_reverse_kl() -> None:
    """h is linear: every centred batch has the same cost, and a constant the highest that there is."""
    found = losses("reverse_kl")
    assert found["antipodal"] == pytest.approx(found["simplex"])
    assert found["constant"] == pytest.approx(1 - 40)
    assert found["antipodal"] == pytest.approx(1 - 40 * (1 + 2 * 8 / 7))


def test_neyman_prefers_two_opposite_points() -> None:
    found = losses("neyman")
    assert found["antipodal"] < found["simplex"] < found["constant"]


@pytest.mark.parametrize("name", STRICT)
def test_the_papers_divergences_prefer_the_simplex(name: str) -> None:
    found = losses(name)
    assert found["simplex"] < found["antipodal"] < found["constant"]
