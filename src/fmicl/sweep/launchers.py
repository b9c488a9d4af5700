"""Launchers of a sweep's runs: processes on the devices of this machine, or SLURM jobs through submitit.

Every run is its own process (``python -m fmicl train ... --resume``), so that one that crashes, or that the system
kills for its memory, doesn't affect the others.
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
from typing import Any, Protocol

from fmicl.utils.environment import STARTED_BY_SWEEP
from fmicl.utils.extras import how_to_install
from fmicl.utils.machine import available_cpus

__all__ = [
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

CHECKPOINT_SECONDS = 60.0
"""Time that a job has for its last checkpoint; submitit warns it 90 seconds before the end."""
GENERIC_OPTIONS = ("cpus_per_task", "gpus_per_node", "mem_gb", "nodes", "tasks_per_node", "timeout_min")
"""Parameters that submitit has for every cluster; others get the prefix ``slurm_``."""


class Handle(Protocol):
    """A run that was started."""

    where: str  # the device, or the job
    job: str | None  # number of the job; None for a process of this machine
    log: Path
    log_start: int  # where in the log the output of this start begins
    error: str  # why it ended, if the launcher knows that better than the log

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the run is going on."""

    def stop(self, *, kill: bool = False) -> None:
        """Ask the run to write a checkpoint and exit, or kill it."""


class Launcher(Protocol):
    """Starts runs."""

    detached: bool  # whether runs continue without the sweep
    capacity: int | None  # runs at once; None is any number

    def free(self) -> bool:
        """Whether another run can be started."""

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Start a run."""

    def attach(self, job: str) -> Handle | None:
        """A job that an earlier sweep has started; None if it has ended."""


@dataclass(frozen=True)
class Slot:
    """A device, or several, for one run, and the environment variables that select it."""

    where: str
    environment: Mapping[str, str]


def local_slots(parallel: int = 1, *, device: str = "auto", devices: int = 1) -> list[Slot]:
    """Slots for ``parallel`` runs on each device of this machine.

    Args:
        parallel: runs at once on each device.
        device: auto, cpu, cuda or mps.
        devices: GPUs of one run.

    Returns:
        The slots, in the order in which they are filled: each device once, then again. On the CPU, runs share the
        CPUs evenly (``OMP_NUM_THREADS``, unless it is set already).

    Raises:
        ValueError: there is no such device, or there are too few.

    Example:
        >>> [slot.where for slot in local_slots(2, device="cpu")]
        ['cpu', 'cpu']
    """
    from fmicl.utils.device import pick_device

    kind = pick_device(device).type
    if kind == "cuda":
        gpus = _visible_gpus()
        if len(gpus) < devices:
            raise ValueError(f"a run takes {devices} GPUs (--devices), but this machine has {len(gpus)}")
        groups = [gpus[i : i + devices] for i in range(0, len(gpus) - devices + 1, devices)]
        slots = [Slot("cuda:" + "+".join(group), {"CUDA_VISIBLE_DEVICES": ",".join(group)}) for group in groups]
        return slots * parallel
    environment = {}
    if kind == "cpu" and "OMP_NUM_THREADS" not in os.environ:
        environment = {"OMP_NUM_THREADS": str(max(1, available_cpus() // (parallel * devices)))}
    return [Slot(kind, environment)] * parallel


def _visible_gpus() -> list[str]:
    """The GPUs of this process, by number or by their names in CUDA_VISIBLE_DEVICES."""
    import torch

    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    count = torch.cuda.device_count()
    return names[:count] if names else [str(i) for i in range(count)]


class LocalLauncher:
    """Runs as processes on this machine, one per slot.

    Args:
        slots: see :func:`local_slots`.
        inherited: a file descriptor that each run inherits: a lock on the sweep's folder, which a run thereby holds
            even if the sweep is killed.
    """

    detached = False

    def __init__(self, slots: Sequence[Slot], *, inherited: int | None = None) -> None:
        self.capacity: int | None = len(slots)
        self._slots, self._inherited = list(slots), inherited
        self._processes: list[_Process | None] = [None] * len(slots)

    def free(self) -> bool:
        """Whether a slot is free."""
        return bool(self._free_slots())

    def _free_slots(self) -> list[int]:
        return [i for i, process in enumerate(self._processes) if process is None or process.poll() is not None]

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Start a process in the first free slot."""
        del name  # for schedulers that list their jobs
        index = self._free_slots()[0]
        process = _Process(command, log, self._slots[index], self._inherited)
        self._processes[index] = process
        return process

    def attach(self, job: str) -> Handle | None:
        """None: processes of this machine end with their sweep."""
        del job
        return None


