"""What of this machine the process may use; without torch, for whoever shares it out."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

__all__ = ["Group", "control_groups", "lines", "processors"]


def processors(root: Path = Path("/")) -> int:
    """Processors that this process may use; a container or a cluster may give fewer than there are.

    A container that may use so much of the processors' time, and of any of them, counts as having that many.

    Args:
        root: where proc and sys are.

    Example:
        >>> 1 <= processors() <= os.cpu_count()
        True
    """
    known = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min([known, *_allotted(root)]))


def _allotted(root: Path) -> Iterator[int]:
    """Processors' worth of time that each control group above this process gives, rounded up."""
    for group in control_groups("cpu", root):
        if group.older:
            words = [*lines(group.path / "cpu.cfs_quota_us"), *lines(group.path / "cpu.cfs_period_us")]
        else:
            words = " ".join(lines(group.path / "cpu.max")).split()
        if len(words) == 2 and all(word.isdigit() for word in words) and int(words[1]):  # no limit: "max", or -1
            yield -(-int(words[0]) // int(words[1]))


class Group(NamedTuple):
    """A control group.

    Attributes:
        path: the folder with its files.
        older: whether they are those of the first version, which has a tree for each controller.
    """

    path: Path
    older: bool


def control_groups(controller: str, root: Path = Path("/")) -> Iterator[Group]:
    """The control groups that this process is in, the innermost first; none where Linux isn't there to tell.

    Args:
        controller: "memory" or "cpu".
        root: where proc and sys are.
    """
    for line in lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        base = root / "sys/fs/cgroup"
        if controllers:
            if controller not in controllers.split(","):
                continue
            base = base / controller
        group = base / path.lstrip("/")
        for place in (group, *group.parents):
            if not place.is_relative_to(base):
                break
            yield Group(place, bool(controllers))


def lines(path: Path) -> list[str]:
    """Whole lines of a file; none of one that can't be read."""
    try:
        return path.read_text(encoding="utf-8").split("\n")[:-1]
    except OSError:
        return []
