"""What ends training before its time: Ctrl-C, SIGTERM, or SIGHUP, by which a closed terminal takes its leave.

They are noted, and the run ends after the step under way, with a checkpoint.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType
from typing import Any

from fmicl.runs.folder import Run

__all__ = ["ENDS", "Signals", "Stopped", "handlers_to_replace", "what_is_left"]

ENDS = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP")
    if hasattr(signal, name)  # Windows has no SIGHUP
)
"""Signals by which a run or a sweep is asked to end."""


class Stopped(KeyboardInterrupt):
    """A training run was ended by Ctrl-C, SIGTERM or SIGHUP.

    Args:
        words: what is left of it; "" where another process says so.
        number: which of them it was.
    """

    def __init__(self, words: str, number: int = signal.SIGINT) -> None:
        super().__init__(words)
        self.number = signal.Signals(number)


def what_is_left(run: Run | None) -> str:
    """In words, what is left of a run that ended at any moment; None is one that has no folder yet.

    Example:
        >>> what_is_left(None)
        'stopped; nothing was saved yet: the same command starts again'
    """
    if run is None:
        return "stopped; nothing was saved yet: the same command starts again"
    if not run.checkpoint.exists():
        return "stopped; nothing was saved yet: --resume starts again"
    return f"stopped; the same command with --resume goes on from the last checkpoint in {run.path}"


def handlers_to_replace() -> dict[int, Any]:
    """The handlers of :data:`ENDS`, but for signals that are ignored, as `nohup` has it, and that are to stay so.

    Example:
        >>> before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
        >>> signal.SIGTERM in handlers_to_replace()
        False
        >>> _ = signal.signal(signal.SIGTERM, before)
    """
    found = {number: signal.getsignal(number) for number in ENDS}
    return {number: handler for number, handler in found.items() if handler is not signal.SIG_IGN}


class Signals:
    """Notes Ctrl-C, SIGTERM and SIGHUP where they would end the process; a second Ctrl-C does end it.

    A handler of the caller's own is called as well, and a signal that is ignored stays so. Python allows handlers in
    its main thread only: in others, nothing is noted.

    Args:
        tell: whether to say what a second Ctrl-C does.

    Attributes:
        noted: the signal that came first.
    """

    def __init__(self, *, tell: bool = True) -> None:
        self.tell = tell
        self.noted: signal.Signals | None = None
        self._before = handlers_to_replace()

    def listen(self) -> None:
        """From now on."""
        self._set(dict.fromkeys(self._before, self._note))

    def leave(self) -> None:
        """Put back what was there when this was made."""
        self._set(self._before)

    @staticmethod
    def _set(handlers: dict[int, Any]) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if handler is not None:  # not set by Python, which can't put it back
                    signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        again = self.noted is not None
        self.noted = self.noted or signal.Signals(number)
        before = self._before[number]
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)
        if number == signal.SIGINT and again:
            raise KeyboardInterrupt
        if number == signal.SIGINT and self.tell:
            # print may be what was interrupted, and doesn't bear being called within itself
            os.write(2, b"\nstopping after this step, with a checkpoint; Ctrl-C again stops at once\n")
