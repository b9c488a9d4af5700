"""Settings: one namespace from declared options, their JSON and command line, and the hash that identifies a run."""

from __future__ import annotations

import dataclasses
import json
import pickle
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st

from fmicl.cli.train import parse
from fmicl.config import RECIPES, TASKS, OptimisationOptions, Schema, Settings, recipe, register_recipe, schema_of
from fmicl.methods import METHODS, Method, MethodOptions, SimCLR, register_method
from fmicl.methods.moco import MoCoOptions
from fmicl.utils.options import option
from option_values import other_values, settings_of

NAMES = RECIPES.names()

HASHES = {
    "digits": "53990d7c",
    "cifar10": "26e9ecca",
    "stl10": "8253c1a5",
    "tinyimagenet": "6b60d468",
    "imagenet": "0a620007",
    "imagenet_mocov3": "7ede4d96",
    "images": "a42a99ed",
    "wikipedia": "8489fd65",
}
"""A change here means that runs of the recipe are no longer comparable with archived ones under the same hash."""


def test_the_hash_of_each_recipe_is_what_it_was() -> None:
    assert {name: recipe(name).hash for name in NAMES} == HASHES


def test_settings_are_an_immutable_namespace() -> None:
    settings = recipe("digits", epochs=3, data_dir="here")
    assert (settings.epochs, settings.queue, settings.data_dir) == (3, 4096, Path("here"))
    assert settings[OptimisationOptions].epochs == 3
    assert settings.changes == {"epochs": 3, "data_dir": Path("here")}
    with pytest.raises(dataclasses.FrozenInstanceError, match="epochs"):
        settings.epochs = 4
    with pytest.raises(AttributeError, match="epoch"):
        _ = settings.epoch
    with pytest.raises(KeyError):
        _ = settings[MoCoOptions]  # of another method
    assert recipe("digits", method="moco")[MoCoOptions].queue == 4096


def test_a_change_back_to_the_recipe_is_none() -> None:
    settings = recipe("digits", epochs=3)
    assert settings.replace(epochs=100) == recipe("digits")
    assert settings.replace(epochs=100).changes == {}
    assert repr(settings.replace(seed=1)) == "recipe('digits', epochs=3, seed=1)"
    assert settings != recipe("cifar10", epochs=3)
    assert len({settings, recipe("digits", epochs=3), recipe("digits")}) == 2


