"""`fmicl reproduce`: sweeps of the plan, archives, missing data, files; and the page of an archive."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from browser import CHROMIUM, open_page
from fmicl.cli.main import main
from fmicl.reproduce import EXPERIMENTS, Scale, pipeline
from fmicl.reproduce.pipeline import Reproduction
from fmicl.sweep.grid import Cell
from fmicl.sweep.scheduler import Sweep

ROOT = Path(__file__).resolve().parents[2]
COSINE_JS = next(run for run in EXPERIMENTS["similarity"].value().plan(Scale(small=True))
                 if run.key[:2] == ("cosine", "JS")).settings.hash  # fmt: skip


def finish_at_once(cells: Sequence[Cell], *, out: Path, **_: Any) -> int:
    """In place of training: every run has results, but for Neyman and for JS with the cosine, which failed."""
    out.mkdir(parents=True, exist_ok=True)
    sweep = Sweep(cells, out)
    code = 0
    for run in sweep.runs:
        run.run.path.mkdir(exist_ok=True)
        if run.settings.divergence == "neyman" or run.settings.hash == COSINE_JS:
            run.state, run.error, code = "failed", "the loss is not finite", 1
            continue
        run.run.metrics.write_text("epoch,loss,knn\n1,2.0,\n2,1.0,50\n")
        run.run.results.write_text(json.dumps({"knn": 50.0, "linear": 60.0, "STSB": 70.0, "alignment": 0.3}))
        run.run.report.write_text("page")
        run.finish()
    sweep.save()
    return code


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The labels of the runs that each sweep was asked for."""
    asked: list[list[str]] = []

    def sweep(cells: Sequence[Cell], *, out: Path, **options: Any) -> int:
        asked.append([cell.label for cell in cells])
        return finish_at_once(cells, out=out, **options)

    monkeypatch.setattr(pipeline, "run_sweep", sweep)
    return asked


def test_the_list_names_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in EXPERIMENTS.names())