class _Process:
    job: str | None = None
    error = ""

    def __init__(self, command: Sequence[str], log: Path, slot: Slot, inherited: int | None) -> None:
        self.where, self.log = slot.where, log
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
            self.log_start = file.tell()
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", STARTED_BY_SWEEP: "1", **slot.environment},
                start_new_session=True,  # Ctrl-C at the terminal goes to the sweep alone, which then stops its runs
                pass_fds=() if inherited is None else (inherited,),
            )

    def poll(self) -> int | None:
        return self._process.poll()

    def stop(self, *, kill: bool = False) -> None:
        if self.poll() is not None:
            return
        if not kill:
            self._process.terminate()  # not the group: the checkpoint needs the processes that load the data
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


class TrainJob:
    """What a submitit job calls: the command of a run, which is resumed when the job is requeued."""

    def __init__(self, command: Sequence[str]) -> None:
        self.command = list(command)
        self._process: subprocess.Popen[bytes] | None = None

    def __call__(self) -> int:
        """Run the command and return its exit code."""
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.DEVNULL,
            env={**os.environ, STARTED_BY_SWEEP: "1"},
            start_new_session=True,  # the scheduler's warning signal, which would kill the run, goes to this process
        )
        return self._process.wait()

    def checkpoint(self) -> Any:
        """Called by submitit on preemption or near the time limit: stop with a checkpoint, and ask to be requeued."""
        from submitit.helpers import DelayedSubmission

        if self._process is not None:
            # This runs in a signal handler while `wait` above holds the lock of the Popen object: its methods would
            # deadlock.
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(self._process.pid, signal.SIGTERM)
                end = time.monotonic() + CHECKPOINT_SECONDS
                flags = os.WEXITED | os.WNOHANG | os.WNOWAIT
                while os.waitid(os.P_PID, self._process.pid, flags) is None and time.monotonic() < end:
                    time.sleep(0.1)
        return DelayedSubmission(TrainJob(self.command))


def slurm_options(words: Sequence[str]) -> dict[str, Any]:
    """Parse ``KEY=VALUE`` words into parameters of submitit.

    Times may be in sbatch's format (``24:00:00``, ``2-00:00:00``) or in minutes, which submitit takes.

    Raises:
        ValueError: a word is not ``KEY=VALUE``, a key is given twice, or a time or number can't be parsed.

    Example:
        >>> slurm_options(["partition=gpu", "time=1-12:00:00", "cpus_per_task=8"])
        {'slurm_partition': 'gpu', 'slurm_time': 2160, 'cpus_per_task': 8}
    """
    found: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        key = key.lstrip("-").replace("-", "_")
        if not equals or not key or not text:
            raise ValueError(f"--slurm takes KEY=VALUE, such as partition=gpu, but it is {word!r}")
        name = key if key in GENERIC_OPTIONS else f"slurm_{key}"
        if name in found:
            raise ValueError(f"--slurm has {key} twice, the second time in {word!r}")
        try:
            if key == "time":
                found[name] = _minutes(text)
            elif key == "mem_gb":
                found[name] = float(text)
            else:
                found[name] = int(text) if re.fullmatch(r"\d+", text) else text
        except ValueError:
            expected = "minutes, 24:00:00 or 2-00:00:00" if key == "time" else "a number"
            raise ValueError(f"--slurm {key} must be {expected}, but it is {text!r}") from None
    return found


