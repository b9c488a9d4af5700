"""SLURM launcher: each run of a sweep is a job of a cluster, by sbatch and squeue alone.

SLURM's queue is the truth about a job, and the run's folder about the run: accounting (sacct) is not needed, and jobs
go on without the sweep. A job that is requeued, as by preemption, continues its run from the checkpoint that SIGTERM
made it write. Before its time limit it gets SIGTERM too, and then requeues itself, if its run has a new checkpoint.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fmicl.runs.folder import Run
from fmicl.sweep.launchers import Handle
from fmicl.utils.environment import STARTED_BY_SWEEP

SIGNAL_SECONDS = 60
"""Time before a job's time limit at which it gets SIGTERM; SLURM may send it up to a minute earlier."""
QUEUE_INTERVAL = 5.0
"""Seconds between two calls of squeue, for all jobs together."""
RETRY_INTERVAL = 60.0
"""Seconds until a job that sbatch refused is submitted again."""
LISTING_DELAY = 30.0
"""Seconds after its submission in which a job may be missing in squeue's list."""
ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
"""States of jobs that SLURM doesn't start again; a requeued job is PENDING."""

SCRIPT = """\
#!/bin/bash
echo {header}
export {started_by_sweep}=1
if [ -n "$SLURM_CPUS_PER_TASK" ]; then
    export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$SLURM_CPUS_PER_TASK}}" SRUN_CPUS_PER_TASK="$SLURM_CPUS_PER_TASK"
fi
touch {script}
srun --kill-on-bad-exit=1 {command}
code=$?
# 143: the run was stopped by SIGTERM. Requeueing and scancel end this script, too: here the time limit is near.
if [ $code -eq 143 ]; then
    if [ {checkpoint} -nt {script} ]; then
        scontrol requeue "$SLURM_JOB_ID" && exit
        echo "fmicl: error: job $SLURM_JOB_ID was stopped near its time limit and can't be requeued"
    else
        echo "fmicl: error: job $SLURM_JOB_ID made no progress: its time limit is too short for a new checkpoint" \\
            "(--slurm time=...)"
    fi
fi
exit $code
"""
"""The batch script of a job."""


class SlurmError(ValueError):
    """Refusal by a command of SLURM, in its own words."""


