"""The local launcher: slots on this machine's devices, and processes in them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fmicl.runs.folder import Run
from fmicl.sweep import launchers
from fmicl.sweep.launchers import LocalLauncher, Slot, local_slots
from fmicl.utils.environment import STARTED_BY_SWEEP
from sweeps import wait_until


def test_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
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


def test_runs_are_marked_as_started_by_a_sweep(tmp_path: Path) -> None:
    command = [sys.executable, "-S", "-c", f"import os, sys; sys.exit(os.environ[{STARTED_BY_SWEEP!r}] != '1')"]
    process = LocalLauncher([Slot("cpu", {})]).start(command, Run(tmp_path / "run"), tmp_path / "log", name="run")
    wait_until(lambda: process.poll() is not None)
    assert process.poll() == 0, (tmp_path / "log").read_text()
