"""Free memory of this machine, by the kernel and the control groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from fmicl.utils.machine import control_groups, read_lines

__all__ = ["free_memory"]


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
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if group.older else ("memory.max", "memory.current")
        most, now = (read_lines(group.path / name) for name in names)
        if most and now and most[0].isdigit():  # else it is "max", or hidden inside a container
            stat = dict(entry.split(maxsplit=1) for entry in read_lines(group.path / "memory.stat"))
            total = "total_" if group.older else ""
            cached = sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(most[0]) - int(now[0]) + cached
