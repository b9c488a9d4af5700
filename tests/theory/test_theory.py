"""Uniformity certificates against hand-derived curvatures and descent; the simplex; estimation error; push."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import mpmath
import pytest
import torch
from torch import Tensor

import fmicl
from fmicl import theory
from fmicl.losses.similarities import log_mu

F64 = torch.float64
STRICT = ["kl", "js", "pearson", "squared_hellinger", "tsallis", "jeffrey", "vlc"]

# penalty''(r) by hand, as functions of u = e^r
CURVATURE: dict[str, Callable[[float], float]] = {
    "kl": lambda u: u,
    "reverse_kl": lambda u: 0.0,  # noqa: ARG005
    "js": lambda u: u / (1 + u) ** 2,
    "pearson": lambda u: 4 * u**2,
    "squared_hellinger": lambda u: math.sqrt(u) / 4,
    "neyman": lambda u: -2 / u,
    "jeffrey": lambda u: u,
    "tsallis": lambda u: 9 * u**3,
    "vlc": lambda u: 8 * u**2 * (2 - u) / (1 + u) ** 4,
}


@pytest.mark.parametrize("name", fmicl.list_divergences())
@pytest.mark.parametrize("gamma", [0.5, 1.0, 20.0])
@pytest.mark.parametrize("mu", [0.5, 1.0, 1.9])
def test_certificates(name: str, gamma: float, mu: float) -> None:
    certificate = theory.uniformity(name, gamma, mu)
    expected = {"reverse_kl": "convex", "neyman": "not convex"}.get(name, "strictly convex")
    assert certificate.kind == expected
    u = mu * math.exp(-gamma * certificate.at)
    assert certificate.curvature == pytest.approx(gamma**2 * CURVATURE[name](u), rel=1e-6, abs=1e-12)
    grid = [gamma**2 * CURVATURE[name](mu * math.exp(-gamma * t / 100)) for t in range(401)]
    assert certificate.curvature <= min(grid) + 1e-9 * abs(min(grid))


@pytest.mark.parametrize(("mu", "kind"), [(1.0, "strictly convex"), (1.99, "strictly convex"), (2.01, "not convex")])
def test_vlc_depends_on_mu(mu: float, kind: str) -> None:
    """The paper says that constants don't matter, but 2 - u changes sign."""
    assert theory.uniformity("vlc", mu=mu).kind == kind
    if kind == "not convex":
        assert theory.uniformity("vlc", mu=mu).at == 0.0


@pytest.mark.parametrize("name", [name for name in STRICT if name != "vlc"])
@pytest.mark.parametrize("mu", [10.0, 1000.0])
def test_the_others_do_not_depend_on_mu(name: str, mu: float) -> None:
    assert theory.uniformity(name, mu=mu).kind == "strictly convex"


@pytest.mark.parametrize("gamma", [1e-3, 20.0, 100.0, 1e4])
@pytest.mark.parametrize("mu", [1e-300, 1.0, 1e20, 1e300])
@pytest.mark.parametrize("name", [name for name in fmicl.list_divergences() if name != "vlc"])
def test_extreme_gamma_and_mu(name: str, mu: float, gamma: float) -> None:
    """The sign of the curvature is exact where the curvature itself underflows."""
    expected = {"reverse_kl": "convex", "neyman": "not convex"}.get(name, "strictly convex")
    assert theory.uniformity(name, gamma, mu).kind == expected


def test_vlc_at_extreme_gamma_and_mu() -> None:
    assert theory.uniformity("vlc", gamma=100.0).kind == "strictly convex"
    assert theory.uniformity("vlc", gamma=100.0, mu=1e20).kind == "not convex"
    assert theory.uniformity("js", gamma=20.0, mu=math.exp(log_mu(20.0, 512))).kind == "strictly convex"


def test_a_curvature_within_rounding_counts_as_zero() -> None:
    """Jeffrey's f by automatic differentiation at gamma = 20: its curvature e^-80 is lost beside a slope of one."""
    mine = fmicl.Divergence.from_generator(lambda u: (u - 1) * u.log(), name="mine")
    certificate = theory.uniformity(mine, gamma=20.0)
    assert certificate.kind == "convex"
    assert certificate.curvature >= 0


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_works_from_f_alone(name: str) -> None:
    known = fmicl.divergence(name)
    mine = fmicl.Divergence.from_generator(known._f, name="mine")
    seen, true = theory.uniformity(mine), theory.uniformity(known)
    assert seen.kind == true.kind
    assert seen.curvature == pytest.approx(true.curvature, rel=1e-6, abs=1e-9)


