"""Writing files so that a reader sees all of one or nothing; without torch, for whoever leaves something on disk."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

__all__ = ["check_new", "check_writable", "keep_old", "read_json", "write_json", "write_whole"]

NO_LINKS = (errno.EPERM, errno.EACCES, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS)
"""What a file system without hard links says of one: on a memory card, or over a network."""


def check_writable(path: Path, hint: str) -> None:
    """Refuse a place that nothing can be written to, before the work that would be lost.

    Args:
        path: a folder; one that isn't there yet is made in the nearest one that is.
        hint: what to do about it.

    Raises:
        NotADirectoryError: there is a file where a folder would have to be.
        PermissionError: this user may not write there, or nobody may.

    Example:
        >>> import tempfile
        >>> check_writable(Path(tempfile.mkdtemp()) / "new" / "folder", "take another --out")
    """
    there = next(place for place in (path, *path.parents) if place.exists())
    if not there.is_dir():
        raise NotADirectoryError(f"{there.absolute()} is a file, and no folder to write into: {hint}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise PermissionError(f"there is no permission to write into {there.absolute()}: {hint}")


def check_new(path: Path, hint: str) -> None:
    """Refuse the name of a file that can't be written, before the work for it is done.

    Args:
        path: the file.
        hint: what to do where its folder can't be written to.

    Raises:
        FileExistsError: there is one.
        FileNotFoundError: its folder isn't there.
        PermissionError: nothing may be written there.

    Example:
        >>> check_new(Path("nowhere/x.csv"), "take another -o")
        Traceback (most recent call last):
        ...
        FileNotFoundError: there is no folder nowhere to write x.csv into
    """
    if path.exists():
        raise _exists(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {path.parent} to write {path.name} into")
    check_writable(path.parent, hint)


def write_whole(path: Path, write: Callable[[Path], object], *, overwrite: bool = True) -> None:
    """Let ``write`` fill a temporary file beside ``path``, then move it there: a reader sees all of it or nothing.

    The data is on the disk before the name is, so this holds after a power cut too. Whoever may read other new files in
    that folder may read this one, also where ``write`` (safetensors' way) makes files for their owner alone.

    Args:
        path: the file to write; folders above it are made.
        write: called with the temporary path.
        overwrite: whether a file of that name may be there.

    Raises:
        FileExistsError: there is one, and it may not.

    Example:
        >>> import tempfile
        >>> target = Path(tempfile.mkdtemp()) / "x.txt"
        >>> write_whole(target, lambda path: path.write_text("whole"))
        >>> target.read_text()
        'whole'
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.touch()
        mode = stat.S_IMODE(temporary.stat().st_mode)
        write(temporary)
        temporary.chmod(mode)
        with temporary.open("r+b") as file:
            os.fsync(file.fileno())
        if overwrite:
            temporary.replace(path)
        else:
            _move_to_new(temporary, path)
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


def _move_to_new(temporary: Path, path: Path) -> None:
    """Give a file a name that no other has.

    Raises:
        FileExistsError: one has.
    """
    try:
        os.link(temporary, path)  # unlike a rename, this refuses to overwrite
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError from None
        temporary.replace(path)


def _exists(path: Path) -> FileExistsError:
    return FileExistsError(f"{path} exists and is not overwritten: take another name")


def write_json(path: Path, value: object) -> None:
    """Write JSON, whole or not at all."""
    write_whole(path, lambda p: p.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8"))


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it holds something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} should hold a JSON object, but it is a {type(value).__name__}")
    return value


def keep_old(path: Path, value: dict[str, Any]) -> None:
    """Move a JSON file that holds something else out of the way: results.json -> results-1.json."""
    if not path.exists() or read_json(path) == value:
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}-{number}{path.suffix}")).exists():
        number += 1
    path.rename(kept)
