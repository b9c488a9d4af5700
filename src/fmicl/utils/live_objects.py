"""Lookup of live objects by their identity, which is all that code traced by torch.compile can say of an object."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

import torch

T = TypeVar("T")

_LIVE: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def remember(value: T) -> T:
    """Let `find_object` know an object for as long as it lives. What torch.compile makes while it traces is no object.

    Example:
        >>> class Thing: ...
        >>> thing = remember(Thing())
        >>> find_object(id(thing)) is thing
        True
    """
    if not torch.compiler.is_dynamo_compiling():
        _LIVE[id(value)] = value
    return value


def find_object(identity: int) -> Any | None:
    """The object of this identity; None if it isn't known."""
    return _LIVE.get(identity)
