"""Cache folder of tokenised files and decoded images, shared by runs and sweeps, with a lock for each entry."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fmicl.utils.locks import wait_for_lock
from fmicl.utils.options import Options, option


@dataclass(frozen=True)
class CacheOptions(Options):
    """Where the cache is."""

    cache_dir: Path | None = option(
        None,
        "Folder of the cache of tokenised files and decoded images (None: fmicl in $XDG_CACHE_HOME, or in ~/.cache).",
        role="machine",
    )


def cache_root(folder: Path | None = None) -> Path:
    """Folder of the cache: the given one, or fmicl in the user's cache folder."""
    if folder is not None:
        return folder
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says to ignore a relative path.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "fmicl"


@contextlib.contextmanager
def locked_entry(root: Path, key: str) -> Iterator[Path]:
    """Hold the lock of an entry, and remove what a killed process left of it.

    One process writes an entry while others wait; without file locks each writes one, and the last rename wins.

    Yields:
        The entry: ``root / key``.

    Raises:
        OSError: the folder can't be written.
    """
    root.mkdir(parents=True, exist_ok=True)
    with wait_for_lock(root / f".{key}.lock"):
        for left in root.glob(f".{key}.*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
        yield root / key
