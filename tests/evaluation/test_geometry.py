"""Geometry of embeddings against plain loops, NumPy and closed forms."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from fmicl.evaluation import geometry
from fmicl.evaluation.geometry import (
    alignment,
    effective_rank,
    lidar,
    nearest_neighbours,
    pair_distances,
    rankme,
    uniformity,
)


def cloud(n: int, d: int, seed: int = 0) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def unit(row: Tensor) -> list[float]:
    length = math.sqrt(sum(float(v) ** 2 for v in row))
    return [float(v) / length for v in row]


def squared(a: Tensor, b: Tensor) -> float:
    return sum((p - q) ** 2 for p, q in zip(unit(a), unit(b), strict=True))


def dot(a: Tensor, b: Tensor) -> float:
    return sum(p * q for p, q in zip(unit(a), unit(b), strict=True))


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of odd sizes, so small that a few dozen rows need many of them."""
    monkeypatch.setattr(geometry, "_COLUMNS", 13)
    monkeypatch.setattr(geometry, "_ROWS_CPU", 5)


def test_alignment_is_the_mean_squared_distance_of_pairs() -> None:
    x, y = cloud(20, 5), cloud(20, 5, seed=1)
    loop = sum(squared(a, b) for a, b in zip(x, y, strict=True)) / 20
    assert alignment(x, y) == pytest.approx(loop, rel=1e-12)
    assert alignment(7.0 * x, y) == pytest.approx(loop, rel=1e-12)


@pytest.mark.parametrize("t", [0.5, 2.0, 5.0])
@pytest.mark.usefixtures("small_tiles")
def test_uniformity_is_the_log_mean_potential_over_tiles(t: float) -> None:
    x = cloud(33, 4)
    pairs = [math.exp(-t * squared(a, b)) for a, b in itertools.combinations(x, 2)]
    assert uniformity(x, t) == pytest.approx(math.log(sum(pairs) / len(pairs)), rel=1e-12)


def test_uniformity_where_every_potential_underflows() -> None:
    assert uniformity(torch.eye(6), t=400.0) == pytest.approx(-800.0, rel=1e-6)


def test_uniformity_of_a_uniform_sphere_has_its_closed_form() -> None:
    # On the circle, E exp(-2 t (1 - cos a)) = exp(-2 t) I0(2 t): evenly spaced points converge to it.
    angle = torch.arange(4000, dtype=torch.float64) * (2 * math.pi / 4000)
    x = torch.stack([angle.cos(), angle.sin()], dim=1)
    exact = -4.0 + math.log(np.i0(4.0))
    # Without the diagonal, which contributes potential 1 with weight 1/n.
    mean = (4000 * math.exp(exact) - 1) / 3999
    assert uniformity(x) == pytest.approx(math.log(mean), abs=1e-9)


@pytest.mark.parametrize(("n", "d"), [(40, 6), (6, 40), (9, 9)])
def test_effective_rank_is_the_entropy_of_singular_values(n: int, d: int) -> None:
    x = cloud(n, d) * torch.linspace(0.01, 3, d)
    p = np.linalg.svd(x.numpy(), compute_uv=False)
    p = p / p.sum()
    assert effective_rank(x) == pytest.approx(float(np.exp(-(p * np.log(p)).sum())), rel=1e-9)


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("rank", [1, 3])
def test_effective_rank_of_flat_spectra_at_any_scale(rank: int, scale: float) -> None:
    basis = torch.linalg.qr(cloud(512, rank)).Q.T
    rows = torch.linalg.qr(cloud(600, rank, seed=1)).Q
    assert effective_rank((rows @ basis).float() * scale) == pytest.approx(rank, rel=1e-3)


@pytest.mark.parametrize(("n", "d"), [(40, 6), (6, 40)])
@pytest.mark.parametrize("epsilon", [0.0, 1e-7, 1e-2])
def test_rankme_is_the_entropy_of_singular_values_and_epsilon(n: int, d: int, epsilon: float) -> None:
    x = cloud(n, d) * torch.linspace(0.01, 3, d)
    p = np.linalg.svd(x.numpy(), compute_uv=False)
    p = p / p.sum() + epsilon
    assert rankme(x, epsilon) == pytest.approx(float(np.exp(-(p * np.log(p)).sum())), rel=1e-9)
    assert rankme(1e-9 * x, 0.0) == pytest.approx(effective_rank(x), rel=1e-9)


