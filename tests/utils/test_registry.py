"""Registries: names, near names in errors, second registrations, plugins that can't be loaded."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest

from fmicl.utils import registry
from fmicl.utils.registry import PLUGINS, Registry, load_plugins, unknown_name


def colours() -> Registry[type]:
    made = Registry[type]("colour")
    for name in ("red", "dark_red", "green"):
        made.register(name, summary=f"It is {name}.")(type(name, (), {}))
    return made


def test_entries_keep_their_order_and_are_found_by_pattern() -> None:
    made = colours()
    assert [entry.name for entry in made] == made.names() == ["red", "dark_red", "green"]
    assert made.names("*red") == ["red", "dark_red"]
    assert (len(made), "red" in made, "blue" in made) == (3, True, False)
    assert made["green"].summary == "It is green."
    made.unregister("red")
    assert made.names() == ["dark_red", "green"]


def test_an_unknown_name_lists_the_near_ones_and_all_others() -> None:
    with pytest.raises(ValueError, match=r"unknown colour 'gren'; did you mean 'green'.* red, dark_red, green"):
        colours()["gren"]
    with pytest.raises(ValueError, match="'dark_red'"):
        colours()["Dark-Red"]
    assert "did you mean" not in str(unknown_name("colour", "xyz", colours().names()))


def test_a_taken_name_is_refused_but_the_same_class_may_register_again() -> None:
    made = colours()
    with pytest.raises(ValueError, match="'red'"):
        made.register("red", summary="Another.")(type("other", (), {}))
    again = type("red", (), {})  # its module was imported a second time
    made.register("red", summary="Newer.")(again)
    assert (made["red"].value, made["red"].summary) == (again, "Newer.")


def test_a_plugin_that_can_not_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "broken_pack-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: broken-pack\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{PLUGINS}]\nbroken = no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setitem(registry._state, "loaded", False)
    assert "broken" in metadata.entry_points(group=PLUGINS).names
    with pytest.raises(ValueError, match=r"broken .*broken-pack.*no_such_module_anywhere"):
        load_plugins()
    with pytest.raises(ValueError, match="broken-pack"):  # and again, as long as it is broken
        colours().names()
