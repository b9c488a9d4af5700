"""The recipes: the paper's table of settings, and options that have no effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fmicl.config import RECIPES, OptimisationOptions, recipe
from fmicl.data.augmentations.views import SecondViewOptions, Views, view_pair

IMAGE_RECIPES = [entry.name for entry in RECIPES if entry.value.task == "images"]

TABLE = {  # encoder, batch, d, lr, gamma, alpha, epochs, k, method
    "cifar10": ("resnet18", 512, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "stl10": ("resnet50", 64, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "tinyimagenet": ("resnet50", 256, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "imagenet": ("vit_small_patch16_224", 1024, 512, 1.5e-4 * 1024 / 256, 1, 40, 1000, None, "mocov3"),
    "images": ("auto", "auto", 128, None, 1, None, "auto", 20, "simclr"),  # by the data
    "digits": ("small_conv", 256, 64, None, 1, None, None, 20, "simclr"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_settings(name: str) -> None:
    r = recipe(name)
    assert r.mu == 1
    rate = r[OptimisationOptions].peak_learning_rate
    found = (r.encoder, r.batch_size, r.dim, rate, r.gamma, r.alpha, r.epochs, r.k, r.method)
    for value, expected in zip(found, TABLE[name], strict=True):
        if expected is not None:
            assert value == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_all_recipes_are_in_the_table() -> None:
    assert set(TABLE) == set(IMAGE_RECIPES)


def test_wikipedia_has_the_values_of_the_paper_and_of_simcse() -> None:
    r = recipe("wikipedia")
    found = (r.alpha, r.gamma, r.temperature, r.batch_size, r.learning_rate, r.optimizer, r.schedule, r.epochs)
    assert found == (409600, 20, 0.05, 64, 3e-5, "adamw", "linear", 1)
    assert (r.model, r.pooling, r.length) == ("bert-base-uncased", "cls_mlp", 32)


def test_imagenet_has_adamw_and_two_families_of_views() -> None:
    r = recipe("imagenet")
    assert r.optimizer == "adamw"
    first, second = view_pair(r[Views], r[SecondViewOptions])
    assert (first.blur, first.solarise, second.blur, second.solarise) == (1.0, 0.0, 0.1, 0.2)
    assert dataclasses.replace(second, blur=first.blur, solarise=first.solarise) == first
    cifar10 = recipe("cifar10")
    one, other = view_pair(cifar10[Views], cifar10[SecondViewOptions])
    assert one == other


@pytest.mark.parametrize("entry", RECIPES, ids=lambda entry: entry.name)
def test_every_recipe_has_a_sentence_and_uses_what_it_sets(entry: Any) -> None:
    assert entry.summary.endswith(".")
    settings = recipe(entry.name)
    assert settings.changes == {}
    assert set(entry.value.settings) <= set(settings.used())


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"temperature": 0.5}, ["temperature"]),
        ({"temperature": 0.5, "objective": "infonce"}, []),
        ({"divergence": "js", "alpha": 2.0, "objective": "infonce"}, ["divergence", "alpha"]),
        ({"objective": "infonce", "gamma": 2.0, "mu": 2.0, "shift": "optimal"}, ["mu", "gamma", "shift"]),
        ({"objective": "align_uniform", "uniformity_gamma": 3.0, "uniformity_weight": 3.0}, []),
        ({"objective": "spectral", "mu": 2.0, "similarity": "cosine"}, ["similarity"]),
        ({"shift": "optimal", "alpha": 2.0, "mu": 2.0}, ["mu", "alpha"]),  # of kl
        ({"shift": "optimal", "alpha": 2.0, "mu": 2.0, "divergence": "js"}, []),
        ({"order": 2.0}, ["order"]),
        ({"order": 2.0, "divergence": "tsallis"}, []),
        ({"order": 2.0, "divergence": "tsallis", "objective": "infonce"}, ["divergence", "order"]),
        ({"queue": 512, "encoder_momentum": 0.9}, ["encoder_momentum", "queue"]),
        ({"queue": 512, "encoder_momentum": 0.9, "method": "moco"}, []),
        ({"negatives": "both", "method": "moco"}, ["negatives"]),
        ({"queue": 512, "encoder_momentum": 0.9, "method": "mocov3"}, ["queue"]),
        ({"rotation_size": 4}, ["rotation_size"]),
        ({"rotation_size": 4, "rotation_weight": 0.4}, []),
    ],
)
def test_options_without_effect_are_named_with_a_reason(changes: dict[str, Any], unused: list[str]) -> None:
    settings = recipe("digits", **changes)  # its own alpha of 20 is nobody's mistake
    found = settings.unused()
    assert sorted(found) == sorted(unused)
    assert all(found.values())
    assert not set(unused) & set(settings.used())


def test_text_has_its_own_options_without_effect() -> None:
    changes = {"method": "moco", "key_statistics": "past", "hidden": 64}
    assert set(recipe("wikipedia", **changes).unused()) == {"key_statistics", "hidden"}
    assert recipe("wikipedia", method="mocov3", hidden=64).unused() == {}


def test_the_owner_is_the_reason() -> None:
    assert "method moco" in recipe("digits", queue=512).unused()["queue"]
    assert "divergence tsallis" in recipe("digits", order=2.0).unused()["order"]