@pytest.mark.parametrize(("n", "q", "d"), [(12, 3, 5), (4, 2, 9)])
@pytest.mark.parametrize("delta", [1e-4, 0.3])
def test_lidar_by_plain_loops(n: int, q: int, d: int, delta: float) -> None:
    x = (cloud(n * q, d).view(n, q, d) + 2 * cloud(n, d, seed=1).unsqueeze(1)).numpy() * np.linspace(0.1, 2, d)
    means = [sum(x[i, j] for j in range(q)) / q for i in range(n)]
    mean = sum(means) / n
    between, within = np.zeros((d, d)), delta * np.eye(d)
    for i in range(n):
        between += np.outer(means[i] - mean, means[i] - mean) / n
        for j in range(q):
            within += np.outer(x[i, j] - means[i], x[i, j] - means[i]) / (n * q)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    p = np.sort(np.linalg.eigvalsh(root @ between @ root))[::-1][: min(n - 1, d)].clip(0)
    p = p / p.sum() + 1e-7
    expected = float(np.exp(-(p * np.log(p)).sum()))
    assert lidar(torch.tensor(x), delta) == pytest.approx(expected, rel=1e-8)
    assert lidar(torch.tensor(x + 5.0), delta) == pytest.approx(expected, rel=1e-8)  # the mean doesn't matter


def test_lidar_leaves_out_what_differs_between_views() -> None:
    # 3 directions tell samples apart, 5 more only the views: RankMe counts those, LiDAR does not
    samples = torch.linalg.qr(cloud(64, 3)).Q * 8
    views = torch.zeros(64, 16, 8, dtype=torch.float64)
    views[:, :, :3] = samples.unsqueeze(1) + 1e-3 * cloud(64 * 16, 3, seed=1).view(64, 16, 3)
    views[:, :, 3:] = cloud(64 * 16, 5, seed=2).view(64, 16, 5)
    assert lidar(views, delta=1e-6) == pytest.approx(3, abs=0.1)
    assert rankme(views.flatten(0, 1)) > 6


def test_lidar_of_large_features_in_few_directions() -> None:
    """A covariance of rank 3 whose rounding is above delta, as that of an untrained encoder without normalisation."""
    samples, noise = cloud(20, 3), cloud(20 * 4, 3, seed=1).view(20, 4, 3)
    views = 1e7 * (samples.unsqueeze(1) + 0.1 * noise) @ cloud(3, 64, seed=2)
    assert lidar(views) == pytest.approx(3, abs=0.5)


def test_ranks_without_label_of_a_collapse_are_zero() -> None:
    noise = 1e-8 * torch.randn(20, 4, 3, generator=torch.Generator().manual_seed(0))
    assert lidar(1.0 + noise) == 0.0  # rounding must not count as a full rank
    assert rankme(torch.zeros(5, 3)) == 0.0


def test_few_negative_pairs_are_all_used() -> None:
    x, y = cloud(12, 3), cloud(12, 3, seed=1)
    positive, negative = pair_distances(x, y)
    loop = sorted(math.sqrt(squared(a, b)) for a, b in zip(x, y, strict=True))
    assert positive.tolist() == pytest.approx(loop, rel=1e-10)
    loop = sorted(math.sqrt(squared(a, b)) for a, b in itertools.combinations(x, 2))
    assert negative.tolist() == pytest.approx(loop, rel=1e-10)


def test_pair_distances_sample_is_seeded_and_never_a_row_with_itself() -> None:
    x = cloud(300, 3)
    once, again, other = (pair_distances(x, x, max_negatives=5000, seed=s).negative for s in (3, 3, 4))
    assert once.shape == (5000,)
    assert torch.equal(once, again)
    assert not torch.equal(once, other)
    assert float(once[0]) > 0.0
    everything = pair_distances(x, x).negative
    assert float(once.mean()) == pytest.approx(float(everything.mean()), abs=0.03)
    assert bool((once.diff() >= 0).all())


def test_distances_of_close_pairs_are_accurate() -> None:
    x = torch.tensor([[1.0, 0.0], [1.0, 1e-6]])
    assert float(pair_distances(x, x).negative) == pytest.approx(1e-6, rel=1e-3)


