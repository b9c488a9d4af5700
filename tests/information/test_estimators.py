"""Estimators against plain formulas at known ratios, and end to end on samples with known information."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import fmicl
from fmicl.divergences import list_divergences
from fmicl.information import (
    Estimate,
    GaussianCopula,
    InformationEstimator,
    Training,
    estimate,
    gaussian_information,
    list_critics,
    list_estimators,
)
from fmicl.information.critics import CRITICS, CopulaCritic, Critic, JointCritic, Stack, infonce_rows, length_features
from fmicl.information.estimation import _pair_scores, _shares, _Sums
from fmicl.information.estimators import make_estimator, plug_in
from fmicl.information.limits import warnings_of
from fmicl.information.preparation import as_samples, normal_scores, one_hot, prepare

F64 = torch.float64
QUICK = Training(steps=60, hidden=16, batch_size=128, check_every=20)


def pairs(rho: float, number: int, seed: int = 0, columns: int = 1) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, number, columns, generator=torch.Generator().manual_seed(seed))
    return x, rho * x + math.sqrt(1 - rho**2) * noise


def true_ratios(rho: float, number: int, k: int) -> tuple[Tensor, Tensor]:
    """Log ratios of joint (N,) and independent (N, k) pairs."""
    x, y = (part.squeeze(1).double() for part in pairs(rho, number))

    def ratio(a: Tensor, b: Tensor) -> Tensor:
        return -0.5 * math.log(1 - rho**2) + (2 * rho * a * b - rho**2 * (a * a + b * b)) / (2 * (1 - rho**2))

    return ratio(x, y), torch.stack([ratio(x, y.roll(shift)) for shift in range(1, k + 1)], dim=1)


def value(name: str, divergence: str, joint: Tensor, independent: Tensor, offset: float = 0.0) -> float:
    estimator, f = make_estimator(name), fmicl.divergence(divergence)
    terms = estimator.terms(f, *estimator.log_ratio(joint, independent, offset))
    second = torch.zeros(()) if terms.independent is None else terms.independent.mean()
    return float(estimator.combine(f, terms.joint.mean(), second))


@pytest.mark.parametrize("name", list_estimators())
@pytest.mark.parametrize("divergence", ["kl", "js", "squared_hellinger", "vlc"])
def test_at_the_true_ratio_every_estimator_gives_the_information(name: str, divergence: str) -> None:
    joint, independent = true_ratios(0.6, 40_000, 40)
    assert value(name, divergence, joint, independent) == pytest.approx(
        gaussian_information([0.6], divergence), abs=0.025
    )


def test_formulas_against_plain_loops() -> None:
    joint = torch.tensor([1.0, -0.5, 0.3], dtype=F64)
    independent = torch.tensor([[0.2, -1.0], [0.4, 0.1], [-2.0, 0.6]], dtype=F64)
    flat = [math.exp(v) for v in independent.flatten().tolist()]
    mean = sum(joint.tolist()) / 3
    assert value("donsker_varadhan", "kl", joint, independent) == pytest.approx(mean - math.log(sum(flat) / 6))
    assert value("nwj", "kl", joint, independent) == pytest.approx(mean + 1 - sum(flat) / 6)
    clipped = [min(max(v, math.exp(-5)), math.exp(5)) for v in flat]
    assert value("smile", "kl", joint, independent) == pytest.approx(mean - math.log(sum(clipped) / 6))
    assert value("classifier", "kl", joint, independent) == pytest.approx(mean)
    rows = [
        (math.exp(j), [math.exp(v) for v in row]) for j, row in zip(joint.tolist(), independent.tolist(), strict=True)
    ]
    nce = sum(math.log(j / ((j + sum(row)) / 3)) for j, row in rows) / 3
    loss = make_estimator("infonce").objective(fmicl.divergence("kl"))(joint, independent)
    assert float(loss) == pytest.approx(-nce)
    alpha = 0.5
    total = 0.0
    for j, row in rows:
        with_joint, without = (j + row[1]) / 2, sum(row) / 2
        total += 1 + math.log(j / (alpha * with_joint + 1 - alpha)) - without / (alpha * without + 1 - alpha)
    assert value("i_alpha", "kl", joint, independent) == pytest.approx(total / 3)


def test_the_ends_of_i_alpha_are_nwj_and_a_softmax() -> None:
    joint, independent = true_ratios(0.5, 500, 20)
    kl = fmicl.divergence("kl")
    at_zero = make_estimator("i_alpha", interpolation=0.0).terms(kl, joint, independent).joint.mean()
    assert float(at_zero) == pytest.approx(value("nwj", "kl", joint, independent))
    at_one = make_estimator("i_alpha", interpolation=1.0).terms(kl, joint, independent).joint.mean()
    candidates = torch.cat([joint.unsqueeze(1), independent[:, 1:]], dim=1)
    assert float(at_one) == pytest.approx(float((joint - candidates.logsumexp(1) + math.log(20)).mean()))


def test_mine_has_the_gradient_of_a_moving_average() -> None:
    joint = torch.zeros(2, requires_grad=True)
    objective = make_estimator("mine", decay=0.9).objective(fmicl.divergence("kl"))
    objective(joint, torch.zeros(2, 1))  # the average starts at 1
    second = torch.full((2, 1), math.log(2.0), requires_grad=True)
    loss = objective(joint, second)
    assert float(loss.detach()) == pytest.approx(math.log(2.0))
    loss.backward()  # of log E[e^s]: e^s / N over the average 0.9 * 1 + 0.1 * 2
    torch.testing.assert_close(second.grad, torch.full((2, 1), 2 / 2 / 1.1))


@pytest.mark.parametrize("divergence", list_divergences())
def test_plug_in_of_both_distributions_is_the_information(divergence: str) -> None:
    table = torch.tensor([[0.3, 0.1], [0.2, 0.4]], dtype=F64)
    independent = table.sum(1, keepdim=True) * table.sum(0)
    f = fmicl.divergence(divergence)
    found = ((table + independent) * plug_in(f, (table / independent).log())).sum()
    torch.testing.assert_close(found, fmicl.information.f_mutual_information(table, f))


@pytest.mark.parametrize("name", list_critics())
def test_all_pairs_agree_with_single_pairs(name: str) -> None:
    torch.manual_seed(0)
    critic = CRITICS[name].value(3, 2, 8)
    x, y = torch.randn(40, 3), torch.randn(40, 2)
    critic.start(x, y)
    expected = torch.stack([critic(x[:4], y[j : j + 1].expand(4, 2)) for j in range(5)], dim=1)
    torch.testing.assert_close(critic.all_pairs(x[:4], y[:5]), expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["bilinear", "joint"])
def test_independent_pairs_and_their_shares(name: str) -> None:
    """Against the matrix of all pairs: no joint pair, and row mean plus column mean less the mean."""
    torch.manual_seed(0)
    critic = CRITICS[name].value(1, 1, 4)
    x, y = torch.arange(5.0).unsqueeze(1), torch.arange(5.0).unsqueeze(1)
    full = critic.all_pairs(x, y).detach()
    scores = _pair_scores(critic, x, y, 4, torch.Generator().manual_seed(0))
    torch.testing.assert_close(scores.joint, full.diagonal())
    off = full - torch.diag(full.diagonal())
    torch.testing.assert_close(scores.independent.sum(1), off.sum(1))
    expected = off.sum(1) / 4 + off.sum(0) / 4 - off.sum() / 20
    torch.testing.assert_close(_shares(scores.independent, scores.shifts), expected)


# --- samples ---------------------------------------------------------------------------------------------------------


def test_normal_scores_are_invariant_under_increasing_maps() -> None:
    x = torch.randn(200, 2, generator=torch.Generator().manual_seed(0), dtype=F64)
    torch.testing.assert_close(normal_scores(x), normal_scores(x.exp() * 3))
    assert normal_scores(torch.tensor([[1.0], [1.0], [5.0]]))[:2].unique().numel() == 1


def test_discrete_columns_are_one_hot_and_constants_are_dropped() -> None:
    x = torch.tensor([[1, 7], [2, 7], [1, 7]])
    assert prepare(x, "normal", "x").tolist() == [[1, 0], [0, 1], [1, 0]]
    with pytest.raises(ValueError, match="constant"):
        prepare(torch.ones(4), "normal", "x")
    with pytest.raises(ValueError, match="600"):
        one_hot(torch.arange(600).unsqueeze(1), "x")


@pytest.mark.parametrize(
    ("x", "y", "fact"),
    [
        (np.zeros((50, 2)), np.zeros((49, 2)), "49"),
        (np.array([[1.0], [np.nan]] * 40), np.zeros(80), "40 of 80"),
        (np.array(["a"] * 50), np.zeros(50), "x"),
        (np.zeros(5), np.zeros(5), "5 samples"),
        (np.zeros((0, 3)), np.zeros((0, 3)), r"\(0, 3\)"),
        (np.zeros(50, dtype=complex), np.zeros(50), "complex"),
    ],
)
def test_wrong_samples(x: Any, y: Any, fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        estimate(x, y)


def test_wrong_options() -> None:
    with pytest.raises(ValueError, match="donsker_varadhan"):
        InformationEstimator(estimator="donsker")
    with pytest.raises(ValueError, match="separable"):
        InformationEstimator(critic="separabel")
    with pytest.raises(TypeError, match="clip"):
        InformationEstimator(estimator="nwj", clip=3.0)
    with pytest.raises(ValueError, match="folds"):
        InformationEstimator(folds=1)
    with pytest.raises(RuntimeError, match="fit"):
        InformationEstimator().estimate()


@pytest.mark.parametrize("name", list_estimators())
def test_every_estimator_is_near_the_truth_on_samples(name: str) -> None:
    x, y = pairs(0.8, 900)
    found = estimate(x, y, estimator=name, folds=2, training=QUICK)
    assert found.value == pytest.approx(gaussian_information([0.8]), abs=0.12)
    assert found.low < found.value < found.high


@pytest.mark.parametrize("name", list_critics())
def test_every_critic_finds_dependence(name: str) -> None:
    x, y = pairs(0.9, 600)
    found = estimate(x, y, critic=name, folds=2, training=Training(steps=100, hidden=32, batch_size=128, shifts=8))
    assert found.held_out > 0.2  # of 0.83 nats; a bilinear critic has no squares
    assert found.held_out < 0.83 + 0.15


@pytest.mark.parametrize("divergence", ["js", "squared_hellinger", "pearson"])
def test_other_divergences_by_their_own_bound(divergence: str) -> None:
    x, y = pairs(0.6, 1500)
    found = estimate(x, y, divergence, "fmi", training=QUICK)
    truth = gaussian_information([0.6], divergence)
    assert found.value == pytest.approx(truth, rel=0.3)


def test_discrete_samples_reach_the_table() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(3, (1500,), generator=generator)
    y = torch.where(torch.rand(1500, generator=generator) < 0.7, x, torch.randint(3, (1500,), generator=generator))
    table = torch.full((3, 3), 0.3 / 9, dtype=F64) + torch.eye(3, dtype=F64) * 0.7 / 3
    truth = float(fmicl.information.f_mutual_information(table, "kl"))
    found = estimate(
        x.numpy(), y.numpy(), critic="bilinear", training=Training(steps=100, batch_size=128, learning_rate=0.05)
    )
    assert found.value == pytest.approx(truth, abs=0.07)


def test_a_module_of_the_user_in_its_own_shape() -> None:
    class Conv(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.zeros(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            assert x.shape[1:] == (1, 2, 2)
            return self.scale[0] * x.mean(dim=(1, 2, 3)) * y + self.scale[1]

    x = torch.randn(400, 1, 2, 2, generator=torch.Generator().manual_seed(0))
    y = 2 * x.mean(dim=(1, 2, 3)) + 0.3 * torch.randn(400, generator=torch.Generator().manual_seed(1))
    found = estimate(x, y, critic=Conv(), marginals="none", training=Training(steps=100, learning_rate=0.05))
    assert found.held_out > 0.3

    class Wrong(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return x.sum() + y.sum()

    with pytest.raises(ValueError, match="N scores"):
        estimate(x, y, critic=Wrong(), marginals="none", training=QUICK)


def test_seeds_progress_and_invariance() -> None:
    x, y = pairs(0.7, 300)
    seen: list[float] = []
    first = estimate(x, y, training=QUICK, seed=3, progress=seen.append)
    assert first == estimate(x.numpy(), y.numpy(), training=QUICK, seed=3)
    assert first == estimate(x.double().exp(), y.double() ** 3, training=QUICK, seed=3), "bijections of each column"
    assert first != estimate(x, y, training=QUICK, seed=4)
    assert seen == sorted(seen)
    assert seen[-1] == 1.0


def test_training_does_not_touch_the_global_generator() -> None:
    x, y = pairs(0.7, 100)
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    estimate(x, y, training=Training(steps=5))
    torch.testing.assert_close(torch.rand(3), expected)


def test_the_interval_widens_with_its_level_and_shrinks_with_samples() -> None:
    fitted = InformationEstimator(training=QUICK).fit(*pairs(0.6, 400))
    (a, b), (c, d) = fitted.interval(0.8), fitted.interval(0.99)
    assert c < a < fitted.estimate() < b < d
    larger = InformationEstimator(training=QUICK).fit(*pairs(0.6, 1600)).interval(0.8)
    assert larger[1] - larger[0] < b - a
    with pytest.raises(ValueError, match="level"):
        fitted.interval(1.0)


@pytest.mark.slow
def test_coverage_of_gaussians_in_five_dimensions() -> None:
    truth = 5 * gaussian_information([0.5])
    inside = 0
    for seed in range(60):
        found = estimate(*pairs(0.5, 1000, seed, columns=5), seed=seed)
        inside += found.low <= truth <= found.high
    assert inside >= 54, inside  # nominal 57 of 60


def test_as_samples_accepts_lists_and_keeps_integers() -> None:
    assert not as_samples([1, 2, 3], "x").is_floating_point()


def rotated(z: Tensor, i: int, j: int) -> Tensor:
    """A bijection: a rotation in a plane whose angle grows with the length."""
    angle = z.square().sum(dim=1) / z.shape[1]
    turned = z.clone()
    turned[:, i] = angle.cos() * z[:, i] - angle.sin() * z[:, j]
    turned[:, j] = angle.sin() * z[:, i] + angle.cos() * z[:, j]
    return turned


def rotated_pair(number: int) -> tuple[Tensor, Tensor]:
    """Two correlated columns of 16, and both sides rotated."""
    (x, y), noise = pairs(0.8, number, columns=16), torch.randn(number, 14, generator=torch.Generator().manual_seed(1))
    return rotated(x, 0, 1), rotated(torch.cat([y[:, :2], noise], dim=1), 1, 2)


def student(number: int, columns: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Uncorrelated Student variables with 2 degrees of freedom: their lengths depend on each other."""
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(number, 2 * columns, generator=generator)
    scale = torch.empty(number, 1).exponential_(1.0, generator=generator).sqrt()  # chi-square of 2 degrees over 2
    return (z / scale)[:, :columns], (z / scale)[:, columns:]


