"""Launchers of a sweep's runs: the interface, and processes on the devices of this machine.

Every run is its own process (``python -m fmicl train ... --resume``), so that one that crashes, or that the system
kills for its memory, doesn't affect the others.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from fmicl.runs.folder import Run
from fmicl.utils.environment import STARTED_BY_SWEEP
from fmicl.utils.machine import available_cpus


class Handle(Protocol):
    """A run that was started."""

    job: str | None  # number of the job; None for a process of this machine
    error: str  # why it ended, if the launcher knows that better than the log

    @property
    def where(self) -> str:
        """The device, or the job."""

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the run is going on."""


class Launcher(Protocol):
    """Starts runs."""

    detached: bool  # whether runs continue without the sweep
    capacity: int | None  # runs at once; None is any number

    def free(self) -> bool:
        """Whether another run can be started."""

    def start(self, command: Sequence[str], run: Run, log: Path, *, name: str) -> Handle:
        """Start a run, whose output is added to the log after a line with the command."""

    def attach(self, run: Run) -> Handle | None:
        """The process or job that an earlier sweep has started for this run, if it is still going on."""

    def stop(self, *, kill: bool = False) -> None:
        """Ask runs that would not continue without the sweep to write a checkpoint and exit, or kill them."""


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

    def start(self, command: Sequence[str], run: Run, log: Path, *, name: str) -> Handle:
        """Start a process in the first free slot."""
        del run, name  # for schedulers, whose jobs have names
        index = self._free_slots()[0]
        process = _Process(command, log, self._slots[index], self._inherited)
        self._processes[index] = process
        return process

    def attach(self, run: Run) -> Handle | None:
        """None: processes of this machine end with their sweep."""
        del run
        return None

    def stop(self, *, kill: bool = False) -> None:
        """Ask all processes to write a checkpoint and exit, or kill them."""
        for process in self._processes:
            if process is not None:
                process.stop(kill=kill)


class _Process:
    job: str | None = None
    error = ""

    def __init__(self, command: Sequence[str], log: Path, slot: Slot, inherited: int | None) -> None:
        self.where = slot.where
        with log.open("ab") as file:
            file.write(f"$ {shlex.join(command)}\n".encode())
            file.flush()
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

    def stop(self, *, kill: bool) -> None:
        if self.poll() is not None:
            return
        if not kill:
            self._process.terminate()  # not the group: the checkpoint needs the processes that load the data
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
