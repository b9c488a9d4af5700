"""Shared argument validation."""

from __future__ import annotations

import math
import numbers
from typing import Literal, get_args

Negatives = Literal["anchor", "both", "cross"]
Pooling = Literal["cls_mlp", "cls", "mean"]
TokenPooling = Literal["cls", "mean"]  # without the head, as after training


def require_positive(name: str, value: float) -> None:
    """Raise ValueError for a value that isn't a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {name}={value!r}")


def require_at_least_zero(name: str, value: float) -> None:
    """Raise ValueError for a value that isn't a finite number of at least zero."""
    if value != 0:
        require_positive(name, value)


def require_skew(skew: float) -> None:
    """Raise ValueError for a skew that isn't a share of positives in a mixture with negatives."""
    if isinstance(skew, bool) or not isinstance(skew, numbers.Real) or not 0 <= skew < 1:
        raise ValueError(f"skew must lie in [0, 1), got skew={skew!r}")


def require_power(power: float) -> None:
    """Raise ValueError for a power of a distance whose gradient is infinite at distance 0."""
    if not (math.isfinite(power) and power >= 1):
        raise ValueError(f"power must be a number of at least 1, got power={power!r}")


def require_shift(shift: str | None) -> None:
    """Raise ValueError for an unknown shift."""
    if shift not in (None, "optimal"):
        raise ValueError(f"shift must be None or 'optimal', got {shift!r}")


def require_negatives(negatives: str) -> None:
    """Raise ValueError for an unknown source of negatives."""
    known = get_args(Negatives)
    if negatives not in known:
        raise ValueError(f"negatives must be {', '.join(map(repr, known))} or a tensor (M, d), got {negatives!r}")
