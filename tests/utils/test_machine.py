"""Number of processors that a process may use, by affinity and by control groups."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fmicl.utils import machine


def test_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = Path("/nowhere")  # no control groups there
    assert machine.available_cpus(nowhere) == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6})
    assert machine.available_cpus(nowhere) == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert machine.available_cpus(nowhere) == os.cpu_count()


def test_cpu_quota_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The quota of the group and of its parents, in both versions of control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    group = tmp_path / "sys/fs/cgroup/pod/box"
    older = tmp_path / "sys/fs/cgroup/cpu"
    for folder in (group, older, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    mine = tmp_path / "proc/self/cgroup"
    mine.write_text("0::/pod/box\n")
    for box, pod, seen in (
        ("max 100000", "max 100000", 64), ("max 100000", "800000 100000", 8), ("150000 100000", "800000 100000", 2),
        ("20000 100000", "max 100000", 1),
    ):  # fmt: skip
        (group / "cpu.max").write_text(f"{box}\n")
        (group.parent / "cpu.max").write_text(f"{pod}\n")
        assert machine.available_cpus(tmp_path) == seen
    mine.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    for quota, seen in ((-1, 64), (400_000, 4)):
        (older / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (older / "cpu.cfs_period_us").write_text("100000\n")
        assert machine.available_cpus(tmp_path) == seen
