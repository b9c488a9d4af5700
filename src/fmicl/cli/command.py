"""Commands whose options are the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import tyro


def command(name: str, kind: type[Callable[[], int | None]]) -> Callable[[Sequence[str]], int]:
    """``run(words)`` of a command: parses the words as fields of the dataclass, calls it, and returns the exit code."""

    def run(words: Sequence[str]) -> int:
        return tyro.cli(kind, prog=f"fmicl {name}", args=list(words))() or 0

    return run
