"""f-mutual information against closed forms for Gaussians, and the bound against the truth."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

import fmicl
from fmicl.information import f_mutual_information, label_information, variational_bound

F64 = torch.float64


def closed_form(name: str, rho: float) -> float:
    """Of a bivariate Gaussian with correlation rho against the product of its marginals."""
    rest = 1 - rho**2
    return {
        "kl": -0.5 * math.log(rest),
        "reverse_kl": rho**2 / rest + 0.5 * math.log(rest),
        "pearson": rho**2 / rest,
        "squared_hellinger": 2 - 2 * math.sqrt(math.sqrt(rest)) / math.sqrt(1 - rho**2 / 4),
    }[name]


def gaussian_grid(rho: float, half_width: float = 9.0, points: int = 1201) -> tuple[Tensor, Tensor]:
    """Joint and independent probabilities on a fine grid."""
    x = torch.linspace(-half_width, half_width, points, dtype=F64)
    step = float(x[1] - x[0])
    marginal = torch.exp(-(x**2) / 2) / math.sqrt(2 * math.pi) * step
    quadratic = (x[:, None] ** 2 - 2 * rho * x[:, None] * x[None] + x[None] ** 2) / (1 - rho**2)
    joint = torch.exp(-quadratic / 2) / (2 * math.pi * math.sqrt(1 - rho**2)) * step**2
    return joint, marginal[:, None] * marginal[None]


@pytest.mark.parametrize("rho", [0.1, 0.5, 0.8])
@pytest.mark.parametrize("name", ["kl", "reverse_kl", "pearson", "squared_hellinger"])
def test_gaussians(name: str, rho: float) -> None:
    joint, independent = gaussian_grid(rho)
    # pearson's integrand reaches far along the diagonal, reverse KL's where joint mass is tiny but not zero
    estimate = f_mutual_information(joint / joint.sum(), name)
    assert float(estimate) == pytest.approx(closed_form(name, rho), rel=1e-3)
    kind = fmicl.divergence(name)
    r = (joint / independent).log()
    bound = variational_bound(kind, kind.score(r), kind.score(r), joint_weights=joint, independent_weights=independent)
    assert float(bound) == pytest.approx(closed_form(name, rho), rel=1e-3)


@pytest.mark.parametrize("name", ["kl", "pearson", "squared_hellinger"])
def test_gaussian_samples(name: str) -> None:
    """From samples and the true density ratio, within their error."""
    rho, n = 0.5, 200_000
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, n, generator=generator, dtype=F64)
    y = rho * x + math.sqrt(1 - rho**2) * noise

    def log_ratio(a: Tensor, b: Tensor) -> Tensor:
        rest = 1 - rho**2
        return -0.5 * math.log(rest) - (rho**2 * (a**2 + b**2) - 2 * rho * a * b) / (2 * rest)

    kind = fmicl.divergence(name)
    independent = log_ratio(x, y[torch.randperm(n, generator=generator)])
    bound = variational_bound(kind, kind.score(log_ratio(x, y)), kind.score(independent))
    assert float(bound) == pytest.approx(closed_form(name, rho), rel=0.05)


joints = st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6).map(
    lambda values: torch.tensor(values, dtype=F64).reshape(2, 3) / sum(values)
)


@pytest.mark.parametrize("name", fmicl.list_divergences())
@given(joint=joints, noise=st.integers(0, 100))
@settings(max_examples=20, deadline=None)
def test_bound_is_tight_at_the_derivative_and_below_otherwise(name: str, joint: Tensor, noise: int) -> None:
    kind = fmicl.divergence(name)
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    truth = f_mutual_information(joint, name)
    assert float(truth) >= -1e-12
    best = kind.derivative(joint / independent)

    def bound(scores: Tensor) -> float:
        return float(variational_bound(kind, scores, scores, joint_weights=joint, independent_weights=independent))

    assert bound(best) == pytest.approx(float(truth), abs=1e-9)
    wrong = best + torch.randn(2, 3, generator=torch.Generator().manual_seed(noise), dtype=F64)
    assert bound(wrong) < float(truth)


@pytest.mark.parametrize("k", [2, 4, 7])
def test_label_information_of_kl_is_the_cross_entropy_and_of_pearson_the_brier_score(k: int) -> None:
    logits, labels = 3 * torch.randn(21, k, dtype=F64), torch.arange(21) % k
    entropy = F.cross_entropy(logits, labels)
    brier = (logits.softmax(1) - F.one_hot(labels, k)).square().sum(1).mean()
    torch.testing.assert_close(label_information("kl", logits, labels), math.log(k) - entropy)
    torch.testing.assert_close(label_information("pearson", logits, labels), k - 1 - k * brier)


@pytest.mark.parametrize("name", fmicl.list_divergences())
@given(seed=st.integers(0, 999), noise=st.floats(-1, 1))
@settings(deadline=None, max_examples=25)
def test_label_information_is_tight_at_the_posterior_and_below_otherwise(name: str, seed: int, noise: float) -> None:
    """On all samples of a table of counts, rows x and columns labels, each label with the same count."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(1, 9, (5, 3), generator=generator)
    counts = torch.cat([counts, counts.sum(0).max() + 1 - counts.sum(0, keepdim=True)])
    x, labels = (part.flatten().repeat_interleave(counts.flatten()) for part in torch.meshgrid(
        torch.arange(6), torch.arange(3), indexing="ij"
    ))  # fmt: skip
    truth = f_mutual_information(counts.to(F64) / counts.sum(), name)
    posterior = counts.to(F64).log()
    torch.testing.assert_close(label_information(name, posterior[x], labels), truth)
    other = posterior + noise * torch.randn(6, 3, dtype=F64, generator=generator)
    assert label_information(name, other[x], labels) <= truth + 1e-12


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_the_gradient_is_finite_at_a_confident_mistake(name: str) -> None:
    logits = torch.tensor([[9.0, -9.0], [-9.0, 9.0]], requires_grad=True)
    label_information(name, logits, torch.tensor([1, 0])).backward()
    assert logits.grad is not None
    assert bool(logits.grad.isfinite().all())
    assert float(logits.grad[0, 1]) > 0, "the bound grows with the logit of the label"


