"""Scheduling: runs are trained, resumed, tried again and stopped; the sweep's folder and its lock."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.sweep import state
from fmicl.sweep.display import Display
from fmicl.sweep.scheduler import Sweep
from fmicl.sweep.state import Progress, find_folder, last_error, lock_folder, read_progress
from sweeps import FAKE, grid, local, read_record, saved_runs, some_run, starts, states, sweep_of, wait_until


def test_failed_runs_are_reported_and_tried_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "sweep"
    values: dict[str, Any] = {"divergence": ("kl", "js", "pearson", "neyman"), "seed": (0, 1)}
    assert sweep_of(folder, **values).train(local()) == 1
    shown = capsys.readouterr()
    saved = saved_runs(folder)
    for seed in (0, 1):
        assert saved[f"kl-seed{seed}"]["state"] == "finished"
        assert saved[f"js-seed{seed}"]["error"] == "torch.OutOfMemoryError: CUDA out of memory."
        assert saved[f"pearson-seed{seed}"]["error"] == "killed by SIGKILL (out of memory?)"
        assert saved[f"neyman-seed{seed}"]["error"] == "ended without results.json"
    assert "failed: js-seed0: torch.OutOfMemoryError: CUDA out of memory." in shown.out
    assert "6 of 8 runs failed; the same command tries them again" in shown.err
    assert {json.loads(p.read_text())["CUDA_VISIBLE_DEVICES"] for p in folder.rglob("environment.json")} == {"0", "1"}

    assert sweep_of(folder, **values).train(local()) == 1
    shown = capsys.readouterr()
    assert f"sweep of 8 runs in {folder}; 2 already finished" in shown.out
    assert "js-seed0: started" in shown.out
    assert "neyman-seed0: resumed" in shown.out
    assert "2 of 8 runs failed" in shown.err  # neyman never writes results
    assert [starts(folder)[name] for name in ("kl-seed0", "js-seed0", "pearson-seed1")] == [1, 2, 2]
    js = saved_runs(folder)["js-seed0"]
    assert js["error"] is None
    assert "CUDA out of memory" in (folder / js["log"]).read_text(), "the log has the output of all starts"
    assert (
        f"failed: neyman-seed0: ended without results.json\n  log: {folder / saved['neyman-seed0']['log']}" in shown.out
    )
    row = next(row for row in read_record(folder)["summary"] if row["settings"] == {"divergence": "js"})
    assert row == {
        "case": None,
        "settings": {"divergence": "js"},
        "runs": [saved["js-seed0"]["hash"], saved["js-seed1"]["hash"]],
        "n": 2,
        "scores": {
            "k-NN": {"mean": 60.5, "std": pytest.approx(0.5**0.5), "values": [60.0, 61.0]},
            "linear": {"mean": 70.0, "std": 0.0, "values": [70.0, 70.0]},
        },
    }
    assert "60.50 ± 0.71" in shown.out


def test_more_values_with_the_same_folder_grow_the_sweep(tmp_path: Path) -> None:
    """Runs are found by the hash of their settings, in which machine options and unused options have no part."""
    folder = tmp_path / "sweep"

    def train(**values: Any) -> None:
        assert sweep_of(folder, **values).train(local()) == 0

    train(divergence=("kl", "tsallis"))
    first = read_record(folder)
    train(divergence=("kl", "tsallis"), seed=(0, 1), workers=(0,), temperature=(0.1,))
    assert list(states(folder)) == ["kl-seed0", "tsallis-seed0", "kl-seed1", "tsallis-seed1"]
    assert set(starts(folder).values()) == {1}
    assert saved_runs(folder)["tsallis-seed0"]["settings"] == {"divergence": "tsallis"}, "as it was trained"
    train(divergence=("reverse_kl", "jeffrey"))
    train(epochs=(2,))
    assert len(states(folder)) == 7, "runs that are not in the grid stay"
    assert set(starts(folder).values()) == {1}
    assert read_record(folder)["created"] == first["created"]
    with pytest.raises(ValueError, match="sweep of digits, not of cifar10"):
        sweep_of(folder, name="cifar10")


def test_a_run_is_found_whatever_its_folder_is_called(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder has the name that it was created with; each call names runs by what varies in it."""
    folder = tmp_path / "sweep"
    assert sweep_of(folder, epochs=(2,), seed=(0, 1)).train(local()) == 0
    for done in (2, 4):
        again = sweep_of(folder, epochs=(2, 4), seed=(0, 1))
        assert [run.name for run in again.runs] == ["epochs2-seed0", "epochs4-seed0", "epochs2-seed1", "epochs4-seed1"]
        assert again.train(local()) == 0
        assert f"sweep of 4 runs in {folder}; {done} already finished" in capsys.readouterr().out
    assert starts(folder) == dict.fromkeys(["seed0", "seed1", "epochs4-seed0", "epochs4-seed1"], 1)
    assert [row["settings"] for row in read_record(folder)["summary"]] == [{"epochs": 2}, {"epochs": 4}]

    record = read_record(folder)
    old = record["runs"][0]["folder"]
    record["runs"][0]["folder"] = "mine"
    (folder / old).rename(folder / "mine")
    (folder / "sweep.json").write_text(json.dumps(record))
    assert sweep_of(folder, seed=(0,), epochs=(2,)).train(local()) == 0
    assert not (folder / old).exists()