def test_a_kink_is_detected() -> None:
    """Total variation's penalty is a step: flat almost everywhere, and not convex."""
    step = fmicl.Divergence.from_generator(lambda u: (u - 1).abs(), name="total variation")
    certificate = theory.uniformity(step, gamma=1.0, mu=2.0)
    assert certificate.kind == "not convex"
    assert certificate.at == pytest.approx(math.log(2), abs=2e-3)


def test_table() -> None:
    lines = theory.table().splitlines()
    assert len(lines) == 2 + 9
    for name, line in zip(fmicl.list_divergences(), lines[2:], strict=True):
        assert line.startswith(f"| `{name}` |")
        assert f"| {theory.uniformity(name).kind} |" in line


@pytest.mark.parametrize(("n", "d"), [(2, 1), (2, 5), (3, 2), (5, 4), (8, 16)])
def test_simplex(n: int, d: int) -> None:
    gram = theory.simplex(n, d) @ theory.simplex(n, d).T
    expected = torch.full((n, n), -1 / (n - 1), dtype=F64).fill_diagonal_(1)
    torch.testing.assert_close(gram, expected)


def uniformity_of(name: str) -> Callable[[Tensor], Tensor]:
    """The uniformity term of a batch at gamma = 0.5."""
    loss = fmicl.FMICLLoss(name, alpha=1.0, gamma=0.5)
    return lambda x: loss.terms(x, x.detach()).uniformity


def descend(energy: Callable[[Tensor], Tensor], n: int, d: int, seed: int) -> Tensor:
    """Unit rows of least energy, by L-BFGS from random points."""
    x = torch.randn(n, d, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x], max_iter=400, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = energy(torch.nn.functional.normalize(x, dim=-1))
        value.backward()  # type: ignore[no-untyped-call, unused-ignore]
        return value

    optimizer.step(closure)
    return torch.nn.functional.normalize(x.detach(), dim=-1)


@pytest.mark.parametrize("name", STRICT)
def test_descent_arrives_at_the_simplex(name: str) -> None:
    n, d = 5, 6
    points = descend(uniformity_of(name), n, d, seed=1)
    off = ~torch.eye(n, dtype=torch.bool)
    torch.testing.assert_close(
        (points @ points.T)[off], torch.full((n * (n - 1),), -1 / (n - 1), dtype=F64), rtol=0, atol=1e-4
    )
    # and nothing is better than the simplex itself
    best = uniformity_of(name)(theory.simplex(n, d))
    assert float(uniformity_of(name)(points)) == pytest.approx(float(best), abs=1e-8)


def test_descent_on_neyman_does_not() -> None:
    points = descend(uniformity_of("neyman"), 5, 6, seed=1)
    gram = (points @ points.T)[~torch.eye(5, dtype=torch.bool)]
    assert float(gram.max() - gram.min()) > 0.5


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_estimation_error(name: str) -> None:
    kind, gamma, mu, n, delta = fmicl.divergence(name), 0.8, 1.3, 200, 0.1
    u = mu * torch.exp(-gamma * torch.linspace(0, 4, 1001, dtype=F64))
    t = kind.derivative(u)
    r_t = float(t.max() - t.min())
    cost = kind.conjugate(t)
    r_f = float(cost.max() - cost.min())
    expected = (r_t + 2 * r_f) * math.sqrt(math.log(6 / delta) / (2 * (n - 1)))
    assert theory.estimation_error(name, n, delta, gamma, mu) == pytest.approx(expected, rel=1e-6)
    weighted = (r_t + 2 * 7 * r_f) * math.sqrt(math.log(6 / delta) / (2 * (n - 1)))
    assert theory.estimation_error(name, n, delta, gamma, mu, alpha=7.0) == pytest.approx(weighted, rel=1e-6)


