"""The objective that a recipe asks for, and what is said of it before and after a run."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fmicl import AlignUniformLoss, FMICLLoss, divergence
from fmicl.config import recipe
from fmicl.training import objectives
from small_settings import digits


def test_the_order_of_tsallis_is_the_recipes() -> None:
    objective = objectives.build_objective(digits(divergence="tsallis", order=2.5))
    assert objective.divergence == divergence("tsallis", order=2.5)
    x, y = torch.randn(2, 8, 4)
    assert objective(x, y) == FMICLLoss(divergence("tsallis", order=2.5), alpha=20.0)(x, y)
    for name in ("infonce", "align_uniform", "spectral"):
        with pytest.raises(ValueError, match="unknown divergence 'nonsense'"):
            objectives.build_objective(digits(divergence="nonsense", objective=name))


def test_align_uniform_has_a_kernel_of_its_own() -> None:
    x, y = torch.randn(2, 8, 4)
    assert objectives.build_objective(digits(objective="align_uniform", gamma=7.0))(x, y) == AlignUniformLoss()(x, y)
    changed = objectives.build_objective(digits(objective="align_uniform", uniformity_gamma=3.0, uniformity_weight=2.0))
    assert changed(x, y) == AlignUniformLoss(gamma=3.0, weight=2.0)(x, y)


def test_advice_names_what_the_objective_has() -> None:
    assert "--alpha" not in objectives.collapse_advice(digits(objective="infonce"), 64)
    assert "--temperature" in objectives.collapse_advice(digits(objective="infonce"), 64)
    assert "--uniformity-weight" in objectives.collapse_advice(digits(objective="align_uniform"), 64)
    assert "--mu" in objectives.collapse_advice(digits(objective="spectral"), 64)
    for method in ("simclr", "moco"):  # a constant there
        assert "--alpha" not in objectives.collapse_advice(digits(shift="optimal", method=method), 64)
    assert "--alpha" in objectives.collapse_advice(digits(shift="optimal", divergence="js"), 64)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({}, "Raise"),
        ({"method": "mocov3"}, "Raise"),
        ({"method": "moco"}, "Lower"),  # whose keys don't give way
        ({"method": "moco", "divergence": "tsallis", "alpha": 403.0}, "Lower"),  # collapsed, in docs/reproduction.md
        ({"method": "mocov3", "negatives": "cross"}, "Lower"),
    ],
)
def test_advice_goes_the_right_way(changes: dict[str, Any], word: str) -> None:
    assert f"{word} --alpha" in objectives.collapse_advice(digits(**changes), 64)
    uniform = objectives.collapse_advice(digits(**changes, objective="align_uniform"), 64)
    assert uniform.startswith(f"{word} --uniformity-weight")


@pytest.mark.parametrize(
    ("changes", "warned"),
    [
        ({"method": "moco"}, True),
        ({"method": "moco", "alpha": 7.4}, False),
        ({"method": "moco", "shift": "optimal"}, False),
        ({"method": "moco", "divergence": "pearson"}, False),
        ({"method": "moco", "divergence": "squared_hellinger"}, True),
        ({"method": "moco", "objective": "infonce"}, False),
        ({"method": "moco", "mu": "normalised"}, True),
        ({"method": "moco", "mu": "normalised", "gamma": 1000.0, "dim": 4096}, False),  # beyond a float: nothing to say
        ({"method": "moco", "divergence": "neyman", "gamma": 500.0}, False),  # no alpha would do
        ({"method": "moco", "divergence": "tsallis", "order": 1.01}, True),
        ({"method": "moco", "similarity": "cosine"}, False),  # what pulls there is no density ratio
        ({"method": "moco", "objective": "align_uniform"}, False),
        ({"method": "mocov3"}, False),
        ({"method": "mocov3", "negatives": "cross"}, True),
        ({"method": "mocov3", "negatives": "both", "alpha": 40.0}, True),
        ({"method": "mocov3", "negatives": "both", "alpha": 20.0}, False),  # where a half of them are keys
        ({"negatives": "cross"}, False),
    ],
)
def test_negatives_without_gradient_that_push_too_hard(changes: dict[str, Any], warned: bool) -> None:
    recipe = digits(**changes)
    line = objectives.overweight(recipe, recipe.dim)
    assert bool(line) == warned
    if warned:
        alpha = float(line.split("--alpha ")[1].split()[0])
        assert objectives.overweight(dataclasses.replace(recipe, alpha=alpha), recipe.dim) == ""


def test_who_is_a_negative_by_default() -> None:
    def negatives(**changes: Any) -> str:
        return str(objectives.build_objective(digits(**changes)).negatives)

    assert negatives(objective="infonce") == "both"
    assert negatives(objective="infonce", method="mocov3") == "cross"
    assert negatives(method="mocov3") == negatives() == "anchor"
    assert negatives(method="mocov3", negatives="cross") == "cross"


@pytest.mark.parametrize("objective", ["fmicl", "infonce", "align_uniform", "spectral"])
def test_the_loss_of_sentences_is_in_float32_and_that_of_images_as_it_comes(objective: Any) -> None:
    for negatives in ("auto", "cross"):
        assert objectives.build_objective(TextRecipe(objective=objective, negatives=negatives)).options == {
            "precision": "high"
        }
        images = dataclasses.replace(recipe("cifar10"), objective=objective, negatives=negatives)
        assert objectives.build_objective(images).options == {}