def test_a_table_with_the_papers_numbers_beside_ours(
    tmp_path: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["reproduce", "alpha-vision", "--scale", "small", "--out", str(tmp_path), "--seed", "0", "1"]
    assert main(words) == 0
    assert len(trained[0]) == 30
    told = json.loads((tmp_path / "small" / "alpha-vision" / "alpha-vision.json").read_text())
    assert told["tables"][0]["rows"][0][:2] == ["paper, KL", 13.16]
    assert told["tables"][0]["rows"][1][1]["values"] == [50.0, 50.0]
    assert {"command", "versions", "commit", "device"} <= told.keys()
    page = (tmp_path / "small" / "alpha-vision" / "alpha-vision.md").read_text()
    assert "50.00 ± 0.00" in page
    assert "not comparable" in page
    assert (tmp_path / "small" / "alpha-vision" / "alpha-vision.svg").read_text().startswith("<?xml")
    assert "84.19" in capsys.readouterr().out


@pytest.mark.usefixtures("trained")
def test_experiments_share_their_runs(tmp_path: Path) -> None:
    """Each run has one folder in the sweep of its recipe, whichever experiment asked first."""
    assert main(["reproduce", "curves", "uniformity", "--scale", "small", "--out", str(tmp_path)]) == 1  # Neyman failed
    folders = [path for path in (tmp_path / "small" / "runs" / "digits").iterdir() if path.is_dir()]
    assert len(folders) == 8
    assert "failed" not in (tmp_path / "small" / "curves" / "curves.md").read_text()
    table = (tmp_path / "small" / "uniformity" / "uniformity.md").read_text()
    assert "| Neyman | failed |" in table


def test_small_runs_train_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def sweep(cells: Sequence[Cell], *, out: Path, parallel: int | None, **options: Any) -> int:
        asked.append(parallel)
        return finish_at_once(cells, out=out, **options)

    monkeypatch.setattr(pipeline, "run_sweep", sweep)
    monkeypatch.setattr(pipeline, "available_cpus", lambda: 2)
    for number, words in enumerate(([], ["--parallel", "3"], ["--launcher", "slurm"])):
        out = str(tmp_path / str(number))
        assert main(["reproduce", "curves", "--scale", "small", "--out", out, *words]) == 0
    assert asked == [2, 3, None]


@pytest.mark.usefixtures("trained")
def test_a_failure_that_is_a_result_is_no_error(tmp_path: Path) -> None:
    """The paper's table of similarities has one."""
    assert main(["reproduce", "similarity", "--scale", "small", "--out", str(tmp_path)]) == 0
    table = (tmp_path / "small" / "similarity" / "similarity.md").read_text()
    assert table.count("failed") == 2  # linear and k-NN


def test_recipes_without_data_are_left_out_by_name(
    tmp_path: Path, trained: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reproduce", "batch-size", "--out", str(tmp_path)]) == 1
    assert trained == []
    assert "--data cifar10=PATH" in capsys.readouterr().out


def test_archived_runs_are_not_trained_again(tmp_path: Path, trained: list[list[str]]) -> None:
    words = ["reproduce", "curves", "--archive", str(ROOT / "results"), "--data", "cifar10=x", "--out", str(tmp_path)]
    assert main(words) == 0
    assert trained == []
    assert "KL" in (tmp_path / "curves" / "curves.svg").read_text()


@pytest.mark.parametrize(
    ("words", "fact"),
    [
        (["no-such-table"], "no-such-table"),
        (["curves", "--data", "cifar10"], "RECIPE=PATH"),
        (["curves", "--data", "cifar=x"], "cifar10"),
        (["curves", "--scale", "small", "--data", "cifar10=x"], "--scale full"),
        (["curves", "--slurm", "partition=main"], "--launcher slurm"),
        (["curves", "--archive", "nowhere"], "nowhere"),
    ],
)
def test_wrong_input_is_named(words: list[str], fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reproduce", *words, "--out", str(tmp_path / "out")]) == 2
    assert fact in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPERIMENTS.names())
def test_small_scale_for_real(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Trains on digits and on a tiny BERT; runs are shared, as a user's would be."""
    out = tmp_path_factory.getbasetemp() / "reproduction"
    assert Reproduction(Scale(small=True, common={"device": "cpu"}), out).run([name]) == 0
    told = json.loads((out / "small" / name / f"{name}.json").read_text())
    assert told["tables"] or told["plots"]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a part of the archive."""
    folder = tmp_path_factory.mktemp("archive")
    shutil.copytree(ROOT / "results" / "cifar10", folder / "cifar10")
    assert main(["report", str(folder)]) == 0
    return folder / "report.html"


def test_the_page_has_every_experiment_and_every_run(page: Path) -> None:
    text = page.read_text()
    assert all(f'id="{name}"' in text for name in EXPERIMENTS.names())
    assert "kl-800e-s0-26e9ecca" in text
    assert "http://" not in text.replace("http://www.w3.org", "")
    assert "90.83" in text  # linear accuracy of KL, 800 epochs


def test_a_folder_that_is_no_archive_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "other.json").write_text("{}")
    assert main(["report", str(tmp_path)]) == 2
    assert "archive" in capsys.readouterr().err


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_page_sorts_opens_runs_and_loads_nothing(page: Path) -> None:
    with open_page(page) as tab:
        assert tab.console == []
        assert [url for url in tab.requests if not url.startswith(("file:", "data:"))] == []
        column = "[...document.querySelectorAll('#all-runs tbody tr')].map(row => row.cells[6].dataset.value)"
        tab.run("document.querySelectorAll('#all-runs th')[6].click()")
        values = [float(value) for value in tab.run(column) if value]
        assert values == sorted(values)
        assert len(values) > 10
        tab.run("document.querySelectorAll('#all-runs th')[6].click()")
        values = [float(value) for value in tab.run(column) if value]
        assert values == sorted(values, reverse=True)
        shown = "getComputedStyle(document.querySelector('.run:target') ?? document.head).display"
        assert tab.run(shown) == "none"
        tab.run("document.querySelector('#objectives td a').click()")
        assert tab.run(shown) == "block"
        assert "fmicl train cifar10" in tab.run("document.querySelector('.run:target pre').textContent")
        assert tab.console == []
