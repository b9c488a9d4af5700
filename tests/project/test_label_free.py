"""Rank correlations of scores without labels: the computation, and that the page agrees with the archived runs."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import label_free
from label_free import correlations

RANKS = [3.0, 9.0, 1.0, 7.0, 5.0, 8.0]
KNN = [50.0, 70.0, 40.0, 60.0, 80.0, 75.0]


def runs(**changes: float) -> list[dict[str, float | None]]:
    return [
        {"effective_rank": rank, "alignment": -rank, "knn": knn, "linear": 100 - knn, **changes}
        for rank, knn in zip(RANKS, KNN, strict=True)
    ]


def test_correlations_by_plain_loops() -> None:
    def order(values: list[float]) -> list[int]:
        return [sorted(values).index(v) for v in values]

    n = len(KNN)
    rho = 1 - 6 * sum((a - b) ** 2 for a, b in zip(order(RANKS), order(KNN), strict=True)) / (n * (n * n - 1))
    pairs = list(itertools.combinations(range(n), 2))
    tau = sum(1 if (RANKS[i] - RANKS[j]) * (KNN[i] - KNN[j]) > 0 else -1 for i, j in pairs) / len(pairs)
    expected = [f"{rho:+.2f}", f"{tau:+.2f}", f"{-rho:+.2f}", f"{-tau:+.2f}"]
    assert correlations(runs(), "effective_rank") == ["6", *expected, "70.00 of 80.00"]
    assert correlations(runs(), "alignment") == correlations(runs(), "effective_rank")  # it is -rank


def test_runs_without_the_score_do_not_count() -> None:
    some = [*runs(), {"effective_rank": None, "knn": 99.0, "linear": 99.0}]
    assert correlations(some, "effective_rank")[0] == "6"
    assert correlations(some, "rankme") == ["0", "", "", "", "", ""]
    assert "RankMe" not in label_free.correlation_table(some)


def test_a_sweep_is_collected_without_the_machine_s_paths(tmp_path: Path) -> None:
    sweep = tmp_path / "sweep"
    for name, state in (("one", "finished"), ("two", "failed")):
        (sweep / name).mkdir(parents=True)
        told = {"device": "cpu", "versions": {"torch": "2"}, "commit": "abc", "started": "2026-01-01"}
        (sweep / name / "settings.json").write_text(json.dumps(told))
        if state == "finished":
            (sweep / name / "results.json").write_text(json.dumps({"knn": 90.0, "distances": {"positive": [1.0]}}))
    entries = [
        {"folder": name, "hash": name, "state": state, "settings": {"alpha": 1.0}}
        for name, state in (("one", "finished"), ("two", "failed"))
    ]
    command = ["/home/x/python", "-m", "fmicl", "sweep", "digits", "--alpha", "1", "--out", "/home/x/sweep"]
    (sweep / "sweep.json").write_text(json.dumps({"command": command, "runs": entries}))
    out = tmp_path / "out.json"
    assert label_free.main(["--collect", str(sweep), "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert found["command"] == "fmicl sweep digits --alpha 1 --out RUN"
    assert found["runs"] == [{"hash": "one", "settings": {"alpha": 1.0}, "results": {"knn": 90.0}}]
    assert found["commit"] == "abc"
    assert "/home" not in out.read_text()


def test_the_page_agrees_with_the_archived_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert label_free.main(["--check"]) == 0, capsys.readouterr().out
