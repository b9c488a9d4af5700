"""Plans, tables and plots of every experiment, with results in place of training."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from fmicl.config import recipe
from fmicl.divergences import divergence
from fmicl.reproduce import EXPERIMENTS, Scale, paper
from fmicl.reproduce.costs import SECONDS_PER_EPOCH
from fmicl.reproduce.estimation import batch_objective, exact_objective
from fmicl.reproduce.experiment import Measured, Outcome, Outcomes, archive_hash
from fmicl.reproduce.pipeline import as_json, collect
from fmicl.reproduce.simplex import minimise_energy
from fmicl.theory import simplex

NAMES = EXPERIMENTS.names()
TRAINED = [name for name in NAMES if EXPERIMENTS[name].value().plan(Scale())]


def outcome(settings: Any, knn: float) -> Outcome:
    quantiles = [i / 100 for i in range(101)]
    results = {
        "knn": knn, "linear": knn + 1, "STSB": knn, "avg": knn, "alignment": 0.5, "uniformity": -3.0,
        "effective_rank": 40.0, "distances": {"positive": quantiles, "negative": quantiles},
    }  # fmt: skip
    metrics = [{"epoch": 1.0, "loss": 2.0}, {"epoch": 2.0, "loss": 1.5}]
    return Outcome(settings, results, metrics, Path("run"))


@pytest.mark.parametrize("small", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_a_plan_has_each_key_once_for_each_seed(name: str, small: bool) -> None:
    plan = EXPERIMENTS[name].value().plan(Scale(small=small, seeds=(0, 1)))
    assert Counter(run.key for run in plan).most_common(1)[0][1] == 2
    assert {run.settings.seed for run in plan} == {0, 1}
    recipes = {run.settings.recipe for run in plan}
    assert recipes <= {"digits", "wikipedia"} if small else "digits" not in recipes
    assert not any(run.settings.unused() for run in plan), "no option of a plan is without effect"


@pytest.mark.parametrize("name", TRAINED)
def test_every_run_of_a_plan_is_shown(name: str) -> None:
    """Each score of the plan's runs is in a table or a plot: the presented numbers change if a run's result does."""
    scale = Scale(small=True)
    experiment = EXPERIMENTS[name].value()
    plan = experiment.plan(scale)
    runs = {run.key: [outcome(run.settings, 10.0 + i)] for i, run in enumerate(plan)}
    shown = json.dumps(as_json(experiment.present(Outcomes(runs), scale)), default=str)
    assert shown != "{}"
    for key in runs:
        if name == "gaussian":  # needs the runs' weights
            continue
        if name in ("curves", "uniformity"):
            assert key[0] in shown
            continue
        others = {other: [outcome(run.settings, 99.99)] if other == key else found
                  for (other, found), run in zip(runs.items(), plan, strict=True)}  # fmt: skip
        changed = json.dumps(as_json(experiment.present(Outcomes(others), scale)), default=str)
        assert changed != shown, f"{key} is planned and not shown"


@pytest.mark.parametrize("name", TRAINED)
def test_blank_without_a_run_and_failed_with_a_failed_one(name: str) -> None:
    scale = Scale(small=True)
    experiment = EXPERIMENTS[name].value()
    plan = experiment.plan(scale)
    empty = experiment.present(Outcomes({}), scale)
    entries = [entry for table in empty.tables for row in table.rows for entry in row]
    assert not any(entry.values for entry in entries if isinstance(entry, Measured))
    if name not in ("curves", "gaussian"):
        failed = experiment.present(Outcomes({}, {plan[0].key: "loss is not finite"}), scale)
        assert "failed" in "".join(table.markdown() for table in failed.tables)


def test_the_numbers_of_the_paper_are_complete() -> None:
    assert [len(row) for row in (*paper.LINEAR.values(), *paper.KNN.values(), paper.STS)] == [9] * 7
    assert paper.LINEAR["cifar10"]["KL"] == 90.61
    assert paper.KNN["tinyimagenet"]["JS"] == 38.20
    assert max(paper.ALPHA_VISION["KL"].values()) == paper.ALPHA_VISION["KL"][40.0] == 84.19


def test_archived_runs_are_found_by_their_settings() -> None:
    """Where the data lies and which device trained has no part; the seed and every option that counts have."""
    settings = recipe("cifar10", epochs=200, data_dir="somewhere", device="cpu", seed=1)
    known = {archive_hash(recipe("cifar10", epochs=200, seed=1)): outcome(settings, 85.0)}
    plan = EXPERIMENTS["curves"].value().plan(Scale(seeds=(0, 1), places={"cifar10": {"data_dir": "elsewhere"}}))
    found = collect(plan, known, {})
    assert list(found.runs) == [("KL",)]
    assert len(found[("KL",)]) == 1


def test_measured_times_are_those_on_record() -> None:
    root = Path(__file__).resolve().parents[2]
    told = json.loads((root / "results/benchmarks/command-h200.json").read_text())
    assert SECONDS_PER_EPOCH["cifar10"] == pytest.approx(told["seconds"]["an epoch, median of the others"], abs=1e-3)


@pytest.mark.parametrize("name", ["kl", "js", "pearson", "squared_hellinger"])
def test_minimisers_are_regular_simplices_up_to_d_plus_one_points(name: str) -> None:
    points = minimise_energy(divergence(name), 5, 4, starts=1)
    expected = torch.pdist(simplex(5, 4))
    torch.testing.assert_close(torch.pdist(points), expected, atol=1e-4, rtol=0)


def test_the_icosahedron_minimises_kl_beyond_the_simplex() -> None:
    """Universally optimal for d = 3, N = 12 (Cohn and Kumar): cosines -1, -1/sqrt 5 and 1/sqrt 5."""
    points = minimise_energy(divergence("kl"), 12, 3, starts=2)
    cosines = (points @ points.T)[torch.triu(torch.ones(12, 12, dtype=torch.bool), 1)].sort().values
    expected = torch.tensor([-1.0] * 6 + [-1 / math.sqrt(5)] * 30 + [1 / math.sqrt(5)] * 30, dtype=torch.float64)
    torch.testing.assert_close(cosines, expected, atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["kl", "js", "vlc"])
def test_the_objective_on_batches_has_the_exact_mean(name: str) -> None:
    found = batch_objective(name, 64, 5, 300)
    error = float(found.std()) / math.sqrt(len(found))
    assert abs(float(found.mean()) - exact_objective(name, 5)) < 4 * error
