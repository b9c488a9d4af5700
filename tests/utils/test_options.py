"""Declared options: what is an option, which types fit, which ranges are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal

import pytest

from fmicl.utils.options import Option, Options, check_types, fraction, option, options_of


@dataclass(frozen=True)
class Base(Options):
    width: int = option(3, "Its width.")
    names: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Derived(Base):
    rate: float | None = option(
        None,
        """Its rate,
        over two lines.""",
        role="machine",
    )


def test_options_are_the_declared_fields_with_those_of_base_classes_first() -> None:
    assert options_of(Derived) == (
        Option("width", int, 3, "Its width.", "compute"),
        Option("rate", float | None, None, "Its rate, over two lines.", "machine"),
    )
    assert [each.flag for each in options_of(Derived)] == ["--width", "--rate"]


FITTING: list[tuple[Any, list[Any], list[Any]]] = [
    (bool, [True, False], [1, "True", None]),
    (int, [3, -1], [3.0, True, "3", None]),
    (float, [3, 0.5, math.inf], [True, "3", None]),
    (float | None, [0.5, None], ["None", False]),
    (Literal["a", "b"], ["a"], ["c", "", None]),
    (float | Literal["auto"], [1.0, "auto"], ["automatic", None]),
    (Literal["a"] | None, ["a", None], ["b"]),
]


@pytest.mark.parametrize(("hint", "value"), [(hint, value) for hint, fitting, _ in FITTING for value in fitting])
def test_values_that_fit(hint: Any, value: Any) -> None:
    check_types("thing", value, hint)


@pytest.mark.parametrize(("hint", "value"), [(hint, value) for hint, _, wrong in FITTING for value in wrong])
def test_values_that_do_not_fit_are_refused_by_name(hint: Any, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"thing .*{value!r}"):
        check_types("thing", value, hint)


def test_other_types_are_not_checked() -> None:
    check_types("thing", 3, tuple[float, float])
    check_types("thing", 3, str)


def test_all_fields_are_checked() -> None:
    Derived(rate=0.5)
    with pytest.raises(ValueError, match=r"width .*2\.5"):
        Derived(width=2.5)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("declared", "allowed", "refused"),
    [
        (option(1, "", above=0), [1, 0.1], [0, -1.0, math.nan, math.inf]),
        (option(1, "", at_least=0), [0, 0.1], [-0.1, math.nan, math.inf]),
        (option(0.1, "", at_least=0, below=1), [0, 0.9], [-0.1, 1, math.nan]),
        (fraction(1, ""), [0, 1, 0.5, None], [-0.1, 1.1, math.nan]),
        (option(1, ""), [-1.0, 0, None], [math.nan, -math.inf]),
    ],
)
def test_bounds(declared: Any, allowed: list[Any], refused: list[Any]) -> None:
    rate = Option("rate", float | None, declared.default, **declared.metadata)
    for value in allowed:
        rate.check(value)
    for value in refused:
        with pytest.raises(ValueError, match=f"rate .*{value}"):
            rate.check(value)


def test_each_number_of_a_tuple_is_bounded_and_words_are_not() -> None:
    pair = Option("pair", tuple[float, float], (0.1, 1.0), "", "compute", {"above": 0, "at most": 1})
    pair.check((0.1, 1.0))
    for value in ((0.0, 1.0), (0.1, 1.5), (0.1, math.inf)):
        with pytest.raises(ValueError, match=r"pair .*above 0 and at most 1"):
            pair.check(value)
    Option("mu", float | Literal["normalised"], 1.0, "", "compute", {"above": 0}).check("normalised")
