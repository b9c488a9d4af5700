"""Commands whose options are the fields of a dataclass: evaluate, embed and report."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tyro


def command(kind: type[Callable[[], None]]) -> Callable[[Sequence[str]], int]:
    """``run(words)`` of a command: parses the words as fields of the dataclass, and calls it.

    Args:
        kind: the dataclass; its name, in lower case, is that of the command.
    """

    def run(words: Sequence[str]) -> int:
        tyro.cli(kind, prog=f"fmicl {kind.__name__.lower()}", args=list(words))()
        return 0

    return run
