"""Each divergence against the table of the paper (as corrected), autodiff, brute-force suprema and mpmath."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import mpmath
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl.divergences import DIVERGENCES, KL, Divergence, Learned
from fmicl.utils.options import option

NAMES = ["kl", "reverse_kl", "js", "pearson", "squared_hellinger", "neyman", "jeffrey", "tsallis", "vlc"]
SKEWED = [
    "kl, skew 0.1",
    "kl, skew 1e-5",
    "reverse_kl, skew 0.3",
    "js, skew 0.1",
    "pearson, skew 0.5",
    "tsallis, skew 0.01",
]
SKEWED += ["vlc, skew 0.1", "jeffrey, skew 0.2", "squared_hellinger, skew 0.1", "neyman, skew 0.1"]
LAWFUL = [*NAMES, *SKEWED, "learned", "learned, skew 0.1"]
LOG2 = math.log(2)
F64 = torch.float64


def largest(name: str) -> float:
    """Of the values that fit float32; the components of a mixture overflow before the mixture does."""
    return torch.finfo(torch.float32).max * (0.01 if name.startswith("learned") else 1.0)


def make(name: str) -> Divergence:
    """A divergence of `LAWFUL`."""
    base, _, beta = name.partition(", skew ")
    kind = Learned(torch.tensor([0.5, -0.2, 0.1, 0.3, -0.7])) if base == "learned" else fmicl.divergence(base)
    return kind.skew(float(beta or 0))


def lambert_conjugate(t: Tensor) -> Tensor:
    w = torch.tensor([float(mpmath.lambertw(mpmath.e ** (1 - mpmath.mpf(v)))) for v in t.tolist()], dtype=F64)
    return w + 1 / w + t - 2


# The table, written a second time in the plainest form: f, f*, score, penalty.
TABLE: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "kl": (lambda u: u * u.log(), lambda t: (t - 1).exp(), lambda r: r + 1, lambda r: r.exp()),
    "reverse_kl": (lambda u: -u.log(), lambda t: -1 - (-t).log(), lambda r: -(-r).exp(), lambda r: r - 1),
    "js": (
        lambda u: u * u.log() - (u + 1) * ((u + 1) / 2).log(),
        lambda t: -(2 - t.exp()).log(),
        lambda r: LOG2 - (1 + (-r).exp()).log(),
        lambda r: (1 + r.exp()).log() - LOG2,
    ),
    "pearson": (
        lambda u: (u - 1) ** 2,
        lambda t: torch.where(t <= -2, -1.0, t**2 / 4 + t),
        lambda r: 2 * (r.exp() - 1),
        lambda r: (2 * r).exp() - 1,
    ),
    "squared_hellinger": (
        lambda u: (u.sqrt() - 1) ** 2,
        lambda t: t / (1 - t),
        lambda r: 1 - (-r / 2).exp(),
        lambda r: (r / 2).exp() - 1,
    ),
    "neyman": (
        lambda u: (1 - u) ** 2 / u,
        lambda t: 2 - 2 * (1 - t).sqrt(),
        lambda r: 1 - (-2 * r).exp(),
        lambda r: 2 - 2 * (-r).exp(),
    ),
    "jeffrey": (
        lambda u: (u - 1) * u.log(),
        lambert_conjugate,
        lambda r: r - ((-r).exp() - 1),
        lambda r: r.exp() - 1 + r,
    ),
    "tsallis": (
        lambda u: (u**3 - 1) / 2,
        lambda t: torch.where(t <= 0, 0.5, (2 * t.clamp(min=0) / 3) ** 1.5 + 0.5),
        lambda r: 1.5 * (2 * r).exp(),
        lambda r: (3 * r).exp() + 0.5,
    ),
    "vlc": (
        lambda u: (u - 1) ** 2 / (u + 1),
        lambda t: torch.where(t <= -3, -1.0, 4 - t - 4 * (1 - t).sqrt()),
        lambda r: 1 - 4 * torch.sigmoid(-r) ** 2,
        lambda r: 3 - 8 * torch.sigmoid(-r) + 4 * torch.sigmoid(-r) ** 2,
    ),
}


def arguments(name: str) -> Tensor:
    """Values of t inside the conjugate's domain."""
    top = min(make(name).supremum, 6.0)
    return torch.linspace(-6, top - 1e-3, 101, dtype=F64)


