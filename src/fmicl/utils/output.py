"""Output to closed pipes and terminals: `fmicl train ... | head -1` trains to the end."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

__all__ = ["ignore_closed_output", "redirect_to_devnull"]

_CLOSED = (errno.EPIPE, errno.EIO)  # errors of a pipe without a reader, and of a closed terminal


@contextlib.contextmanager
def ignore_closed_output() -> Iterator[None]:
    """Discard what is printed to a closed pipe or terminal in this block; other errors are raised as ever."""
    before = sys.stdout, sys.stderr
    tolerant = [cast(TextIO, _TolerantStream(stream)) for stream in before]
    sys.stdout, sys.stderr = tolerant
    try:
        yield
    finally:
        for stream in tolerant:
            stream.flush()
        sys.stdout, sys.stderr = before


def redirect_to_devnull(stream: TextIO) -> None:
    """Let a stream write to the null device, including what is still in its buffer."""
    with contextlib.suppress(OSError, ValueError):  # a stream without a file descriptor
        devnull = os.open(os.devnull, os.O_WRONLY)
        os.dup2(devnull, stream.fileno())
        os.close(devnull)


class _TolerantStream:
    """A text stream that writes to the null device once its reader is gone."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._ignore_closed():
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with self._ignore_closed():
            self._stream.flush()

    @contextlib.contextmanager
    def _ignore_closed(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _CLOSED:
                raise
            redirect_to_devnull(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
