"""Sweeps of a program that takes no time, and their records."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from fmicl.config import recipe
from fmicl.runs.folder import Run
from fmicl.sweep.grid import Cell, make_cells
from fmicl.sweep.launchers import LocalLauncher, Slot
from fmicl.sweep.scheduler import Sweep
from fmicl.sweep.state import SweepRun

FAKE = [sys.executable, "-S", str(Path(__file__).with_name("fake_run.py"))]
Cases = Sequence[tuple[str, dict[str, Any]]]


def grid(cases: Cases = (), name: str = "digits", **values: Any) -> list[Cell]:
    return make_cells(recipe(name), values, cases)


def sweep_of(folder: Path, cases: Cases = (), name: str = "digits", **values: Any) -> Sweep:
    return Sweep(grid(cases, name, **values), folder, program=FAKE)


def local(count: int = 2) -> LocalLauncher:
    return LocalLauncher([Slot(f"cuda:{i}", {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(count)])


def some_run(name: str = "run", epochs: int = 10, **attributes: Any) -> SweepRun:
    return SweepRun(recipe("digits", epochs=epochs), Run(Path(name)), Path(f"{name}.log"), name=name, **attributes)


def read_record(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return record


def without_hash(folder: str) -> str:
    return folder[:-9]


def saved_runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The runs in sweep.json by the names of their folders, without the hash."""
    return {without_hash(run["folder"]): run for run in read_record(folder)["runs"]}


def states(folder: Path) -> dict[str, str]:
    return {name: run["state"] for name, run in saved_runs(folder).items()}


def starts(folder: Path) -> dict[str, int]:
    """How often each run of a sweep was started."""
    return {without_hash(path.parent.name): len(path.read_text()) for path in folder.rglob("starts")}


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
