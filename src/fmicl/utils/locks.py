"""Folders that one process at a time works in, and work that one process does while others wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LOCK", "locked", "one_at_a_time"]

LOCK = ".lock"
"""The file in a folder that is locked; it stays there."""


@contextlib.contextmanager
def one_at_a_time(file: Path) -> Iterator[None]:
    """Wait until no other process is in such a block with this file, which is made and stays; a killed one is in none.

    Without file locks (Windows, some network disks) nobody waits.

    Raises:
        OSError: the file can't be made.

    Example:
        >>> import tempfile
        >>> with one_at_a_time(Path(tempfile.mkdtemp()) / ".work.lock"):
        ...     pass
    """
    with file.open("wb") as lock:
        with contextlib.suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def locked(folder: Path, taken: str, *, inherited: bool = False) -> Iterator[int | None]:
    """Hold a folder, until this block or the process ends, whatever ends it.

    Args:
        folder: the folder, which must be there.
        taken: what to say if another process has it.
        inherited: whether child processes that have the lock's descriptor keep it after this block.

    Yields:
        The lock's descriptor; None where the system or the file system has no locks, and nothing is held.

    Raises:
        ValueError: another process has it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with locked(folder, "it is taken"), locked(folder, "it is taken"):
        ...     pass
        Traceback (most recent call last):
        ...
        ValueError: it is taken
    """
    try:
        import fcntl
    except ImportError:  # not on Windows
        yield None
        return
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        held = True
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(taken) from None
        except OSError:  # some network file systems have none
            held = False
        try:
            yield descriptor if held else None
        finally:
            if held and not inherited:  # a worker that outlives the block has the descriptor too
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)