@pytest.mark.parametrize("alpha", [1.0, 40.0])
def test_the_objective_on_samples_lies_within_the_estimation_error(alpha: float) -> None:
    """Embeddings at two opposite points, each pair at one of them: the expectation is known."""
    n, generator = 512, torch.Generator().manual_seed(0)
    signs = 2.0 * torch.randint(2, (200, n), generator=generator, dtype=F64) - 1
    same = (signs.sum(dim=1).square() - n) / (n * (n - 1))  # mean of s_i s_j over i != j
    near, far = 1.0, math.exp(-4)
    negative = near * (1 + same) / 2 + far * (1 - same) / 2
    expected = (near + far) / 2
    error = theory.estimation_error("kl", n, 0.05, alpha=alpha)
    assert float((alpha * (negative - expected)).abs().max()) <= error


# penalty'(r) = u^2 f''(u) by hand, up to a factor
SLOPE: dict[str, Callable[[float], float]] = {
    "kl": lambda u: u,
    "reverse_kl": lambda u: 1.0,  # noqa: ARG005
    "js": lambda u: u / (1 + u),
    "pearson": lambda u: 2 * u**2,
    "squared_hellinger": lambda u: math.sqrt(u) / 2,
    "neyman": lambda u: 2 / u,
    "jeffrey": lambda u: 1 + u,
    "tsallis": lambda u: 3 * u**3,
    "vlc": lambda u: u**2 / (1 + u) ** 3,
}


@pytest.mark.parametrize("name", sorted(SLOPE))
@pytest.mark.parametrize(("alpha", "gamma", "mu"), [(40.0, 1.0, 1.0), (3.0, 0.4, 2.5)])
def test_push(name: str, alpha: float, gamma: float, mu: float) -> None:
    slope = SLOPE[name]
    assert theory.push(name, alpha, gamma, mu) == pytest.approx(
        alpha * mu * slope(mu * math.exp(-2 * gamma)) / slope(mu), rel=1e-9
    )


def test_push_at_a_very_large_mu() -> None:
    assert theory.push("kl", 1e-10, 1.0, 1e300) == pytest.approx(1e290 * math.exp(-2.0), rel=1e-9)


def test_push_is_a_ratio_of_slopes_in_the_inner_product() -> None:
    equal, orthogonal = (torch.tensor(c, dtype=F64, requires_grad=True) for c in (1.0, 0.0))
    critic = fmicl.Gaussian(gamma=0.8).critic(fmicl.divergence("js"), 2)
    (pull,) = torch.autograd.grad(critic.score(critic.z(equal)), equal)
    (pushed,) = torch.autograd.grad(7.0 * critic.penalty(critic.z(orthogonal)), orthogonal)
    assert theory.push("js", 7.0, 0.8) == pytest.approx(float(pushed / pull), rel=1e-12)


