"""Options: fields of frozen dataclasses with a help text and a role, from which the command line is derived.

A thing that is configured (a method, an objective, a divergence, the optimiser) keeps its options in a frozen dataclass
beside it, whose fields are declared by :func:`option`. Everything else follows from these declarations: command-line
options, `--help`, type checks, JSON, sweeps, what may differ when a run resumes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import numbers
import types
import typing
from typing import Any, Literal

Role = Literal["compute", "rounding", "location", "machine"]
"""What a change of an option changes: what is computed, only its rounding, where files are, or nothing of the result.

A resumed run may change all but "compute". A run's identity (its hash) consists of all but "machine".
"""


def option(default: Any, help: str, *, role: Role = "compute") -> Any:
    """Declare a field of an options dataclass.

    Args:
        default: its value unless a recipe or the user says otherwise.
        help: one or two sentences for `--help`.
        role: see :data:`Role`.

    Example:
        >>> @dataclasses.dataclass(frozen=True)
        ... class QueueOptions:
        ...     queue: int = option(4096, "Negatives that are kept from past batches.")
        >>> QueueOptions().queue, options_of(QueueOptions)[0].help
        (4096, 'Negatives that are kept from past batches.')
    """
    return dataclasses.field(default=default, metadata={"help": " ".join(help.split()), "role": role})


@dataclasses.dataclass(frozen=True)
class Option:
    """A declared option: name, type, default, help and role."""

    name: str
    type: Any
    default: Any
    help: str
    role: Role

    @property
    def flag(self) -> str:
        """The command-line flag.

        Example:
            >>> Option("batch_size", int, 256, "", "compute").flag
            '--batch-size'
        """
        return f"--{self.name.replace('_', '-')}"


@functools.cache
def options_of(kind: Any) -> tuple[Option, ...]:
    """The options that a dataclass declares, in their order; fields without a help text are none."""
    hints = typing.get_type_hints(kind)
    return tuple(
        Option(field.name, hints[field.name], field.default, field.metadata["help"], field.metadata["role"])
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


def check_fields(options: Any) -> None:
    """Apply :func:`check_types` to every option of an options dataclass."""
    kind: Any = type(options)
    for each in options_of(kind):
        check_types(each.name, getattr(options, each.name), each.type)


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


def require_positive_fields(options: Any, *names: str) -> None:
    """Raise ValueError for fields that are not positive, finite numbers."""
    for name in names:
        value = getattr(options, name)
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} must be positive{_and_finite(value)}, but it is {value}")


def _and_finite(value: float) -> str:
    return "" if math.isfinite(value) else ", and finite"


def require_at_least_zero(options: Any, *names: str) -> None:
    """Raise ValueError for fields that are negative or not finite."""
    for name in names:
        value = getattr(options, name)
        if not (math.isfinite(value) and value >= 0):
            raise ValueError(f"{name} must not be negative{_and_finite(value)}, but it is {value}")


def require_fraction(options: Any, *names: str) -> None:
    """Raise ValueError for fields that are neither None nor between 0 and 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 <= value <= 1:
            raise ValueError(f"{name} must lie in [0, 1], but it is {value}")