def copula_of(x: Tensor, y: Tensor) -> CopulaCritic:
    critic = CopulaCritic(x.shape[1], y.shape[1], 8)
    critic.start(normal_scores(x).float(), normal_scores(y).float())
    return critic


def test_the_copula_takes_functions_of_the_length_where_they_help() -> None:
    x, y = pairs(0.8, 3000, columns=3)
    assert copula_of(x, y).features == (False, False)
    assert copula_of(*rotated_pair(3000)).features[0]
    assert copula_of(*student(3000, 4)).features[1]


def test_length_features_of_gaussians_are_about_standard_normal() -> None:
    x = torch.randn(50_000, 6, generator=torch.Generator().manual_seed(0))
    found = length_features(x, (True, True))
    assert torch.equal(found[:, :6], x)
    w = found[:, -1:]
    torch.testing.assert_close(found[:, 6:12], w * x)
    assert abs(float(w.mean())) < 0.02
    assert float(w.var()) == pytest.approx(1, abs=0.03)
    assert float((w**3).mean()) == pytest.approx(0, abs=0.05)


@pytest.mark.parametrize("kind", ["rotated", "student"])
def test_what_the_length_carries_is_found_without_training(kind: str) -> None:
    """With as good as no training, so by the closed form alone; a copula of the columns finds much less."""
    x, y = rotated_pair(3000) if kind == "rotated" else student(3000, 4)
    found = copula_of(x, y)
    plain = copy.deepcopy(found)
    plain.features = (False, False)
    plain.copula = GaussianCopula.fit(normal_scores(x).float(), normal_scores(y).float())
    z = normal_scores(x).float(), normal_scores(y).float()

    def bound(critic: Critic) -> float:
        with torch.no_grad():
            scores = _pair_scores(critic, *z, 1, torch.Generator())
        return float(scores.joint.mean() - scores.independent.exp().mean().log())

    assert bound(found) > bound(plain) + 0.1


