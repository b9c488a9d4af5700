"""CPU and memory limits of this process: affinity and control groups, without importing torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple


def available_cpus(root: Path = Path("/")) -> int:
    """Number of CPUs that this process may use, by its affinity and the CPU quota of its control groups.

    A quota of CPU time counts as that many CPUs, rounded up.

    Args:
        root: the folder with proc and sys.

    Example:
        >>> 1 <= available_cpus() <= os.cpu_count()
        True
    """
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([affinity, *_cpu_quotas(root)]))


def _cpu_quotas(root: Path) -> Iterator[int]:
    """CPU quota of each control group of this process, in CPUs, rounded up."""
    for group in control_groups("cpu", root):
        if group.is_v1:
            words = [*read_lines(group.path / "cpu.cfs_quota_us"), *read_lines(group.path / "cpu.cfs_period_us")]
        else:
            words = " ".join(read_lines(group.path / "cpu.max")).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # no limit is "max" or -1
            yield -(-int(words[0]) // int(words[1]))


class ControlGroup(NamedTuple):
    """A Linux control group.

    Attributes:
        path: the folder with its files.
        is_v1: whether it belongs to version 1, which has one hierarchy for each controller.
    """

    path: Path
    is_v1: bool


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[ControlGroup]:
    """Control groups of this process, innermost first; none outside of Linux.

    Args:
        controller: "memory" or "cpu".
        root: the folder with proc and sys.
    """
    for line in read_lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            base = base / controller
        group = base / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(base):
                break
            yield ControlGroup(folder, bool(controllers))


def read_lines(path: Path) -> list[str]:
    """Complete lines of a file; none if it can't be read."""
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that processes can still allocate; None on systems other than Linux.

    Args:
        root: where proc and sys are.
    """
    found = dict(line.split(":", 1) for line in read_lines(root / "proc/meminfo"))
    if "MemAvailable" not in found:
        return None
    available = int(found["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_free_in_groups(root)]))


def _free_in_groups(root: Path) -> Iterator[int]:
    """Bytes that each control group of this process leaves: its limit less its use, not counting cached files."""
    for group in control_groups("memory", root):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if group.is_v1 else ("memory.max", "memory.current")
        most, now = (read_lines(group.path / name) for name in names)
        if most and now and most[0].isdigit():  # else it is "max", or hidden inside a container
            stat = dict(entry.split(maxsplit=1) for entry in read_lines(group.path / "memory.stat"))
            total = "total_" if group.is_v1 else ""
            cached = sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(most[0]) - int(now[0]) + cached