def test_there_are_nine() -> None:
    assert fmicl.list_divergences() == NAMES
    assert fmicl.list_divergences("*kl") == ["kl", "reverse_kl"]
    for name in NAMES:
        assert fmicl.divergence(name).name == name
        assert fmicl.divergence(fmicl.divergence(name)) == fmicl.divergence(name)


@pytest.mark.parametrize("name", NAMES)
def test_equals_the_table(name: str) -> None:
    kind = fmicl.divergence(name)
    f, conjugate, score, penalty = TABLE[name]
    r = torch.linspace(-5, 5, 101, dtype=F64)
    torch.testing.assert_close(kind.f(r.exp()), f(r.exp()))
    torch.testing.assert_close(kind.conjugate(arguments(name)), conjugate(arguments(name)), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(kind.score(r), score(r))
    torch.testing.assert_close(kind.penalty(r), penalty(r))


@pytest.mark.parametrize("name", LAWFUL)
def test_f_of_one_is_zero(name: str) -> None:
    assert float(make(name).f(1.0)) == 0.0
    assert float(make(name).penalty(0.0)) == pytest.approx(
        float(make(name).derivative(1.0)), abs=1e-6
    )  # u f' - f at u = 1


@pytest.mark.parametrize("name", LAWFUL)
def test_derivatives_follow_from_f(name: str) -> None:
    kind = make(name)
    r = torch.linspace(-5, 5, 41, dtype=F64, requires_grad=True)
    u = r.detach().exp().requires_grad_()
    (slope,) = torch.autograd.grad(kind.f(u).sum(), u)
    torch.testing.assert_close(kind.derivative(u), slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kind.score(r), slope, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kind.penalty(r), (u * slope - kind.f(u)), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kind.penalty(r), kind.conjugate(kind.score(r)), rtol=1e-7, atol=1e-9)
    (change,) = torch.autograd.grad(kind.penalty(r).sum(), r)
    torch.testing.assert_close(kind.penalty_slope(r), change)
    rise = torch.func.grad(lambda value: kind.score(value).sum())(r.detach())
    torch.testing.assert_close(kind.score_slope(r), rise)
    torch.testing.assert_close(kind.penalty_slope(r), r.exp() * kind.score_slope(r))  # u^2 f'' and u f''
    bend = torch.func.grad(lambda value: kind.penalty_slope(value).sum())(r.detach())
    torch.testing.assert_close(kind.relative_curvature(r), bend / kind.penalty_slope(r), rtol=1e-9, atol=1e-9)
    for seen, true in zip(kind.penalty_and_slope(r.detach().clone()), (kind.penalty(r), change), strict=True):
        torch.testing.assert_close(seen, true, rtol=1e-9, atol=1e-9)
    t = arguments(name).requires_grad_()
    (attained,) = torch.autograd.grad(kind.conjugate(t).sum(), t)
    torch.testing.assert_close(kind.conjugate_derivative(t), attained, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(kind.conjugate_derivative(kind.derivative(u)), u, rtol=1e-7, atol=1e-9)
    v = torch.linspace(-3, 3, 41, dtype=F64)
    torch.testing.assert_close(kind.activated_penalty(v), kind.conjugate(kind.activation(v)), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", LAWFUL)
def test_conjugate_is_the_supremum(name: str) -> None:
    kind = make(name)
    u = torch.logspace(-8, 8, 400_001, dtype=F64)
    for t in arguments(name)[::10]:
        if kind.conjugate_derivative(t) > 1e7:
            continue  # attained beyond the grid
        brute = (t * u - kind.f(u)).max()
        assert float(kind.conjugate(t)) == pytest.approx(float(brute), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", LAWFUL)
@given(log_u=st.floats(-8, 8), t=st.floats(-20, 20))
@settings(deadline=None)
def test_fenchel_young(name: str, log_u: float, t: float) -> None:
    kind = make(name)
    u = torch.tensor(math.exp(log_u), dtype=F64)
    bound = u * t
    assert float(kind.f(u) + kind.conjugate(torch.tensor(t, dtype=F64))) >= float(bound) - 1e-9 * (1 + abs(bound))


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_conjugate_is_never_nan(name: str, dtype: torch.dtype) -> None:
    kind = make(name)
    edge = 0.0 if math.isinf(kind.supremum) else kind.supremum
    near = [edge - 1e-6, edge, edge + 1e-6, edge + 1.0]
    t = torch.tensor(
        [-math.inf, -1e30, -1e4, -3.0, -2.0, -1.0, 0.0, *near, 1e4, 1e30, math.inf], dtype=dtype, requires_grad=True
    )
    value = kind.conjugate(t)
    assert not value.isnan().any()
    assert not kind.conjugate_derivative(t).isnan().any()
    if math.isfinite(kind.supremum):
        assert (value[t > kind.supremum] == math.inf).all()
        assert (kind.conjugate_derivative(t)[t > kind.supremum] == math.inf).all()
    (grad,) = torch.autograd.grad(value.sum(), t)
    assert not grad.isnan().any()


def test_jeffreys_conjugate_from_minus_to_plus_ten_thousand() -> None:
    t = torch.tensor([-1e4, -1e3, -50.0, -1.0, -1e-3, 0.0, 1e-3, 1.0, 50.0, 600.0], dtype=F64, requires_grad=True)
    value = fmicl.divergence("jeffrey").conjugate(t)
    (grad,) = torch.autograd.grad(value.sum(), t)
    with mpmath.workdps(60):
        for point, seen, slope in zip(t.tolist(), value.tolist(), grad.tolist(), strict=True):
            w = mpmath.lambertw(mpmath.e ** (1 - mpmath.mpf(point)))
            true = w + 1 / w + mpmath.mpf(point) - 2
            assert seen == pytest.approx(float(true.real), rel=1e-12, abs=1e-15)
            assert slope == pytest.approx(float((1 / w).real), rel=1e-12)
    # beyond 709 the value itself leaves float64, from above
    assert float(fmicl.divergence("jeffrey").conjugate(torch.tensor(1e4, dtype=F64))) == math.inf
    single = fmicl.divergence("jeffrey").conjugate(torch.tensor([-1e4, -10.0, 10.0, 80.0]))
    double = fmicl.divergence("jeffrey").conjugate(torch.tensor([-1e4, -10.0, 10.0, 80.0], dtype=F64))
    torch.testing.assert_close(single.double(), double, rtol=1e-5, atol=0)


@pytest.mark.parametrize("name", LAWFUL)
@pytest.mark.parametrize("autocast", [None, torch.bfloat16, torch.float16])
def test_accurate_for_r_up_to_80_in_float32(name: str, autocast: torch.dtype | None) -> None:
    kind = make(name)
    r = torch.linspace(-80, 80, 1601, requires_grad=True)
    wide = r.detach().double().requires_grad_()
    for function in ("score", "penalty", "penalty_slope"):
        with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
            value = getattr(kind, function)(r)
        true = getattr(kind, function)(wide)
        pairs = [(value, true)]
        if value.requires_grad:  # reverse KL's slope is constant
            pairs += zip(torch.autograd.grad(value.sum(), r), torch.autograd.grad(true.sum(), wide), strict=True)
        for seen, exact in pairs:
            assert not seen.isnan().any()
            fits = exact.abs() < largest(name)
            assert seen[fits].isfinite().all()
            torch.testing.assert_close(seen[fits].double(), exact[fits], rtol=5e-5, atol=3e-7)


@pytest.mark.parametrize("name", LAWFUL)
def test_small_derivatives_are_accurate(name: str) -> None:
    """In relative error, since an optimiser such as Adam divides by them."""
    kind = make(name)
    r = torch.linspace(-40, 40, 801, requires_grad=True)
    u = r.detach().double().exp()
    curved = kind.penalty_slope(r.detach().double())  # u^2 f''(u), and u f''(u) is the slope of the score
    (score,), (penalty,) = (torch.autograd.grad(f(r).sum(), r) for f in (kind.score, kind.penalty))
    for seen, exact in (
        (score, curved / u),
        (penalty, curved),
        (kind.penalty_and_slope(r.detach().clone())[1], curved),
    ):
        fits = (exact.abs() < largest(name)) & (exact.abs() > torch.finfo(torch.float32).tiny)
        torch.testing.assert_close(seen.double()[fits], exact[fits], rtol=3e-5, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    r = torch.tensor([-20.0, 0.0, 20.0], dtype=dtype, requires_grad=True)
    value = fmicl.divergence("kl").penalty(r)
    assert value.dtype == torch.float32
    assert value.isfinite().all()  # e^20 doesn't fit float16
    value[0].backward()
    assert r.grad is not None
    assert r.grad.dtype == dtype


def test_numbers_and_integers() -> None:
    assert float(fmicl.divergence("pearson").f(3)) == 4.0
    assert float(fmicl.divergence("kl").f(torch.tensor(-1.0))) == math.inf
    with pytest.raises(ValueError, match="complex64"):
        fmicl.divergence("kl").f(torch.tensor(1j))


def test_the_papers_vlc_penalty_is_a_misprint() -> None:
    """docs/errata.md: f*(f'(1)) is 0 for any f with f(1) = f'(1) = 0, but the printed 3 - 4/(u+1) is 1 there."""
    vlc = fmicl.divergence("vlc")
    assert float(vlc.derivative(1.0)) == 0.0
    assert float(vlc.penalty(0.0)) == 0.0
    assert 3 - 4 / (1 + 1) == 1
    u = torch.tensor(0.5, dtype=F64)
    assert float(vlc.penalty(u.log())) == pytest.approx(float(u * vlc.derivative(u) - vlc.f(u)))


@pytest.fixture
def scaled_kl() -> Iterator[None]:
    @fmicl.register_divergence("scaled_kl", summary="A third party's divergence.")
    @dataclass(frozen=True)
    class ScaledKL(KL):
        factor: float = option(2.0, "Its parameter.")

        def _f(self, u: Tensor) -> Tensor:
            return self.factor * super()._f(u)

        def _derivative(self, u: Tensor) -> Tensor:
            return self.factor * super()._derivative(u)

        def _conjugate(self, t: Tensor) -> Tensor:
            return self.factor * super()._conjugate(t / self.factor)

        def _conjugate_derivative(self, t: Tensor) -> Tensor:
            return super()._conjugate_derivative(t / self.factor)

        def _score(self, r: Tensor) -> Tensor:
            return self.factor * super()._score(r)

        def _penalty(self, r: Tensor) -> Tensor:
            return self.factor * super()._penalty(r)

    yield
    DIVERGENCES.unregister("scaled_kl")


@pytest.mark.usefixtures("scaled_kl")
class TestThirdParty:
    def test_it_is_used_by_name(self) -> None:
        assert fmicl.list_divergences()[-1] == fmicl.divergence("scaled_kl").name == "scaled_kl"
        assert fmicl.divergence("kl").name == "kl"
        x, y = torch.randn(2, 6, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
        torch.testing.assert_close(fmicl.FMICLLoss("scaled_kl")(x, y), 2 * fmicl.FMICLLoss("kl")(x, y))
        assert "| `scaled_kl` | u log u | strictly convex |" in fmicl.theory.table()

    def test_its_parameters_are_its_options(self) -> None:
        assert float(fmicl.divergence("scaled_kl", factor=3.0).derivative(1.0)) == 3.0
        with pytest.raises(TypeError, match="takes factor, got order"):
            fmicl.divergence("scaled_kl", order=3.0)

    def test_names_are_taken_once_and_by_dataclasses(self) -> None:
        with pytest.raises(ValueError, match="'scaled_kl'"):
            fmicl.register_divergence("scaled_kl", summary="Another one.")(KL)
        assert KL.name == "kl"
        with pytest.raises(TypeError, match="Bare"):

            @fmicl.register_divergence("bare", summary="Not a dataclass.")
            class Bare(Divergence): ...


class TestNames:
    def test_every_divergence_has_a_summary(self) -> None:
        assert all(entry.summary.endswith(".") and entry.value.name == entry.name for entry in DIVERGENCES)

    def test_an_unknown_name_lists_the_near_ones(self) -> None:
        with pytest.raises(ValueError, match=r"unknown divergence 'hellinger'; did you mean 'squared_hellinger'\?"):
            fmicl.divergence("hellinger")
        with pytest.raises(ValueError, match="known: kl, reverse_kl, js"):
            fmicl.divergence("zzzz")

    def test_parameters(self) -> None:
        assert float(fmicl.divergence("tsallis", order=2.0).f(3.0)) == 8.0


class TestWeighted:
    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("alpha", [0.5, 40.0])
    def test_formula(self, name: str, alpha: float) -> None:
        base, weighted = fmicl.divergence(name), fmicl.divergence(name).weighted(alpha)
        x = torch.logspace(-2, 2, 41, dtype=F64, requires_grad=True)
        expected = alpha * base.f(x / alpha) - alpha * base.f(torch.tensor(1 / alpha, dtype=F64))
        torch.testing.assert_close(weighted.f(x), expected)
        assert float(weighted.f(torch.tensor(1.0, dtype=F64))) == pytest.approx(0, abs=1e-12)
        (slope,) = torch.autograd.grad(weighted.f(x).sum(), x)
        torch.testing.assert_close(weighted.derivative(x), slope, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(weighted.score(x.log()), slope, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(weighted.penalty(x.log()), x * slope - weighted.f(x), rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(weighted.conjugate(slope), x * slope - weighted.f(x), rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(weighted.conjugate_derivative(slope), x, rtol=1e-6, atol=1e-8)

    @pytest.mark.parametrize("name", NAMES)
    def test_proposition(self, name: str) -> None:
        """E_pos[f_a'(x)] - E_neg[f_a*(f_a'(x))] = E_pos[f'(u)] - a E_neg[f*(f'(u))] - a f(1/a) at x = a u."""
        alpha, base = 40.0, fmicl.divergence(name)
        weighted = base.weighted(alpha)
        positive, negative = torch.randn(2, 50, dtype=F64, generator=torch.Generator().manual_seed(0))
        left = weighted.score(positive + math.log(alpha)).mean() - weighted.penalty(negative + math.log(alpha)).mean()
        right = base.score(positive).mean() - alpha * base.penalty(negative).mean()
        constant = alpha * base.f(torch.tensor(1 / alpha, dtype=F64))
        torch.testing.assert_close(left, right - constant)

    def test_refuses(self) -> None:
        with pytest.raises(ValueError, match=r"alpha=0\.0"):
            fmicl.divergence("kl").weighted(0.0)
        assert fmicl.divergence("kl").weighted(2.0).name == "kl[alpha=2]"


class TestFromGenerator:
    @pytest.mark.parametrize("name", NAMES)
    def test_agrees_with_the_closed_form(self, name: str) -> None:
        closed, mine = fmicl.divergence(name), Divergence.from_generator(TABLE[name][0], name="mine")
        assert mine.name == "mine"
        assert mine.supremum == pytest.approx(closed.supremum, abs=1e-9)
        r = torch.linspace(-6, 4, 41, dtype=F64)
        torch.testing.assert_close(mine.f(r.exp()), closed.f(r.exp()))
        for function in ("score", "penalty", "penalty_slope"):
            torch.testing.assert_close(
                getattr(mine, function)(r), getattr(closed, function)(r), rtol=1e-8, atol=1e-8, msg=function
            )
        t = arguments(name).requires_grad_()
        torch.testing.assert_close(mine.conjugate(t), closed.conjugate(t), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(mine.conjugate_derivative(t), closed.conjugate_derivative(t), rtol=1e-6, atol=1e-6)
        (seen,), (true,) = (torch.autograd.grad(kind.conjugate(t).sum(), t) for kind in (mine, closed))
        torch.testing.assert_close(seen, true, rtol=1e-6, atol=1e-6)

    def test_gradients_reach_through(self) -> None:
        mine = Divergence.from_generator(lambda u: u * u.log(), name="mine")
        r = torch.linspace(-2, 2, 5, dtype=F64, requires_grad=True)
        assert torch.autograd.gradcheck(mine.penalty, r)
        assert torch.autograd.gradcheck(mine.score, r)
        assert torch.autograd.gradgradcheck(mine.penalty, r)
        with torch.no_grad():
            torch.testing.assert_close(mine.penalty(r), r.exp())

    def test_finite_in_float32_for_r_up_to_80(self) -> None:
        mine = Divergence.from_generator(TABLE["js"][0], name="mine")
        r = torch.linspace(-80, 80, 161, requires_grad=True)
        assert mine.score(r).isfinite().all()
        assert mine.penalty(r).isfinite().all()
        (grad,) = torch.autograd.grad(mine.penalty(r).sum(), r)
        assert grad.isfinite().all()

    @pytest.mark.parametrize("name", NAMES)
    def test_the_conjugate_needs_few_evaluations_of_f(self, name: str) -> None:
        """A loss with the optimal shift computes it for every pair, about ten times a step."""
        calls: list[int] = []

        def f(u: Tensor) -> Tensor:
            calls.append(1)
            return TABLE[name][0](u)

        mine = Divergence.from_generator(f, name="mine")
        calls.clear()
        t = fmicl.divergence(name).score(torch.linspace(-8, 6, 999))  # float32, as in training
        t = t[t < mine.supremum]
        torch.testing.assert_close(mine.conjugate(t), fmicl.divergence(name).conjugate(t), rtol=1e-4, atol=1e-5)
        assert len(calls) <= 10

    def test_above_the_domain_is_infinite(self) -> None:
        mine = Divergence.from_generator(TABLE["js"][0], name="mine")
        assert mine.conjugate(torch.tensor([0.5, 0.7, 9.0], dtype=F64)).isinf().tolist() == [False, True, True]

    def test_a_kink_is_convex(self) -> None:
        total_variation = Divergence.from_generator(lambda u: (u - 1).abs(), name="tv")
        assert float(total_variation.score(1.0)) == 1.0
        assert float(total_variation.conjugate(torch.tensor(0.5, dtype=F64))) == pytest.approx(0.5)

    @pytest.mark.parametrize(
        ("f", "message"),
        [
            (lambda u: u - u**2, "not convex near u = 1"),
            (lambda u: (u - 1) ** 2 * (u - 3), "not convex near u = "),
            (lambda u: torch.sin(u - 1), "not convex near u = "),
            (lambda u: torch.where(u > 2, u - 2, u - 1), r"not convex near u = (1\.98|2)"),
            (lambda u: u**2, r"f\(1\) .*f\(u\) = 1 at u = 1"),
            (lambda u: (u - 2).log(), r"f\(1\)"),
            (lambda u: torch.where(u < 0.5, math.nan, (u - 1) ** 2), r"finite .*f\(u\) = nan"),
        ],
    )
    def test_refuses_and_says_at_which_u(self, f: Callable[[Tensor], Tensor], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            Divergence.from_generator(f, name="mine")

    def test_refuses_an_f_that_is_concave_far_out(self) -> None:
        with pytest.raises(ValueError, match=r"not convex beyond u = 8\.88611e\+06"):
            Divergence.from_generator(lambda u: torch.where(u < 1e8, u - 1, 1e8 - 1 - (u - 1e8)), name="mine")

    def test_f_at_zero_is_its_limit(self) -> None:
        zero = torch.tensor(0.0, dtype=F64)
        for name in NAMES:
            mine = Divergence.from_generator(TABLE[name][0], name="mine")
            assert float(mine.f(zero)) == pytest.approx(float(fmicl.divergence(name).f(zero)))

    def test_an_f_that_overflows_is_still_convex(self) -> None:
        mine = Divergence.from_generator(lambda u: torch.exp(u - 1) - 1, name="exponential")
        assert mine.supremum == math.inf
        assert float(mine.score(0.0)) == pytest.approx(1.0)


@pytest.mark.parametrize("r", [15.0, 20.001, 25.0, 36.0, 39.9, 41.0, 300.0])
def test_js_in_float64_beyond_torchs_threshold_of_softplus(r: float) -> None:
    with mpmath.workdps(40):
        true = float(mpmath.log1p(mpmath.exp(r)) - mpmath.log(2))
    seen = fmicl.divergence("js").penalty(torch.tensor(r, dtype=torch.float64))
    assert float(seen) == pytest.approx(true, rel=1e-15)


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_score_difference(name: str) -> None:
    kind = fmicl.divergence(name)
    r, reference = torch.linspace(-3, 3, 13, dtype=torch.float64), torch.tensor(0.7, dtype=torch.float64)
    for each in (kind, kind.weighted(3.0)):
        torch.testing.assert_close(each.score_difference(r, reference), each.score(r) - each.score(reference))