def test_logits_in_half_precision_are_computed_in_float32() -> None:
    logits, labels = torch.randn(8, 4), torch.arange(8) % 4
    found = label_information("js", logits.bfloat16(), labels)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, label_information("js", logits.bfloat16().float(), labels))


def test_labels_must_be_integers() -> None:
    with pytest.raises(ValueError, match=r"torch\.float32"):
        label_information("kl", torch.zeros(4, 2), torch.zeros(4))


@pytest.mark.parametrize(("low", "high"), [(0, 3), (-1, 2), (7, 9)])
def test_labels_out_of_range_are_refused(low: int, high: int) -> None:
    with pytest.raises(ValueError, match=rf"0 to 2.* {low} to {high}"):
        label_information("kl", torch.zeros(4, 3), torch.tensor([low, high, high, low]))


def test_a_table_must_be_a_tensor() -> None:
    table: Any = [[0.5, 0.0], [0.0, 0.5]]
    with pytest.raises(TypeError, match=r"joint .*list"):
        f_mutual_information(table, "kl")


@pytest.mark.parametrize("shapes", [((4,), (4,)), ((4, 2), (3,)), ((4, 2), (4, 1)), ((0, 2), (0,))])
def test_logits_and_labels_must_fit(shapes: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match=r"\(N, K\).*\(N,\)"):
        label_information("kl", torch.zeros(shapes[0]), torch.zeros(shapes[1], dtype=torch.long))


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_independent_variables_have_none(name: str) -> None:
    joint = torch.tensor([0.3, 0.7], dtype=F64)[:, None] * torch.tensor([0.2, 0.5, 0.3], dtype=F64)[None]
    assert float(f_mutual_information(joint, name)) == pytest.approx(0, abs=1e-15)


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_the_gradient_of_a_full_table(name: str) -> None:
    """Also if f(0) is infinite, as no cell is 0."""
    free = torch.tensor([[0.3, 0.9], [-0.4, 0.2], [0.0, -1.0]], dtype=F64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda free: f_mutual_information(free.flatten().softmax(0).view(3, 2), name), free)


def test_zeros_in_the_table() -> None:
    diagonal = torch.diag(torch.tensor([0.5, 0.5], dtype=F64))
    assert float(f_mutual_information(diagonal, "kl")) == pytest.approx(math.log(2))
    assert float(f_mutual_information(diagonal, "pearson")) == pytest.approx(1.0)
    assert float(f_mutual_information(diagonal, "reverse_kl")) == math.inf
    padded = torch.zeros(3, 3, dtype=F64)
    padded[:2, :2] = diagonal  # a row and a column without mass
    assert float(f_mutual_information(padded, "reverse_kl")) == math.inf
    assert float(f_mutual_information(padded, "js")) == pytest.approx(float(f_mutual_information(diagonal, "js")))


