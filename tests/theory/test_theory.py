"""Uniformity certificates against hand-derived curvatures and descent; the simplex; estimation error; push."""

from __future__ import annotations

import math
from collections.abc import Callable

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


def descend(name: str, n: int, d: int, gamma: float, seed: int) -> Tensor:
    """Minimise the penalty of all pairs from random points, by L-BFGS."""
    x = torch.randn(n, d, dtype=F64, generator=torch.Generator().manual_seed(seed)).requires_grad_()
    y = torch.nn.functional.normalize(x.detach(), dim=-1)
    loss = fmicl.FMICLLoss(name, alpha=1.0, gamma=gamma)
    optimizer = torch.optim.LBFGS(
        [x], max_iter=400, tolerance_grad=1e-12, tolerance_change=0, line_search_fn="strong_wolfe"
    )

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss.terms(x, y).uniformity
        value.backward()
        return value

    optimizer.step(closure)
    return torch.nn.functional.normalize(x.detach(), dim=-1)


@pytest.mark.parametrize("name", STRICT)
def test_descent_arrives_at_the_simplex(name: str) -> None:
    n, d = 5, 6
    points = descend(name, n, d, gamma=0.5, seed=1)
    off = ~torch.eye(n, dtype=torch.bool)
    torch.testing.assert_close(
        (points @ points.T)[off], torch.full((n * (n - 1),), -1 / (n - 1), dtype=F64), rtol=0, atol=1e-4
    )
    # and nothing is better than the simplex itself
    loss = fmicl.FMICLLoss(name, alpha=1.0, gamma=0.5)
    best = loss.terms(theory.simplex(n, d), theory.simplex(n, d)).uniformity
    assert float(loss.terms(points, points).uniformity) == pytest.approx(float(best), abs=1e-8)


def test_descent_on_neyman_does_not() -> None:
    points = descend("neyman", 5, 6, gamma=0.5, seed=1)
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


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: theory.simplex(1, 3), "n=1"),
        (lambda: theory.simplex(5, 3), "d=3"),
        (lambda: theory.estimation_error("kl", 1, 0.1), "n=1"),
        (lambda: theory.estimation_error("kl", 10, 1.5), r"delta=1\.5"),
        (lambda: theory.estimation_error("kl", 10, 0.1, alpha=-1.0), r"alpha=-1\.0"),
        (lambda: theory.uniformity("kl", gamma=-1.0), r"gamma=-1\.0"),
        (lambda: theory.uniformity("nope"), "unknown divergence"),
        (lambda: theory.push("kl", alpha=0.0), r"alpha=0\.0"),
        (lambda: theory.push("kl", gamma=-1.0), r"gamma=-1\.0"),
        (lambda: theory.push("kl", mu=0.0), r"mu=0\.0"),
    ],
)
def test_refuses(make: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()  # type: ignore[operator]


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
