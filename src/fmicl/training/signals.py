"""Signal handling of training: Ctrl-C, SIGTERM and SIGHUP stop a run after the current step, with a checkpoint."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from fmicl.runs.folder import Run

STOP_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)
"""Signals that stop a run or a sweep."""


def how_to_continue(run: Run | None, *, stopped: bool = True) -> str:
    """What is left of a run that ended at any moment; None is a run without a folder.

    Example:
        >>> how_to_continue(None)
        'stopped; nothing was saved yet: the same command starts again'
    """
    if run is None:
        left = "nothing was saved yet: the same command starts again"
    elif not run.checkpoint.exists():
        left = "nothing was saved yet: --resume starts again"
    else:
        left = f"the same command with --resume continues from the last checkpoint in {run.path}"
    return f"stopped; {left}" if stopped else left


def replaceable_handlers() -> dict[int, Any]:
    """The handlers of :data:`STOP_SIGNALS`, except for signals that are ignored (as `nohup` does) and stay so.

    Example:
        >>> before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        >>> signal.SIGTERM in replaceable_handlers()
        False
        >>> _ = signal.signal(signal.SIGTERM, before)
    """
    found = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    return {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}


class StopSignals:
    """Remembers Ctrl-C, SIGTERM and SIGHUP instead of ending the process; a second Ctrl-C does end it.

    A handler of the caller's is called as well, and an ignored signal stays ignored. Python allows handlers in its main
    thread only: in others, nothing is remembered.

    Args:
        announce: whether to print what a second Ctrl-C does.

    Attributes:
        received: the first signal.
    """

    def __init__(self, *, announce: bool = True) -> None:
        self.announce = announce
        self.received: signal.Signals | None = None
        self._before = replaceable_handlers()

    def install(self) -> None:
        """Install the handlers."""
        self._set(dict.fromkeys(self._before, self._handle))

    def restore(self) -> None:
        """Restore the handlers from before."""
        self._set(self._before)

    @staticmethod
    def _set(handlers: dict[int, Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # not set by Python, which can't restore it
                    signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.received is not None
        self.received = self.received or signal.Signals(number)
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self.announce:
            # not print, which may be what was interrupted and is not re-entrant
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n")
