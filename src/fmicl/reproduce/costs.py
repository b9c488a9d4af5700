"""Device time of a plan, from measured times per epoch."""

from __future__ import annotations

from collections.abc import Sequence

from fmicl.config import Settings, recipe

SECONDS_PER_EPOCH = {"cifar10": 0.984}
"""Median seconds of an epoch on one H200 by recipe (results/benchmarks/command-h200.json); others are not measured."""
DECISIVE = ("method", "encoder", "size", "batch_size", "multiplicity", "local_crops", "rotation_weight")
"""Options that the time of an epoch depends on most: with another value than the recipe's it is not measured."""


def device_hours(settings: Sequence[Settings]) -> float | None:
    """Hours of training on one H200; None if the epochs of a run among these were not measured, or nothing is trained.

    Example:
        >>> device_hours([recipe("cifar10", epochs=200, seed=seed) for seed in range(3)])
        0.164
        >>> device_hours([recipe("stl10")])
        >>> device_hours([recipe("cifar10", batch_size=32)])
    """
    if not settings or not all(_measured(each) for each in settings):
        return None
    seconds: float = sum(each.epochs * SECONDS_PER_EPOCH[each.recipe] for each in settings)
    return round(seconds / 3600, 3)


def _measured(settings: Settings) -> bool:
    if settings.recipe not in SECONDS_PER_EPOCH:
        return False
    usual = recipe(settings.recipe)
    return all(getattr(settings, name) == getattr(usual, name) for name in DECISIVE)