def slurm_options(words: Sequence[str]) -> dict[str, str]:
    """Parse ``KEY=VALUE`` words into options of sbatch.

    Raises:
        ValueError: a word is not ``KEY=VALUE``, or a key is given twice.

    Example:
        >>> slurm_options(["partition=gpu", "time=1-12:00:00", "cpus_per_task=8"])
        {'partition': 'gpu', 'time': '1-12:00:00', 'cpus-per-task': '8'}
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = key.lstrip("-").replace("_", "-")
        if not equals or not key or not value:
            raise ValueError(f"--slurm takes KEY=VALUE, such as partition=gpu, but it is {word!r}")
        if key in found:
            raise ValueError(f"--slurm has {key} twice, the second time in {word!r}")
        found[key] = value
    return found


def has_gpus(partition: str | None = None) -> bool:
    """Whether a node of this partition, or of the default one, has GPUs according to sinfo."""
    listed = _call("sinfo", "--noheader", "--format=%P|%G", *([f"--partition={partition}"] if partition else []))
    rows = [line.split("|", 1) for line in listed.splitlines()]
    return any("gpu" in resources for name, resources in rows if partition or name.endswith("*"))


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        prefix = re.compile(rf"^({command[0]}: )?(error: )?")
        lines = [prefix.sub("", line).strip() for line in done.stderr.splitlines()]
        raise SlurmError(f"{command[0]} failed: {'; '.join(filter(None, lines)) or f'exit code {done.returncode}'}")
    return done.stdout


class SlurmLauncher:
    """Runs as SLURM jobs, which continue without the sweep.

    Args:
        options: of sbatch, see :func:`slurm_options`.
        devices: processes of one run, and GPUs if it takes any.
        device: "cuda" asks for GPUs; "auto" does if the partition has any.
        limit: jobs at once (None: all).

    Raises:
        ValueError: there is no SLURM on this machine, or it doesn't answer.
    """

    detached = True

    def __init__(
        self, options: Mapping[str, str], *, devices: int = 1, device: str = "auto", limit: int | None = None
    ) -> None:
        if missing := [name for name in ("sbatch", "squeue", "sinfo") if not shutil.which(name)]:
            raise ValueError(
                f"--launcher slurm needs SLURM, but there is no {missing[0]} on this machine: submit from a login "
                "node, or omit --launcher to train here"
            )
        self.capacity = limit
        self._options = {"ntasks-per-node": str(devices), "signal": f"TERM@{SIGNAL_SECONDS}"}
        given = any(key.startswith("gpus") or key == "gres" for key in options)
        if not given and (device == "cuda" or (device == "auto" and has_gpus(options.get("partition")))):
            self._options["gpus-per-node"] = str(devices)
        self._options |= options
        self._jobs: list[_Job] = []
        self._queue: dict[str, tuple[str, str]] | None = None
        self._listed = self._refused = float("-inf")

    def free(self) -> bool:
        """Whether fewer jobs than the limit are queued or running, and sbatch has not just refused one."""
        if time.monotonic() - self._refused < RETRY_INTERVAL:
            return False
        return self.capacity is None or sum(job.poll() is None for job in self._jobs) < self.capacity

    def start(self, command: Sequence[str], run: Run, log: Path, *, name: str) -> Handle:
        """Submit a job.

        Raises:
            SlurmError: sbatch refuses it.
        """
        script = _script(run)
        script.write_text(
            SCRIPT.format(
                header=shlex.quote(f"$ {shlex.join(command)}"),
                started_by_sweep=STARTED_BY_SWEEP,
                script=shlex.quote(str(script)),
                command=shlex.join(command),
                checkpoint=shlex.quote(str(run.checkpoint.absolute())),
            )
        )
        output = str(log.absolute()).replace("%", "%%")  # sbatch replaces %j and others
        fixed = ["--parsable", "--requeue", "--open-mode=append", f"--job-name=fmicl-{name}", f"--output={output}"]
        options = [f"--{key}={value}" for key, value in self._options.items()]
        try:
            answer = _call("sbatch", *fixed, *options, str(script))
        except SlurmError:
            self._refused = time.monotonic()
            raise
        return self._watch(answer.strip().split(";")[0], run)  # JOB, or JOB;CLUSTER

    def attach(self, run: Run) -> Handle | None:
        """The job of this run that is queued or running, whichever sweep submitted it."""
        script = str(_script(run))
        for job, (state, path) in self.queue().items():
            if path == script and state not in ENDED:
                return self._watch(job, run)
        return None

    def stop(self, *, kill: bool = False) -> None:
        """Do nothing: jobs continue without the sweep."""

    def queue(self) -> dict[str, tuple[str, str]]:
        """State and script of this user's jobs; those that have ended stay for some minutes."""
        if self._queue is None or time.monotonic() - self._listed > QUEUE_INTERVAL:
            try:
                listed = _call("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%o")
            except SlurmError:
                if self._queue is None:  # without it, a job could be submitted twice
                    raise
            else:  # otherwise the controller is busy or being restarted, and the list before holds
                rows = [line.split("|", 2) for line in listed.splitlines()]
                self._queue = {job: (state, path) for job, state, path in rows}
            self._listed = time.monotonic()
        return self._queue

    def _watch(self, number: str, run: Run) -> _Job:
        job = _Job(self, number, run)
        self._jobs.append(job)
        return job


def _script(run: Run) -> Path:
    """The batch script of a run's job, by which squeue tells whose job it is."""
    return Path(os.path.realpath(f"{run.path}.sbatch"))


class _Job:
    def __init__(self, launcher: SlurmLauncher, number: str, run: Run) -> None:
        self.job: str | None = number
        self.error = ""
        self._launcher, self._run, self._since = launcher, run, time.monotonic()
        self._code: int | None = None
        self._state = "PENDING"

    @property
    def where(self) -> str:
        waiting = "" if self._state == "RUNNING" else f" ({self._state.lower()})"
        return f"job {self.job}{waiting}"

    def poll(self) -> int | None:
        """The exit code; 0 as soon as the run has finished, even if its job was requeued meanwhile."""
        if self._code is None and self._run.finished:
            self._code = 0
        elif self._code is None:
            self._code = self._poll_queue()
        return self._code

    def _poll_queue(self) -> int | None:
        state, _ = self._launcher.queue().get(str(self.job), ("", ""))
        if not state and time.monotonic() - self._since < LISTING_DELAY:
            return None
        self._state = state
        if state and state not in ENDED:
            return None
        if state not in ("", "COMPLETED", "FAILED"):  # of those the log tells more
            self.error = f"job {self.job} ended as {state}" + " (scancel)" * (state == "CANCELLED")
        return 0 if state == "COMPLETED" else 1
