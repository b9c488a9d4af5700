"""Run folders: creation, lookup and recognition."""

from __future__ import annotations

from pathlib import Path

import pytest

from fmicl.runs.folder import Run, create_run, find_run, is_run_or_sweep, latest_run, open_run, remove_temporary_files
from fmicl.runs.settings import read_settings


def test_numbers_count_up_from_the_highest_and_the_latest_is_found(tmp_path: Path) -> None:
    assert latest_run("digits", tmp_path) is None
    for name in ("digits-002", "digits-010", "digits-x", "digits-more-011"):
        (tmp_path / name).mkdir()
    (tmp_path / "digits-099").touch()  # a file is not a run
    run = create_run("digits", root=tmp_path)
    assert run.path.name == "digits-011"
    assert latest_run("digits", tmp_path) == run


def test_a_run_never_overwrites_another(tmp_path: Path) -> None:
    run = create_run("digits", tmp_path / "deep" / "mine")
    with pytest.raises(FileExistsError, match="mine"):
        create_run("digits", run.path)
    assert find_run("digits", run.path) == run
    assert find_run("digits", tmp_path / "none") is None


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    for path, fact in ((file, "file"), (tmp_path / "none", "none"), (tmp_path, r"settings\.json")):
        assert not Run.is_run(path)
        with pytest.raises(FileNotFoundError, match=fact):
            open_run(path)
    with pytest.raises(ValueError, match="file"):
        find_run("digits", file)
    Run(tmp_path).settings.touch()
    assert Run.is_run(tmp_path)
    assert open_run(str(tmp_path)) == Run(tmp_path)


def test_a_run_has_finished_when_it_has_results_and_report(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.results.touch()
    assert not run.finished
    run.report.touch()
    assert run.finished


def test_partial_files_are_removed_and_nothing_else(tmp_path: Path) -> None:
    for name in ("metrics.csv", ".results.json.12.tmp", "checkpoints/.last.ckpt.12.tmp", ".model.12.tmp/weights"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    remove_temporary_files(Run(tmp_path))
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["checkpoints", "metrics.csv"]


@pytest.mark.parametrize(
    ("folders", "files", "expected"),
    [
        ([], ["settings.json", "metrics.csv"], True),
        ([], ["settings.json", "encoder.json"], True),
        (["checkpoints"], ["settings.json"], True),
        ([], ["sweep.json"], True),
        (["images"], ["settings.json"], False),
        (["checkpoints"], ["metrics.csv", "encoder.json"], False),
    ],
)
def test_runs_and_sweeps_are_recognised_by_their_contents(
    folders: list[str], files: list[str], expected: bool, tmp_path: Path
) -> None:
    for name in folders:
        (tmp_path / name).mkdir()
    for name in files:
        (tmp_path / name).touch()
    assert is_run_or_sweep(tmp_path) == expected


def test_settings_of_something_else_are_refused_by_what_they_lack(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.settings.write_text('{"recipe": "digits"}')
    with pytest.raises(ValueError, match="settings, task"):
        read_settings(run)
