"""The recipes say what the paper's table of settings says, and wrong numbers are refused by name."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmicl.config import RECIPES, recipe
from fmicl.data.augmentations.views import Views

TABLE = {  # encoder, batch, d, lr, gamma, alpha, epochs, k, method
    "cifar10": ("resnet18", 512, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "stl10": ("resnet50", 64, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "tinyimagenet": ("resnet50", 256, 512, 0.1, 1, 40, 800, 200, "simclr"),
    "imagenet": ("vit_small_patch16_224", 1024, 512, 1.5e-4 * 1024 / 256, 1, 40, 1000, None, "mocov3"),
    "images": (None, 256, 512, 0.1, 1, 40, 200, 20, "simclr"),
    "digits": ("small_conv", 256, 64, None, 1, None, None, 20, "simclr"),
}


@pytest.mark.parametrize("name", TABLE)
def test_the_table_of_settings(name: str) -> None:
    r = RECIPES[name].recipe
    assert r.mu == 1
    found = (r.encoder, r.batch_size, r.dim, r.peak_learning_rate, r.gamma, r.alpha, r.epochs, r.k, r.method)
    for value, expected in zip(found, TABLE[name], strict=True):
        if expected is not None:
            assert value == (pytest.approx(expected) if isinstance(expected, float) else expected)


def test_all_recipes_are_in_the_table() -> None:
    assert set(TABLE) == set(RECIPES)


def test_imagenet_takes_adamw_and_two_families_of_views() -> None:
    r = recipe("imagenet")
    assert r.optimizer == "adamw"
    first, second = r.view_pair
    assert (first.blur, first.solarise, second.blur, second.solarise) == (1.0, 0.0, 0.1, 0.2)
    assert dataclasses.replace(second, blur=first.blur, solarise=first.solarise) == first
    one, other = recipe("cifar10").view_pair
    assert one == other


@pytest.mark.parametrize("name", RECIPES)
def test_json_is_the_way_there_and_back(name: str) -> None:
    r = RECIPES[name].recipe
    assert Recipe.from_json(json.loads(json.dumps(r.to_json()))) == r


def test_json_that_left_the_momentum_to_the_method() -> None:
    r = recipe("cifar10")
    assert Recipe.from_json(r.to_json() | {"encoder_momentum": None}) == r


@pytest.mark.parametrize(("objective", "meant"), [("fmicl", "cross"), ("align_uniform", "cross"), ("infonce", "auto")])
def test_json_from_when_mocov3_compared_with_keys(objective: Any, meant: Any) -> None:
    r = dataclasses.replace(recipe("cifar10"), method="mocov3", objective=objective)
    old = {name: value for name, value in r.to_json().items() if name != "symmetric"}
    assert Recipe.from_json(old) == dataclasses.replace(r, negatives=meant)
    assert Recipe.from_json(old | {"negatives": "anchor"}).negatives == "anchor"
    assert Recipe.from_json(old | {"method": "moco"}).negatives == "auto"
    assert Recipe.from_json(r.to_json()) == r


def test_json_from_when_symmetric_moco_normalised_by_the_batch() -> None:
    r = dataclasses.replace(recipe("cifar10"), method="moco", symmetric=True)
    old = {name: value for name, value in r.to_json().items() if name != "key_statistics"}
    assert (r.statistics, Recipe.from_json(old).statistics) == ("past", "batch")
    assert Recipe.from_json(old | {"symmetric": False}) == dataclasses.replace(r, symmetric=False)


def test_settings_that_compute_the_same_don_t_differ() -> None:
    r = dataclasses.replace(recipe("cifar10"), method="moco", symmetric=True)
    said = dataclasses.replace(r, key_statistics="past", device="cpu", data_dir=Path("here"))
    assert (said.differences(r), r.differences(said)) == ("", "")
    other = dataclasses.replace(r, key_statistics="batch", views=dataclasses.replace(r.views, blur=0.5))
    assert other.differences(r) == "key_statistics was past, is now batch; blur was 0.0, is now 0.5"


def test_json_from_another_version_is_refused() -> None:
    settings = recipe("digits").to_json() | {"colour": "red"}
    with pytest.raises(ValueError, match="colour"):
        Recipe.from_json(settings)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("alpha", 0), ("gamma", -1.0), ("mu", 0), ("epochs", 0), ("batch_size", -5), ("dim", 0), ("depth", 0),
        ("learning_rate", float("nan")), ("weight_decay", -1), ("validation", 1.0), ("second_blur", 1.5),
        ("order", 1.0), ("order", float("inf")), ("seed", -1), ("seed", 2**63), ("multiplicity", 1),
        ("encoder_momentum", 2), ("encoder_momentum_end", 0.5), ("encoder_momentum_end", 2), ("checkpoint_minutes", 0),
        ("memory_gib", -1), ("temperature", float("inf")), ("probe_views", -1),
    ],
)  # fmt: skip
def test_numbers_out_of_range_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        dataclasses.replace(recipe("cifar10"), **{field: value})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"objective": "info_nce"}, "objective must be 'fmicl', 'infonce', 'align_uniform' or 'spectral', but it is"),
        ({"precision": "bf16-mixed"}, "precision must be 'auto', '32' or 'bf16', but it is 'bf16-mixed'"),
        ({"shift": "best"}, "shift must be 'optimal' or None, but it is 'best'"),
        ({"mu": "normalized"}, "mu must be a number or 'normalised', but it is 'normalized'"),
        ({"batch_size": 64.5}, "batch_size must be a whole number, but it is 64.5"),
        ({"batch_size": True}, "batch_size must be a whole number, but it is True"),
        ({"alpha": "40"}, "alpha must be a number, but it is '40'"),
        ({"symmetric": 1}, "symmetric must be True or False, but it is 1"),
    ],
)
def test_what_can_not_be_meant_is_refused_in_python_too(changes: dict[str, Any], words: str) -> None:
    """A word that is none of a setting's would be taken for another of them."""
    with pytest.raises(ValueError, match=re.escape(words)):
        dataclasses.replace(recipe("cifar10"), **changes)