def test_the_interval_is_finite_where_a_few_pairs_dominate() -> None:
    """Resampled means of linearised terms may be negative, of which there is no logarithm."""
    estimator = InformationEstimator(critic="bilinear", training=QUICK).fit(*pairs(0.5, 90))
    joint, independent = torch.zeros(90, dtype=F64), torch.full((90,), -1.0, dtype=F64)
    independent[0] = 95.0
    estimator._held_out = estimator._in_sample = type(estimator._held_out)(joint, independent)  # type: ignore[misc]
    low, high = estimator.interval()
    assert math.isfinite(low)
    assert low < estimator.estimate() < high


# --- stacking and the learning curve ---------------------------------------------------------------------------------


def uniform_noise(number: int, seed: int = 0) -> tuple[Tensor, Tensor, float]:
    """x uniform in (0, 1), y - x uniform in (-b, b): a density ratio with jumps, and b - log 2b nats (b < 1/2)."""
    b = 0.2
    x, noise = torch.rand(2, number, 1, generator=torch.Generator().manual_seed(seed))
    return x, x + b * (2 * noise - 1), b - math.log(2 * b)


def test_infonce_rows_against_a_plain_loop() -> None:
    candidates = torch.randn(5, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
    expected = [row[0] - math.log(sum(math.exp(v) for v in row) / 4) for row in candidates.tolist()]
    assert infonce_rows(candidates).tolist() == pytest.approx(expected)


def test_a_stack_is_the_weighted_mean_of_scores() -> None:
    torch.manual_seed(0)
    critics = [JointCritic(2, 1, 8), CRITICS["separable"].value(2, 1, 8)]
    stack = Stack(critics)
    stack.weights.copy_(torch.tensor([0.25, 0.75]))
    x, y = torch.randn(6, 2), torch.randn(6, 1)
    torch.testing.assert_close(stack(x, y), 0.25 * critics[0](x, y) + 0.75 * critics[1](x, y))


def test_stacking_finds_the_true_ratio_among_others() -> None:
    joint, independent = true_ratios(0.8, 2000, 30)
    true = torch.cat([joint.unsqueeze(1), independent], dim=1)
    noise = torch.randn(true.shape, dtype=F64, generator=torch.Generator().manual_seed(0))
    stack = Stack([JointCritic(1, 1, 4), JointCritic(1, 1, 4), JointCritic(1, 1, 4)])
    stack.fit(torch.stack([noise, true, -true], dim=2))
    assert stack.weights.tolist() == pytest.approx([0, 1, 0], abs=0.03)


def test_stacking_halves_independent_errors() -> None:
    """Of two copies of the truth with independent errors of one size, the best weights are equal."""
    joint, independent = true_ratios(0.8, 4000, 30)
    true = torch.cat([joint.unsqueeze(1), independent], dim=1)
    errors = 0.5 * torch.randn(*true.shape, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    stack = Stack([JointCritic(1, 1, 4), JointCritic(1, 1, 4)])
    candidates = true.unsqueeze(2) + errors
    stack.fit(candidates)
    assert stack.weights.tolist() == pytest.approx([0.5, 0.5], abs=0.08)
    mean = infonce_rows(candidates @ stack.weights.double()).mean()
    assert mean > infonce_rows(candidates[..., 0]).mean() + 0.02


def test_the_default_takes_the_joint_network_only_where_it_helps() -> None:
    def chosen(x: Tensor, y: Tensor) -> Critic:
        columns = [prepare(z, "normal", "z") for z in (x, y)]
        training = Training(steps=100, hidden=32, batch_size=256, check_every=25)
        return InformationEstimator(training=training)._train(columns, 0, 1).critic

    assert isinstance(chosen(*pairs(0.8, 1000, columns=3)), CopulaCritic)
    x, y, _ = uniform_noise(1000)
    stack = chosen(x, y)
    assert isinstance(stack, Stack)
    assert float(stack.weights[1]) > 0.8


def interval_of(held_out: float, in_sample: float, half: float) -> tuple[float, float]:
    """The interval where bootstrap adds nothing, since all samples are alike."""
    estimator = InformationEstimator(estimator="nwj")
    estimator._held_out, estimator._in_sample, estimator._half = (
        _Sums(torch.full((50,), value, dtype=F64), torch.zeros(50, dtype=F64)) for value in (held_out, in_sample, half)
    )
    return estimator.interval()


def test_the_interval_is_that_of_a_uniform_law() -> None:
    z = 1.959964 / math.sqrt(12)
    low, high = interval_of(1.0, 1.2, 1.0)
    assert (low, high) == pytest.approx((1.1 - z * 0.2, 1.1 + z * 0.2), abs=1e-5)
    # a truth of 1.3 that the bound approaches as n^(-1/3): half as many samples lack 2^(1/3) times as much
    low, high = interval_of(1.0, 1.0, 1.3 - 0.3 * 2 ** (1 / 3))
    assert (low, high) == pytest.approx((1.0, 1.15 + z * 0.3), abs=1e-5)
    assert interval_of(1.0, 1.2, 1.4) == interval_of(1.0, 1.2, 1.0), "half as many samples may be better by chance"
    assert interval_of(1.0, 1.2, -9.0) == interval_of(1.0, 1.2, 0.0), "no information is negative"


def test_a_critic_that_is_still_learning_is_reported() -> None:
    kl = fmicl.divergence("kl")
    settled, learning = Estimate(1.05, 1, 1.1, 1.0, 1.1, 0.95), Estimate(1.05, 1, 1.1, 1.0, 1.1, 0.8)
    assert not warnings_of(kl, {"nwj": settled}, 5000)
    assert "nwj by 0.20" in warnings_of(kl, {"nwj": learning}, 5000)[0]
    by_chance = Estimate(1.05, 0.8, 1.3, 1.0, 1.1, 0.8)
    assert not warnings_of(kl, {"nwj": by_chance}, 5000)


def test_critics_of_half_as_many_samples_count_where_no_network_helped() -> None:
    """A Student copula: the test finds nothing, and the interval that trusts it misses the truth."""

    def entropy(d: int) -> float:  # of a Student distribution with 2 degrees of freedom, up to terms that cancel
        top = torch.tensor([1 + d / 2, 1.0], dtype=F64)
        return float(top[0] * (top[0].digamma() - top[1].digamma()) - top[0].lgamma())

    truth = 2 * entropy(3) - entropy(6)
    assert truth == pytest.approx(0.2909, abs=1e-4)  # as the package benchmark-mi has it
    fitted = InformationEstimator(training=QUICK).fit(*student(800, 3))
    assert truth < fitted.interval()[1]
    fitted._half = None
    assert fitted.interval()[1] < truth


def test_the_network_that_did_not_help_is_not_trained_on_half_as_many_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[type] = []
    optimise = InformationEstimator._optimise

    def counted(self: InformationEstimator, critic: Critic, *rest: Any) -> None:
        trained.append(type(critic))
        optimise(self, critic, *rest)

    monkeypatch.setattr(InformationEstimator, "_optimise", counted)
    estimate(*pairs(0.5, 300), folds=2, training=QUICK)
    assert [each.__name__ for each in trained] == 2 * ["CopulaCritic", "JointCritic"] + 2 * ["CopulaCritic"]


def test_a_lower_bound_trains_no_critics_of_half_as_many_samples() -> None:
    found = estimate(*pairs(0.5, 200), corrected=False, training=QUICK)
    assert math.isnan(found.half)
    assert found.value == found.held_out


@pytest.mark.slow
def test_coverage_where_no_copula_is_gaussian() -> None:
    """Uniform noise, whose density ratio has jumps; a copula alone is 0.1 nats and more below."""
    inside = 0
    for seed in range(6):
        x, y, truth = uniform_noise(1500, seed)
        found = estimate(x, y, seed=seed)
        assert found.value == pytest.approx(truth, abs=0.12)
        inside += found.low <= truth <= found.high
    assert inside >= 5, inside  # nominal 5.7 of 6
