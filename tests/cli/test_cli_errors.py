"""What the command line refuses: one message that says what to do, an exit code, and nothing written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.config import recipe
from fmicl.runs import folder as runs
from fmicl.utils.environment import STARTED_BY_SWEEP


def test_a_run_is_not_resumed_by_another_recipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = runs.create_run("digits", tmp_path / "run")
    runs.write_settings(run, "digits", recipe("digits"), "cpu")
    assert cli.main(["train", "cifar10", "--resume", "--out", str(run.path)]) == 2
    assert f"is a run of the recipe digits, not of cifar10: fmicl train digits --resume --out {run.path}" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "where", "why"),
    [
        ("images", "of images in {}/runs", "images (any folder of images, with or without class subfolders) is read"),
        ("images --out new/run", "in new/run", "images (any folder of images, with or without class subfolders) is"),
        ("digits --data-dir /nowhere --dataset images", "of digits in {}/runs", "there is no folder /nowhere"),
        ("wikipedia", "of wikipedia in {}/runs", "which text to train on is not said"),
    ],
)
def test_a_resume_that_finds_no_run_and_can_begin_none_says_both(
    arguments: str,
    where: str,
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["train", *arguments.split(), "--resume"]) == 2
    words = f"there is no run {where.format(tmp_path)} to go on with, and none can be begun: {why}"
    assert capsys.readouterr().err.startswith(f"fmicl: error: {words}")
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_a_sweep_that_can_not_begin_says_only_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The sweep resumes all its runs, those that were not there among them."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STARTED_BY_SWEEP, "1")
    assert cli.main(["train", "images", "--resume", "--data-dir", "/nowhere", "--out", "sweep/run"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: there is no folder /nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_resume_that_finds_a_run_says_only_what_is_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs.write_settings(runs.create_run("images"), "images", recipe("images"), "cpu")
    assert cli.main(["train", "images", "--resume", "--data-dir", "/nowhere"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: there is no folder /nowhere")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("train digits --out FILE", "{}/FILE is a file, and no folder to write into: take another --out"),
        ("train digits --out FILE/run", "{}/FILE is a file, and no folder to write into: take another --out"),
        ("sweep digits --out RUN", "RUN holds a run, and no sweep: take another --out"),
        ("sweep digits --out FILE/sweep", "{}/FILE is a file, and no folder to write into: take another --out"),
        ("train digits --out FILE --resume", "FILE is a file, not a run folder to resume"),
        ("evaluate FILE", "FILE is a file, not a run folder"),
        ("report FILE", "FILE is a file, not a run folder"),
        ("embed RUN one.jpg -o x.npz", "one.jpg is one image: name its folder, of which all images are embedded"),
    ],
)
def test_a_file_in_the_place_of_a_folder_is_one_line(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("FILE", "one.jpg"):
        (tmp_path / name).write_text("")
    runs.write_settings(runs.create_run("digits", Path("RUN")), "digits", recipe("digits"), "cpu")
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(arguments.split()) == 2
    assert capsys.readouterr().err == f"fmicl: error: {words.format(tmp_path)}\n"
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["train", "digits", "--epochs", "0"], "epochs must be positive, but it is 0"),
        (["train", "digits", "--flip", "2"], "flip is a probability"),
        (["train", "cifar10"], "--data-dir"),
        (["train", "imgs", "--data-dir", "x"], "there is no recipe 'imgs'; did you mean images"),
        (["train", "wiki"], "did you mean wikipedia?"),
        (["sweep", "digitz", "--seed", "0", "1"], "there is no recipe 'digitz'; did you mean digits?"),
        (["train", "photos"], "there are: digits, cifar10"),
        (["train", "cifar10", "--data-dir", "/nowhere"], "there is no folder /nowhere"),
        (["train", "digits", "--encoder", "resnet_18"], "did you mean resnet18"),
        (["train", "digits", "--divergence", "kll"], "kl"),
        (["train", "digits", "--divergence", "nonsense", "--objective", "infonce"], "unknown divergence 'nonsense'"),
        (["train", "digits", "--divergence", "tsallis", "--order", "1"], "order (of tsallis) must be above 1"),
        (["train", "digits", "--seed", str(2**63)], "seed must lie between 0 and 2^63 - 1"),
        (["evaluate", "/nowhere"], "there is no run folder /nowhere"),
        (["report", "/nowhere"], "there is no run folder /nowhere"),
        (["embed", "/nowhere", "/", "-o", "x.csv"], "there is no run folder /nowhere"),
    ],
)
def test_wrong_input_is_one_message_and_exit_code_two(
    arguments: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("fmicl: error: ")
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["train", "digits"], "take another --out"),
        (["train", "digits", "--out", "new/run"], "take another --out"),
        (["train", "digits", "--out", "RUN", "--resume"], "copy the run folder"),
        (["sweep", "digits"], "take another --out"),
        (["sweep", "digits", "--out", "new/sweep"], "take another --out"),
        (["evaluate", "RUN"], "copy the run folder"),
        (["evaluate", "RUN", "--sts", "STS"], "copy the run folder"),
        (["evaluate", "MODEL", "--sts", "STS", "--json", "x.json"], "take another --json"),
        (["report", "RUN"], "copy the run folder"),
        (["embed", "RUN", ".", "-o", "x.csv"], "take another -o"),
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
    runs.write_settings(runs.create_run("digits", tmp_path / "RUN"), "digits", recipe("digits"), "cpu")
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.setattr(
        "fmicl.utils.files.os.access", lambda *_: False
    )  # tests may be run by root, who may do anything
    monkeypatch.setattr("fmicl.training.pipeline.create_run", None)  # nor is it said as late as that
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith("fmicl: error: there is no permission to write into /")
    assert hint in error
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("arguments", ["images --data-dir nowhere", "wikipedia --data nowhere.txt"])
def test_a_folder_that_exists_is_refused_before_anything_is_read(
    arguments: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert cli.main(["train", *arguments.split(), "--out", "mine"]) == 2
    assert capsys.readouterr().err.startswith("fmicl: error: mine exists, and a run never overwrites")
    assert [path.name for path in tmp_path.rglob("*")] == ["mine"]


@pytest.mark.parametrize("arguments", [["train"], ["train", "digits", "--epochs", "x"], ["nothing"]])
def test_what_cannot_be_parsed_is_exit_code_two(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_code:
        cli.main(arguments)
    assert exit_code.value.code == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_broken_number_is_exit_code_one(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fmicl.utils.errors import NonFiniteError

    def broken(*_: Any, **__: Any) -> None:
        raise NonFiniteError("the loss is nan at batch 7")

    monkeypatch.setattr("fmicl.training.pipeline.train", broken)
    assert cli.main(["train", "digits"]) == 1
    assert capsys.readouterr().err == "fmicl: error: the loss is nan at batch 7\n"
