"""Atomic file writes, JSON files, and checks that a file can be written."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from fmicl.utils.errors import DiskFullError

LEAST_SPACE = 2**20
"""Bytes below which a disk counts as full, if an error doesn't say why a file can't be written."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_NO_HARD_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)  # FAT, some network disks


def check_writable(path: Path, hint: str) -> None:
    """Check that a folder can be written to, before work is done that would be lost.

    Args:
        path: the folder; if it doesn't exist, it would be made in the nearest parent that does.
        hint: what the user can do about it, for the message.

    Raises:
        NotADirectoryError: there is a file where a folder is needed.
        PermissionError: the folder is not writable.

    Example:
        >>> import tempfile
        >>> check_writable(Path(tempfile.mkdtemp()) / "new" / "folder", "take another --out")
    """
    parent = next(place for place in (path, *path.parents) if place.exists())
    if not parent.is_dir():
        raise NotADirectoryError(f"{parent.absolute()} is a file, not a folder to write into: {hint}")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise PermissionError(f"there is no permission to write into {parent.absolute()}: {hint}")


def check_new_file(path: Path, hint: str) -> None:
    """Check that a new file can be written, before work is done that would be lost.

    Args:
        path: the file.
        hint: what the user can do if its folder is not writable, for the message.

    Raises:
        FileExistsError: it exists.
        FileNotFoundError: its folder doesn't.
        PermissionError: its folder is not writable.

    Example:
        >>> check_new_file(Path("nowhere/x.csv"), "take another -o")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder nowhere to write x.csv into
    """
    if path.exists():
        raise _exists(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    check_writable(path.parent, hint)


@contextlib.contextmanager
def explain_full_disk(path: Path) -> Iterator[None]:
    """Replace the errors of a full disk, of whatever type, by one that says so.

    Libraries report it as RuntimeError (torch), an error of their own (safetensors), or OSError without a number
    (NumPy).

    Raises:
        DiskFullError: in place of such an error in this block, which writes this file or into this folder.

    Example:
        >>> with explain_full_disk(Path("x.txt")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        ...
        fmicl.utils.errors.DiskFullError: the disk is full: x.txt can't be written
    """
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if not is_disk_full(error, path):
            raise
        raise DiskFullError(f"the disk is full: {path} can't be written") from error


def is_disk_full(error: BaseException, path: Path) -> bool:
    """Whether writing a file, or into a folder, failed for want of space."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno is not None:
            return cause.errno in _NO_SPACE
        if any(os.strerror(number) in str(cause) for number in _NO_SPACE):
            return True
        cause = cause.__cause__ or cause.__context__
    place = next(place for place in (path.absolute(), *path.absolute().parents) if place.exists())
    return shutil.disk_usage(place).free < LEAST_SPACE


def write_atomically(path: Path, write: Callable[[Path], object], *, overwrite: bool = True) -> None:
    """Write a file completely or not at all: to a temporary file beside it, which is then renamed.

    The data is synchronised to disk before the rename, so this holds after a power cut too. The file gets the mode that
    the umask says, even if ``write`` creates files for their owner alone, as safetensors does.

    Args:
        path: the file; parent folders are made.
        write: called with the temporary path.
        overwrite: whether to replace an existing file.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is False.
        DiskFullError: there is no space for it; an existing file is kept.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "x.txt"
        >>> write_atomically(target, lambda path: path.write_text("complete"))
        >>> target.read_text()
        'complete'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with explain_full_disk(path):
            temporary.touch()
            mode = stat.S_IMODE(temporary.stat().st_mode)
            write(temporary)
            temporary.chmod(mode)
            with temporary.open("r+b") as file:
                os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _rename_new(temporary, path)
    except FileExistsError:
        raise _exists(path) from None
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _rename_new(temporary: Path, path: Path) -> None:
    """Rename a file, or raise FileExistsError if the new name is taken."""
    try:
        os.link(temporary, path)  # unlike a rename, this refuses to overwrite
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        if path.exists():
            raise FileExistsError from None
        temporary.replace(path)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists and is not overwritten: choose another name")


def write_json(path: Path, value: object, *, overwrite: bool = True) -> None:
    """Write a JSON file atomically.

    Raises:
        FileExistsError: the file exists, and ``overwrite`` is False.
        ValueError: a number is not finite, and ``overwrite`` is False: such a file is for other programs to read.
    """
    text = json.dumps(value, indent=2, allow_nan=overwrite) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), overwrite=overwrite)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is no JSON, or not an object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, but it holds a {type(value).__name__}")
    return value


def back_up_json(path: Path, value: dict[str, Any]) -> Path | None:
    """Rename an existing JSON file with another value before it is replaced: results.json -> results-1.json.

    Returns:
        The new name; None if nothing had to be renamed.
    """
    if not path.exists() or read_json(path) == value:
        return None
    number = 1
    while (backup := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(backup)
    return backup
