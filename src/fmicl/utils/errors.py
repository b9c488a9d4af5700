"""Exceptions that several packages raise or handle; without torch, so that the command line starts quickly."""

from __future__ import annotations

import signal


class NonFiniteError(RuntimeError):
    """The loss, or a weight, is not a finite number."""


class BatchTooLargeError(ValueError):
    """A step needs more memory than there is."""


class DiskFullError(OSError):
    """There is no space left to write a file."""


class Stopped(KeyboardInterrupt):
    """A training run was stopped by Ctrl-C, SIGTERM or SIGHUP.

    Args:
        message: what is left of it; "" if another process says so.
        number: the signal.
    """

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = signal.Signals(number)
