"""The command line as a whole: help and start-up time, missing packages, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from typing import Any

import pytest

import fmicl as package
from command_line import fmicl, python
from fmicl.cli import main as cli
from fmicl.utils.extras import how_to_install

COMMANDS = ("train", "sweep", "select", "evaluate", "embed", "report", "mi", "check-assumption")


def test_help_answers_within_half_a_second() -> None:
    times: list[float] = []
    while not times or (min(times) >= 0.5 and len(times) < 10):  # other tests keep the machine busy
        before = time.perf_counter()
        done = fmicl("--help")
        times.append(time.perf_counter() - before)
        assert done.returncode == 0
    assert min(times) < 0.5
    assert all(command in done.stdout for command in COMMANDS)
    assert fmicl().stdout == done.stdout


def test_help_and_version_load_nothing_heavy() -> None:
    script = (
        "import sys, fmicl.__main__\n"
        "for word in ('--help', '--version'):\n"
        "    sys.argv = ['fmicl', word]\n"
        "    assert fmicl.__main__.main() == 0\n"
        "heavy = {'torch', 'lightning', 'timm', 'sklearn', 'matplotlib', 'numpy', 'tyro', 'rich'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    lines = python("-c", script).stdout.splitlines()
    assert lines[-2:] == [f"fmicl {package.__version__}", "[]"]


def test_python_m_fmicl_is_the_command_line() -> None:
    done = fmicl("report", "/nowhere")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("fmicl: error: ")
    assert "/nowhere" in done.stderr


def test_a_reader_that_has_closed_the_pipe_is_no_error() -> None:
    """As `fmicl train digits --help | head -1`, with a reader that leaves before a word is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fmicl", "train", "digits", "--help"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=300)
    os.close(writing)
    assert done.stderr == ""


def without(hidden: str, script: str) -> subprocess.CompletedProcess[str]:
    """Run a script where a package is not installed."""
    return python("-c", f"import sys; sys.modules[{hidden!r}] = None\n" + script)


@pytest.mark.parametrize(
    ("missing", "arguments", "extra"),
    [
        ("tyro", ["train", "digits", "--help"], "train"),
        ("lightning", ["train", "digits"], "train"),
        ("transformers", ["train", "wikipedia"], "text"),
        ("sentence_transformers", ["train", "wikipedia"], "text"),
    ],
)
def test_a_missing_package_is_one_line_with_the_extra_that_brings_it(
    missing: str, arguments: list[str], extra: str
) -> None:
    script = f"import fmicl.__main__\nsys.argv = {['fmicl', *arguments]!r}\nsys.exit(fmicl.__main__.main())"
    done = without(missing, script)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("fmicl: error: ")
    assert f"{missing}" in done.stderr
    assert how_to_install(extra) in done.stderr


def test_load_encoder_says_which_extra_it_needs() -> None:
    done = without("safetensors", "import fmicl\nfmicl.FMICLLoss('kl')\nfmicl.load_encoder('run')")
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: fmicl.load_encoder ")
    assert "safetensors" in last
    assert how_to_install("train") in last


def words_of(shown: str) -> str:
    return " ".join(shown.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("train images --divergance js", "--divergence"),
        ("sweep images --divergance js", "--divergence"),
        ("train wikipedia --modle x", "--model"),
        ("evaluate RUN --jsno x", "--json"),
        ("embed RUN photos -o x.csv --batchsize 3", "--batch-size"),
    ],
)
def test_a_misspelt_option_is_answered_with_the_near_one_of_this_recipe(
    arguments: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_code:
        cli.main(arguments.split())
    assert exit_code.value.code == 2
    said = words_of(capsys.readouterr().err)
    assert f"Perhaps you meant: {option} " in said
    verb, name = arguments.split()[:2]
    command = f"{verb} {name}" if verb in ("train", "sweep") else verb
    assert f"fmicl {command} --help" in said
    assert said.count("--help") == 1, "of no other command"
    assert "cifar10" not in said


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["digits", "--out", "~/run"], ["digits", "--out", "HOME/run"]),
        (["digits", "--out=~/run", "--data-dir", "~"], ["digits", "--out=HOME/run", "--data-dir", "HOME"]),
        (["images", "--data-dir", "~/a", "~/b", "--case", "x", "data_dir=~/c"],
         ["images", "--data-dir", "HOME/a", "HOME/b", "--case", "x", "data_dir=HOME/c"]),
        (["a~", "b/~/c", "x=y.csv"], ["a~", "b/~/c", "x=y.csv"]),
    ],
)  # fmt: skip
def test_the_home_folder_is_expanded_in_every_word(
    given: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setattr("fmicl.cli.train.run", seen.append)
    assert cli.main(["train", *given]) == 0
    assert seen == [[word.replace("HOME", "/home/somebody") for word in expected]]


def raising(error: BaseException) -> Any:
    def run(_: Any) -> None:
        raise error

    return run


def test_exit_codes(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from fmicl.utils.errors import NonFiniteError, Stopped

    cases = [
        (ValueError("wrong"), 2), (FileNotFoundError("not there"), 2), (NonFiniteError("nan at batch 7"), 1),
        (KeyboardInterrupt(), 130), (Stopped("ended", 15), 143), (Stopped("", 15), 0),
    ]  # fmt: skip
    for error, code in cases:
        monkeypatch.setattr("fmicl.cli.train.run", raising(error))
        assert cli.main(["train", "digits"]) == code, error
        assert str(error) in capsys.readouterr().err
    monkeypatch.setattr("fmicl.cli.train.run", raising(ValueError("wrong")))
    monkeypatch.setenv("FMICL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["train", "digits"])


@pytest.mark.parametrize("module", ["fmicl.cli.main", "fmicl.cli.train", "torch"])
def test_ctrl_c_while_python_imports_is_one_line(module: str) -> None:
    script = f"""
class Interrupt:
    def find_spec(self, name, *_):
        if name == {module!r}:
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupt())
import fmicl.__main__
sys.argv = ["fmicl", "train", "digits"]
sys.exit(fmicl.__main__.main())
"""
    done = python("-c", f"import sys{script}")
    assert (done.returncode, done.stderr) == (130, "fmicl: stopped\n")


def test_dir_lists_public_names_alone() -> None:
    import fmicl.divergences  # noqa: F401 (sets attributes of the package)

    shown = {name for name in dir(package) if not name.startswith("__")}
    assert shown == set(package.__all__)