def test_a_run_whose_folder_was_deleted_is_trained_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert sweep_of(tmp_path / "sweep").train(local()) == 0
        assert "seed0: started" in capsys.readouterr().out
        shutil.rmtree(tmp_path / "sweep" / saved_runs(tmp_path / "sweep")["seed0"]["folder"])
    assert saved_runs(tmp_path / "sweep")["seed0"]["attempts"] == 2


def test_cells_with_the_same_label_are_named_by_their_folders(tmp_path: Path) -> None:
    cases = [("A/B", {"divergence": "kl"}), ("A:B", {"divergence": "js"})]
    assert [run.name for run in sweep_of(tmp_path, cases).runs] == [cell.folder for cell in grid(cases)]


def test_a_finished_run_keeps_its_case_and_its_machine_options(tmp_path: Path) -> None:
    cases = [("Cubic", {"divergence": "tsallis"}), ("SimCLR", {"objective": "infonce"})]
    assert sweep_of(tmp_path, cases, workers=(1,)).train(local()) == 0
    assert sweep_of(tmp_path, workers=(2,), divergence=("tsallis",), seed=(0, 1)).train(local()) == 0
    found = {name: (run["case"], run["settings"].get("workers")) for name, run in saved_runs(tmp_path).items()}
    assert found == {"Cubic-seed0": ("Cubic", 1), "SimCLR-seed0": ("SimCLR", 1), "seed1": (None, 2)}
    assert sweep_of(tmp_path, cases, seed=(1,)).train(local()) == 0
    assert saved_runs(tmp_path)["seed1"]["case"] == "Cubic"


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("images", {"data_dir": "a"}, {"data_dir": "b"}),
        ("wikipedia", {"data": "a.txt"}, {"data": "b.txt"}),
        ("wikipedia", {"data": "a.txt"}, {"data": "a.txt", "sts": "sts"}),
        ("digits", {"precision": "32"}, {"precision": "bf16"}),
    ],
)
def test_other_data_or_precision_is_another_run(
    tmp_path: Path, name: str, before: dict[str, str], after: dict[str, str]
) -> None:
    """Results on one data set are never shown as those on another."""

    def cells(values: dict[str, str]) -> Any:
        given: dict[str, Any] = {x: (value if x == "precision" else Path(value),) for x, value in values.items()}
        return grid(name=name, **given)

    first = Sweep(cells(before), find_folder(cells(before), root=tmp_path))
    first.save()
    assert find_folder(cells(before), root=tmp_path) == first.folder
    assert find_folder(cells(after), root=tmp_path) != first.folder
    both = Sweep(cells(after), first.folder)
    assert len(both.record.runs) == 2
    assert len({run.group for run in both.record.runs.values()}) == 2


