"""Successive halving: the plan's cost, who is kept, what the choice may see, and how it is continued."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fmicl.cli import main as cli
from fmicl.cli import select
from fmicl.config import recipe
from fmicl.sweep.grid import make_cells
from fmicl.sweep.halving import Budget, Rung, Selection, plan_rungs, train_command
from fmicl.utils.files import read_json
from sweeps import local

GRADED = """
import json, sys
from pathlib import Path
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1]
out = Path(option("--out"))
out.mkdir(exist_ok=True)
(out / "starts").write_text((out / "starts").read_text() + "x" if (out / "starts").exists() else "x")
alpha, epochs = float(option("--alpha")), int(option("--epochs"))
if alpha == 7:
    sys.exit("alpha 7 diverges")
(out / "metrics.csv").write_text("epoch,loss,knn,seconds\\n1,2.5,,3\\n")
# few epochs prefer a larger alpha, many the smallest: k-NN; the rank prefers the largest
results = {"knn": 50 + epochs - abs(alpha - 1), "linear": 1.0, "effective_rank": alpha, "split": SPLIT}
(out / "results.json").write_text(json.dumps(results))
"""


def program(folder: Path, split: str | None = "validation") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "graded.py"
    file.write_text(GRADED.replace("SPLIT", repr(split)))
    return [sys.executable, "-S", str(file)]


def candidates(**values: Any) -> list[Any]:
    base = recipe("digits", epochs=27, validation=0.1)
    return make_cells(base, values or {"alpha": tuple(float(a) for a in range(1, 10))})


@settings(max_examples=200)
@given(number=st.integers(2, 300), runs=st.floats(2, 400), epochs=st.integers(1, 1000), eta=st.integers(2, 5))
def test_a_plan_keeps_within_its_budget_and_narrows(number: int, runs: float, epochs: int, eta: int) -> None:
    rungs = plan_rungs(number, runs, epochs, eta=eta)
    assert sum(rung.runs * rung.epochs for rung in rungs) <= runs * epochs * (1 + 1e-9)
    assert all(2 <= rung.runs <= number and 1 <= rung.epochs <= epochs for rung in rungs)
    assert all(a.runs > b.runs and a.epochs < b.epochs for a, b in itertools.pairwise(rungs))
    if number <= runs:
        assert rungs == [Rung(epochs, number)]  # room for all of them at full length


def test_the_best_of_each_rung_go_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nine candidates; alpha 7 fails, and is the last. The third rung would have one run, which leaves no choice."""
    selection = Selection(candidates(), Budget(3.2, "runs"), program=program(tmp_path))
    assert selection.run(tmp_path / "s", local()) == 0
    told = read_json(tmp_path / "s" / "select.json")
    assert [(rung["epochs"], len(rung["runs"])) for rung in told["rungs"]] == [(3, 9), (9, 3)]
    first, last = told["rungs"][0]["runs"], told["rungs"][-1]["runs"]
    assert [row["kept"] for row in first] == [True] * 3 + [False] * 6
    assert [row["candidate"] for row in first][:3] == ["alpha1", "alpha2", "alpha3"]
    assert first[-1]["candidate"] == "alpha7"
    assert "alpha 7 diverges" in first[-1]["error"]
    assert [row["score"] for row in last] == sorted((row["score"] for row in last), reverse=True)
    assert told["winner"]["candidate"] == "alpha1"
    assert told["winner"]["command"] == "fmicl train digits --alpha 1.0 --epochs 27"
    assert told["winner"]["settings"]["validation"] == 0.0  # trained on all images in the end
    shown = capsys.readouterr().out
    assert "fmicl train digits --alpha 1.0 --epochs 27" in shown
    # the same again: nothing is trained anew but what failed
    starts = {path: path.read_text() for path in (tmp_path / "s").rglob("starts")}
    again = Selection(candidates(), Budget(3.2, "runs"), program=program(tmp_path))
    assert again.run(tmp_path / "s", local()) == 0
    changed = [path for path, text in starts.items() if path.read_text() != text]
    assert [path.parent.name[:6] for path in changed] == ["alpha7"]
    assert read_json(tmp_path / "s" / "select.json")["winner"] == told["winner"]


def test_without_labels_the_score_decides(tmp_path: Path) -> None:
    selection = Selection(candidates(), Budget(2, "runs"), by="effective_rank", program=program(tmp_path))
    assert selection.run(tmp_path / "s", local()) == 0
    assert read_json(tmp_path / "s" / "select.json")["winner"]["candidate"] == "alpha9"


