"""The recipes: the paper's table of settings, and options that have no effect."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from fmicl.config import RECIPES, OptimisationOptions, recipe
from fmicl.data.augmentations.views import SecondViewOptions, Views, view_pair
from fmicl.training.tasks.image_parts import build_image_encoder

IMAGE_RECIPES = [entry.name for entry in RECIPES if entry.value.task == "images"]

TABLE = {  # encoder, batch, d, lr, gamma, alpha, epochs, k, method
    "cifar10": ("resnet18", 512, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "stl10": ("resnet50", 64, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "tinyimagenet": ("resnet50", 256, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "imagenet": ("vit_small_patch16_224", 1024, 512, 0.1, 1, 40, 1000, None, "mocov3"),
    "imagenet_mocov3": ("vit_small_patch16_224", 1024, 512, 1.5e-4 * 1024 / 256, 1, 40, 1000, None, "mocov3"),
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
    found = (r.alpha, r.gamma, r.mu, r.temperature, r.batch_size, r.learning_rate, r.optimizer, r.schedule, r.epochs)
    assert found == (409600, 20, 1, 0.05, 64, 3e-5, "adamw", "linear", 1)
    assert (r.weight_decay, r.clip, r.warmup_epochs) == (0, 1, 0)
    assert (r.model, r.pooling, r.length) == ("bert-base-uncased", "cls_mlp", 32)


@pytest.mark.parametrize(
    ("name", "optimizer", "schedule"),
    [
        ("cifar10", "sgd", "cosine"),
        ("stl10", "sgd", "cosine"),
        ("tinyimagenet", "sgd", "cosine"),
        ("imagenet", "adamw", "linear"),
        ("wikipedia", "adamw", "linear"),
        ("imagenet_mocov3", "adamw", "cosine"),  # MoCo v3's own
    ],
)
def test_optimiser_and_decay_are_the_papers(name: str, optimizer: str, schedule: str) -> None:
    r = recipe(name)
    assert (r.optimizer, r.schedule) == (optimizer, schedule)


def test_the_papers_views_on_small_images_are_crops_flips_jitter_and_grey() -> None:
    for name in ("cifar10", "stl10", "tinyimagenet"):
        r = recipe(name)
        assert (r.flip, r.jitter, r.grey, r.blur, r.solarise) == (0.5, 0.8, 0.2, 0.0, 0.0)


def test_imagenet_has_six_blocks_and_its_variant_the_twelve_of_vit_s() -> None:
    for name, blocks in (("imagenet", 6), ("imagenet_mocov3", 12)):
        assert len(list(build_image_encoder(recipe(name)).get_submodule("blocks").children())) == blocks
    paper, other = recipe("imagenet").to_json(), recipe("imagenet_mocov3").to_json()
    different = {key for key in paper if paper[key] != other[key]}
    assert different == {"depth", "learning_rate", "scale_learning_rate", "schedule"}


def test_imagenet_alone_has_too_large_a_batch_for_the_theorem_on_uniformity() -> None:
    """It needs N <= d + 1, which the paper says that all of its settings satisfy."""
    within = {
        name: recipe(name).batch_size <= recipe(name).dim + 1 for name in TABLE if name not in ("images", "digits")
    }
    within["wikipedia"] = recipe("wikipedia").batch_size <= 768 + 1
    assert [name for name, fits in within.items() if not fits] == ["imagenet", "imagenet_mocov3"]


@pytest.mark.parametrize("name", ["imagenet", "imagenet_mocov3"])
def test_imagenet_has_two_families_of_views(name: str) -> None:
    r = recipe(name)
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
    used = {*settings.used(), *settings.replace(method="moco").used()}
    assert set(entry.value.settings) <= used, "by the recipe itself, or with --method moco"


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
    changes = {"method": "moco", "key_statistics": "past", "hidden": 64, "temperature": 0.1}
    assert set(recipe("wikipedia", **changes).unused()) == {"key_statistics", "hidden", "temperature"}
    assert recipe("wikipedia", method="mocov3", hidden=64).unused() == {}
