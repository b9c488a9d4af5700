"""Sweeps of a program that takes no time, and what they leave."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fmicl.config.recipes import RECIPES
from fmicl.sweep.grid import cells
from fmicl.sweep.launchers import LocalLauncher, Slot

DIGITS = RECIPES["digits"].recipe
FAKE = [sys.executable, "-S", str(Path(__file__).with_name("fake_run.py"))]


def grid(**values: tuple[Any, ...]) -> list[Any]:
    return cells(DIGITS, values)


def local(count: int = 2) -> LocalLauncher:
    return LocalLauncher([Slot(f"cuda:{i}", {"CUDA_VISIBLE_DEVICES": str(i)}) for i in range(count)])


def record_of(folder: Path) -> dict[str, Any]:
    """What a sweep's folder says of its runs, and their summary."""
    record: dict[str, Any] = json.loads((folder / "sweep.json").read_text())
    return record


def states(folder: Path) -> dict[str, str]:
    return {name: run["state"] for name, run in record_of(folder)["runs"].items()}


def wait_until(true: Callable[[], bool], seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)
