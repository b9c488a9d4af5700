"""Output that outlives its reader: `fmicl train ... | head -1` trains to the end, also when nobody listens any more."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["outliving_readers", "to_nowhere"]

GONE = (errno.EPIPE, errno.EIO)
"""What writing to a pipe without a reader, and to a closed terminal, ends in."""


@contextlib.contextmanager
def outliving_readers() -> Iterator[None]:
    """In here, what is said to a closed pipe or terminal is lost without an error; other errors are errors as ever."""
    before = sys.stdout, sys.stderr
    unheard = [cast(TextIO, _Unheard(stream)) for stream in before]
    sys.stdout, sys.stderr = unheard
    try:
        yield
    finally:
        for stream in unheard:
            stream.flush()
        sys.stdout, sys.stderr = before


def to_nowhere(stream: TextIO) -> None:
    """Have a stream's file be the one that swallows everything, what it still holds included."""
    with contextlib.suppress(OSError, ValueError):  # no file of the system's own
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


class _Unheard:
    """A text stream that goes nowhere once its reader has left."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._survive():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._survive():
            self._stream.flush()

    @contextlib.contextmanager
    def _survive(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in GONE:
                raise
            to_nowhere(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
