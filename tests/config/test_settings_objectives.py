"""Objectives that settings describe, with what method and task tell them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fmicl import FMICLLoss, divergence
from fmicl.config import Settings, recipe
from fmicl.losses import OBJECTIVES
from fmicl.losses.statistics import BatchStatisticsOptions
from small_settings import digits


def build(settings: Settings) -> Any:
    objective: nn.Module = settings.objective_options.build(settings.objective_context())
    return objective


def test_options_and_the_divergences_own_reach_the_loss() -> None:
    objective = build(digits(divergence="tsallis", order=2.5))
    assert objective.divergence == divergence("tsallis", order=2.5)
    x, y = torch.randn(2, 8, 4)
    assert objective(x, y) == FMICLLoss(divergence("tsallis", order=2.5), alpha=20.0)(x, y)


def test_negatives_follow_objective_method_and_task() -> None:
    assert build(digits()).negatives == "anchor"
    assert build(digits(objective="infonce")).negatives == "both"
    assert build(digits(objective="infonce", method="mocov3")).negatives == "cross"
    assert build(recipe("wikipedia", objective="infonce")).negatives == "cross"
    assert build(digits(method="mocov3")).negatives == "anchor"
    assert build(digits(method="mocov3", negatives="cross")).negatives == "cross"


@pytest.mark.parametrize(
    "objective", [entry.name for entry in OBJECTIVES if not issubclass(entry.value, BatchStatisticsOptions)]
)
def test_the_loss_of_text_is_in_float32(objective: str) -> None:
    for negatives in ("auto", "cross"):
        changes = {"objective": objective, "negatives": negatives}
        assert build(recipe("wikipedia", **changes)).options == {"precision": "high"}
        assert build(recipe("cifar10", **changes)).options == {}


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({}, False),
        ({"negatives": "cross"}, False),
        ({"method": "moco"}, True),
        ({"method": "moco", "alpha": 7.4}, False),
        ({"method": "moco", "divergence": "tsallis", "order": 1.01}, True),
        ({"method": "moco", "mu": "normalised", "gamma": 1000.0, "dim": 4096}, False),  # beyond a float
        ({"method": "mocov3"}, False),
        ({"method": "mocov3", "negatives": "cross"}, True),
        ({"method": "mocov3", "negatives": "both", "alpha": 40.0}, True),
        ({"method": "mocov3", "negatives": "both", "alpha": 20.0}, False),  # half of the negatives have a gradient
    ],
)
def test_methods_say_which_negatives_have_no_gradient(changes: dict[str, Any], warned: bool) -> None:
    settings = digits(**changes)
    context = settings.objective_context(settings.dim)
    assert bool(settings.objective_options.warnings(context)) == warned
    if "alpha" not in changes:
        advice = settings.objective_options.collapse_advice(context)
        assert ("Lower --alpha" in advice) == (warned or "mu" in changes)
