"""A sweep trains a grid, outlives runs that die, goes on where it was, and stops when it is told to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.config.recipes import RECIPES
from fmicl.config.text_recipes import TEXT_RECIPES
from fmicl.sweep import scheduler as sweep
from fmicl.sweep.folder import find_folder, last_error, locked, not_told_apart_by
from fmicl.sweep.grid import cells
from fmicl.sweep.scheduler import Sweep
from fmicl.sweep.table import Display, Progress, read_progress
from sweeps import DIGITS, FAKE, grid, local, record_of, states, wait_until


def test_runs_that_die_are_reported_the_others_go_on_and_again_is_all_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    found = grid(divergence=("kl", "js", "pearson", "neyman"), seed=(0, 1))
    assert Sweep("digits", DIGITS, found, folder, program=FAKE)(local()) == 1
    shown = capsys.readouterr()
    saved = record_of(folder)["runs"]
    for seed in (0, 1):
        assert saved[f"divergence=kl,seed={seed}"]["state"] == "finished"
        assert saved[f"divergence=js,seed={seed}"]["error"] == "torch.OutOfMemoryError: CUDA out of memory."
        assert saved[f"divergence=pearson,seed={seed}"]["error"] == "killed by SIGKILL (out of memory?)"
        assert saved[f"divergence=neyman,seed={seed}"]["error"] == "ended without results.json"
    assert "failed: divergence=js,seed=0: torch.OutOfMemoryError: CUDA out of memory." in shown.out
    assert "6 of 8 runs failed; the same command tries them again" in shown.err
    assert {json.loads(p.read_text())["CUDA_VISIBLE_DEVICES"] for p in folder.rglob("environment.json")} == {"0", "1"}

    assert Sweep("digits", DIGITS, found, folder, program=FAKE)(local()) == 1
    assert "sweep of 8 runs" in (shown := capsys.readouterr()).out
    assert "2 finished before" in shown.out
    assert "divergence=js,seed=0: started" in shown.out
    assert "2 of 8 runs failed" in shown.err  # neyman never leaves results
    tries = {path.parent.name: len(path.read_text()) for path in folder.rglob("tries")}
    assert tries["divergence=kl,seed=0"] == 1
    assert tries["divergence=js,seed=0"] == tries["divergence=pearson,seed=1"] == 2
    assert "CUDA out of memory" in (folder / "divergence=js,seed=0.log").read_text()  # the log keeps all starts
    saved = record_of(folder)
    assert saved["runs"]["divergence=js,seed=0"]["error"] is None
    assert [row for row in saved["summary"] if row["group"] == "divergence=js"] == [
        {
            "group": "divergence=js",
            "runs": 2,
            "k-NN": {"mean": 60.5, "std": pytest.approx(0.5**0.5), "values": [60.0, 61.0]},
            "linear": {"mean": 70.0, "std": 0.0, "values": [70.0, 70.0]},
        }
    ]
    assert "60.50 ± 0.71" in shown.out


def test_a_sweep_may_grow_but_not_change(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"

    def sweep(**values: tuple[Any, ...]) -> int:
        return Sweep("digits", DIGITS, grid(**values), folder, program=FAKE, machine=frozenset({"workers"}))(local())

    assert sweep(divergence=("kl", "tsallis")) == 0
    assert sweep(divergence=("kl", "tsallis"), seed=(0, 1), workers=(0,)) == 0
    assert set(states(folder)) == {
        "divergence=kl", "divergence=tsallis", "divergence=kl,seed=1", "divergence=tsallis,seed=1"
    }  # fmt: skip
    assert len((folder / "divergence=kl" / "tries").read_text()) == 1  # seed 0 is the recipe's own: it was there
    assert sweep(divergence=("reverse_kl", "jeffrey")) == 0
    assert len(states(folder)) == 6  # what is not in the grid stays on record
    with pytest.raises(ValueError, match=r"a run divergence=kl with other settings \(epochs was the recipe's, is 3"):
        sweep(divergence=("kl", "js"), epochs=(3,))
    with pytest.raises(ValueError, match="is a sweep of digits, not of cifar10"):
        Sweep("cifar10", RECIPES["cifar10"].recipe, cells(RECIPES["cifar10"].recipe, {}), folder)


def test_runs_of_several_calls_are_averaged_only_where_nothing_but_the_seed_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Settings with one value are in no run's name, and still make other runs."""
    folder = tmp_path / "sweep"

    def groups(**values: tuple[Any, ...]) -> dict[str, list[float]]:
        sweep = Sweep("digits", DIGITS, grid(**values), folder, program=FAKE, machine=frozenset({"workers", "device"}))
        assert sweep(local()) == 0
        return {row["group"]: row["k-NN"]["values"] for row in record_of(folder)["summary"]}

    assert groups(epochs=(1,), alpha=(5.0,), seed=(0, 1)) == {"run": [60.0, 61.0]}
    both = groups(epochs=(3,), alpha=(40.0,), seed=(2, 3))
    assert both == {"alpha=5,epochs=1": [60.0, 61.0], "alpha=40,epochs=3": [62.0, 63.0]}
    assert "alpha=40,epochs=3" in capsys.readouterr().out
    more = groups(epochs=(3,), alpha=(40.0,), seed=(4, 5), workers=(1,))  # which changes no result
    assert more == {**both, "alpha=40,epochs=3": [62.0, 63.0, 64.0, 65.0]}
    named = groups(divergence=("kl", "tsallis"), epochs=(3,), alpha=(40.0,), seed=(6,))
    assert named["divergence=kl,alpha=40,epochs=3"] == [62.0, 63.0, 64.0, 65.0, 66.0]  # the recipe's divergence is KL
    assert named["divergence=tsallis,alpha=40,epochs=3"] == [66.0]
    assert named["divergence=kl,alpha=5,epochs=1"] == [60.0, 61.0]
    assert len(named) == 3


