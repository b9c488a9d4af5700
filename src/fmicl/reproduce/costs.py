"""Device time of a plan, from measured times per epoch."""

from __future__ import annotations

from collections.abc import Sequence

from fmicl.config import Settings

__all__ = ["SECONDS_PER_EPOCH", "device_hours"]

SECONDS_PER_EPOCH = {"cifar10": 0.984}
"""Median seconds of an epoch on one H200 by recipe (results/benchmarks/command-h200.json); others are not measured."""


def device_hours(settings: Sequence[Settings]) -> float | None:
    """Hours of training on one H200; None if a recipe among these has no measured time, or nothing is trained.

    Example:
        >>> from fmicl.config import recipe
        >>> device_hours([recipe("cifar10", epochs=200, seed=seed) for seed in range(3)])
        0.164
        >>> device_hours([recipe("stl10")])
    """
    if not settings or any(each.recipe not in SECONDS_PER_EPOCH for each in settings):
        return None
    seconds: float = sum(each.epochs * SECONDS_PER_EPOCH[each.recipe] for each in settings)
    return round(seconds / 3600, 3)