class TestMonotonicity:
    """Batches of more than d + 1: complete monotonicity, and the configurations that are then optimal."""

    PENALTIES: ClassVar[dict[str, Callable[[mpmath.mpf], mpmath.mpf]]] = {
        "kl": lambda r: mpmath.exp(r),
        "reverse_kl": lambda r: r - 1,
        "js": lambda r: mpmath.log1p(mpmath.exp(r)),
        "pearson": lambda r: mpmath.expm1(2 * r),
        "squared_hellinger": lambda r: mpmath.expm1(r / 2),
        "neyman": lambda r: -2 * mpmath.expm1(-r),
        "jeffrey": lambda r: mpmath.expm1(r) + r,
        "tsallis": lambda r: mpmath.exp(3 * r),
        "vlc": lambda r: 4 / (1 + mpmath.exp(-r)) ** 2 - 1,
    }

    @pytest.mark.parametrize("name", sorted(PENALTIES))
    def test_signs_of_the_derivatives(self, name: str) -> None:
        """Against mpmath, to order 8, at gamma = mu = 1: r from -4 to 0."""
        places = [-4 + k / 4 for k in range(17)]
        with mpmath.workdps(60):
            signs = [
                min(mpmath.diff(self.PENALTIES[name], r, k) for r in places) > -(mpmath.mpf(10) ** -20)
                for k in range(1, 9)
            ]
        certificate = theory.monotonicity(name, checked=8)
        assert certificate.complete == all(signs)
        if not certificate.complete:
            assert certificate.order == signs.index(False)

    def test_other_cases(self) -> None:
        assert theory.monotonicity(fmicl.divergence("kl").weighted(40.0)).complete
        assert theory.monotonicity("pearson", gamma=20.0, mu=1e5).complete
        mine = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="mine")
        assert theory.monotonicity(mine) == theory.Monotonicity(complete=False, order=6, checked=6)

    @staticmethod
    def icosahedron() -> Tensor:
        golden = (1 + 5**0.5) / 2
        found = [(0.0, a, b * golden) for a in (-1.0, 1.0) for b in (-1.0, 1.0)]
        rolled = [row[k:] + row[:k] for row in found for k in range(3)]
        return torch.nn.functional.normalize(torch.tensor(rolled, dtype=torch.float64), dim=-1)

    @staticmethod
    def polygon(n: int) -> Tensor:
        angles = torch.arange(n, dtype=torch.float64) * (2 * math.pi / n)
        return torch.stack([angles.cos(), angles.sin()], dim=1)

    @pytest.mark.parametrize("name", ["kl", "pearson", "squared_hellinger", "tsallis", "jeffrey", "reverse_kl"])
    def test_no_descent_finds_less_energy_than_a_universal_optimum(self, name: str) -> None:
        kind = fmicl.divergence(name)
        assert theory.monotonicity(name).complete
        eye = torch.eye(4, dtype=torch.float64)
        for optimum in (self.polygon(5), torch.cat([eye, -eye]), self.icosahedron()):
            n, d = optimum.shape
            assert n > d + 1

            def energy(x: Tensor) -> Tensor:
                """Mean penalty of the pairs, gamma = mu = 1."""
                off = ~torch.eye(len(x), dtype=torch.bool)
                return kind.penalty(2 * (x @ x.T)[off] - 2).mean()

            least, found = float(energy(optimum)), float(energy(descend(energy, n, d, seed=n)))
            assert found >= least - 1e-9
            assert found <= least + 0.02 * abs(least)  # the descent is no straw man


class TestEstimationError:
    """The bound holds, for one encoder and for the worst of a class, on data whose expectation is known."""

    @pytest.mark.parametrize("number", [1, 50])
    def test_holds_for_every_encoder_of_a_class(self, number: int) -> None:
        n, delta, kind = 40, 0.2, fmicl.divergence("kl")
        generator = torch.Generator().manual_seed(0)
        heads = torch.randn(number, 6, 3, generator=generator, dtype=torch.float64)

        def objectives(samples: int) -> Tensor:
            z = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
            noise = torch.randn(2, samples, 6, generator=generator, dtype=torch.float64)
            views = torch.nn.functional.normalize((z + 0.5 * noise)[:, None] @ heads, dim=-1)
            losses = [
                fmicl.functional.fmicl_loss(x, y, kind, alpha=1.0, gamma=0.5) for x, y in zip(*views, strict=True)
            ]
            return -torch.stack(losses)

        expected = torch.stack([objectives(1500) for _ in range(3)]).mean(dim=0)
        deviations = torch.stack([(objectives(n) - expected).abs().max() for _ in range(30)])
        bound = theory.estimation_error(kind, n, delta, gamma=0.5, log_class_size=math.log(number))
        assert float((deviations > bound).double().mean()) <= delta
        assert bound > theory.estimation_error(kind, n, delta, gamma=0.5) or number == 1

    def test_massarts_bound_of_the_complexity(self) -> None:
        """E max_k mean_i s_i T_k(i) over random signs s, for K random vectors with values in an interval."""
        generator = torch.Generator().manual_seed(0)
        n, number = 50, 20
        values = 3 + 2 * torch.rand(number, n, generator=generator, dtype=torch.float64).round()  # a range of 2
        signs = torch.randint(0, 2, (4000, n), generator=generator, dtype=torch.float64) * 2 - 1
        complexity = float((signs @ values.T / n).amax(dim=1).mean())
        with_class = theory.estimation_error(
            "reverse_kl", n, 0.1, gamma=math.log(3) / 4, log_class_size=math.log(number)
        )
        alone = theory.estimation_error("reverse_kl", n, 0.1, gamma=math.log(3) / 4)
        massart = (with_class - alone) / (2 + 2 * (1 + math.sqrt(n / (n - 1))))  # r_T = e^(4 gamma) - 1 = 2
        assert 0.5 * massart < complexity <= massart
