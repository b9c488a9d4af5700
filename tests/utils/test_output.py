"""Output to closed pipes and terminals."""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from fmicl.utils.output import ignore_closed_output, open_missing_output

SMALL = ["--epochs", "1", "--hidden", "16", "--baselines", "False", "--device", "cpu", "--monitor-every", "0"]


def run_with_closed_pipe(*words: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose output goes to a closed pipe."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fmicl", *words]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writing)
    return done


def test_training_finishes_with_a_closed_pipe(tmp_path: Path) -> None:
    options = [word for word in SMALL if word not in ("--baselines", "False")]
    done = run_with_closed_pipe("train", "digits", *options, "--no-baselines", "--out", str(tmp_path / "run"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()
    assert (tmp_path / "run" / "report.html").exists()


def test_a_sweep_finishes_with_a_closed_pipe(tmp_path: Path) -> None:
    done = run_with_closed_pipe("sweep", "digits", *SMALL, "--out", str(tmp_path / "sweep"))
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "sweep").glob("seed0-*/report.html"))) == 1


def test_training_finishes_without_an_output(tmp_path: Path) -> None:
    options = [word for word in SMALL if word not in ("--baselines", "False")]
    words = ["train", "digits", *options, "--no-baselines", "--out", str(tmp_path / "run")]
    command = f"exec {shlex.join([sys.executable, '-m', 'fmicl', *words])} >&-"
    done = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "report.html").exists()


def test_a_wrong_command_exits_with_two_with_a_closed_pipe() -> None:
    assert run_with_closed_pipe("train", "digits", "--epochs", "0").returncode == 2


@pytest.mark.parametrize("terminal", [True, False])
def test_closed_terminals_and_pipes_are_ignored(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.openpty() if terminal else os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with ignore_closed_output():
            assert sys.stdout.isatty() is False
            for _ in range(3):
                print("a word", flush=True)
            print("the last one")
        assert sys.stdout is stream
        print("now it goes nowhere", flush=True)


def test_other_output_errors_are_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def write(self, _: str) -> int:
            raise OSError(errno.EINVAL, "Invalid argument")

        def flush(self) -> None: ...

    monkeypatch.setattr(sys, "stdout", Broken())
    with pytest.raises(OSError, match="Invalid"), ignore_closed_output():
        print("a word")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_on_a_full_disk_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        with ignore_closed_output():
            print("a word", flush=True)
            print("more than a buffer" * 10_000)


def test_output_that_was_closed_from_the_start_goes_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `fmicl train digits >&-`, where Python has no sys.stdout."""
    monkeypatch.setattr(sys, "stdout", None)
    open_missing_output()
    with ignore_closed_output():
        print("a word", flush=True)
        assert sys.stdout.isatty() is False
