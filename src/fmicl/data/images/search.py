"""Search for image files in a folder and its subfolders."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from fmicl.data.images.decoding import EXTENSIONS, check_images
from fmicl.data.images.registry import Exclude
from fmicl.data.images.samples import FileSamples, Skipped, summarise_skipped


def find_images(folder: Path | str, *, exclude: Exclude | None = None) -> tuple[FileSamples, tuple[Skipped, ...]]:
    """All readable images below a folder, sorted by path, without labels.

    Returns:
        The images, and what is left out, with a warning: images that can't be read, folders that can't be opened, and
        excluded ones.

    Raises:
        FileNotFoundError: there is no such folder, or no readable image in it.
    """
    root = Path(folder)
    left_out: list[Skipped] = []
    paths = image_paths(root, left_out, exclude)
    shapes, skipped = check_images(paths)
    report_skipped(root, skipped, len(paths), left_out)
    return FileSamples(tuple(shapes)), (*skipped, *left_out)


def subfolders(folder: Path) -> list[Path]:
    """The folders directly below a folder, sorted, without hidden ones.

    Raises:
        FileNotFoundError: there is no such folder.
    """
    _check_exists(folder)
    return sorted(f for f in folder.iterdir() if f.is_dir() and not _hidden(f.name))


def image_paths(folder: Path, left_out: list[Skipped], exclude: Exclude | None = None) -> list[Path]:
    """All image files below a folder, sorted; a file is an image by its extension.

    Hidden files and folders are ignored. Links are followed, but no folder is searched twice.

    Args:
        folder: where to search.
        left_out: subfolders that can't be opened, and excluded ones, are appended to this list.
        exclude: which folders not to search.

    Raises:
        FileNotFoundError: there is no such folder, or no image in it.
        ValueError: the folder itself is excluded.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.jpg", "2024/b.png", "thumbnails/c.png"):
        ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
        ...     (folder / name).touch()
        >>> left_out = []
        >>> paths = image_paths(folder, left_out, lambda path: "cache" if path.name == "thumbnails" else None)
        >>> [path.name for path in paths], left_out[0].reason
        (['b.png', 'a.jpg'], 'excluded (cache)')
    """
    _check_exists(folder)
    itself = exclude(folder) if exclude is not None else None
    if itself is not None:
        raise ValueError(f"the images in {folder} are no data ({itself}): name the folder of your own")
    found: list[Path] = []
    closed: list[Skipped] = []
    excluded: dict[Path, dict[Path, str]] = {}  # by parent folder
    with_images = {folder}  # folders with images in them, at whatever depth
    seen: set[str] = set()

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), f"can't be opened ({error.strerror})"))

    for name, folders, files in os.walk(folder, onerror=note, followlinks=True):
        here, real = Path(name), os.path.realpath(name)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        kind = exclude(here) if exclude is not None and here != folder else None
        if kind is not None:
            folders.clear()
            excluded.setdefault(here.parent, {})[here] = kind
            continue
        folders[:] = [f for f in folders if not _hidden(f)]
        images = [here / f for f in files if not _hidden(f) and os.path.splitext(f)[1].lower() in EXTENSIONS]
        found += images
        if images:
            with_images |= {here, *here.parents}
    gone = sorted([*closed, *_summarise_excluded(excluded, with_images)], key=lambda x: x.path)
    left_out += gone
    if not found:
        without = f". These folders are left out: {summarise_skipped(gone)}" if gone else ""
        extensions = ", ".join(sorted(EXTENSIONS))
        raise FileNotFoundError(f"no images in {folder}: no file ends in {extensions}{without}")
    return sorted(found, key=lambda path: path.parts)


def names_below(root: Path, paths: Sequence[Path]) -> list[str]:
    """Paths relative to a folder that all of them are in, with forward slashes: faster than Path.relative_to.

    Example:
        >>> names_below(Path("photos"), [Path("photos/a/1.png")]), names_below(Path("."), [Path("a/1.png")])
        (['a/1.png'], ['a/1.png'])
    """
    start = len((root / "x").as_posix()) - 1
    return [path.as_posix()[start:] for path in paths]


def report_skipped(root: Path, skipped: Sequence[Skipped], total: int, left_out: Sequence[Skipped]) -> None:
    """Warn of images that can't be read, and of folders that are left out.

    Raises:
        FileNotFoundError: none of the images can be read.
    """
    if len(skipped) == total:
        raise FileNotFoundError(f"none of the {total} images in {root} can be read: {summarise_skipped(skipped)}")
    if skipped:
        reasons = summarise_skipped(skipped)
        warnings.warn(
            f"{len(skipped)} of the {total} images in {root} can't be read and are skipped: {reasons}", stacklevel=4
        )
    if left_out:
        warnings.warn(
            f"folders of {root} are not searched and are skipped: {summarise_skipped(left_out)}", stacklevel=4
        )


def _summarise_excluded(excluded: dict[Path, dict[Path, str]], with_images: set[Path]) -> list[Skipped]:
    """One entry for a folder that has nothing but excluded ones, and one for each of those that lie among images."""
    summary: list[Skipped] = []
    for parent, kinds in excluded.items():
        if parent in with_images:
            summary += [Skipped(path, f"excluded ({kind})") for path, kind in kinds.items()]
        else:
            counts = Counter(kinds.values()).items()
            held = " and ".join(f"{count} {kind}{'s' if count > 1 else ''}" for kind, count in counts)
            summary.append(Skipped(parent, f"holds {held}"))
    return summary


def _check_exists(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
