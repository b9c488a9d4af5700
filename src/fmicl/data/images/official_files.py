"""Integrity checks of the official files of a dataset: size, record length, MD5."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

_FIX = "extract the archive again, or download it again"
_NO_CHECKSUM = "If it is a part of the data on purpose, switch the check off (--no-checksum; checksum=False)"


def find_folder(root: Path, name: str, *files: str) -> Path | None:
    """The folder of a dataset: of this name below ``root``, or ``root`` itself if one of the files is in it."""
    if (root / name).is_dir():
        return root / name
    if root.name == name or any((root / file).is_file() for file in files):
        return root if root.is_dir() else None
    return None


def how_to_get(root: Path, url: str, archives: str) -> str:
    """How to get a missing dataset; ``archives`` is a pattern for archives that may not be extracted yet."""
    found = sorted(root.glob(archives)) if root.is_dir() else []
    if found:
        return f"Its archive {found[0].name} is there: extract it with `tar xf {found[0]} -C {root}`."
    return (
        f"Get {url} and extract it there, or let torchvision download it (--download). "
        f"If you have it elsewhere, set --data-dir."
    )


def check_file(path: Path, md5: str | None, *, record: int = 1, size: int | None = None) -> None:
    """Check that a file is complete.

    Args:
        path: the file.
        md5: its official MD5; None accepts any file of whole records.
        record: bytes of a record.
        size: its official size in bytes.

    Raises:
        FileNotFoundError: it is missing.
        ValueError: it is empty, truncated, or not the official one.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing: {_FIX}")
    found = path.stat().st_size
    if found == 0:
        raise ValueError(f"{path} is empty: {_FIX}")
    if md5 is not None and size is not None and found < size:
        raise ValueError(f"{path} is truncated: it has {found:,} of {size:,} bytes; {_FIX}. {_NO_CHECKSUM}")
    if found % record:
        raise ValueError(f"{path} is damaged: {found:,} bytes are no multiple of a record's {record:,}; {_FIX}")
    if md5 is not None:
        with open(path, "rb") as file:
            seen = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
        if seen != md5:
            raise ValueError(
                f"{path} is not the official file: its MD5 is {seen}, and should be {md5}; {_FIX}. {_NO_CHECKSUM}"
            )


def map_file(path: Path, md5: str | None, *, record: int = 1, size: int | None = None) -> np.ndarray:
    """The bytes of a file that was checked by :func:`check_file`, mapped into memory."""
    check_file(path, md5, record=record, size=size)
    return np.memmap(path, dtype=np.uint8, mode="r")
