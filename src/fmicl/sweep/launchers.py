"""Where the runs of a sweep are trained: on this machine's devices, or as jobs of a cluster through submitit.

Every run is a process of its own (``python -m fmicl train ... --resume``), so that one which crashes, or which the
system kills for its memory, takes no other with it.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

from fmicl import how_to_install
from fmicl.utils.machine import available_cpus

__all__ = [
    "OF_A_SWEEP",
    "Handle",
    "Launcher",
    "LocalLauncher",
    "Slot",
    "SubmititLauncher",
    "TrainJob",
    "check_submitit",
    "local_slots",
    "slurm_options",
]

OF_A_SWEEP = "FMICL_SWEEP"
"""Environment variable of a sweep's runs: all are started by ``--resume``, so that where none was is no news."""


class Handle(Protocol):
    """A run that was started."""

    where: str
    """On which device, or as which job."""
    log: Path
    """Where its output goes."""
    log_start: int
    """Where in this file the output of this start begins."""
    error: str
    """How it ended, in words of whoever ran it; "" where its output says it."""

    def poll(self) -> int | None:
        """The exit code once it has ended, negative for a signal; None before."""

    def stop(self, *, hard: bool = False) -> None:
        """Ask it to write a checkpoint and end; ``hard`` ends it at once."""


class Launcher(Protocol):
    """Starts runs, as many at once as there is room for."""

    detached: bool
    """Whether runs go on without the sweep, which then only watches them."""

    def free(self) -> bool:
        """Whether there is room for one more."""

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Start a run."""

    def attach(self, job: str) -> Handle | None:
        """A run that an earlier sweep started and that goes on, by its job's number; None if it has ended."""


@dataclass(frozen=True)
class Slot:
    """Room for one run: a device (or several), and what tells a process to keep to it."""

    where: str
    environment: Mapping[str, str]


