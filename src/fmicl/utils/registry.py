"""Registries: named entries with a one-line summary, near names in errors, and third-party plugins."""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Generic, TypeVar

PLUGINS = "fmicl.plugins"
"""Entry-point group of third-party packages: each entry point names a module that registers on import."""

FEW_NAMES = 20
"""Above this number, an error lists the near names only."""

T = TypeVar("T")


@dataclass(frozen=True)
class Entry(Generic[T]):
    """A registered thing: the name users type, a one-line summary, and the thing itself."""

    name: str
    summary: str
    value: T


class Registry(Generic[T]):
    """Named entries of one kind, in the order of registration.

    Args:
        kind: what an entry is, singular, for messages: "method".

    Example:
        >>> registry = Registry[type]("number")
        >>> @registry.register("int", summary="Whole numbers.")
        ... class Whole(int): ...
        >>> registry["int"].value is Whole, registry["int"].summary, registry.names("i*")
        (True, 'Whole numbers.', ['int'])
        >>> registry["itn"]
        Traceback (most recent call last):
        ...
        ValueError: unknown number 'itn'; did you mean 'int'? known: int
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str, *, summary: str) -> Callable[[T], T]:
        """Decorator that registers a value under a name.

        Raises:
            ValueError: the name is taken by something else.
        """

        def add(value: T) -> T:
            taken = self._entries.get(name)
            if taken is not None and _origin(taken.value) != _origin(value):  # a module may be imported twice
                raise ValueError(f"there is a {self.kind} {name!r} already ({taken.value!r}): choose another name")
            self._entries[name] = Entry(name, summary, value)
            return value

        return add

    def unregister(self, name: str) -> None:
        """Remove an entry, such as one that a test has registered."""
        del self._entries[name]

    def names(self, pattern: str = "*") -> list[str]:
        """The names that match a shell-style pattern."""
        load_plugins()
        return [name for name in self._entries if fnmatch.fnmatch(name, pattern)]

    def table(self) -> str:
        """Names and summaries as a Markdown table."""
        rows = [f"| `{entry.name}` | {entry.summary} |" for entry in self]
        return "\n".join([f"| {self.kind} | |", "|---|---|", *rows])

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries:
            load_plugins()
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        return self._entries[name]

    def __contains__(self, name: object) -> bool:
        load_plugins()
        return name in self._entries

    def __iter__(self) -> Iterator[Entry[T]]:
        load_plugins()
        return iter(list(self._entries.values()))

    def __len__(self) -> int:
        return len(self._entries)


def unknown_name(kind: str, name: object, known_names: Iterable[str]) -> ValueError:
    """The error for an unknown name, with the near ones.

    Example:
        >>> unknown_name("recipe", "cifar", ["cifar10", "digits"])
        ValueError("unknown recipe 'cifar'; did you mean 'cifar10'? known: cifar10, digits")
    """
    names = list(known_names)
    near = difflib.get_close_matches(str(name).lower().replace("-", "_"), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(map(repr, near))}?" if near else ""
    known = f"known: {', '.join(names)}" if not near or len(names) <= FEW_NAMES else ""
    return ValueError(f"unknown {kind} {name!r}; {' '.join(part for part in (hint, known) if part)}")


def _origin(value: object) -> tuple[object, object]:
    return getattr(value, "__module__", value), getattr(value, "__qualname__", value)


_state = {"loading": False, "loaded": False}


def load_plugins() -> None:
    """Import the modules behind the entry points `fmicl.plugins`, once per process; registries call it when used.

    Raises:
        ValueError: a plugin can't be imported; the message names its distribution.
    """
    if _state["loaded"] or _state["loading"]:  # a plugin may use registries while it is imported
        return
    _state["loading"] = True
    try:
        for point in metadata.entry_points(group=PLUGINS):
            try:
                point.load()
            except Exception as error:
                package = point.dist.name if point.dist is not None else "an unknown package"
                raise ValueError(f"the plugin {point.name} of {package} can't be loaded: {error}") from error
        _state["loaded"] = True
    finally:
        _state["loading"] = False
