"""Formatting of durations."""

from __future__ import annotations

import math


def format_duration(seconds: float | None) -> str:
    """Hours, minutes and seconds; "" if unknown.

    Example:
        >>> format_duration(3725.0), format_duration(None), format_duration(math.inf)
        ('1:02:05', '', '')
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
