"""Settings that more than one room refuses, each with the same words."""

from __future__ import annotations

import math
import numbers
from typing import Literal

__all__ = ["Negatives", "Pooling", "TokenPooling", "require_mode", "require_positive", "require_power", "require_shift"]

Negatives = Literal["anchor", "both", "cross"]
Pooling = Literal["cls_mlp", "cls", "mean"]
TokenPooling = Literal["cls", "mean"]  # without a head, as after training
_MODES = ("anchor", "both", "cross")


def require_positive(name: str, value: float) -> None:
    """Refuse a setting that isn't a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {name}={value!r}")


def require_power(power: float) -> None:
    """Refuse a power whose gradient is infinite where two views agree."""
    if not (math.isfinite(power) and power >= 1):
        raise ValueError(f"power must be a number of at least 1, got power={power!r}")


def require_shift(shift: str | None) -> None:
    """Refuse a shift that there isn't."""
    if shift not in (None, "optimal"):
        raise ValueError(f"shift is None or 'optimal', got {shift!r}")


def require_mode(negatives: str) -> None:
    """Refuse a source of negatives that there isn't."""
    if negatives not in _MODES:
        raise ValueError(f"negatives are one of {', '.join(map(repr, _MODES))} or a tensor (M, d), got {negatives!r}")