def test_hours_are_measured_by_one_run_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    selection = Selection(candidates(), Budget(1, "hours"), program=program(tmp_path))
    assert selection.run(tmp_path / "s", local()) == 0
    assert "one run of 1 epochs, to see how long it takes" in capsys.readouterr().out
    told = read_json(tmp_path / "s" / "select.json")
    assert [(rung["epochs"], len(rung["runs"])) for rung in told["rungs"]] == [(27, 9)]  # fast: all of them


def test_results_on_test_images_are_refused(tmp_path: Path) -> None:
    selection = Selection(candidates(), Budget(3, "runs"), program=program(tmp_path, "test"))
    with pytest.raises(ValueError, match="test split"):
        selection.run(tmp_path / "s", local())


def test_no_score_at_all(tmp_path: Path) -> None:
    cells = candidates(alpha=(2.0, 3.0))
    selection = Selection(cells, Budget(3, "runs"), by="lidar", program=program(tmp_path))
    assert selection.run(tmp_path / "s", local()) == 1
    assert read_json(tmp_path / "s" / "select.json")["winner"] is None


def test_another_selection_in_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "select.json").write_text(json.dumps({"identity": {"by": "linear"}}))
    with pytest.raises(ValueError, match="another selection"):
        Selection(candidates(), Budget(3, "runs")).run(tmp_path, local())


# ---- the command line


def test_candidates_by_default() -> None:
    cells, options = select.parse("cifar10", ["--budget", "10"])
    assert len(cells) == len({cell.settings.hash for cell in cells}) == 6 * 3 * 3
    assert {cell.settings.alpha for cell in cells} == {4.0, 40.0, 400.0}
    assert {cell.settings.validation for cell in cells} == {0.1}
    assert (options.by, options.eta) == ("knn", 3)


def test_given_values_replace_them() -> None:
    cells, _ = select.parse("cifar10", ["--budget", "10", "--alpha", "40", "--gamma=1", "2", "--validation", "0.2"])
    assert {(cell.settings.alpha, cell.settings.gamma, cell.settings.validation) for cell in cells} == {
        (40.0, 1.0, 0.2), (40.0, 2.0, 0.2),
    }  # fmt: skip
    cells, _ = select.parse("digits", ["--budget", "2", "--shift", "optimal"])  # alpha has no effect
    assert len(cells) == 6 * 3
    cells, _ = select.parse("digits", ["--budget", "2", "--case", "A", "alpha=2", "--case", "B", "objective=infonce"])
    assert [cell.case for cell in cells] == ["A", "B"]
    assert train_command(cells[1].settings) == "fmicl train digits --objective infonce"


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        ("digits", "--budget"),
        ("digits --budget x", "'x'"),
        ("digits --budget 0", "'0'"),
        ("digits --budget 0.01", "too small"),
        ("digits --budget 3 --by accuracy", "'accuracy'"),
        ("digits --budget 3 --validation 0", "test images"),
        ("digits --budget 3 --by lidar --validation 0", "test images"),
        ("digits --budget 3 --seed 0 1", "--seed"),
        ("digits --budget 3 --epochs 3 9", "--epochs"),
        ("digits --budget 3 --eta 1", "--eta"),
        ("digits --budget 3 --first-epochs 1000", "1000"),
        ("digits --budget 3 --divergence kl --alpha 1 --gamma 1", "one candidate"),
        ("digits --budget 3 --objective infonce", "one candidate"),
        ("digits --budget 2h --launcher slurm", "hours"),
        ("wikipedia --budget 3", "images"),
        ("images --budget 3 --data-dir .", "--epochs"),
    ],
)
def test_wrong_inputs(
    words: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        code = cli.main(["select", *words.split()])
    except SystemExit as stop:
        code = int(stop.code or 0)
    assert code == 2
    assert fact in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_on_digits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two alphas, one of which collapses, the other is chosen, by held-out images alone."""
    monkeypatch.chdir(tmp_path)
    words = "digits --budget 3 --epochs 2 --divergence neyman kl --alpha 20 --gamma 1 --device cpu --out here"
    assert cli.main(["select", *words.split()]) == 0
    told = read_json(tmp_path / "here" / "select.json")
    assert told["winner"]["settings"]["divergence"] == "kl"
    for results in (tmp_path / "here").rglob("results.json"):
        assert read_json(results)["split"] == "validation"
