"""What of this machine the process may use; without torch, for whoever shares it out."""

from __future__ import annotations

import os

__all__ = ["processors"]


def processors() -> int:
    """Processors that this process may use; a container or a cluster may give fewer than there are.

    Example:
        >>> 1 <= processors() <= os.cpu_count()
        True
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
