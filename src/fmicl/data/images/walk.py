"""Search for image files in a folder and its subfolders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from fmicl.data.images.decode import EXTENSIONS
from fmicl.data.images.samples import Skipped, listed

__all__ = ["Exclude", "images_in", "subfolders"]

Exclude = Callable[[Path], str | None]
"""Which subfolders hold no data: what such a folder is, in the singular ("fmicl run"), or None to search it."""


def subfolders(folder: Path) -> list[Path]:
    """The folders right below a folder, sorted; hidden ones are passed over.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    _check_there(folder)
    return sorted(f for f in folder.iterdir() if f.is_dir() and not _hidden(f.name))


def images_in(folder: Path, left_out: list[Skipped], exclude: Exclude | None = None) -> list[Path]:
    """All image files below a folder, sorted. Links are followed, but no folder is entered twice.

    Hidden files and folders are ignored.

    Args:
        folder: Where to look.
        left_out: Subfolders that can't be opened, and those that are excluded, are added to this list.
        exclude: Which subfolders not to search; the folder itself is always searched.

    Raises:
        FileNotFoundError: If there is no such folder, or no image in it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.jpg", "2024/b.png", "thumbnails/c.png"):
        ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
        ...     (folder / name).touch()
        >>> left_out = []
        >>> paths = images_in(folder, left_out, lambda path: "cache" if path.name == "thumbnails" else None)
        >>> [path.name for path in paths], left_out[0].reason
        (['b.png', 'a.jpg'], 'excluded (cache)')
    """
    _check_there(folder)
    found: list[Path] = []
    closed: list[Skipped] = []
    excluded: dict[Path, dict[Path, str]] = {}  # by parent folder
    with_images = {folder}  # folders with images in them, at whatever depth
    seen: set[str] = set()

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), f"can't be opened ({error.strerror})"))

    for here, folders, files in os.walk(folder, onerror=note, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        kind = exclude(Path(here)) if exclude is not None and Path(here) != folder else None
        if kind is not None:
            folders.clear()
            excluded.setdefault(Path(here).parent, {})[Path(here)] = kind
            continue
        folders[:] = [f for f in folders if not _hidden(f)]
        images = [Path(here, f) for f in files if not _hidden(f) and Path(f).suffix.lower() in EXTENSIONS]
        found += images
        if images:
            with_images |= {Path(here), *Path(here).parents}
    gone = sorted([*closed, *_summarise(excluded, with_images)], key=lambda x: x.path)
    left_out += gone
    if not found:
        without = f". These folders are left out: {listed(gone)}" if gone else ""
        endings = ", ".join(sorted(EXTENSIONS))
        raise FileNotFoundError(f"no images in {folder}: there is no file that ends in {endings}{without}")
    return sorted(found)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: say where the images are with --data-dir")


def _summarise(excluded: dict[Path, dict[Path, str]], with_images: set[Path]) -> list[Skipped]:
    """One entry for a folder that has nothing but excluded ones, and one for each of those that lie among images."""
    summary: list[Skipped] = []
    for parent, kinds in excluded.items():
        if parent in with_images:
            summary += [Skipped(path, f"excluded ({kind})") for path, kind in kinds.items()]
        else:
            counts = Counter(kinds.values())
            held = " and ".join(f"{n} {kind}{'s' if n > 1 else ''}" for kind, n in counts.items())
            summary.append(Skipped(parent, f"holds {held}"))
    return summary


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