def test_zeros_with_a_user_defined_divergence() -> None:
    mine = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="mine")
    diagonal = torch.diag(torch.tensor([0.5, 0.5], dtype=F64))
    assert float(f_mutual_information(diagonal, mine)) == pytest.approx(math.log(2))


@pytest.mark.parametrize("name", ["kl", "js", "squared_hellinger", "pearson", "tsallis", "vlc"])
def test_gradient_of_a_table_with_zeros(name: str) -> None:
    table = torch.tensor([[0.5, 0.0], [0.1, 0.4]], dtype=F64, requires_grad=True)
    (seen,) = torch.autograd.grad(f_mutual_information(table, name), table)
    near = torch.tensor([[0.5, 1e-13], [0.1, 0.4]], dtype=F64, requires_grad=True)
    (true,) = torch.autograd.grad(f_mutual_information(near, name), near)
    filled = table > 0
    torch.testing.assert_close(seen[filled], true[filled], rtol=1e-5, atol=1e-5)
    assert bool(seen.isfinite().all())
    if name in ("pearson", "tsallis", "vlc"):  # f'(0) is finite
        torch.testing.assert_close(seen, true, rtol=1e-5, atol=1e-5)


def test_scores_of_any_real_type() -> None:
    scores = torch.linspace(99, 100.3, 50)
    half = scores.bfloat16()
    zero = torch.zeros(1)
    torch.testing.assert_close(variational_bound("kl", half, zero), variational_bound("kl", half.float(), zero))
    whole = torch.tensor([1, 2])
    torch.testing.assert_close(
        variational_bound("kl", whole, whole), variational_bound("kl", whole.float(), whole.float())
    )


def test_a_score_above_the_domain_makes_the_bound_infinite_not_nan() -> None:
    scores = torch.tensor([0.0, 2.0], dtype=F64)
    assert float(variational_bound("js", scores, scores)) == -math.inf


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: f_mutual_information(torch.ones(3) / 3, "kl"), r"\(3,\)"),
        (lambda: f_mutual_information(torch.ones(2, 2), "kl"), "sum of 4"),
        (lambda: f_mutual_information(torch.tensor([[1.5, -0.5]]), "kl"), r"smallest of -0\.5"),
        (lambda: variational_bound("kl", torch.zeros(0), torch.zeros(1)), "at least one sample"),
        (
            lambda: variational_bound("kl", torch.zeros(2), torch.zeros(1), joint_weights=torch.ones(3)),
            r"joint_weights .*\(2,\).*\(3,\)",
        ),
        (
            lambda: variational_bound("kl", torch.zeros(2), torch.zeros(1), joint_weights=torch.tensor([-1.0, 2.0])),
            r"joint_weights .* -1 ",
        ),
        (
            lambda: variational_bound("kl", torch.zeros(2), torch.zeros(1), independent_weights=torch.zeros(1)),
            r"independent_weights .* sum of 0",
        ),
    ],
)
def test_refuses(call: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()  # type: ignore[operator]


@pytest.mark.parametrize("name", fmicl.list_divergences())
def test_a_free_critic_trains_to_the_information(name: str) -> None:
    """Through f-GAN's activation, from values far above the domain of f*; the optimum is the exact f-information."""
    joint = torch.tensor([[0.3, 0.05, 0.05], [0.02, 0.2, 0.08], [0.05, 0.05, 0.2]], dtype=torch.float64)
    independent = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True)
    v = torch.full_like(joint, 3.0).requires_grad_()

    def bound() -> Tensor:
        return variational_bound(name, v, v, joint_weights=joint, independent_weights=independent, free=True)

    start = bound()
    (slope,) = torch.autograd.grad(start, v)
    assert bool(start.isfinite())
    assert float(slope.abs().min()) > 1e-4
    optimiser = torch.optim.LBFGS([v], max_iter=200, line_search_fn="strong_wolfe", tolerance_change=1e-14)

    def closure() -> Tensor:
        optimiser.zero_grad()
        loss = -bound()
        loss.backward()
        return loss

    for _ in range(3):
        optimiser.step(closure)
    torch.testing.assert_close(bound().detach(), f_mutual_information(joint, name), rtol=1e-6, atol=1e-8)