def local_slots(parallel: int = 1, *, device: str = "auto", devices: int = 1) -> list[Slot]:
    """Room for ``parallel`` runs on each device of this machine.

    Args:
        parallel: runs at once on each device.
        device: as in a recipe: auto, cpu, cuda or mps.
        devices: GPUs that one run takes.

    Returns:
        The slots, in the order in which they are to be filled: all devices once, then again. On the CPU, runs share
        the processors evenly (``OMP_NUM_THREADS``, unless it is set already).

    Raises:
        ValueError: there is no such device, or there are fewer than one run takes.

    Example:
        >>> [slot.where for slot in local_slots(2, device="cpu")]
        ['cpu', 'cpu']
    """
    from fmicl.utils.device import pick_device

    kind = pick_device(device).type
    if kind == "cuda":
        gpus = _gpus()
        if len(gpus) < devices:
            raise ValueError(f"a run takes {devices} GPUs (--devices), but this machine shows {len(gpus)}")
        groups = [gpus[i : i + devices] for i in range(0, len(gpus) - devices + 1, devices)]
        slots = [Slot("cuda:" + "+".join(group), {"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]
        return slots * parallel
    shared = {}
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        shared = {"OMP_NUM_THREADS": str(max(1, available_cpus() // (parallel * devices)))}
    return [Slot(kind, shared)] * parallel


def _gpus() -> list[str]:
    """The GPUs of this process, by number or by whatever CUDA_VISIBLE_DEVICES calls them."""
    import torch

    named = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return named[:count] if named else [str(i) for i in range(count)]


class LocalLauncher:
    """Runs as processes on this machine, one in each slot.

    Args:
        slots: the room there is, such as :func:`local_slots` finds.
        keep_open: a file descriptor that each run inherits, such as that of a lock which outlives the sweep.
    """

    detached = False

    def __init__(self, slots: Sequence[Slot], *, keep_open: int | None = None) -> None:
        self.slots, self.keep_open = list(slots), keep_open
        self._taken: list[_Process | None] = [None] * len(self.slots)

    def free(self) -> bool:
        """Whether a slot is free."""
        return any(process is None or process.ended for process in self._taken)

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Start a process in the first free slot."""
        del name  # that is for schedulers that list their jobs
        index = next(i for i, process in enumerate(self._taken) if process is None or process.ended)
        process = _Process(command, log, self.slots[index], self.keep_open)
        self._taken[index] = process
        return process

    def attach(self, job: str) -> Handle | None:
        """None: processes of this machine end with their sweep."""
        del job
        return None


class _Process:
    error = ""

    def __init__(self, command: Sequence[str], log: Path, slot: Slot, keep_open: int | None) -> None:
        self.where, self.log = slot.where, log
        file: IO[bytes]
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            # In a session of its own: Ctrl-C at the terminal reaches the sweep, which then stops its runs in order.
            self.process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", OF_A_SWEEP: "1", **slot.environment},
                start_new_session=True,
                pass_fds=() if keep_open is None else (keep_open,),
            )

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def poll(self) -> int | None:
        return self.process.poll()

    def stop(self, *, hard: bool = False) -> None:
        if self.ended:
            return
        if not hard:
            self.process.terminate()  # this one alone: the processes that load its data must outlive its checkpoint
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


LAST_CHECKPOINT = 60.0
"""Seconds that a job's run has for its last checkpoint; submitit asks 90 seconds before the end."""


class TrainJob:
    """What a job of submitit calls: the command of a run, which is stopped and goes on when the job is requeued."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run the command; its exit code."""
        # In a session of its own, so that the scheduler's warning signal, which would end it, goes to this process.
        self._process = subprocess.Popen(
            self.command, stdin=subprocess.DEVNULL, env={**os.environ, OF_A_SWEEP: "1"}, start_new_session=True
        )
        return self._process.wait()

    def checkpoint(self) -> Any:
        """Called by submitit when the job's time is over, or its machine is wanted: end with a checkpoint; go on."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            # This is called from a signal's handler, while `wait` above holds the Popen object's lock: its own methods
            # would wait for themselves.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process.pid, signal.SIGTERM)
                end = time.monotonic() + LAST_CHECKPOINT
                looked_at = os.WEXITED | os.WNOHANG | os.WNOWAIT
                while os.waitid(os.P_PID, self._process.pid, looked_at) is None and time.monotonic() < end:
                    time.sleep(0.1)
        return DelayedSubmission(TrainJob(self.command))


SHARED = ("cpus_per_task", "gpus_per_node", "mem_gb", "nodes", "tasks_per_node", "timeout_min")
"""Parameters that submitit has for every cluster; others are SLURM's own."""


def slurm_options(words: Sequence[str]) -> dict[str, Any]:
    """``KEY=VALUE`` words as parameters of submitit.

    Times may be as sbatch has them (``24:00:00``, ``2-00:00:00``) or in minutes; submitit wants minutes.

    Raises:
        ValueError: a word is not ``KEY=VALUE``, a key is there twice, or a time or a number is none.

    Example:
        >>> slurm_options(["partition=gpu", "time=1-12:00:00", "cpus_per_task=8"])
        {'slurm_partition': 'gpu', 'slurm_time': 2160, 'cpus_per_task': 8}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if not equals or not key or not text:
            raise ValueError(f"--slurm takes KEY=VALUE, such as partition=gpu; got {word!r}")
        value: Any = _minutes(text) if key == "time" else int(text) if re.fullmatch(r"\d+", text) else text
        if key == "mem_gb":
            value = _number(word, text)
        name = key if key in SHARED else f"slurm_{key}"
        if name in found:
            raise ValueError(f"--slurm has {key} twice, the second time in {word!r}: give it once")
        found[name] = value
    return found


def _number(word: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"--slurm {word}: {text!r} is no number") from None


def _minutes(text: str) -> int:
    """Minutes of a time as sbatch has it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise ValueError(f"--slurm time={text} is no time; minutes, 24:00:00 and 2-00:00:00 are")
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is not None:
        hours, minutes, seconds = [*numbers, 0, 0][:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, [*numbers, 0][:2]
    return max(1, int(days or 0) * 1440 + hours * 60 + minutes + (seconds > 0))


def check_submitit(cluster: str = "slurm") -> None:
    """Whether jobs can be submitted here.

    Raises:
        ValueError: submitit is not installed, or there is no SLURM here.
    """
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--launcher submitit needs submitit: {how_to_install('slurm')}") from error
    if cluster == "slurm" and not (shutil.which("srun") and shutil.which("sbatch")):
        raise ValueError(
            "--launcher submitit finds no SLURM here (no srun and sbatch): call it where jobs are submitted, or leave "
            "--launcher away to train on this machine"
        )


class SubmititLauncher:
    """Runs as jobs of a cluster, by way of submitit; a job that is preempted or out of time is queued again.

    Args:
        folder: for submitit's own files and the jobs' output; all machines must see it.
        options: parameters of submitit, such as :func:`slurm_options` reads. A day is the time limit unless they say
            otherwise, and each run has ``devices`` tasks and GPUs.
        devices: GPUs, and processes, of one run; with ``gpu=False``, processes on CPUs.
        gpu: whether runs take GPUs.
        limit: jobs at once (None: all).
        cluster: which engine of submitit: "slurm", or "local" for a trial on this machine.

    Raises:
        ValueError: submitit is not installed, there is no SLURM here, or submitit refuses an option.
    """

    detached = True

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any],
        *,
        devices: int = 1,
        gpu: bool = True,
        limit: int | None = None,
        cluster: str = "slurm",
    ) -> None:
        check_submitit(cluster)
        import submitit

        self._submitit, self.folder, self.limit, self.cluster = submitit, folder, limit, cluster
        forever = {"slurm_max_num_timeout": 10_000} if cluster == "slurm" else {}  # a run may need many turns
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **forever)
        wanted: dict[str, Any] = {"tasks_per_node": devices, **({"gpus_per_node": devices} if gpu else {}), **options}
        if not {"timeout_min", "slurm_time"} & set(options):
            wanted["timeout_min"] = 1440  # submitit's own would be five minutes
        try:
            self._executor.update_parameters(stderr_to_stdout=True, **wanted)
        except (NameError, ValueError, AssertionError, TypeError) as error:
            raise ValueError(f"submitit refuses the options of --slurm: {str(error).splitlines()[0]}") from error
        self._jobs: list[_Job] = []

    def free(self) -> bool:
        """Whether fewer jobs than the limit are queued or run."""
        return self.limit is None or sum(job.code is None for job in self._jobs) < self.limit

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Submit a job; its output goes where submitit puts it."""
        del log
        self._executor.update_parameters(name=f"fmicl-{name}")
        return self._watch(self._executor.submit(TrainJob(command)))

    def attach(self, job: str) -> Handle | None:
        """The job of that number, if it is still queued or running."""
        if self.cluster != "slurm":
            return None
        found = self._submitit.SlurmJob(folder=self.folder, job_id=job)
        return None if found.done(force_check=True) else self._watch(found)

    def _watch(self, job: Any) -> _Job:
        handle = _Job(job)
        self._jobs.append(handle)
        return handle


class _Job:
    log_start = 0

    def __init__(self, job: Any) -> None:
        self.job, self.error = job, ""
        self.code: int | None = None
        self.where = f"job {job.job_id}"
        self.log = Path(job.paths.stdout)

    def poll(self) -> int | None:
        if self.code is None and self.job.done():
            try:
                self.code = max(self.job.results(), key=abs)
            except Exception as error:  # submitit wraps whatever ended the job
                lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
                self.error, self.code = " ".join(lines[:2]), 1
        return self.code

    def stop(self, *, hard: bool = False) -> None:
        """Jobs go on without the sweep, unless they are to end at once."""
        if hard and self.poll() is None:
            self.job.cancel()
