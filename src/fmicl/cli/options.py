"""Command-line options derived from a schema: one flag per option, grouped in `--help` by owner."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import tyro

from fmicl.config import Schema
from fmicl.utils.options import Option

GROUP = "group_"
"""Prefix of the fields that hold groups of options."""


def options_class(base: type, schema: Schema, values: Mapping[str, Any], *, several: bool = False) -> Any:
    """A dataclass for tyro: the fields of a base class, and one for each group of options, whose fields are these.

    Args:
        base: a frozen, keyword-only dataclass with the command's own options.
        schema: the options.
        values: their defaults on the command line.
        several: whether each option takes several values, for a grid.

    Example:
        >>> from fmicl.config import recipe
        >>> Base = dataclasses.make_dataclass("Base", [], frozen=True, kw_only=True)
        >>> settings = recipe("digits")
        >>> parsed = tyro.cli(options_class(Base, settings.schema, settings.values), args=["--queue", "8"])
        >>> flat_values(parsed)["queue"]
        8
    """
    members: dict[str, list[Option]] = {}
    for name, option in schema.options.items():
        members.setdefault(schema.owner_titles(name), []).append(option)
    fields = []
    for number, (title, options) in enumerate(members.items()):
        group = dataclasses.make_dataclass(
            "Options", [_field(option, values[option.name], several) for option in options], frozen=True, kw_only=True
        )
        group.__doc__ = ""
        kind = Annotated[group, tyro.conf.arg(name=title), tyro.conf.OmitArgPrefixes]  # type: ignore[valid-type]
        fields.append((f"{GROUP}{number}", kind, dataclasses.field(default_factory=group)))
    return dataclasses.make_dataclass(base.__name__, fields, bases=(base,), frozen=True, kw_only=True)


def _field(option: Option, value: Any, several: bool) -> tuple[str, Any, Any]:
    words = option.help
    kind = option.type
    if several and not takes_any_number(kind):
        kind, value = types.GenericAlias(tuple, (kind, ...)), (value,)
        words = f"{words} (--no-{option.flag[2:]}: False)" if option.type is bool else words
    return option.name, Annotated[kind, tyro.conf.arg(help=words)], value


def takes_any_number(hint: Any) -> bool:
    """Whether one value of this type is a sequence of any length, so that there can't be several on a command line."""
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(takes_any_number(choice) for choice in typing.get_args(hint))
    return origin in (list, set, frozenset, dict) or (origin is tuple and ... in typing.get_args(hint))


def flat_values(parsed: Any) -> dict[str, Any]:
    """The options of all groups by name."""
    groups = (getattr(parsed, field.name) for field in dataclasses.fields(parsed) if field.name.startswith(GROUP))
    return {field.name: getattr(group, field.name) for group in groups for field in dataclasses.fields(group)}


def expand_negated_flags(words: Sequence[str], schema: Schema) -> list[str]:
    """``--no-FLAG`` as ``--FLAG False``: a grid takes values of booleans, and `fmicl train` these flags.

    Example:
        >>> from fmicl.config import schema_of
        >>> expand_negated_flags(["--no-baselines", "--seed", "0", "1"], schema_of("images"))
        ['--baselines', 'False', '--seed', '0', '1']
    """
    found: list[str] = []
    for word in words:
        name = word[5:].replace("-", "_") if word.startswith(("--no-", "--no_")) else ""
        option = schema.options.get(name)
        found += [option.flag, "False"] if option is not None and option.type is bool else [word]
    return found
