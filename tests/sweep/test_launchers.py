"""Where the runs of a sweep start: slots on this machine's devices, and jobs of SLURM through submitit."""

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
    OF_A_SWEEP,
    LocalLauncher,
    Slot,
    SubmititLauncher,
    TrainJob,
    local_slots,
    slurm_options,
)
from fmicl.sweep.scheduler import Sweep
from sweeps import DIGITS, FAKE, grid, record_of, states, wait_until


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
    found = grid(divergence=("kl", "js"), seed=(0, 1))
    options = slurm_options(["partition=gpu", "time=8:00:00", "cpus-per-task=4", "account=lab-7", "mem_gb=16"])

    def again() -> int:
        launcher = SubmititLauncher(folder / "jobs", options, devices=2, limit=2)
        return Sweep("digits", DIGITS, found, folder, program=FAKE)(launcher)

    assert again() == 1
    executor = FakeExecutor.made[0]
    assert executor.parameters == {
        "tasks_per_node": 2, "gpus_per_node": 2, "slurm_partition": "gpu", "slurm_time": 480, "cpus_per_task": 4,
        "slurm_account": "lab-7", "mem_gb": 16.0, "stderr_to_stdout": True, "name": "fmicl-divergence=js,seed=1",
    }  # fmt: skip
    assert (executor.cluster, executor.options) == ("slurm", {"slurm_max_num_timeout": 10_000})
    assert len(executor.names) == 4
    saved = record_of(folder)["runs"]
    assert saved["divergence=kl,seed=0"]["job"] == "101"
    assert saved["divergence=kl,seed=0"]["log"] == "jobs/101_0_log.out"
    assert states(folder)["divergence=js,seed=0"] == "failed"
    assert again() == 0
    assert FakeExecutor.made[1].names == ["fmicl-divergence=js,seed=0", "fmicl-divergence=js,seed=1"]


@pytest.mark.usefixtures("interruptible")
def test_a_sweep_that_is_stopped_leaves_its_jobs_and_finds_them_again(
    submitit: types.ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "sweep"
    found = grid(divergence=("vlc",))
    sweep = Sweep("digits", DIGITS, found, folder, program=FAKE)
    threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    assert sweep(SubmititLauncher(folder / "jobs", {})) == 130
    assert "its jobs go on; the same command watches them again, `scancel 101` ends them" in capsys.readouterr().err
    assert states(folder) == {"run": "running"}
    assert FakeExecutor.made[0].parameters["timeout_min"] == 1440

    class Ended(FakeJob):
        def done(self, force_check: bool = False) -> bool:
            if force_check:
                return False
            (folder / "run" / "checkpoint").write_text("")  # the job comes to its end
            self.result = 0 if (folder / "run" / "results.json").exists() else None
            return self.result is not None

    submitit.SlurmJob = Ended  # type: ignore[attr-defined]
    assert Sweep("digits", DIGITS, found, folder, program=FAKE)(SubmititLauncher(folder / "jobs", {})) == 0
    assert len((folder / "run" / "tries").read_text()) == 1
    assert "job 101 goes on" in capsys.readouterr().out
    lost = launchers._Job(FakeJob(folder, "7"))
    assert lost.poll() == 1
    assert lost.error == "Job 7 has not produced any output (state: NODE_FAIL) more"


def test_a_preempted_job_stops_its_run_and_goes_on(submitit: types.ModuleType, tmp_path: Path) -> None:
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


def test_a_run_is_told_that_it_is_of_a_sweep(tmp_path: Path) -> None:
    """By every launcher: its command line then leaves out what is news to a person alone."""
    command = [sys.executable, "-S", "-c", f"import os, sys; sys.exit(os.environ[{OF_A_SWEEP!r}] != '1')"]
    assert TrainJob(command)() == 0
    process = LocalLauncher([Slot("cpu", {})]).start(command, tmp_path / "log", name="run")
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0, process.log.read_text()


def test_a_jobs_run_is_stopped_from_a_signals_handler(tmp_path: Path) -> None:
    """As submitit does it: in the main thread, which waits for the run at that moment."""
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
    assert (out / "tries").read_text() == "xx"
    assert (out / "results.json").exists()


def test_options_that_submitit_refuses(submitit: types.ModuleType, tmp_path: Path) -> None:
    del submitit
    with pytest.raises(ValueError, match="submitit refuses the options of --slurm: Unknown argument 'colour'"):
        SubmititLauncher(tmp_path, slurm_options(["colour=red"]))
    for word in ("gpu", "=3", "time="):
        with pytest.raises(ValueError, match="--slurm takes KEY=VALUE"):
            slurm_options([word])
    with pytest.raises(ValueError, match="is no time"):
        slurm_options(["time=soon"])
    with pytest.raises(ValueError, match=r"--slurm mem_gb=much: 'much' is no number"):
        slurm_options(["mem_gb=much"])
    with pytest.raises(ValueError, match=r"--slurm has cpus_per_task twice, the second time in 'cpus_per_task=8'"):
        slurm_options(["cpus-per-task=4", "cpus_per_task=8"])
    times = {"90": 90, "90:30": 91, "1:30:00": 90, "2-0": 2880, "1-1:1": 1501, "0:10": 1}
    assert {text: slurm_options([f"time={text}"])["slurm_time"] for text in times} == times


def test_without_submitit_or_slurm_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert capsys.readouterr().err.startswith(
        "fmicl: error: --launcher submitit needs submitit: pip install -e '.[slurm]' in the folder"
    )
    monkeypatch.setitem(sys.modules, "submitit", types.ModuleType("submitit"))
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert cli.main(["sweep", "digits", "--launcher", "submitit"]) == 2
    assert "finds no SLURM here" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_real_submitit_on_this_machine(tmp_path: Path) -> None:
    pytest.importorskip("submitit", reason="submitit is not installed (the extra slurm)")
    folder = tmp_path / "sweep"
    sweep = Sweep("digits", DIGITS, grid(divergence=("kl", "js")), folder, program=FAKE)
    launcher = SubmititLauncher(folder / "jobs", {"timeout_min": 2}, gpu=False, cluster="local")
    assert sweep(launcher) == 1
    assert states(folder) == {"divergence=kl": "finished", "divergence=js": "failed"}
    saved = record_of(folder)["runs"]["divergence=js"]
    assert saved["error"] == "torch.OutOfMemoryError: CUDA out of memory."