@pytest.mark.parametrize(("call", "words"), [
    (lambda: recipe("cifar"), "recipe 'cifar'.*'cifar10'"),
    (lambda: recipe("digits", epoch=3), "option 'epoch'.*'epochs'"),
    (lambda: recipe("digits", method="moko"), "method 'moko'.*'moco'"),
    (lambda: recipe("digits", objective="info_nce"), "objective 'info_nce'.*'infonce'"),
    (lambda: recipe("digits", divergence="hellinger"), "divergence 'hellinger'.*'squared_hellinger'"),
    (lambda: recipe("digits", divergence="nonsense", objective="infonce"), "divergence 'nonsense'"),
    (lambda: Settings.from_json("digits", recipe("digits").to_json() | {"colour": "red"}), "option 'colour'"),
])  # fmt: skip
def test_unknown_names_are_refused_with_the_near_ones(call: Any, words: str) -> None:
    with pytest.raises(ValueError, match=f"unknown {words}"):
        call()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("alpha", 0), ("gamma", -1.0), ("mu", 0), ("epochs", 0), ("batch_size", -5), ("dim", 0), ("depth", 0),
        ("learning_rate", float("nan")), ("weight_decay", -1), ("validation", 1.0), ("second_blur", 1.5),
        ("seed", -1), ("seed", 2**63), ("multiplicity", 1), ("checkpoint_minutes", 0), ("memory_gib", -1),
        ("probe_views", -1), ("precision", "bf16-mixed"), ("shift", "best"), ("mu", "normalized"),
        ("batch_size", 64.5), ("batch_size", True), ("alpha", "40"), ("symmetric", 1), ("size", 32.5),
    ],
)  # fmt: skip
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        recipe("cifar10", **{name: value})


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ({"divergence": "tsallis"}, "order", 1.0), ({"divergence": "tsallis"}, "order", float("inf")),
        ({"objective": "infonce"}, "temperature", float("inf")), ({"method": "moco"}, "encoder_momentum", 2),
        ({"method": "moco"}, "encoder_momentum_end", 0.5), ({"method": "mocov3"}, "encoder_momentum_end", 2),
        ({"method": "moco"}, "queue", 0), ({}, "queue", 0),
    ],
)  # fmt: skip
def test_numbers_are_checked_whether_their_group_is_used_or_not(owner: dict[str, Any], name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        recipe("cifar10", **owner, **{name: value})


@pytest.mark.parametrize("method", ["moco", "mocov3"])
def test_more_than_two_views_are_for_simclr(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method} .*multiplicity is 3"):
        recipe("cifar10", method=method, multiplicity=3)


def test_more_than_two_views_are_of_one_family() -> None:
    with pytest.raises(ValueError, match=r"multiplicity is 3.*second_solarise"):
        recipe("cifar10", second_solarise=0.2, multiplicity=3)
    recipe("cifar10", second_blur=0.0, multiplicity=3)  # as in the first


def test_numbers_of_numpy_and_whole_numbers_are_those_of_the_option() -> None:
    settings = recipe("cifar10", batch_size=np.int64(8), alpha=np.float32(2), gamma=2, crop_scale=[1, 1])
    saved = json.dumps(settings.to_json())
    assert all(words in saved for words in ('"batch_size": 8,', '"alpha": 2.0', '"gamma": 2.0', "[1.0, 1.0]"))
    assert settings.hash == recipe("cifar10", batch_size=8, alpha=2.0, gamma=2.0, crop_scale=(1.0, 1.0)).hash


@pytest.mark.parametrize("name", NAMES)
@given(st.data())
@effort(max_examples=15, deadline=None)
def test_settings_come_back_from_json_pickle_and_the_command_line(name: str, data: st.DataObject) -> None:
    settings = data.draw(settings_of(name))
    saved = json.loads(json.dumps(settings.to_json()))
    loaded = Settings.from_json(name, saved)
    assert loaded.to_json() == settings.to_json()
    assert (loaded.hash, loaded.used(), loaded.differences(settings)) == (settings.hash, settings.used(), "")
    assert pickle.loads(pickle.dumps(settings)) == settings
    parsed, out, resume = parse(name, settings.arguments())
    assert (parsed, out, resume) == (settings, None, False)
    assert parsed.hash == settings.hash


def test_json_has_the_used_groups_alone() -> None:
    saved = recipe("digits", queue=512, order=2.0).to_json()
    assert not {"queue", "order", "temperature"} & set(saved)
    assert Settings.from_json("digits", saved) == recipe("digits")


@given(st.data())
@effort(max_examples=200, deadline=None)
def test_the_hash_is_of_used_options_but_for_the_machine_s(data: st.DataObject) -> None:
    """A change of any option changes the hash if, and only if, it is used and not the machine's."""
    settings = data.draw(settings_of(data.draw(st.sampled_from(NAMES))))
    changed = settings.schema.options[data.draw(st.sampled_from(sorted(settings.schema.options)))]
    value = data.draw(other_values(changed))
    try:
        other = settings.replace(**{changed.name: value})
    except ValueError:
        return
    same = settings.used() == other.used() or (changed.role == "machine" and settings.identity() == other.identity())
    assert (settings.hash == other.hash) == same


SPECIAL = {
    "method": "moco", "objective": "infonce", "divergence": "js", "mu": 2.0, "depth": 2, "rotation_size": 7,
    "second_blur": 0.3, "second_solarise": 0.3, "encode_length": 40, "encoder_momentum_end": 1.0,
    "key_statistics": "past", "weights": "timm", "freeze": 1,
}  # fmt: skip


def other_value(name: str, value: Any, hint: Any) -> Any:
    """A value of an option that is allowed, and isn't the one that it has."""
    if name in SPECIAL:
        return SPECIAL[name]
    if isinstance(value, tuple):
        return tuple(0.9 * item for item in value)
    if hint is bool:
        return not value
    if hint in (int, float):
        return value + 2 if hint is int else value / 2 + 0.125
    if hint is str:
        return "other"
    choices = typing.get_args(hint)
    if int in choices or float in choices:
        return 7 if int in choices else 0.7
    if any(typing.get_origin(choice) is tuple for choice in choices):
        return (0.7,) * 3
    if value is not None and type(None) in choices:
        return None
    return Path("elsewhere") if Path in choices else next(choice for choice in _flat(choices) if choice != value)


def _flat(choices: tuple[Any, ...]) -> list[Any]:
    return [word for choice in choices for word in (typing.get_args(choice) or (choice,))]


@pytest.mark.parametrize("name", NAMES)
def test_every_used_option_but_the_machine_s_is_in_the_hash(name: str) -> None:
    settings = recipe(name)
    for each, value in settings.used().items():
        option = settings.schema.options[each]
        try:
            other = settings.replace(**{each: other_value(each, value, option.type)})
        except ValueError:
            assert (name.split("_")[0], each) == ("imagenet", "multiplicity")
            continue
        assert (other.hash != settings.hash) == (option.role != "machine"), each


def test_the_hash_is_of_what_is_computed_and_not_of_the_recipe() -> None:
    assert recipe("digits").hash == recipe("digits", queue=512, temperature=3.0, monitor_every=0, workers=0).hash
    symmetric = recipe("cifar10", method="moco", symmetric=True)
    assert (
        symmetric.hash
        == symmetric.replace(key_statistics="past").hash
        != symmetric.replace(key_statistics="batch").hash
    )
    register_recipe("same_digits", summary="Digits.", **dict(RECIPES["digits"].value.settings))
    try:
        assert recipe("same_digits").hash == recipe("digits").hash
    finally:
        RECIPES.unregister("same_digits")


def test_settings_that_compute_the_same_do_not_differ() -> None:
    settings = recipe("cifar10", method="moco", symmetric=True)
    same = settings.replace(key_statistics="past", device="cpu", data_dir=Path("here"), temperature=3.0)
    assert (same.differences(settings), settings.differences(same)) == ("", "")
    other = settings.replace(key_statistics="batch", blur=0.5)
    assert other.differences(settings) == "key_statistics was past, is now batch; blur was 0.0, is now 0.5"
    assert settings.differences(settings.replace(method="simclr")).startswith("method was simclr, is now moco")


class Registered:
    """Toy methods, removed after the test."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def __call__(self, name: str, kind: type[MethodOptions]) -> None:
        register_method(name, summary="A toy.")(kind)
        self.names.append(name)


@pytest.fixture
def register() -> Iterator[Registered]:
    registered = Registered()
    yield registered
    for name in registered.names:
        METHODS.unregister(name)


def test_a_method_that_is_registered_later_brings_its_options(register: Registered) -> None:
    @dataclass(frozen=True)
    class ToyOptions(MethodOptions):
        method: ClassVar[type[Method]] = SimCLR
        toy_width: int = option(3, "Width.", above=2)

    before = schema_of("images")
    register("toy", ToyOptions)
    assert recipe("digits", method="toy", toy_width=4)[ToyOptions] == ToyOptions(4)
    assert "method toy" in recipe("digits", toy_width=4).unused()["toy_width"]
    with pytest.raises(ValueError, match=r"toy_width must be above 2, .*1"):
        recipe("digits", method="toy", toy_width=1)
    assert recipe("digits").hash == HASHES["digits"]
    assert "toy_width" not in before.options
    METHODS.unregister(register.names.pop())
    assert "toy_width" not in schema_of("images").options


def test_an_option_that_two_owners_declare_differently_is_refused(register: Registered) -> None:
    @dataclass(frozen=True)
    class WideQueue(MethodOptions):
        method: ClassVar[type[Method]] = SimCLR
        queue: float = option(0.5, "Another queue.")

    register("wide_queue", WideQueue)
    with pytest.raises(ValueError, match=r"queue of method wide_queue .*method moco"):
        recipe("digits")


def test_two_owners_may_share_a_declaration(register: Registered) -> None:
    @dataclass(frozen=True)
    class LongQueue(MoCoOptions):
        patience: int = option(2, "Epochs to wait.")

    register("long_queue", LongQueue)
    schema = Schema(TASKS["images"])
    assert schema.owner_titles("queue") == "method moco, long_queue"
    assert recipe("digits", method="long_queue", queue=300).unused() == {}


@pytest.mark.parametrize("task", sorted(TASKS))
def test_every_option_says_what_it_does(task: str) -> None:
    for each in schema_of(task).options.values():
        assert each.help.endswith((".", ")")), each.name
        assert each.help[0].isupper() or each.name in ("precision", "compile", "shift"), each.name


def test_a_recipe_is_checked_and_converted_as_changes_are() -> None:
    register_recipe("toy", summary="", dataset="digits", warmup_epochs=5, crop_scale=[0.4, 1.0], epcohs=3)
    try:
        with pytest.raises(ValueError, match=r"epcohs.*epochs"):
            recipe("toy")
        register_recipe("toy_whole", summary="", dataset="digits", warmup_epochs=5, crop_scale=[0.4, 1.0])
        register_recipe("toy_float", summary="", dataset="digits", warmup_epochs=5.0, crop_scale=(0.4, 1.0))
        assert recipe("toy_whole").hash == recipe("toy_float").hash
        register_recipe("toy_task", summary="", task="txt")
        with pytest.raises(ValueError, match=r"txt.*text"):
            recipe("toy_task")
    finally:
        for entry in [entry.name for entry in RECIPES if entry.name.startswith("toy")]:
            RECIPES.unregister(entry)


def test_settings_of_a_recipe_that_is_not_registered_any_more_can_be_read() -> None:
    register_recipe("toy", summary="", dataset="digits", encoder="small_conv", epochs=3)
    settings = recipe("toy", divergence="js")
    saved = settings.to_json()
    RECIPES.unregister("toy")
    found = Settings.from_json("toy", saved, "images")
    assert (found.hash, found.epochs, found.divergence) == (settings.hash, 3, "js")
    assert found.replace(workers=1).epochs == 3
    assert pickle.loads(pickle.dumps(found)) == found


def test_an_option_may_not_have_the_name_of_an_attribute_of_settings() -> None:
    @dataclasses.dataclass(frozen=True)
    class Bad(MethodOptions):
        method = SimCLR
        values: int = option(3, "Hides the attribute.")

    METHODS.register("bad", summary="")(Bad)
    try:
        with pytest.raises(ValueError, match=r"values.*method bad"):
            recipe("digits")
    finally:
        METHODS.unregister("bad")