def _minutes(text: str) -> int:
    """Minutes of a time in sbatch's format: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text)
    if not match:
        raise ValueError(text)
    days, *parts = match.groups()
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]  # M or M:S, not H or H:M
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return max(1, int(days or 0) * 1440 + hours * 60 + minutes + (seconds > 0))


def check_submitit(cluster: str = "slurm") -> None:
    """Check that jobs can be submitted.

    Raises:
        ValueError: submitit is not installed, or there is no SLURM.
    """
    try:
        import submitit  # noqa: F401
    except ImportError as error:
        raise ValueError(f"--launcher submitit needs submitit: {how_to_install('slurm')}") from error
    if cluster == "slurm" and not (shutil.which("srun") and shutil.which("sbatch")):
        raise ValueError(
            "--launcher submitit needs SLURM, but there is no srun and sbatch on this machine: submit from a login "
            "node, or omit --launcher to train here"
        )


class SubmititLauncher:
    """Runs as jobs of a cluster through submitit; a job that is preempted or reaches its time limit is requeued.

    Args:
        folder: for submitit's files and the output of jobs; all machines must see it.
        options: parameters of submitit, see :func:`slurm_options`. The default time limit is a day.
        devices: processes, and GPUs, of one run.
        gpu: whether runs take GPUs.
        limit: jobs at once (None: all).
        cluster: submitit's "slurm", or "local" to try jobs on this machine.

    Raises:
        ValueError: submitit is not installed, there is no SLURM, or submitit refuses an option.
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

        self._submitit, self._folder, self._cluster = submitit, folder, cluster
        self.capacity = limit
        self._jobs: list[_Job] = []
        requeue = {"slurm_max_num_timeout": 10_000} if cluster == "slurm" else {}  # a long run needs many turns
        self._executor = submitit.AutoExecutor(folder=folder, cluster=cluster, **requeue)
        parameters: dict[str, Any] = {
            "tasks_per_node": devices,
            **({"gpus_per_node": devices} if gpu else {}),
            **options,
        }
        if not {"timeout_min", "slurm_time"} & set(options):
            parameters["timeout_min"] = 1440  # submitit's default is five minutes
        try:
            self._executor.update_parameters(stderr_to_stdout=True, **parameters)
        except (NameError, ValueError, AssertionError, TypeError) as error:
            raise ValueError(f"submitit refuses the options of --slurm: {str(error).splitlines()[0]}") from error

    def free(self) -> bool:
        """Whether fewer jobs than the limit are queued or running."""
        return self.capacity is None or sum(job.code is None for job in self._jobs) < self.capacity

    def start(self, command: Sequence[str], log: Path, *, name: str) -> Handle:
        """Submit a job; submitit chooses the file of its output."""
        del log
        self._executor.update_parameters(name=f"fmicl-{name}")
        return self._watch(self._executor.submit(TrainJob(command)))

    def attach(self, job: str) -> Handle | None:
        """The job of this number, if it is still queued or running."""
        if self._cluster != "slurm":
            return None
        found: Any = self._submitit.SlurmJob(folder=self._folder, job_id=job)
        return None if found.done(force_check=True) else self._watch(found)

    def _watch(self, job: Any) -> _Job:
        handle = _Job(job)
        self._jobs.append(handle)
        return handle


class _Job:
    log_start = 0

    def __init__(self, job: Any) -> None:
        self._job, self.error = job, ""
        self.code: int | None = None
        self.job: str | None = str(job.job_id)
        self.where = f"job {job.job_id}"
        self.log = Path(job.paths.stdout)

    def poll(self) -> int | None:
        if self.code is None and self._job.done():
            try:
                self.code = max(self._job.results(), key=abs)
            except Exception as error:  # submitit wraps whatever ended the job
                lines = [line.strip() for line in str(error).splitlines() if line.strip(" -")]
                self.error, self.code = " ".join(lines[:2]), 1
        return self.code

    def stop(self, *, kill: bool = False) -> None:
        """Cancel the job if it is to be killed; else it continues without the sweep."""
        if kill and self.poll() is None:
            self._job.cancel()