def test_the_same_grid_finds_its_folder(tmp_path: Path) -> None:
    one, other, root = grid(seed=(0, 1)), grid(seed=(0, 2)), tmp_path / "sweeps"
    first = find_folder(one, root=root)
    assert first.name == "digits-001"
    Sweep(one, first, program=FAKE).train(local())
    assert find_folder(one, root=root) == first
    assert find_folder(other, root=root).name == "digits-002"
    assert find_folder(one, tmp_path / "x") == tmp_path / "x"


def start_in_background(folder: Path, *extra: str, hangup: Any = signal.SIG_DFL) -> subprocess.Popen[str]:
    """A sweep of four runs, of which two wait for a checkpoint."""
    script = textwrap.dedent(f"""
        import sys
        from pathlib import Path
        from fmicl.config import recipe
        from fmicl.sweep.grid import make_cells
        from fmicl.sweep.launchers import LocalLauncher, Slot
        from fmicl.sweep.scheduler import Sweep
        from fmicl.sweep.state import lock_folder
        folder = Path({str(folder)!r})
        cells = make_cells(recipe("digits"), {{"divergence": ("kl", "vlc"), "seed": (0, 1), {", ".join(extra)}}})
        with lock_folder(folder) as lock:
            sweep = Sweep(cells, folder, program={FAKE!r})
            sys.exit(sweep.train(LocalLauncher([Slot("cpu", {{}})] * 2, inherited=lock)))
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
        # background jobs of a shell ignore SIGINT, and so would their children
        preexec_fn=lambda: (signal.signal(signal.SIGINT, signal.SIG_DFL), signal.signal(signal.SIGHUP, hangup)),
    )

    def waiting() -> bool:
        assert process.poll() is None, process.communicate()
        return len(list(folder.glob("*vlc*/metrics.csv"))) == 2

    wait_until(waiting, seconds=60)
    return process


def finish_runs(folder: Path) -> None:
    for path in folder.glob("*vlc*/"):
        (path / "checkpoint").write_text("")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_stops_the_runs_with_a_checkpoint(number: signal.Signals, code: int, tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(folder)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert process.returncode == code, err
    assert "stopping 2 run(s)" in out, out
    assert err == f"fmicl: stopped; the same command continues the runs (--out {folder})\n"
    assert sorted(states(folder).values()) == ["finished", "finished", "stopped", "stopped"]
    assert len(list(folder.glob("*vlc*/checkpoint"))) == 2
    assert sweep_of(folder, divergence=("kl", "vlc"), seed=(0, 1)).train(local()) == 0
    assert set(states(folder).values()) == {"finished"}


def test_nohup_protects_a_sweep_from_a_closed_terminal(tmp_path: Path) -> None:
    process = start_in_background(tmp_path / "sweep", hangup=signal.SIG_IGN)
    process.send_signal(signal.SIGHUP)
    time.sleep(0.5)
    finish_runs(tmp_path / "sweep")
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, (out, err)


def test_an_error_of_the_sweep_itself_stops_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sweep"

    def broken(*_: object) -> None:
        if len(list(folder.glob("*/metrics.csv"))) == 2:
            monkeypatch.setattr(Display, "update", lambda *_: None)
            raise RuntimeError("the sweep itself is broken")

    monkeypatch.setattr(Display, "update", broken)
    with pytest.raises(RuntimeError, match="itself is broken"):
        sweep_of(folder, divergence=("vlc",), seed=(0, 1)).train(local())
    assert len(list(folder.glob("*/checkpoint"))) == 2
    assert set(states(folder).values()) == {"stopped"}


def test_a_second_signal_kills_runs_that_ignore_the_first(tmp_path: Path) -> None:
    process = start_in_background(tmp_path / "sweep", '"hidden": (32,)')
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 130


def test_runs_of_a_killed_sweep_keep_its_lock(tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    process = start_in_background(folder)
    process.kill()
    process.communicate()
    with pytest.raises(ValueError, match="is working in"), lock_folder(folder):
        pass
    finish_runs(folder)
    wait_until(lambda: len(list(folder.glob("*vlc*/report.html"))) == 2)
    time.sleep(0.3)
    with lock_folder(folder):
        assert sweep_of(folder, divergence=("kl", "vlc"), seed=(0, 1)).train(local()) == 0
    assert starts(folder)["vlc-seed0"] == 1


def test_a_program_that_does_not_exist_fails_its_run(tmp_path: Path) -> None:
    assert Sweep(grid(), tmp_path / "s", program=["/nowhere/python"]).train(local()) == 1
    assert "could not be started" in saved_runs(tmp_path / "s")["seed0"]["error"]


def test_the_last_error_is_that_of_the_last_start(tmp_path: Path) -> None:
    log = tmp_path / "x.log"
    log.write_text("$ fmicl train\nValueError: old\n$ fmicl train\nepoch 1\nfmicl: error: the loss is nan\n")
    assert last_error(log, 1) == "the loss is nan"
    log.write_text("$ fmicl train\nValueError: old\n$ fmicl train\nsome words\n")
    assert last_error(log, 1) == "some words"
    assert "exit code 3" in last_error(tmp_path / "none", 3)
    assert last_error(log, -15) == "killed by SIGTERM"


def test_a_run_that_can_not_start_reports_only_why(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The command line would add that there was no run to resume, which is normal in a sweep."""
    (tmp_path / "empty").mkdir()
    where = ["--data-dir", str(tmp_path / "empty"), "--out", str(tmp_path / "s")]
    assert cli.main(["sweep", "images", "--device", "cpu", *where]) == 1
    reason = f"no images in {tmp_path / 'empty'}"
    run = saved_runs(tmp_path / "s")["seed0"]
    assert run["error"].startswith(reason)
    assert not (tmp_path / "s" / run["folder"]).exists()
    shown = capfd.readouterr().out
    assert f"] seed0: failed: {reason}" in shown
    assert f"\nfailed: seed0: {reason}" in shown
    assert f"\nfmicl: error: {reason}" in (tmp_path / "s" / run["log"]).read_text()


def test_two_runs_of_digits(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Two real runs at once; called again, nothing is trained; with another default, the sweep is refused."""
    command = ["sweep", "digits", "--case", "SimCLR", "objective=infonce", "--case", "JS", "divergence=js"]
    command += ["--epochs", "1", "--hidden", "16", "--baselines", "False", "--device", "cpu", "--parallel", "2"]
    command += ["--monitor-every", "1", "--out", str(tmp_path / "sweep")]
    assert cli.main(command) == 0
    runs = saved_runs(tmp_path / "sweep")
    for name, objective in (("SimCLR-seed0", "infonce"), ("JS-seed0", "fmicl")):
        file = tmp_path / "sweep" / runs[name]["folder"] / "settings.json"
        saved = json.loads(file.read_text())
        assert saved["command"][:5] == ["python", "-m", "fmicl", "train", "digits"]
        assert saved["hash"] == runs[name]["hash"]
        settings = saved["settings"]
        assert (settings["objective"], settings["hidden"], settings["baselines"]) == (objective, 16, False)
    summary = read_record(tmp_path / "sweep")["summary"]
    assert [row["case"] for row in summary] == ["SimCLR", "JS"]
    assert all(row["scores"]["k-NN"]["mean"] > 50 for row in summary)
    assert (runs["JS-seed0"]["epoch"], runs["JS-seed0"]["attempts"]) == (1, 1)
    capfd.readouterr()
    assert cli.main(command) == 0
    assert "2 already finished" in capfd.readouterr().out
    assert saved_runs(tmp_path / "sweep")["JS-seed0"]["attempts"] == 1
    saved["settings"]["alpha"] = 10.0  # as if by a version with another recipe
    file.write_text(json.dumps(saved))
    assert cli.main(command) == 2
    assert "started with other settings (alpha was 10.0, is now 20.0)" in capfd.readouterr().err


def test_metrics_are_read_only_if_they_have_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []

    def reading(path: Path) -> Progress:
        read.append(path)
        return read_progress(path)

    monkeypatch.setattr(state, "read_progress", reading)
    run = some_run(str(tmp_path))
    run.update_progress()
    assert not read
    for number, text in enumerate(("epoch,loss\n1,0.5\n", "epoch,loss\n1,0.5\n2,0.25\n"), 1):
        (tmp_path / "metrics.csv").write_text(text)
        run.update_progress()
        run.update_progress()
        assert len(read) == number
        assert run.progress.epoch == number