def test_what_the_runs_differ_in_tells_them_apart_whatever_it_is(tmp_path: Path) -> None:
    """Also a setting of the machine's, which otherwise may change when a sweep goes on."""
    found = grid(precision=("32", "bf16"))
    machine = not_told_apart_by(DIGITS, found)
    for _ in range(2):
        sweep = Sweep("digits", DIGITS, found, tmp_path / "sweep", program=FAKE, machine=machine)
        assert [run.name for run in sweep.runs] == ["precision=32", "precision=bf16"]
        assert sweep(local()) == 0
    assert machine >= {"workers", "device"}


@pytest.mark.parametrize(
    ("recipe", "before", "after"),
    [
        ("images", {"data_dir": ("a",)}, {"data_dir": ("b",)}),
        ("wikipedia", {"data": ("a.txt",)}, {"data": ("b.txt",)}),
        ("wikipedia", {"data": ("a.txt",)}, {"data": ("a.txt",), "sts": ("sts",)}),
    ],
)
def test_other_data_is_another_sweep(
    tmp_path: Path, recipe: str, before: dict[str, tuple[str]], after: dict[str, tuple[str]]
) -> None:
    """The results of one data set are never shown as those of another."""
    default: Any = {**RECIPES, **TEXT_RECIPES}[recipe].recipe

    def sweep(values: dict[str, tuple[str]], out: Path | None = None) -> Sweep:
        found = cells(default, {name: tuple(map(Path, paths)) for name, paths in values.items()})
        machine = not_told_apart_by(default, found)
        return Sweep(recipe, default, found, find_folder(recipe, found, out, machine, tmp_path), machine=machine)

    first = sweep(before)
    first.save()
    assert sweep(before).folder == first.folder
    assert sweep(after).folder != first.folder
    with pytest.raises(ValueError, match="with other settings"):
        sweep(after, first.folder)