def test_numbers_of_numpy_are_numbers() -> None:
    changes: dict[str, Any] = {"batch_size": np.int64(8), "alpha": np.float32(2), "gamma": 2}
    told = json.loads(json.dumps(dataclasses.replace(recipe("cifar10"), **changes).to_json()))
    assert (told["batch_size"], told["alpha"], told["gamma"]) == (8, 2.0, 2)


def test_views_have_whole_numbers_of_pixels_and_known_fields() -> None:
    with pytest.raises(ValueError, match=r"size must be a whole number, but it is 32\.5"):
        Views(size=32.5)  # type: ignore[arg-type]
    told = recipe("cifar10").to_json()
    told["views"]["shear"] = 0.1
    with pytest.raises(ValueError, match=r"fields that this version of fmicl doesn't know: shear"):
        Recipe.from_json(told)


@pytest.mark.parametrize("method", ["moco", "mocov3"])
def test_more_than_two_views_are_for_simclr(method: str) -> None:
    with pytest.raises(ValueError, match=f"method {method} compares two views .* multiplicity is 3.*--method simclr"):
        dataclasses.replace(recipe("cifar10"), method=method, multiplicity=3)  # type: ignore[arg-type]


def test_more_than_two_views_are_of_one_family() -> None:
    with pytest.raises(ValueError, match=r"multiplicity is 3, .* second_blur and second_solarise"):
        dataclasses.replace(recipe("cifar10"), second_solarise=0.2, multiplicity=3)
    dataclasses.replace(recipe("cifar10"), second_blur=0.0, multiplicity=3)  # as in the first


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"temperature": 0.5}, ["temperature"]),
        ({"temperature": 0.5, "objective": "infonce"}, []),
        ({"divergence": "js", "alpha": 2.0, "objective": "infonce"}, ["divergence", "alpha"]),
        ({"objective": "infonce", "gamma": 2.0, "mu": 2.0, "shift": "optimal"}, ["gamma", "mu", "shift"]),
        ({"objective": "align_uniform", "uniformity_gamma": 3.0, "uniformity_weight": 3.0}, []),
        ({"objective": "spectral", "mu": 2.0, "similarity": "cosine"}, ["similarity"]),
        ({"shift": "optimal", "alpha": 2.0, "mu": 2.0}, ["alpha", "mu"]),  # of kl
        ({"shift": "optimal", "alpha": 2.0, "mu": 2.0, "divergence": "js"}, []),
        ({"order": 2.0}, ["order"]),
        ({"order": 2.0, "divergence": "tsallis"}, []),
        ({"queue": 512, "encoder_momentum": 0.9}, ["queue", "encoder_momentum"]),
        ({"queue": 512, "encoder_momentum": 0.9, "method": "moco"}, []),
        ({"negatives": "both", "method": "moco"}, ["negatives"]),
        ({"queue": 512, "encoder_momentum": 0.9, "method": "mocov3"}, ["queue"]),
    ],
)
def test_settings_without_a_part_are_named(changes: dict[str, Any], unused: list[str]) -> None:
    default = recipe("digits")  # its own alpha of 20 is nobody's mistake
    assert dataclasses.replace(default, **changes).without_part(default) == unused


def test_unknown_recipe_names_the_near_ones() -> None:
    assert recipe("digits") is recipe("digits")
    with pytest.raises(ValueError, match="did you mean cifar10"):
        recipe("cifar")
