"""The SLURM launcher, against a real SLURM with this machine as a node where there is one.

FMICL_RECORDS=results/slurm pytest -m "slow or not slow" tests/sweep/test_slurm.py    writes the record, too
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fmicl.cli import main as cli
from fmicl.runs.folder import Run
from fmicl.sweep import slurm
from fmicl.sweep.slurm import SlurmError, SlurmLauncher, slurm_options
from fmicl.training.checkpoints import load_checkpoint
from records import record
from sweeps import saved_runs, states, sweep_of, wait_until


def ask(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def is_node() -> bool:
    """Whether SLURM is running, and jobs run on this machine, so that they see its files."""
    try:
        return os.uname().nodename.split(".")[0] in ask("sinfo", "--noheader", "--format=%n").split()
    except (OSError, subprocess.CalledProcessError):
        return False


real = pytest.mark.skipif(not is_node(), reason="SLURM is not running with this machine as a node")
SMALL = ["--device", "cpu", "--hidden", "32", "--dim", "16", "--batch-size", "64", "--no-baselines", "--epochs"]
ONE_CPU = {"cpus-per-task": "1"}


class Commands:
    """Instead of SLURM's commands: an answer, or an error, for each."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str | SlurmError) -> None:
        self.answers, self.calls = answers, list[tuple[str, ...]]()
        monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(slurm, "_call", self)
        monkeypatch.setattr(slurm, "QUEUE_INTERVAL", 0.0)

    def __call__(self, *command: str) -> str:
        self.calls.append(command)
        answer = self.answers[command[0]]
        if isinstance(answer, SlurmError):
            raise answer
        return answer


def test_options_of_sbatch() -> None:
    for word in ("gpu", "=3", "time="):
        with pytest.raises(ValueError, match="--slurm takes KEY=VALUE"):
            slurm_options([word])
    with pytest.raises(ValueError, match="cpus-per-task twice"):
        slurm_options(["cpus-per-task=4", "cpus_per_task=8"])


