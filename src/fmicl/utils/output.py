"""Output to closed pipes and terminals, or to a full disk: `fmicl train ... | head -1` trains to the end."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

_LOST = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT)
"""Errors of a pipe without a reader, of a closed terminal, and of a log on a full disk."""


def open_missing_output() -> None:
    """Open the null device for output streams that were closed when Python started (`fmicl train digits >&-`)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 (open until the end)


@contextlib.contextmanager
def ignore_closed_output() -> Iterator[None]:
    """Discard what is printed in this block where it can't be written; other errors are raised as ever."""
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
    """A text stream that writes to the null device once its reader, or the space on its disk, is gone."""

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
            if error.errno not in _LOST:
                raise
            redirect_to_devnull(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
