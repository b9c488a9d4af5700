"""Errors of the command line that depend on more than the input: a sweep, a run to resume, missing permissions."""

from __future__ import annotations

from pathlib import Path

import pytest

from fmicl.cli import main as cli
from fmicl.config import recipe
from fmicl.runs.folder import create_run
from fmicl.runs.settings import write_settings
from fmicl.utils.environment import STARTED_BY_SWEEP


def make_run(name: str, out: Path | None = None) -> Path:
    run = create_run(name, out)
    write_settings(run, recipe(name), "cpu")
    return run.path


@pytest.mark.parametrize(
    ("arguments", "where", "why"),
    [
        ("images", "of images in {}/runs", "--data-dir"),
        ("images --out new/run", "in new/run", "--data-dir"),
        ("digits --data-dir /nowhere --dataset images", "of digits in {}/runs", "/nowhere"),
        ("wikipedia", "of wikipedia in {}/runs", "--data"),
    ],
)
def test_a_resume_that_finds_no_run_and_can_start_none_says_both(
    arguments: str,
    where: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments.split(), "--resume"]) == 2
    first, _, second = capsys.readouterr().err.partition(": error: ")[2].partition(": ")
    assert f"no run {where.format(tmp_path)} " in first
    assert why in second
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_sweep_that_can_not_start_says_only_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep resumes all its runs, also those that don't exist yet."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTED_BY_SWEEP, "1")
    assert cli.main(["train", "images", "--resume", "--data-dir", "/nowhere", "--out", "sweep/run"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: there is no folder /nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_resume_that_finds_a_run_says_only_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("images")
    assert cli.main(["train", "images", "--resume", "--data-dir", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: there is no folder /nowhere")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "digits"], "--out"),
        (["train", "digits", "--out", "new/run"], "--out"),
        (["train", "digits", "--out", "RUN", "--resume"], "copy the run folder"),
        (["sweep", "digits"], "--out"),
        (["sweep", "digits", "--out", "new/sweep"], "--out"),
        (["evaluate", "RUN"], "copy the run folder"),
        (["evaluate", "RUN", "--sts", "STS"], "copy the run folder"),
        (["evaluate", "MODEL", "--sts", "STS", "--json", "x.json"], "--json"),
        (["report", "RUN"], "copy the run folder"),
        (["embed", "RUN", ".", "-o", "x.csv"], "-o"),
    ],
)
def test_what_cannot_be_written_is_said_before_the_work(
    arguments: list[str],
    hint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    make_run("digits", tmp_path / "RUN")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr("fmicl.utils.files.os.access", lambda *_: False)  # root may write anywhere
    monkeypatch.setattr("fmicl.training.pipeline.create_run", None)  # that late would be too late
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert "permission" in error
    assert hint in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", ["images --data-dir nowhere", "wikipedia --data nowhere.txt"])
def test_a_folder_that_exists_is_refused_before_anything_is_read(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert cli.main(["train", *arguments.split(), "--out", "mine"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: mine exists")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]