@pytest.mark.parametrize("k", [1, 2, 7, 20, 37])
@pytest.mark.parametrize("rows", [512, 1, 4])
def test_neighbours_are_those_of_a_full_sort(k: int, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.evaluation.geometry._ROWS_CPU", rows)
    x, q = cloud(37, 4), cloud(11, 4, seed=1)
    found = nearest_neighbours(x, q, k)
    for row in range(11):
        order = sorted(range(37), key=lambda i: -dot(x[i], q[row]))
        assert found.indices[row].tolist() == order[:k]
        assert found.similarities[row].tolist() == pytest.approx([dot(x[i], q[row]) for i in order[:k]], rel=1e-10)


@pytest.mark.parametrize("k", [1, 6, 30])
@pytest.mark.usefixtures("small_tiles")
def test_neighbours_over_many_tiles_exclude_the_row_itself(k: int) -> None:
    x = cloud(40, 3)
    found = nearest_neighbours(x, None, k)
    for row in range(40):
        order = sorted((i for i in range(40) if i != row), key=lambda i: -dot(x[i], x[row]))
        assert found.indices[row].tolist() == order[:k]


@pytest.mark.parametrize("n", [64, 1000, 4999, 5003])
@pytest.mark.parametrize("k", [1, 3, 50, 64])
@pytest.mark.parametrize("levels", [3, 50, 10**6])
def test_selection_by_blocks_is_exact_with_any_number_of_ties(n: int, k: int, levels: int) -> None:
    generator = torch.Generator().manual_seed(n * k)
    values = torch.randint(levels, (6, n), generator=generator).float()
    got, place = geometry._largest(values, k)
    assert torch.equal(got.sort(dim=1).values, values.topk(k).values.sort(dim=1).values)
    assert torch.equal(values.gather(1, place), got)
    assert all(len(set(row)) == k for row in place.tolist())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_rows_are_measured_in_float32(dtype: torch.dtype) -> None:
    x, y = cloud(50, 8).to(dtype), cloud(50, 8, seed=1).to(dtype)
    assert alignment(x, y) == alignment(x.float(), y.float())
    assert uniformity(x) == uniformity(x.float())
    assert effective_rank(x) == effective_rank(x.float())
    half, full = nearest_neighbours(x, y, 5), nearest_neighbours(x.float(), y.float(), 5)
    assert half.similarities.dtype == torch.float32
    assert torch.equal(half.indices, full.indices)


def test_autocast_and_tf32_do_not_affect_the_results() -> None:
    x, y = cloud(64, 32).float(), cloud(64, 32, seed=1).float()
    plain = nearest_neighbours(x, y, 5), uniformity(x)
    torch.set_float32_matmul_precision("high")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            mixed = nearest_neighbours(x, y, 5), uniformity(x)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(plain[0].similarities, mixed[0].similarities)
    assert plain[1] == mixed[1]


@pytest.mark.parametrize("scale", [1e-30, 1e-25, 1e20, 1e30])
def test_only_directions_matter(scale: float) -> None:
    x, y = torch.randn(2, 20, 5)
    assert alignment(scale * x, y) == pytest.approx(alignment(x, y), rel=1e-5)
    assert uniformity(scale * x) == pytest.approx(uniformity(x), rel=1e-5)


def test_a_row_of_zeros_has_similarity_zero() -> None:
    found = nearest_neighbours(torch.eye(3), torch.zeros(1, 3), 3)
    assert found.similarities.tolist() == [[0.0, 0.0, 0.0]]


def test_results_have_no_gradient() -> None:
    x = cloud(10, 3).requires_grad_()
    assert not nearest_neighbours(x, x, 2).similarities.requires_grad
    assert not pair_distances(x, x).negative.requires_grad


X = torch.eye(4)
BROKEN = torch.tensor([[1.0, 0.0], [float("nan"), 0.0]])


@pytest.mark.parametrize(
    ("call", "fact"),
    [
        (lambda: alignment(X, X[:3]), r"\(4, 4\) and \(3, 4\)"),
        (lambda: alignment(BROKEN, BROKEN), "1 of 2 rows"),
        (lambda: uniformity(X[:1]), "at least 2"),
        (lambda: uniformity(X, t=0.0), "t must be a positive number"),
        (lambda: effective_rank(torch.zeros(3, 3)), "zero"),
        (lambda: effective_rank(X.long()), "int64"),
        (lambda: rankme(X, epsilon=-1.0), "epsilon.*-1"),
        (lambda: lidar(X), "q at least 2"),
        (lambda: lidar(X.unsqueeze(1)), "q at least 2"),
        (lambda: lidar(X.unsqueeze(1).repeat(1, 2, 1), delta=0.0), "delta.*0"),
        (lambda: effective_rank(X[0]), r"\(4,\)"),
        (lambda: effective_rank(X[:0]), "non-empty"),
        (lambda: pair_distances(X[:1], X[:1]), "at least 2"),
        (lambda: pair_distances(X, X, max_negatives=0), "max_negatives"),
        (lambda: nearest_neighbours(X, X, 5), "4.*k=5"),
        (lambda: nearest_neighbours(X, None, 4), "3.*k=4"),
        (lambda: nearest_neighbours(X, X, 0), "k=0"),
        (lambda: nearest_neighbours(X, X[:, :2], 1), "2 dimensions, features 4"),
        (lambda: nearest_neighbours(X, BROKEN, 1), "queries .*1 of 2 rows"),
    ],
)
def test_wrong_input_is_an_error(call: Callable[[], object], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        call()