def test_slurm_is_required(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shutil.which", lambda _: None)
    assert cli.main(["sweep", "digits", "--launcher", "slurm"]) == 2
    assert "needs SLURM" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sinfo", "device", "options", "asked"),
    [
        ("main*|(null)", "auto", {}, None),
        ("main*|gpu:h200:8(S:0-1)", "auto", {}, "2"),
        ("main*|(null)\ngpu|gpu:8", "auto", {}, None),  # those of another partition are no help
        ("gpu|gpu:8", "auto", {"partition": "gpu"}, "2"),
        ("main*|gpu:8", "cpu", {}, None),
        ("main*|(null)", "cuda", {}, "2"),
        ("main*|gpu:8", "auto", {"gres": "gpu:a100:2"}, None),
        ("main*|gpu:8", "auto", {"gpus-per-node": "1"}, "1"),
    ],
)
def test_gpus_are_asked_for_where_there_are_any(
    sinfo: str,
    device: str,
    options: dict[str, str],
    asked: str | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    commands = Commands(monkeypatch, sinfo=sinfo, sbatch="7\n")
    launcher = SlurmLauncher(options, devices=2, device=device)
    launcher.start(["true"], Run(tmp_path / "run"), tmp_path / "100%.log", name="kl")
    submitted = commands.calls[-1]
    found = [word.partition("=")[2] for word in submitted if word.startswith("--gpus-per-node=")]
    assert found == ([] if asked is None else [asked])
    assert f"--output={tmp_path}/100%%.log" in submitted
    assert {"--requeue", "--ntasks-per-node=2", "--job-name=fmicl-kl"} <= set(submitted)


def finish(run: Run) -> None:
    """Make a run's folder that of a finished run."""
    run.path.mkdir()
    for path in (run.results, run.report):
        path.write_text("{}")


def test_a_refused_job_waits_while_others_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a limit on a user's jobs; if nothing runs, the refusal ends the sweep."""
    refusal = SlurmError("sbatch failed: Job violates policy")
    commands = Commands(monkeypatch, sinfo="", squeue="7|RUNNING|x", sbatch=refusal)
    with pytest.raises(SlurmError, match="violates policy"):
        sweep_of(tmp_path / "none").train(SlurmLauncher({}))
    monkeypatch.setattr(slurm, "RETRY_INTERVAL", 0.0)
    monkeypatch.setattr("fmicl.sweep.scheduler.DETACHED_POLL_INTERVAL", 0.01)
    sweep = sweep_of(tmp_path / "some", seed=(0, 1))
    submissions: list[str] = []

    def answer(*command: str) -> str:
        if command[0] == "sbatch":
            submissions.append(command[-1])
            if len(submissions) == 1:
                return "7"
            if len(submissions) == 4:
                finish(sweep.runs[0].run)
        return commands(*command)

    monkeypatch.setattr(slurm, "_call", answer)
    with pytest.raises(SlurmError, match="violates policy"):
        sweep.train(SlurmLauncher({}, device="cpu"))
    assert states(tmp_path / "some") == {"seed0": "finished", "seed1": "waiting"}
    assert capsys.readouterr().out.count("seed1 has to wait: sbatch failed: Job violates policy") == 3


def test_states_of_jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    commands = Commands(monkeypatch, sinfo="", sbatch="7")
    run = Run(tmp_path / "run")
    script = tmp_path / "run.sbatch"
    launcher = SlurmLauncher({}, limit=1)
    commands.answers["squeue"] = SlurmError("squeue failed: Unable to contact slurm controller")
    with pytest.raises(SlurmError, match="Unable to contact"):
        launcher.attach(run)  # or else the job might be submitted again
    commands.answers["squeue"] = f"3|CANCELLED|{script}\n4|PENDING|{tmp_path}/other.sbatch\n"
    assert launcher.attach(run) is None
    assert launcher.free()
    job = launcher.start(["true"], run, tmp_path / "log", name="x")
    assert (job.poll(), launcher.free()) == (None, False), "it is not in the list yet"
    for state in ("PENDING", "RUNNING", "COMPLETING", "REQUEUED"):
        commands.answers["squeue"] = f"7|{state}|{script}"
        assert job.poll() is None
    assert job.where == "job 7 (requeued)"
    found = launcher.attach(run)
    assert found is not None
    assert found.job == "7"
    commands.answers["squeue"] = SlurmError("squeue failed: busy")
    assert job.poll() is None
    monkeypatch.setattr(slurm, "LISTING_DELAY", 0.0)
    ends = {"FAILED": (1, ""), "TIMEOUT": (1, "job 7 ended as TIMEOUT"), "COMPLETED": (0, "")}
    for state, (code, error) in ends.items():
        commands.answers["squeue"] = f"7|{state}|{script}"
        job = launcher.start(["true"], run, tmp_path / "log", name="x")
        assert (job.poll(), job.error) == (code, error)
    commands.answers["squeue"] = ""
    assert launcher.start(["true"], run, tmp_path / "log", name="x").poll() == 1, "gone, without results"
    finish(run)
    commands.answers["squeue"] = f"7|PENDING|{script}"
    assert launcher.start(["true"], run, tmp_path / "log", name="x").poll() == 0, "requeued, but the run is finished"


@pytest.mark.parametrize(
    ("does", "code", "requeued", "said"),
    [
        ("exit 0", 0, False, ""),
        ("exit 3", 3, False, ""),
        ("sleep 0.05; touch {checkpoint}; exit 143", 0, True, ""),
        ("exit 143", 143, False, "made no progress"),
        ("sleep 0.05; touch {checkpoint}; rm {folder}/scontrol; exit 143", 143, False, "can't be requeued"),
    ],
)
def test_a_job_requeues_itself_if_it_made_progress(
    does: str, code: int, requeued: bool, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run, commands = Run(tmp_path / "a run"), Commands(monkeypatch, sbatch="7")
    run.checkpoint.parent.mkdir(parents=True)
    run.checkpoint.write_text("")
    os.utime(run.checkpoint, (0, 0))
    for name, text in {"srun": 'shift; exec "$@"', "scontrol": f"echo $@ > '{tmp_path}/requeued'"}.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{text}\n")
        (tmp_path / name).chmod(0o755)
    program = does.format(checkpoint=f"'{run.checkpoint}'", folder=tmp_path)
    SlurmLauncher({}, device="cpu").start(["bash", "-c", program], run, tmp_path / "log", name="x")
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", commands.calls[-1][-1]], capture_output=True, text=True, env=environment)
    assert done.returncode == code, done
    assert (tmp_path / "requeued").exists() == requeued
    assert said in done.stdout
    assert ("fmicl: error: job 7" in done.stdout) == bool(said)


def train(out: Path, *words: str) -> Run:
    """An undisturbed run of `fmicl train digits` on this machine."""
    done = subprocess.run(
        [sys.executable, "-m", "fmicl", "train", "digits", *SMALL, *words, "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return Run(out)


class Command:
    """`fmicl sweep digits --launcher slurm` in a process of its own."""

    def __init__(self, folder: Path, *words: str, slurm: tuple[str, ...] = ()) -> None:
        command = [sys.executable, "-m", "fmicl", "sweep", "digits", *SMALL, *words, "--out", str(folder)]
        environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self.folder, self.started = folder, time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--launcher", "slurm", "--slurm", "cpus_per_task=1", *slurm],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @property
    def run(self) -> Run:
        return Run(next(path for path in self.folder.iterdir() if path.is_dir()))

    @property
    def jobs(self) -> dict[str, str]:
        """Numbers and states of the jobs of this sweep."""
        rows = [line.split("|") for line in ask("squeue", "-h", "-t", "all", "-o", "%i|%T|%o").splitlines()]
        return {job: state for job, state, script in rows if Path(script).parent == self.folder}

    def wait_for_epochs(self, number: int, seconds: float = 120) -> None:
        def trained() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            rows = list(self.folder.glob("*/metrics.csv"))
            return bool(rows) and len(rows[0].read_text().splitlines()) > number

        wait_until(trained, seconds)

    def start_requeued(self, job: str) -> None:
        """Start a requeued job now, for which SLURM waits two minutes."""
        wait_until(lambda: self.jobs[job] == "PENDING", 60)
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)

    def finish(self) -> str:
        """The output, when the sweep has ended well."""
        output = self.process.communicate(timeout=600)[0]
        assert self.process.returncode == 0, output
        assert "sacct" not in output
        return output

    def facts(self, output: str, whole: Run) -> dict[str, Any]:
        """For the record, after a comparison of the run with an undisturbed one, bit by bit."""
        for name in ("encoder.safetensors", "projection.safetensors", "results.json"):
            assert (self.run.path / name).read_bytes() == (whole.path / name).read_bytes(), name
        optimizers = [load_checkpoint(run.checkpoint)["optimizer"]["state"] for run in (self.run, whole)]
        for ours, theirs in zip(*(optimizer.values() for optimizer in optimizers), strict=True):
            assert all(torch.equal(ours[name], theirs[name]) for name in ours if torch.is_tensor(ours[name]))
        log = next(self.folder.glob("*.log")).read_text()
        return {
            "starts of the run": log.count("\n$ ") + log.startswith("$ "),
            "same bits as an undisturbed run": True,
            "seconds": round(time.monotonic() - self.started, 1),
            "output": [line for line in output.splitlines() if line.startswith("[")],
        }


def note(case: str, facts: dict[str, Any]) -> None:
    record("one-node", case, {"slurm": ask("sinfo", "--version").strip(), **facts})


@real
def test_refused_in_one_line_and_trained_without_gpus(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["sweep", "digits", *SMALL, "1", "--launcher", "slurm", "--slurm", "cpus_per_task=1"]
    words.remove("--device")
    words.remove("cpu")
    assert cli.main([*words, "--out", str(tmp_path / "refused"), "--device", "cuda"]) == 2
    refusal = capfd.readouterr().err
    assert refusal.count("\n") == 1
    assert "Invalid generic resource (gres) specification" in refusal
    assert cli.main([*words, "--out", str(tmp_path / "auto")]) == 0
    shown = capfd.readouterr()
    assert states(tmp_path / "auto") == {"seed0": "finished"}
    assert "sacct" not in shown.out + shown.err
    note("--device cuda on a partition without GPUs", {"stderr": refusal.strip()})


@real
def test_a_requeued_job_ends_with_the_same_weights(tmp_path: Path) -> None:
    """By `scontrol requeue`, as preemption does, and by the signal that comes before the time limit."""
    sweep = Command(tmp_path / "sweep", "24", "--checkpoint-minutes", "60")
    sweep.wait_for_epochs(2)
    (job,) = sweep.jobs
    ask("scontrol", "requeue", job)
    sweep.start_requeued(job)
    batches = load_checkpoint(sweep.run.checkpoint)["batches"]
    sweep.wait_for_epochs(2 + batches // 21)
    ask("scancel", "--signal=TERM", job)  # what SLURM does before the time limit
    sweep.start_requeued(job)
    output = sweep.finish()
    facts = sweep.facts(output, train(tmp_path / "whole", "24"))
    assert facts["starts of the run"] == 3
    assert list(sweep.jobs) == [job]
    note("requeued by scontrol, then by itself after SIGTERM", {"first checkpoint": batches, **facts})


@pytest.mark.slow
@real
def test_time_limits_shorter_than_the_run(tmp_path: Path) -> None:
    """Two minutes, of which SLURM leaves 30 to 60 seconds until SIGTERM."""
    sweep = Command(tmp_path / "sweep", "100", slurm=("time=2",))
    while sweep.process.poll() is None:
        for job, state in sweep.jobs.items():
            if state == "PENDING":
                sweep.start_requeued(job)
        time.sleep(1)
    output = sweep.finish()
    facts = sweep.facts(output, train(tmp_path / "whole", "100"))
    assert facts["starts of the run"] > 1
    note("time=2, two minutes", facts)


def sweep_and(act: Callable[[str], object], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A sweep of one fake run, which trains until something is done to its job; returns its entry in sweep.json."""
    monkeypatch.setattr(slurm, "QUEUE_INTERVAL", 0.5)
    sweep = sweep_of(folder, divergence=("vlc",))

    def wait_and_act() -> None:
        wait_until((sweep.runs[0].run.path / "metrics.csv").exists, 60)
        act(str(sweep.runs[0].job))

    thread = threading.Thread(target=wait_and_act)
    thread.start()
    assert sweep.train(SlurmLauncher(ONE_CPU, device="cpu")) == 1
    thread.join()
    (entry,) = saved_runs(folder).values()
    assert entry["state"] == "failed"
    return entry


@real
def test_a_cancelled_job_has_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = sweep_and(lambda job: ask("scancel", job), tmp_path / "sweep", monkeypatch)
    assert entry["error"] == f"job {entry['job']} ended as CANCELLED (scancel)"
    note("scancel", {"error": entry["error"]})


@real
def test_a_job_without_progress_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake run has no checkpoint where a run has it."""
    entry = sweep_and(lambda job: ask("scancel", "--signal=TERM", job), tmp_path / "sweep", monkeypatch)
    assert f"job {entry['job']} made no progress" in entry["error"]
    note("SIGTERM before the first checkpoint", {"error": entry["error"]})


@real
def test_the_jobs_of_a_killed_sweep_are_found(tmp_path: Path) -> None:
    """Even if the sweep was killed before it had written that it had submitted them."""
    folder = tmp_path / "sweep"
    first = Command(folder, "40")
    first.wait_for_epochs(1)
    first.process.send_signal(signal.SIGKILL)
    first.process.communicate()
    (job,) = first.jobs
    saved = json.loads((folder / "sweep.json").read_text())
    assert saved["runs"][0]["job"] == job
    saved["runs"][0] |= {"job": None, "state": "waiting", "where": None}
    (folder / "sweep.json").write_text(json.dumps(saved))
    second = Command(folder, "40")
    output = second.finish()
    assert f"found job {job}" in output
    facts = second.facts(output, train(tmp_path / "whole", "40"))
    assert (facts["starts of the run"], list(second.jobs)) == (1, [job])
    note("the sweep killed by SIGKILL, and the same command again", {**facts, "output": output.splitlines()[:3]})


@real
def test_two_tasks_are_one_process_group(tmp_path: Path) -> None:
    sweep = Command(tmp_path / "sweep", "2", "--devices", "2")
    output = sweep.finish()
    whole = train(tmp_path / "whole", "2", "--devices", "2")
    facts = sweep.facts(output, whole)
    assert facts["starts of the run"] == 1
    log = next(sweep.folder.glob("*.log")).read_text()
    assert log.count("epoch 2/2") == 1, "one process reports"
    alone = train(tmp_path / "alone", "2")
    assert (alone.path / "encoder.safetensors").read_bytes() != (whole.path / "encoder.safetensors").read_bytes()
    note("--devices 2: two tasks of one job", facts)
