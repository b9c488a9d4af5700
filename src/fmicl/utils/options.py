"""Options: fields of frozen dataclasses with a help text and a role, from which the command line is derived.

A thing that is configured (a method, an objective, a divergence, the optimiser) keeps its options in a frozen dataclass
beside it, whose fields are declared by :func:`option`. Everything else follows from these declarations: command-line
options, `--help`, checks of types and bounds, JSON, sweeps, what may differ when a run resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import operator
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

Role = Literal["compute", "rounding", "location", "machine"]
"""What a change of an option changes: what is computed, only its rounding, where files are, or nothing of the result.

A resumed run may change all but "compute". A run's identity (its hash) consists of all but "machine".
"""


def option(
    default: Any,
    help: str,
    *,
    role: Role = "compute",
    above: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    at_most: float | None = None,
) -> Any:
    """Declare a field of an options dataclass.

    Args:
        default: its value unless a recipe or the user says otherwise.
        help: one or two sentences for `--help`.
        role: see :data:`Role`.
        above: lower bound of a number, or of each number of a tuple, itself not allowed. Bounded or not, numbers must
            be finite; None and text have no bounds.
        at_least: lower bound, itself allowed.
        below: upper bound, itself not allowed.
        at_most: upper bound, itself allowed.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class QueueOptions(Options):
        ...     queue: int = option(4096, "Negatives that are kept from past batches.", above=0)
        >>> QueueOptions().queue, options_of(QueueOptions)[0].help
        (4096, 'Negatives that are kept from past batches.')
        >>> QueueOptions(queue=0)
        Traceback (most recent call last):
        ...
        ValueError: queue must be above 0, but it is 0
    """
    bounds = {"above": above, "at least": at_least, "below": below, "at most": at_most}
    known = {words: bound for words, bound in bounds.items() if bound is not None}
    return dataclasses.field(default=default, metadata={"help": " ".join(help.split()), "role": role, "bounds": known})


def fraction(default: Any, help: str, *, role: Role = "compute") -> Any:
    """Declare an option between 0 and 1, such as a probability."""
    return option(default, help, role=role, at_least=0, at_most=1)


@dataclasses.dataclass(frozen=True)
class Option:
    """A declared option: name, type, default, help, role and bounds."""

    name: str
    type: Any
    default: Any
    help: str
    role: Role
    bounds: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def flag(self) -> str:
        """The command-line flag.

        Example:
            >>> Option("batch_size", int, 256, "", "compute").flag
            '--batch-size'
        """
        return f"--{self.name.replace('_', '-')}"

    def check(self, value: Any) -> None:
        """Raise ValueError for a value of a wrong type, out of bounds or not finite.

        Example:
            >>> Option("flip", float, 0.5, "", "compute", {"at least": 0, "at most": 1}).check(2.0)
            Traceback (most recent call last):
            ...
            ValueError: flip must be at least 0 and at most 1, but it is 2.0
        """
        check_types(self.name, value, self.type)
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, numbers.Real):
                continue
            finite = math.isfinite(number)
            if not finite or not all(_HOLDS[words](number, bound) for words, bound in self.bounds.items()):
                allowed = [f"{words} {bound}" for words, bound in self.bounds.items()] + ["finite"] * (not finite)
                raise ValueError(f"{self.name} must be {' and '.join(allowed)}, but it is {value}")


_HOLDS = {"above": operator.gt, "at least": operator.ge, "below": operator.lt, "at most": operator.le}


class Options:
    """Base class of options dataclasses: the value of every option is checked.

    Subclasses that check more, such as one option against another, extend ``__post_init__``.

    Raises:
        ValueError: an option has a wrong type or is out of range; the message names it.
    """

    def __post_init__(self) -> None:
        """Check types and bounds."""
        kind: Any = type(self)
        for each in options_of(kind):
            each.check(getattr(self, each.name))


@functools.cache
def options_of(kind: Any) -> tuple[Option, ...]:
    """The options that a dataclass declares, in their order; fields without a help text are none."""
    hints = typing.get_type_hints(kind)
    return tuple(
        Option(field.name, hints[field.name], field.default, **field.metadata)
        for field in dataclasses.fields(kind)
        if "help" in field.metadata
    )


def check_types(name: str, value: Any, hint: Any) -> None:
    """Raise ValueError for a value that a number, truth value or Literal option can't take; others are not checked.

    Example:
        >>> check_types("optimizer", "adam", Literal["sgd", "adamw"])
        Traceback (most recent call last):
        ...
        ValueError: optimizer must be 'sgd' or 'adamw', but it is 'adam'
    """
    choices = _choices(hint)
    if choices is None or any(_fits(value, choice) for choice in choices):
        return
    words = [word for choice in choices for word in _words(choice)]
    expected = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
    raise ValueError(f"{name} must be {expected}, but it is {value!r}")


def _choices(hint: Any) -> tuple[Any, ...] | None:
    union = typing.get_origin(hint) in (typing.Union, types.UnionType)
    choices = typing.get_args(hint) if union else (hint,)
    checked = all(choice in _NUMBERS or typing.get_origin(choice) is typing.Literal for choice in choices)
    return choices if checked else None


_NUMBERS: dict[Any, tuple[Any, str]] = {
    bool: (bool, "True or False"),
    int: (numbers.Integral, "a whole number"),
    float: (numbers.Real, "a number"),
    type(None): (type(None), "None"),
}


def _fits(value: Any, choice: Any) -> bool:
    if typing.get_origin(choice) is typing.Literal:
        return value in typing.get_args(choice)
    return isinstance(value, _NUMBERS[choice][0]) and isinstance(value, bool) == (choice is bool)


def _words(choice: Any) -> list[str]:
    return [repr(word) for word in typing.get_args(choice)] or [_NUMBERS[choice][1]]
