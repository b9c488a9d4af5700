"""k-NN classifier and linear probe against plain loops and scikit-learn."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression as SklearnLogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor, nn

from fmicl.evaluation import geometry, logistic, probes
from fmicl.evaluation.logistic import LogisticRegression
from fmicl.evaluation.probes import knn_accuracy, knn_predict, linear_probe


def cloud(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


def labels_of(n: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images).float(), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


@pytest.mark.parametrize("k", [1, 5, 40])
@pytest.mark.parametrize("temperature", [0.02, 0.1, 1.0])
def test_knn_is_the_vote_of_a_plain_loop(k: int, temperature: float) -> None:
    train, test, labels = cloud(40, 6).double(), cloud(15, 6, seed=1).double(), labels_of(40, 4)
    got = knn_predict(train, labels, test, k=k, temperature=temperature)
    for row, predicted in zip(test, got.tolist(), strict=True):
        cosine = [float(row @ other) / math.sqrt(float(row @ row) * float(other @ other)) for other in train]
        votes: dict[int, float] = defaultdict(float)
        for i in sorted(range(40), key=lambda i: -cosine[i])[:k]:
            votes[int(labels[i])] += math.exp(cosine[i] / temperature)
        assert predicted == max(votes, key=lambda c: votes[c])


@pytest.mark.parametrize("k", [1, 20, 200])
@pytest.mark.parametrize("tiles", [False, True])
def test_knn_agrees_with_scikit_learn(
    digits: tuple[Tensor, ...], k: int, tiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if tiles:
        monkeypatch.setattr(geometry, "_COLUMNS", 301)
        monkeypatch.setattr(geometry, "_ROWS_CPU", 64)
    train, train_labels, test, test_labels = digits
    oracle = KNeighborsClassifier(
        k, metric="cosine", algorithm="brute", weights=lambda distance: np.exp((1 - distance) / 0.1)
    ).fit(train.double(), train_labels)
    expected = torch.tensor(oracle.predict(test.double()))
    assert torch.equal(knn_predict(train.double(), train_labels, test.double(), k=k), expected)
    accuracy = knn_accuracy(train, train_labels, test, test_labels, k=k)
    assert accuracy == pytest.approx(100 * float((expected == test_labels).double().mean()), abs=0.3)


def test_knn_labels_may_be_any_integers() -> None:
    train, test, labels = cloud(60, 5), cloud(20, 5, seed=1), labels_of(60, 3)
    odd = torch.tensor([-7, 40, 10**12])
    plain = knn_predict(train, labels, test, k=9)
    assert torch.equal(knn_predict(train, odd[labels], test, k=9), odd[plain])
    assert torch.equal(knn_predict(train, labels.to(torch.uint8), test, k=9), plain.byte())


def test_knn_equal_votes_go_to_the_smallest_label() -> None:
    train = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    for labels in ([4, 2], [2, 4]):
        assert knn_predict(train, torch.tensor(labels), torch.tensor([[1.0, 0.0]]), k=2).tolist() == [2]


def test_knn_on_collapsed_features_predicts_the_majority() -> None:
    labels = torch.tensor([0] * 30 + [1] * 70)
    assert knn_predict(torch.ones(100, 3), labels, torch.ones(4, 3), k=100).tolist() == [1] * 4


def test_knn_does_not_overflow_at_a_low_temperature() -> None:
    train, labels = torch.eye(3), torch.tensor([0, 1, 2])
    assert knn_predict(train, labels, torch.eye(3), k=3, temperature=1e-3).tolist() == [0, 1, 2]
    # Two neighbours of class 1 outvote one that is slightly nearer.
    train = torch.tensor([[1.0, 0.0], [1.0, 1e-3], [1.0, -1e-3]])
    assert knn_predict(train, torch.tensor([0, 1, 1]), train[:1], k=3, temperature=1e-3).tolist() == [1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_knn_of_half_precision_features_is_computed_in_float32(dtype: torch.dtype) -> None:
    train, test, labels = cloud(300, 16).to(dtype), cloud(50, 16, seed=1).to(dtype), labels_of(300, 5)
    half = knn_predict(train, labels, test, k=30)
    assert torch.equal(half, knn_predict(train.float(), labels, test.float(), k=30))


def test_knn_does_not_depend_on_the_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    train, test, labels = cloud(500, 8), cloud(70, 8, seed=1), labels_of(500, 6)
    whole = knn_predict(train, labels, test, k=25)
    for rows in (1, 7, 64):
        monkeypatch.setattr(geometry, "_ROWS_CPU", rows)
        assert torch.equal(knn_predict(train, labels, test, k=25), whole)


def test_knn_counts_an_unknown_test_class_as_wrong() -> None:
    train, labels = torch.eye(2), torch.tensor([0, 1])
    assert knn_accuracy(train, labels, torch.eye(2), torch.tensor([0, 9]), k=1) == 50.0


def test_knn_never_holds_the_whole_similarity_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(geometry, "_ROWS_CPU", 50)
    train, test, labels = cloud(40_000, 2), cloud(4_000, 2, seed=1), labels_of(40_000, 3)
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        knn_predict(train, labels, test, k=10)
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert largest < 4 * 40_000 * 4_000 / 20


X, L = torch.eye(4), torch.arange(4)


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda: knn_predict(X, L, X, k=5), "4.*k=5"),
        (lambda: knn_predict(X, L, X, k=0), "k=0"),
        (lambda: knn_predict(X, L, X, k=1, temperature=0.0), "temperature"),
        (lambda: knn_predict(X, L[:3], X, k=1), r"train labels .*\(4,\)"),
        (lambda: knn_predict(X, L.float(), X, k=1), "integers"),
        (lambda: knn_predict(X, L, X[:, :3], k=1), "3 dimensions"),
        (lambda: knn_predict(X * math.nan, L, X, k=1), "4 of 4 rows"),
        (lambda: knn_accuracy(X, L, X, L[:2], k=1), "test labels"),
        (lambda: linear_probe(X, L, X[:, :3], L), "4 dimensions, test features 3"),
        (lambda: linear_probe(X, L * 0, X, L), "2 classes"),
        (lambda: linear_probe(X, L, X, L), "single value as weight_decays"),
        (lambda: linear_probe(X, L, X, L, weight_decays=[]), "positive numbers"),
        (lambda: linear_probe(X, L, X, L, weight_decays=[0.0, 1.0]), "positive numbers"),
        (lambda: linear_probe(X, L, X, L, validation=1.0), "validation"),
        (lambda: linear_probe(X, L, X, L, max_iterations=0), "max_iterations"),
        (lambda: linear_probe(X, L, X, L[:1]), "test labels"),
        (lambda: linear_probe(X, L, X, L, views=(X[:, :3], L)), "4 dimensions, those of their views 3"),
        (lambda: linear_probe(X, L, X, L, views=(X, L[:1])), r"4 integer .*\(1,\)"),
        (lambda: linear_probe(X, L, X, L, views=(X, L.float())), "integer .*torch.float32"),
        (lambda: linear_probe(X, L, X, L, views=(X, L - 1)), "0 to 3, got -1"),
    ],
)
def test_wrong_input_is_an_error(call: Callable[[], object], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        call()


@pytest.mark.parametrize("decay", [1e-1, 1e-2, 1e-3])
def test_solver_reaches_scikit_learns_optimum(digits: tuple[Tensor, ...], decay: float) -> None:
    train, labels, test, _ = digits
    x, z, spectrum = probes._standardise(train, test)
    model = LogisticRegression(x, labels, 10, spectrum)
    assert model.fit(decay, 300)
    # scikit-learn sums where we average: C = 1 / (N decay).
    oracle = SklearnLogisticRegression(C=1 / (len(x) * decay), tol=1e-8, max_iter=10_000)
    oracle.fit(x.double(), labels)
    expected = torch.tensor(oracle.predict_proba(z.double()))
    assert (model.logits(z).softmax(dim=1) - expected).abs().max() < 5e-3
    weight, bias = torch.tensor(oracle.coef_).float(), torch.tensor(oracle.intercept_).float().unsqueeze(1)
    ours, theirs = model._objective(model.weight, model.bias, decay)[0], model._objective(weight, bias, decay)[0]
    assert float(ours) == pytest.approx(float(theirs), abs=2e-6)


def test_solver_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = cloud(101, 5), labels_of(101, 3)
    model = LogisticRegression(x, labels, 3, x.var(dim=0))
    model.fit(0.01, 100)
    loss, weight, bias = model._objective(model.weight, model.bias, 0.01)
    monkeypatch.setattr(logistic, "_ROWS_CPU", 8)
    again = model._objective(model.weight, model.bias, 0.01)
    assert float(again[0]) == pytest.approx(float(loss), rel=1e-5)
    torch.testing.assert_close(again[1:], (weight, bias), atol=1e-6, rtol=1e-4)


def test_probe_on_digits_is_as_good_as_scikit_learns_own_choice(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = digits
    result = linear_probe(train, train_labels, test, test_labels)
    oracle = SklearnLogisticRegression(C=1 / (len(train) * result.weight_decay), max_iter=5_000)
    x, z, _ = probes._standardise(train, test)
    accuracy = 100 * oracle.fit(x, train_labels).score(z, test_labels)
    assert result.accuracy == pytest.approx(accuracy, abs=0.3)
    assert result.accuracy > 95
    assert result.top5 is not None
    assert result.accuracy <= result.top5 <= 100
    assert result.converged
    assert result.validation_accuracy is not None
    assert result.validation_accuracy > 95
    assert "seed 0" in result.protocol
    assert "15 values" in result.protocol
    json.dumps(dataclasses.asdict(result))


def test_probe_is_reproducible_and_depends_on_the_seed(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = (part[:300] for part in digits)
    grid = [1e-1, 1e-2, 1e-3]
    once, again, other = (
        linear_probe(train, train_labels, test, test_labels, weight_decays=grid, seed=seed) for seed in (1, 1, 2)
    )
    assert once == again
    assert other.protocol != once.protocol


def test_probe_does_not_choose_on_test_data(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = (part[:300] for part in digits)
    grid = [1.0, 1e-1, 1e-2]
    honest = linear_probe(train, train_labels, test, test_labels, weight_decays=grid)
    scrambled = linear_probe(train, train_labels, -test, test_labels.flip(0), weight_decays=grid)
    assert scrambled.weight_decay == honest.weight_decay
    assert scrambled.validation_accuracy == honest.validation_accuracy


def test_probe_does_not_depend_on_scale_offset_or_label_values(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = (part[:400] for part in digits)
    grid = [1e-1, 1e-2]
    plain = linear_probe(train, train_labels, test, test_labels, weight_decays=grid)
    moved = linear_probe(
        1e-3 * train + 50, 10 * train_labels - 3, 1e-3 * test + 50, 10 * test_labels - 3, weight_decays=grid
    )
    assert moved.accuracy == pytest.approx(plain.accuracy, abs=0.6)
    assert moved.weight_decay == plain.weight_decay


@pytest.mark.parametrize("wide", [70, 500])
def test_probe_of_fewer_samples_than_dimensions_lies_in_their_span(digits: tuple[Tensor, ...], wide: int) -> None:
    x, labels, test, answers = digits
    few, truth = x[:100] / 16, labels[:100]
    isometry = torch.linalg.qr(cloud(wide, 64).double()).Q.float().T  # the same distances in more dimensions
    assert isometry.shape == (64, wide)
    one = linear_probe(few, truth, test / 16, answers, weight_decays=[1e-2])
    other = linear_probe(few @ isometry, truth, test / 16 @ isometry, answers, weight_decays=[1e-2])
    assert other.accuracy == pytest.approx(one.accuracy, abs=0.3)


def test_raw_pixels_take_seconds() -> None:
    x, y = cloud(250, 12_288), cloud(50, 12_288, seed=1)
    start = time.perf_counter()
    linear_probe(x, labels_of(250, 5), y, labels_of(50, 5, seed=1))
    assert time.perf_counter() - start < 20  # by the covariance it takes minutes


def test_probe_prefers_strong_decay_for_noisy_features() -> None:
    train, labels = cloud(300, 40), labels_of(300, 2)
    train[:, 0] += 2.0 * (labels * 2 - 1)
    test, truth = cloud(300, 40, seed=5), labels_of(300, 2, seed=5)
    test[:, 0] += 2.0 * (truth * 2 - 1)
    result = linear_probe(train, labels, test, truth, validation=0.3)
    assert result.weight_decay >= 1e-3
    assert result.accuracy > 94
    assert result.top5 is None


def test_probe_with_a_given_weight_decay_holds_nothing_out() -> None:
    result = linear_probe(X, L, X, L, weight_decays=[1e-3])
    assert result.accuracy == 100.0
    assert result.validation_accuracy is None
    assert "held" not in result.protocol
    assert "1.0e-03" in result.protocol


def test_probe_reports_whether_it_converged(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = (part[:200] for part in digits)
    result = linear_probe(train, train_labels, test, test_labels, weight_decays=[1e-4], max_iterations=2)
    assert not result.converged
    assert "L-BFGS for 2 iterations" in result.protocol
    assert "L-BFGS to convergence" in linear_probe(X, L, X, L, weight_decays=[1e-1]).protocol


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_probe_of_constant_features_is_the_majority(value: float) -> None:
    labels = torch.tensor([0] * 30 + [1] * 70)
    result = linear_probe(torch.full((100, 4), value), labels, torch.full((100, 4), value), labels)
    assert result.accuracy == 70.0


def test_held_out_part_is_stratified_and_leaves_samples_of_every_class() -> None:
    codes = torch.tensor([0] * 100 + [1] * 57 + [2] * 3 + [3])
    held = probes._held_out(codes, 0.1, seed=3)
    assert [int(held[codes == c].sum()) for c in range(4)] == [10, 5, 1, 0]
    assert torch.equal(held, probes._held_out(codes, 0.1, seed=3))
    assert not torch.equal(held, probes._held_out(codes, 0.1, seed=4))


def test_probe_on_views_is_scikit_learns_on_all_rows(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = digits
    generator = torch.Generator().manual_seed(0)
    owners = torch.randint(len(train), (2 * len(train),), generator=generator)
    views = train[owners] + 2 * torch.randn(len(owners), train.shape[1], generator=generator)
    decay, rows = 1e-2, torch.cat([train, views]).double()
    result = linear_probe(train, train_labels, test, test_labels, weight_decays=[decay], views=(views, owners))
    centre = rows.mean(0)
    scale = (rows - centre).square().mean().sqrt()
    oracle = SklearnLogisticRegression(C=1 / (decay * len(rows)), max_iter=5000, tol=1e-8)
    oracle.fit(((rows - centre) / scale).numpy(), torch.cat([train_labels, train_labels[owners]]).numpy())
    expected = 100 * oracle.score(((test - centre) / scale).numpy(), test_labels.numpy())
    assert result.accuracy == pytest.approx(expected, abs=0.26)  # one of 397, if two classes tie up to rounding
    assert f"with those of {len(views)} random views of the training samples" in result.protocol
    plain = linear_probe(train, train_labels, test, test_labels, weight_decays=[decay])
    assert plain.accuracy != result.accuracy
    assert "no augmentation" in plain.protocol


def test_copies_as_views_change_nothing(digits: tuple[Tensor, ...]) -> None:
    train, train_labels, test, test_labels = digits
    copies = train.repeat(2, 1), torch.arange(len(train)).repeat(2)
    grid = [1e-2, 1e-3]
    plain, twice = (
        linear_probe(train, train_labels, test, test_labels, weight_decays=grid, views=views)
        for views in (None, copies)
    )
    assert twice.accuracy == pytest.approx(plain.accuracy, abs=0.26)
    assert twice.weight_decay == plain.weight_decay
    assert twice.validation_accuracy == pytest.approx(plain.validation_accuracy, abs=1)


def test_no_view_of_a_held_out_sample_is_fitted_to(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = torch.arange(40) % 2
    train = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
    owners = torch.repeat_interleave(torch.arange(40), torch.arange(40) % 5)
    fitted: list[int] = []

    class Spy(LogisticRegression):
        def __init__(self, features: Tensor, codes: Tensor, *rest: Any) -> None:
            fitted.append(len(features))
            assert len(features) == len(codes)
            super().__init__(features, codes, *rest)

    monkeypatch.setattr(probes, "LogisticRegression", Spy)
    linear_probe(train, labels, train, labels, validation=0.25, views=(train[owners], owners))
    held = probes._held_out(labels, 0.25, 0)
    kept = torch.arange(40)[~held]
    assert fitted == [len(kept) + int((kept % 5).sum()), 40 + len(owners)]


def test_probe_does_not_change_its_input() -> None:
    train, labels = cloud(40, 3), labels_of(40, 2)
    kept = train.clone()
    linear_probe(train, labels, train, labels, weight_decays=[0.1])
    assert torch.equal(train, kept)


def test_knn_takes_little_longer_than_its_matrix_product() -> None:
    generator = torch.Generator().manual_seed(0)
    train, test = (nn.functional.normalize(torch.randn(n, 512, generator=generator), dim=1) for n in (20_000, 1_000))
    labels = torch.randint(10, (20_000,), generator=generator)
    product, whole = [], []
    for _ in range(3):  # alternating, so that other load on the machine affects both
        start = time.perf_counter()
        torch.mm(test, train.T)
        product.append(time.perf_counter() - start)
        start = time.perf_counter()
        knn_predict(train, labels, test, k=200)
        whole.append(time.perf_counter() - start)
    assert min(whole) < 2.5 * min(product)


def test_solver_ends_where_the_gradient_is_zero_on_ill_conditioned_features() -> None:
    x = cloud(2000, 40) * torch.logspace(0, -3, 40)
    labels = (x * torch.logspace(0, 2, 40) * cloud(1, 40, seed=1)).sum(1).sign().add(1).div(2).long()
    x, _, spectrum = probes._standardise(x, x)
    model = LogisticRegression(x, labels, 2, spectrum)
    assert model.fit(1e-4, 300)
    double = LogisticRegression(x.double(), labels, 2, spectrum.double())
    _, *gradients = double._objective(model.weight.double(), model.bias.double(), 1e-4)
    scale = torch.cat([spectrum / 2 + 1e-4, torch.tensor([0.5])]).rsqrt()
    assert float((scale * torch.cat(gradients, dim=1)).abs().max()) < 1e-4


def test_solver_starts_from_the_previous_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    x, labels = cloud(300, 8), labels_of(300, 3)
    model = LogisticRegression(x, labels, 3, x.var(dim=0))
    assert model.fit(1e-2, 300)
    calls = 0
    usual = LogisticRegression._objective

    def counted(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        nonlocal calls
        calls += 1
        return usual(*arguments)

    monkeypatch.setattr(LogisticRegression, "_objective", counted)
    assert model.fit(1e-2, 300)
    assert calls <= 3


def test_solver_says_when_iterations_were_too_few() -> None:
    x, labels = cloud(300, 8), labels_of(300, 3)
    model = LogisticRegression(x, labels, 3, x.var(dim=0))
    assert not model.fit(1e-3, 2)


def test_objective_and_gradient_are_those_of_cross_entropy() -> None:
    x, labels = cloud(101, 5), labels_of(101, 3)
    weight, bias = cloud(3, 5, seed=1).requires_grad_(), cloud(3, 1, seed=2).requires_grad_()
    expected = nn.functional.cross_entropy(x @ weight.T + bias.T, labels) + 0.05 * weight.square().sum()
    expected.backward()  # type: ignore[no-untyped-call, unused-ignore]
    loss, *gradients = LogisticRegression(x, labels, 3, x.var(dim=0))._objective(weight, bias, 0.1)
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(gradients, [weight.grad, bias.grad])


@pytest.mark.parametrize("inside", [False, True])
def test_probe_takes_features_made_in_inference_mode(inside: bool) -> None:
    with torch.inference_mode():
        x, labels = cloud(60, 4), labels_of(60, 2)
    with torch.inference_mode(inside):
        result = linear_probe(x, labels, x, labels, weight_decays=[1e-1, 1e-2])
    assert result == linear_probe(x.clone(), labels.clone(), x.clone(), labels.clone(), weight_decays=[1e-1, 1e-2])
