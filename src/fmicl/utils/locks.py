"""File locks between processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

LOCK_NAME = ".lock"
"""Name of the lock file in a locked folder; it is not removed."""


@contextlib.contextmanager
def wait_for_lock(file: Path) -> Iterator[None]:
    """Hold a lock file, after waiting until no other process does; the system releases that of a killed process.

    Without file locks (Windows, some network file systems) this doesn't wait.

    Raises:
        OSError: the file can't be created.

    Example:
        >>> import tempfile
        >>> with wait_for_lock(Path(tempfile.mkdtemp()) / ".work.lock"):
        ...     pass
    """
    with file.open("wb") as lock:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def lock_folder(folder: Path, message: str, *, inheritable: bool = False) -> Iterator[int | None]:
    """Hold the lock of a folder until this block or the process ends, or fail at once if another process has it.

    Args:
        folder: an existing folder.
        message: the error if another process has it.
        inheritable: let child processes that inherit the lock's descriptor keep it after this block.

    Yields:
        The lock's descriptor; None if the system or the file system has no locks.

    Raises:
        ValueError: another process has it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with lock_folder(folder, "in use"), lock_folder(folder, "in use"):
        ...     pass
        Traceback (most recent call last):
        ...
        ValueError: in use
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield None
        return
    descriptor = os.open(folder / LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(message) from None
        except OSError:  # some network file systems have no locks
            held = False
        try:
            yield descriptor if held else None
        finally:
            if held and not inheritable:  # closing alone would leave it to children that have the descriptor
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
