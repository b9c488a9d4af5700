"""On-disk cache of decoded images: a file for each folder, mapped into memory.

CACHE/images/<key>/ pixels.bin       uint8, (N, 3, height, width)
                    manifest.json    what it was made of, its shape, and the images that could not be read

The key is a hash of the folder's path and of how its images are stored. The manifest has a digest of the listing
(paths, sizes and times of modification). When the folder changes, its entry is replaced. An entry is written under a
temporary name, synchronised to disk and then renamed, so it is never seen incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fmicl.data.cache import cache_root, locked_entry
from fmicl.data.images.samples import Skipped, printable
from fmicl.data.images.search import names_below
from fmicl.utils.files import write_json

FORMAT = 1
CACHED_IMAGES, CACHED_BYTES = 5_000, 64 * 2**20
"""Folders of fewer images in smaller files are decoded in seconds, and are not cached."""
FREE_SHARE = 0.5
"""Share of the free disk space that an entry may take."""
_logger = logging.getLogger("fmicl")

Pixels = NDArray[np.uint8]


class MemoryStore:
    """Where images are decoded to: memory that worker processes share."""

    def allocate(self, shape: tuple[int, int, int, int]) -> Pixels:
        """A writable array of this shape."""
        size = int(np.prod(shape))
        return np.frombuffer(mmap.mmap(-1, max(1, size)), dtype=np.uint8, count=size).reshape(shape)

    def finish(self, pixels: Pixels, count: int) -> Tensor:
        """The first images of the array, as a tensor."""
        return torch.from_numpy(pixels[:count])


class ImageCache(MemoryStore):
    """The entry of a folder, whose lock is held.

    Args:
        entry: its folder.
        described: what it is made of; an entry that says otherwise is not used.
        limit: bytes that it may take.
    """

    def __init__(self, entry: Path, described: dict[str, Any], limit: int) -> None:
        self.entry, self.described, self.limit = entry, described, limit
        self._temporary: Path | None = None
        self._mapped: mmap.mmap | None = None

    def read(self, paths: Sequence[Path]) -> tuple[Tensor, list[Skipped]] | None:
        """Images, and those of the paths that could not be read; None if the entry is missing, outdated or damaged."""
        try:
            manifest = json.loads((self.entry / "manifest.json").read_text(encoding="utf-8"))
            shape = [int(x) for x in manifest["shape"]]
            skipped = [Skipped(paths[int(i)], str(reason)) for i, reason in manifest["skipped"]]
            if any(manifest[name] != value for name, value in self.described.items()) or len(shape) != 4:
                return None
            size = int(np.prod(shape))
            if (self.entry / "pixels.bin").stat().st_size != size or shape[0] + len(skipped) != len(paths):
                return None
            # A private mapping: the file can't be changed through it.
            images = torch.from_file(str(self.entry / "pixels.bin"), shared=False, size=size, dtype=torch.uint8)
        except (OSError, ValueError, KeyError, TypeError, IndexError, RuntimeError):
            return None
        return images.view(*shape), skipped

    def has_room(self, size: int) -> bool:
        """Whether an entry of so many bytes is within the limit, and leaves half of the free disk space."""
        return size <= min(self.limit, FREE_SHARE * shutil.disk_usage(self.entry.parent).free)

    def allocate(self, shape: tuple[int, int, int, int]) -> Pixels:
        """A writable array of this shape: a file that is mapped into memory.

        Raises:
            OSError: the file can't be written; what was written is removed.
        """
        self.discard()
        size, name = int(np.prod(shape)), self.entry.name
        try:
            self._temporary = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".tmp", dir=self.entry.parent))
            with (self._temporary / "pixels.bin").open("w+b") as file:
                _reserve(file.fileno(), size)  # a full disk under a mapped file would end the process
                self._mapped = mmap.mmap(file.fileno(), size)
        except OSError:
            self.discard()
            raise
        _logger.info("decoding %s images into %s (%.1f GiB)", f"{shape[0]:,}", self.entry, size / 2**30)
        return np.frombuffer(self._mapped, dtype=np.uint8).reshape(shape)

    def finish(self, pixels: Pixels, count: int) -> Tensor:
        """The first images of the array, as a tensor."""
        if self._temporary is None or self._mapped is None:
            return super().finish(pixels, count)
        self._mapped.flush()
        with (self._temporary / "pixels.bin").open("r+b") as file:
            file.truncate(count * pixels[0].size)
            os.fsync(file.fileno())
        return torch.from_numpy(pixels[:count])

    def commit(self, shape: Sequence[int], skipped: Sequence[tuple[int, str]]) -> None:
        """Make the written file the entry, in place of an earlier one."""
        if self._temporary is None:
            return
        manifest = {**self.described, "shape": list(shape), "skipped": [list(x) for x in skipped]}
        try:
            write_json(self._temporary / "manifest.json", manifest)
            shutil.rmtree(self.entry, ignore_errors=True)
            self._temporary.rename(self.entry)
        except OSError as error:
            warn_not_cached(error)
        else:
            self._temporary = None

    def discard(self) -> None:
        """Remove what was written and not committed."""
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
            self._temporary = self._mapped = None


@contextlib.contextmanager
def open_cache(
    root: Path, paths: Sequence[Path], stored: Sequence[object], limit: int, folder: Path | None
) -> Iterator[ImageCache | None]:
    """The entry of a folder's images, locked; None if they are too few to be cached, or it can't be.

    Args:
        root: folder of the images.
        paths: the images.
        stored: all that decides how they are stored.
        limit: bytes that an entry may take; 0 for no cache.
        folder: of the cache, see :func:`fmicl.data.cache_root`.
    """
    digest, size = _listing_digest(root, paths) if limit else ("", 0)
    if not limit or (len(paths) < CACHED_IMAGES and size < CACHED_BYTES):
        yield None
        return
    place = cache_root(folder) / "images"
    key = hashlib.blake2b(json.dumps([FORMAT, os.fsdecode(root.resolve()), *map(str, stored)]).encode(), digest_size=16)
    with contextlib.ExitStack() as stack:
        try:
            entry = stack.enter_context(locked_entry(place, key.hexdigest()))
        except OSError as error:
            warn_not_cached(error)
            yield None
            return
        cache = ImageCache(entry, {"format": FORMAT, "folder": printable(str(root)), "listing": digest}, limit)
        stack.callback(cache.discard)
        yield cache


def warn_not_cached(error: OSError) -> None:
    """Warn that the cache can't be written, without which images are decoded in every run."""
    _logger.warning("images are not cached: %s (--cache-dir names another folder)", error)


def _listing_digest(root: Path, paths: Sequence[Path]) -> tuple[str, int]:
    """Digest of the paths below the folder, their sizes and their times of modification; and all sizes added up."""
    digest, total = hashlib.blake2b(digest_size=16), 0
    for path, name in zip(paths, names_below(root, paths), strict=True):
        try:
            found = os.stat(path)
            size, changed = found.st_size, found.st_mtime_ns
        except OSError:
            size, changed = 0, -1
        digest.update(b"%b\0%d %d\n" % (os.fsencode(name), size, changed))
        total += size
    return digest.hexdigest(), total


def _reserve(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.truncate(descriptor, size)
