"""The registry of divergences: make one by name, list them, add your own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, TypeAlias, TypeVar

from fmicl.divergences.base import Divergence
from fmicl.utils.live_objects import remember
from fmicl.utils.options import options_of
from fmicl.utils.registry import Registry

DIVERGENCES: Registry[type[Divergence]] = Registry("divergence")

DivergenceName: TypeAlias = (
    Literal["kl", "reverse_kl", "js", "pearson", "squared_hellinger", "neyman", "jeffrey", "tsallis", "vlc"] | str
)
"""Name of a divergence; the literals are those of the catalogue, for completion in editors."""

T = TypeVar("T", bound=type[Divergence])


def register_divergence(name: str, *, summary: str) -> Callable[[T], T]:
    """Class decorator that registers a divergence, and sets its `name`.

    The class is a dataclass. Its parameters are the fields that :func:`fmicl.utils.options.option` declares.

    Raises:
        ValueError: the name is taken.
        TypeError: the class is not a dataclass.

    Example:
        >>> from dataclasses import dataclass
        >>> @register_divergence("double_kl", summary="Twice Kullback-Leibler.")
        ... @dataclass(frozen=True)
        ... class DoubleKL(type(divergence("kl"))): ...
        >>> list_divergences("double*"), divergence("double_kl").name
        (['double_kl'], 'double_kl')
        >>> DIVERGENCES.unregister("double_kl")
    """

    def add(kind: T) -> T:
        if not dataclasses.is_dataclass(kind):
            raise TypeError(f"a divergence is registered as a dataclass, but {kind.__name__} is none: decorate it")
        DIVERGENCES.register(name, summary=summary)(kind)
        kind.name = name
        return kind

    return add


def list_divergences(pattern: str = "*", *, learned: bool = False) -> list[str]:
    """Names of the divergences that match a shell-style pattern.

    Args:
        pattern: such as "*kl".
        learned: list those whose f is trained too.

    Example:
        >>> list_divergences("*kl")
        ['kl', 'reverse_kl']
        >>> sorted(set(list_divergences(learned=True)) - set(list_divergences()))
        ['learned']
    """
    return [name for name in DIVERGENCES.names(pattern) if learned or not DIVERGENCES[name].value.learned]


def divergence(name: DivergenceName | Divergence, **parameters: Any) -> Divergence:
    """Make a divergence by name; a `Divergence` is returned as it is.

    Args:
        name: one of `list_divergences()`.
        parameters: of that divergence: `order` for tsallis, none for the others of the catalogue.

    Raises:
        ValueError: the name is unknown (the message has the near ones), or a parameter is out of range.
        TypeError: this divergence has no such parameter, or `name` is a function.

    Example:
        >>> divergence("tsallis", order=2.0)
        Tsallis(order=2.0)
    """
    if isinstance(name, Divergence):
        if parameters:
            raise TypeError(f"{name!r} is a divergence already and takes no parameters, got {sorted(parameters)}")
        return name
    if callable(name):
        raise TypeError("a function is not a divergence: make one of a convex f by fmicl.Divergence.from_generator(f)")
    kind = DIVERGENCES[name].value
    if not parameters:  # torch.compile can trace this line, but not the following ones
        return remember(kind())
    accepted = [option.name for option in options_of(kind)]
    unknown = sorted(set(parameters) - set(accepted))
    if unknown:
        takes = f"takes {', '.join(accepted)}" if accepted else "takes no parameters"
        raise TypeError(f"divergence {name!r} {takes}, got {', '.join(unknown)}")
    return remember(kind(**parameters))
