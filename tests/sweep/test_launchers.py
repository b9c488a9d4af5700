"""Launchers: slots on this machine's devices, and SLURM jobs through submitit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import types
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.sweep import launchers
from fmicl.sweep.launchers import (
    LocalLauncher,
    Slot,
    SubmititLauncher,
    TrainJob,
    local_slots,
    slurm_options,
)
from fmicl.utils.environment import STARTED_BY_SWEEP
from sweeps import FAKE, saved_runs, starts, states, sweep_of, wait_until


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launchers, "available_cpus", lambda: 8)
    assert local_slots(3, device="cpu") == [Slot("cpu", {"OMP_NUM_THREADS": "2"})] * 3
    assert local_slots(20, device="cpu")[0].environment == {"OMP_NUM_THREADS": "1"}
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert local_slots(3, device="cpu")[0].environment == {}
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 3)
    assert [slot.where for slot in local_slots(2)] == ["cuda:0", "cuda:1", "cuda:2"] * 2
    assert [dict(slot.environment) for slot in local_slots(1, devices=2)] == [{"CUDA_VISIBLE_DEVICES": "0,1"}]
    with pytest.raises(ValueError, match="a run takes 4 GPUs"):
        local_slots(1, devices=4)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,GPU-a,5")
    assert [slot.environment["CUDA_VISIBLE_DEVICES"] for slot in local_slots()] == ["7", "GPU-a", "5"]


class FakeJob:
    def __init__(self, folder: Path, job_id: str, tasks: object = (0,)) -> None:
        del tasks
        self.job_id, self.paths = job_id, types.SimpleNamespace(stdout=folder / f"{job_id}_0_log.out")
        self.result: Any = None
        self.cancelled = False

    def work(self, function: TrainJob) -> None:
        self.result = function()

    def done(self, force_check: bool = False) -> bool:
        del force_check
        return self.result is not None or int(self.job_id) < 100  # a cluster forgets old jobs

    def results(self) -> list[int]:
        if self.result is None:
            raise RuntimeError("Job 7 has not produced any output (state: NODE_FAIL)\n------\nmore")
        return [self.result]

    def cancel(self) -> None:
        self.cancelled = True


class FakeExecutor:
    made: list[FakeExecutor] = []  # noqa: RUF012

    def __init__(self, folder: Path, cluster: str, **options: Any) -> None:
        self.folder, self.cluster, self.options = folder, cluster, options
        self.parameters: dict[str, Any] = {}
        self.names: list[str] = []
        FakeExecutor.made.append(self)

    def update_parameters(self, **parameters: Any) -> None:
        if "slurm_colour" in parameters:
            raise NameError("Unknown argument 'colour' for executor 'slurm' in parameter 'slurm_colour'.\nmore")
        self.parameters.update(parameters)

    def submit(self, function: TrainJob) -> FakeJob:
        self.names.append(self.parameters["name"])
        job = FakeJob(self.folder, str(100 + len(self.names)))
        threading.Thread(target=job.work, args=(function,)).start()
        return job


@pytest.fixture
def submitit(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """As much of submitit as is used here."""
    module, helpers = types.ModuleType("submitit"), types.ModuleType("submitit.helpers")
    FakeExecutor.made.clear()
    for name, value in {"AutoExecutor": FakeExecutor, "SlurmJob": FakeJob, "helpers": helpers}.items():
        setattr(module, name, value)
    helpers.DelayedSubmission = lambda function: ("again", function)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "submitit", module)
    monkeypatch.setitem(sys.modules, "submitit.helpers", helpers)
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    return module


def test_a_job_for_each_run(submitit: types.ModuleType, tmp_path: Path) -> None:
    del submitit
    folder = tmp_path / "sweep"
    options = slurm_options(["partition=gpu", "time=8:00:00", "cpus-per-task=4", "account=lab-7", "mem_gb=16"])

    def again() -> int:
        launcher = SubmititLauncher(folder / "jobs", options, devices=2, limit=2)
        return sweep_of(folder, divergence=("kl", "js"), seed=(0, 1)).train(launcher)

    assert again() == 1
    executor = FakeExecutor.made[0]
    assert executor.parameters == {
        "tasks_per_node": 2, "gpus_per_node": 2, "slurm_partition": "gpu", "slurm_time": 480, "cpus_per_task": 4,
        "slurm_account": "lab-7", "mem_gb": 16.0, "stderr_to_stdout": True, "name": "fmicl-js-seed1",
    }  # fmt: skip
    assert (executor.cluster, executor.options) == ("slurm", {"slurm_max_num_timeout": 10_000})
    assert len(executor.names) == 4
    saved = saved_runs(folder)
    assert (saved["kl-seed0"]["job"], saved["kl-seed0"]["log"]) == ("101", "jobs/101_0_log.out")
    assert states(folder)["js-seed0"] == "failed"
    assert again() == 0
    assert FakeExecutor.made[1].names == ["fmicl-js-seed0", "fmicl-js-seed1"]


@pytest.mark.usefixtures("interruptible")
def test_jobs_continue_without_the_sweep_and_are_found_again(
    submitit: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    sweep = sweep_of(folder, divergence=("vlc",))
    run = sweep.runs[0].run
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert sweep.train(SubmititLauncher(folder / "jobs", {})) == 130
    assert "`scancel 101` cancels them" in capsys.readouterr().err
    assert states(folder) == {"seed0": "running"}
    assert FakeExecutor.made[0].parameters["timeout_min"] == 1440

    class Ended(FakeJob):
        def done(self, force_check: bool = False) -> bool:
            if force_check:
                return False
            (run.path / "checkpoint").write_text("")  # lets the run finish
            self.result = 0 if run.results.exists() else None
            return self.result is not None

    submitit.SlurmJob = Ended  # type: ignore[attr-defined]
    assert sweep_of(folder, divergence=("vlc",)).train(SubmititLauncher(folder / "jobs", {})) == 0
    assert starts(folder) == {"seed0": 1}
    assert "job 101 is still running" in capsys.readouterr().out
    lost = launchers._Job(FakeJob(folder, "7"))
    assert lost.poll() == 1
    assert lost.error == "Job 7 has not produced any output (state: NODE_FAIL) more"


def test_a_preempted_job_stops_its_run_and_is_requeued(submitit: types.ModuleType, tmp_path: Path) -> None:
    del submitit
    out = tmp_path / "run"
    job = TrainJob([*FAKE, "train", "digits", "--divergence", "vlc", "--out", str(out), "--resume"])
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(job()))
    thread.start()
    wait_until((out / "metrics.csv").exists)
    word, once_more = job.checkpoint()
    thread.join()
    assert (word, codes, (out / "checkpoint").exists()) == ("again", [143], True)
    assert once_more() == 0
    assert (out / "results.json").exists()


def test_every_launcher_marks_its_runs_as_started_by_a_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", f"import os, sys; sys.exit(os.environ[{STARTED_BY_SWEEP!r}] != '1')"]
    assert TrainJob(command)() == 0
    process = LocalLauncher([Slot("cpu", {})]).start(command, tmp_path / "log", name="run")
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0, process.log.read_text()


def test_a_job_stops_its_run_from_a_signal_handler(tmp_path: Path) -> None:
    """As submitit calls it: in the main thread, which is waiting for the run."""
    out = tmp_path / "run"
    script = textwrap.dedent(f"""
        import signal, sys, types
        helpers = types.ModuleType("submitit.helpers")
        helpers.DelayedSubmission = lambda job: job
        sys.modules |= {{"submitit": types.ModuleType("submitit"), "submitit.helpers": helpers}}
        from fmicl.sweep.launchers import TrainJob
        job = TrainJob({[*FAKE, "train", "digits", "--divergence", "vlc", "--out", str(out), "--resume"]!r})
        def preempted(*_):
            sys.exit(job.checkpoint()())
        signal.signal(signal.SIGUSR2, preempted)
        job()
    """)
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.DEVNULL)
    wait_until((out / "metrics.csv").exists)
    process.send_signal(signal.SIGUSR2)
    assert process.wait(timeout=20) == 0
    assert (out / "starts").read_text() == "xx"
    assert (out / "results.json").exists()


def test_options_that_submitit_refuses(submitit: types.ModuleType, tmp_path: Path) -> None:
    del submitit
    with pytest.raises(ValueError, match="Unknown argument 'colour'"):
        SubmititLauncher(tmp_path, slurm_options(["colour=red"]))
    for word in ("gpu", "=3", "time="):
        with pytest.raises(ValueError, match="--slurm takes KEY=VALUE"):
            slurm_options([word])
    for words, fact in (
        (["time=soon"], "time must be minutes, .* but it is 'soon'"),
        (["mem_gb=much"], "mem_gb must be a number, but it is 'much'"),
        (["cpus-per-task=4", "cpus_per_task=8"], "cpus_per_task twice"),
    ):
        with pytest.raises(ValueError, match=fact):
            slurm_options(words)
    times = {"90": 90, "90:30": 91, "1:30:00": 90, "2-0": 2880, "1-1:1": 1501, "0:10": 1}
    assert {text: slurm_options([f"time={text}"])["slurm_time"] for text in times} == times


def test_submitit_and_slurm_are_required(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert "pip install -e '.[slurm]'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert "needs SLURM" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_real_submitit_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (the extra slurm)")
    folder = tmp_path / "sweep"
    launcher = SubmititLauncher(folder / "jobs", {"timeout_min": 2}, gpu=False, cluster="local")
    assert sweep_of(folder, divergence=("kl", "js")).train(launcher) == 1
    assert states(folder) == {"kl-seed0": "finished", "js-seed0": "failed"}
    assert saved_runs(folder)["js-seed0"]["error"] == "torch.OutOfMemoryError: CUDA out of memory."