def test_the_same_grid_finds_its_folder(tmp_path: Path) -> None:
    one, other = grid(seed=(0, 1)), grid(seed=(0, 2))
    first = find_folder("digits", one, None, root=tmp_path / "sweeps")
    assert first.name == "digits-001"
    Sweep("digits", DIGITS, one, first, program=FAKE)(local())
    assert find_folder("digits", one, None, root=tmp_path / "sweeps") == first
    assert find_folder("digits", other, None, root=tmp_path / "sweeps").name == "digits-002"
    assert find_folder("digits", one, tmp_path / "x") == tmp_path / "x"


def start_in_background(folder: Path, *extra: str, hangup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from fmicl.sweep.grid import cells
        from fmicl.sweep.launchers import LocalLauncher, Slot
        from fmicl.config.recipes import RECIPES
        from fmicl.sweep.scheduler import Sweep
        from fmicl.sweep.folder import locked
        recipe, folder = RECIPES["digits"].recipe, Path({str(folder)!r})
        found = cells(recipe, {{"divergence": ("kl", "vlc"), "seed": (0, 1), {", ".join(extra)}}})
        with locked(folder) as lock:
            sweep = Sweep("digits", recipe, found, folder, program={FAKE!r})
            sys.exit(sweep(LocalLauncher([Slot("cpu", {{}})] * 2, keep_open=lock)))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        # a shell's background jobs ignore SIGINT, and so would their children
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), signal.signal(signal.SIGHUP, hangup)),
    )

    def at_work() -> bool:
        assert process.poll() is None, process.communicate()
        return len(list(folder.glob("*vlc*/metrics.csv"))) == 2

    wait_until(at_work, seconds=60)
    return process


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_runs_with_a_checkpoint(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopping 2 runs" in out, out
    assert err == f"fmicl: stopped; the same command goes on where the runs are (--out {folder})\n"
    assert sorted(states(folder).values()) == ["finished", "finished", "stopped", "stopped"]
    assert len(list(folder.glob("*vlc*/checkpoint"))) == 2
    found = grid(divergence=("kl", "vlc"), seed=(0, 1))
    assert Sweep("digits", DIGITS, found, folder, program=FAKE)(local()) == 0
    assert set(states(folder).values()) == {"finished"}


def test_a_closed_terminal_is_nothing_to_a_sweep_by_nohup(tmp_path: Path) -> None:
    process = start_in_background(tmp_path / "sweep", hangup=signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    for path in (tmp_path / "sweep").glob("*vlc*/"):
        (path / "checkpoint").write_text("")  # they come to their end
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)


def test_a_sweep_that_breaks_ends_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"

    def broken(*_: object) -> None:
        if len(list(folder.glob("*/metrics.csv"))) == 2:
            monkeypatch.setattr(Display, "update", lambda *_: None)
            raise RuntimeError("the sweep itself is broken")

    monkeypatch.setattr(Display, "update", broken)
    with pytest.raises(RuntimeError, match="itself is broken"):
        Sweep("digits", DIGITS, grid(divergence=("vlc",), seed=(0, 1)), folder, program=FAKE)(local())
    assert len(list(folder.glob("*/checkpoint"))) == 2
    assert set(states(folder).values()) == {"stopped"}


def test_a_second_signal_ends_runs_that_do_not_listen(tmp_path: Path) -> None:
    process = start_in_background(tmp_path / "sweep", '"hidden": (32,)')
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_runs_that_outlive_a_killed_sweep_keep_others_out(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(folder)
    process.kill()
    process.communicate()
    with pytest.raises(ValueError, match="a run that outlived one, is at work"), locked(folder):
        pass
    for path in folder.glob("*vlc*/"):
        (path / "checkpoint").write_text("")  # they come to their end
    wait_until(lambda: len(list(folder.glob("*vlc*/report.html"))) == 2)
    time.sleep(0.3)
    with locked(folder):
        assert Sweep("digits", DIGITS, grid(divergence=("kl", "vlc"), seed=(0, 1)), folder, program=FAKE)(local()) == 0


def test_a_program_that_is_not_there_fails_its_run(tmp_path: Path) -> None:
    assert Sweep("digits", DIGITS, grid(), tmp_path / "s", program=["/nowhere/python"])(local()) == 1
    assert "could not be started" in record_of(tmp_path / "s")["runs"]["run"]["error"]


def test_the_last_error_is_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("ValueError: old\n")
    start = log.stat().st_size
    with log.open("a") as file:
        file.write("epoch 1\nfmicl: error: the loss is nan\n")
    assert last_error(log, start, 1) == "the loss is nan"
    log.write_text("ValueError: old\nsome words\n")
    assert last_error(log, start, 1) == "some words"
    assert last_error(tmp_path / "none", 0, 3) == "exit code 3, without a word"
    assert last_error(log, 0, -15) == "killed by SIGTERM"


def test_a_run_that_can_not_begin_says_only_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command line would add that there was no run to resume, which is no news of a sweep's."""
    (tmp_path / "empty").mkdir()
    where = ["--data-dir", str(tmp_path / "empty"), "--out", str(tmp_path / "s")]
    assert cli.main(["sweep", "images", "--device", "cpu", *where]) == 1
    why = f"no images in {tmp_path / 'empty'}: no file ends in"
    assert record_of(tmp_path / "s")["runs"]["run"]["error"].startswith(why)
    assert not (tmp_path / "s" / "run").exists()
    shown = capfd.readouterr().out
    assert f"] run: failed: {why}" in shown
    assert f"\nfailed: run: {why}" in shown
    assert f"\nfmicl: error: {why}" in (tmp_path / "s" / "run.log").read_text()


def test_two_runs_of_digits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The whole of it: real runs at once, and once more without training any."""
    command = ["sweep", "digits", "--case", "SimCLR", "objective=infonce", "--case", "JS", "divergence=js"]
    command += ["--epochs", "1", "--hidden", "16", "--baselines", "False", "--device", "cpu", "--parallel", "2"]
    command += ["--monitor-every", "1", "--out", str(tmp_path / "sweep")]
    assert cli.main(command) == 0
    for name, objective in (("SimCLR", "infonce"), ("JS", "fmicl")):
        told = json.loads((tmp_path / "sweep" / name / "settings.json").read_text())
        assert told["command"][:5] == ["python", "-m", "fmicl", "train", "digits"]
        settings = told["settings"]
        assert (settings["objective"], settings["hidden"], settings["baselines"]) == (objective, 16, False)
    saved = record_of(tmp_path / "sweep")
    assert [row["group"] for row in saved["summary"]] == ["SimCLR", "JS"]
    assert all(row["k-NN"]["mean"] > 50 for row in saved["summary"])
    assert saved["runs"]["JS"]["epoch"] == 1
    assert saved["runs"]["JS"]["attempts"] == 1
    capfd.readouterr()
    assert cli.main(command) == 0
    assert "2 finished before" in capfd.readouterr().out
    assert record_of(tmp_path / "sweep")["runs"]["JS"]["attempts"] == 1
    told["settings"]["alpha"] = 10.0  # as if the recipe had been another then
    (tmp_path / "sweep" / "JS" / "settings.json").write_text(json.dumps(told))
    assert cli.main(command) == 2
    said = capfd.readouterr().err
    assert "was started with other settings (alpha was 10.0, is now 20.0): take another --out" in said


def test_a_runs_metrics_are_read_when_they_are_others_than_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    usual = read_progress

    def reading(path: Path) -> Progress:
        read.append(path)
        return usual(path)

    monkeypatch.setattr(sweep, "read_progress", reading)
    run = sweep.SweepRun(grid(divergence=("kl",))[0], tmp_path, tmp_path / "log", [])
    assert not run.look()
    assert not read
    for number, text in enumerate(("epoch,loss\n1,0.5\n", "epoch,loss\n1,0.5\n2,0.25\n"), 1):
        (tmp_path / "metrics.csv").write_text(text)
        assert [run.look(), run.look(), run.look()] == [True, False, False]
        assert len(read) == number
        assert run.progress.epoch == number
