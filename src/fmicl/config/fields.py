"""The fields of a recipe under the names that the command line has for them, and the options that make one of another.

All of it is derived from the recipe's dataclass, so nothing is listed twice. Nothing here imports torch.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import itertools
import numbers
import re
import textwrap
import types
import typing
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["Leaf", "arguments", "field_words", "leaves", "require_known", "require_types"]

_LEAVES: dict[Any, tuple[Leaf, ...]] = {}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A field of a recipe, or of a dataclass inside it, under the name that the command line has for it."""

    name: str
    path: tuple[str, ...]
    type: Any
    help: str

    @property
    def several(self) -> bool:
        """Whether the field can have several values: not if one value is a sequence of any length itself."""
        return not _open_ended(self.type)

    def of(self, recipe: Any) -> Any:
        """The field's value in a recipe."""
        return functools.reduce(getattr, self.path, recipe)


def leaves(kind: type) -> tuple[Leaf, ...]:
    """The fields of a recipe's class, those of dataclasses inside it among them, in their order.

    Example:
        >>> from fmicl.config.recipes import Recipe
        >>> [leaf.path for leaf in leaves(Recipe) if leaf.name in ("seed", "blur")]
        [('seed',), ('views', 'blur')]
    """
    if kind not in _LEAVES:
        _LEAVES[kind] = tuple(_leaves(kind, ()))
    return _LEAVES[kind]


def _leaves(kind: Any, path: tuple[str, ...]) -> Iterator[Leaf]:
    hints = typing.get_type_hints(kind)
    words = field_words(kind)
    for field in dataclasses.fields(kind):
        if not field.init:
            continue
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint):
            yield from _leaves(hint, (*path, field.name))
        else:
            yield Leaf(field.name, (*path, field.name), hint, words.get(field.name, ""))


def field_words(kind: type) -> dict[str, str]:
    """What a dataclass and those it inherits from say of their fields: a string after it, or a line under ``Args:``."""
    found: dict[str, str] = {}
    for part in reversed(kind.__mro__[:-1]):
        declared = dataclasses.fields(part) if dataclasses.is_dataclass(part) else ()
        found |= {field.name: field.metadata["help"] for field in declared if "help" in field.metadata}
        documented = re.search(r"\n *Args:\n(.*?)(?:\n\n|\Z)", part.__doc__ or "", re.DOTALL)
        if documented:
            for name, words in re.findall(r"^ +(\w+): (.*(?:\n {9,}.*)*)", documented[1], re.MULTILINE):
                found[name] = " ".join(words.split())
        with contextlib.suppress(OSError, TypeError):  # no source at hand
            body = ast.parse(textwrap.dedent(inspect.getsource(part))).body[0]
            assert isinstance(body, ast.ClassDef)
            for field, after in itertools.pairwise(body.body):
                if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
                    continue
                if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                    found[field.target.id] = " ".join(str(after.value.value).split())
    return found


def _open_ended(hint: Any) -> bool:
    origin = typing.get_origin(hint)
    if origin in (typing.Union, types.UnionType):
        return any(_open_ended(choice) for choice in typing.get_args(hint))
    return origin in (list, set, frozenset, dict) or (origin is tuple and ... in typing.get_args(hint))


def require_known(kind: Any, names: Iterable[str]) -> None:
    """Refuse names that are no fields of a dataclass.

    Raises:
        ValueError: there are such; it has them.
    """
    unknown = set(names) - {field.name for field in dataclasses.fields(kind)}
    if unknown:
        raise ValueError(f"settings hold fields that this version of fmicl doesn't know: {', '.join(sorted(unknown))}")


def require_types(settings: Any) -> None:
    """Refuse what can't be meant by the fields of a dataclass that are a number, a truth value or one of some words.

    A word that is none of them would else be taken for the one that stands last where it is asked for.

    Raises:
        ValueError: there is one; it has the field's name, and what would do.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> dataclasses.replace(RECIPES["digits"].recipe, optimizer="adam")
        Traceback (most recent call last):
        ...
        ValueError: optimizer must be 'sgd' or 'adamw', but it is 'adam'
    """
    kind: Any = type(settings)
    for name, choices in _choices(kind).items():
        value = getattr(settings, name)
        if not any(_fits(value, choice) for choice in choices):
            words = [word for choice in choices for word in _words(choice)]
            said = " or ".join(part for part in (", ".join(words[:-1]), words[-1]) if part)
            raise ValueError(f"{name} must be {said}, but it is {value!r}")


@functools.cache
def _choices(kind: Any) -> dict[str, tuple[Any, ...]]:
    """Of each field that can be checked, the types that it may have."""
    found, hints = {}, typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        union = typing.get_origin(hint) in (typing.Union, types.UnionType)
        choices = typing.get_args(hint) if union else (hint,)
        if all(choice in _NUMBERS or typing.get_origin(choice) is typing.Literal for choice in choices):
            found[field.name] = choices
    return found


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


def arguments(recipe: Any, default: Any) -> list[str]:
    """The options by which ``fmicl train`` makes a recipe out of another one.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> default = RECIPES["digits"].recipe
        >>> arguments(dataclasses.replace(default, divergence="js", baselines=False, shift="optimal"), default)
        ['--divergence', 'js', '--shift', 'optimal', '--no-baselines']
    """
    words: list[str] = []
    for leaf in leaves(type(recipe)):
        value = leaf.of(recipe)
        if value == leaf.of(default):
            continue
        option = leaf.name.replace("_", "-")
        if isinstance(value, bool) and leaf.type is bool:
            words.append(f"--{option}" if value else f"--no-{option}")
        elif isinstance(value, list | tuple):
            words += [f"--{option}", *(str(x) for x in value)]
        else:
            words += [f"--{option}", str(value)]
    return words
