"""Random values of options, by their type."""

from __future__ import annotations

import types
import typing
from pathlib import Path
from typing import Any, Literal

from hypothesis import strategies as st

from fmicl.config import Settings, recipe
from fmicl.utils.options import Option

WORDS = st.text("abcxyz019_.", min_size=1, max_size=8)
NUMBERS = st.one_of(st.integers(-2, 100), st.floats(0, 1), st.floats(-1e3, 1e3), st.floats(allow_nan=False))


def values_of(hint: Any) -> st.SearchStrategy[Any]:
    """Values of a type; many of them are out of their option's range."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return st.sampled_from(arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(values_of(choice) for choice in arguments))
    if origin is tuple and ... in arguments:
        return st.lists(values_of(arguments[0]), min_size=1, max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*(values_of(argument) for argument in arguments))
    simple: dict[Any, st.SearchStrategy[Any]] = {
        bool: st.booleans(),
        int: st.one_of(st.integers(-1, 20), st.integers()),
        float: NUMBERS,
        str: WORDS,
        Path: st.lists(WORDS, min_size=1, max_size=3).map(lambda names: Path(*names)),
        type(None): st.none(),
    }
    return simple[hint]


def other_values(option: Option) -> st.SearchStrategy[Any]:
    """Values of an option that are not its default."""
    return values_of(option.type).filter(lambda value: value != option.default)


@st.composite
def settings_of(draw: st.DrawFn, name: str) -> Settings:
    """A recipe with some options changed; changes that are refused are left out."""
    settings = recipe(name)
    options = settings.schema.options
    choices = [each for each in ("objective", "divergence", "method") if draw(st.booleans())]
    others = draw(st.lists(st.sampled_from(sorted(options)), max_size=8, unique=True))
    for each in [*choices, *others]:
        value = draw(values_of(options[each].type))
        try:
            settings = settings.replace(**{each: value})
        except ValueError:
            continue
    return settings
