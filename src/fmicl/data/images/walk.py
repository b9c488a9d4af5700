"""Which image files a folder holds, and which of its subfolders are left out: those of runs, and closed ones."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from fmicl.data.images.decode import EXTENSIONS
from fmicl.data.images.samples import Skipped, listed

__all__ = ["images_in", "subfolders"]


def subfolders(folder: Path) -> list[Path]:
    """The folders right below a folder, sorted; hidden ones are passed over.

    Raises:
        FileNotFoundError: If there is no such folder.
    """
    _check_there(folder)
    return sorted(f for f in folder.iterdir() if f.is_dir() and not _hidden(f.name))


def images_in(folder: Path, left_out: list[Skipped]) -> list[Path]:
    """All image files below a folder, sorted. Links are followed, but no folder is entered twice.

    Folders of runs and sweeps are not entered: the figures in them are no data. The folder itself is, whatever it is.

    Args:
        folder: Where to look.
        left_out: Subfolders that can't be entered, and those that hold runs, are added to this list.

    Raises:
        FileNotFoundError: If there is no such folder, or no image in it.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> for name in ("a.jpg", "runs/images-001/metrics.csv", "runs/images-001/loss.png"):
        ...     (folder / name).parent.mkdir(parents=True, exist_ok=True)
        ...     (folder / name).touch()
        >>> (folder / "runs" / "images-001" / "settings.json").touch()
        >>> left_out = []
        >>> [path.name for path in images_in(folder, left_out)], left_out[0].reason
        (['a.jpg'], 'holds a run of fmicl')
    """
    _check_there(folder)
    found: list[Path] = []
    closed: list[Skipped] = []
    runs: dict[Path, list[Path]] = {}  # by the folder that they are in
    entered = {folder}  # and all below it that have images, at whatever depth
    seen: set[str] = set()

    def note(error: OSError) -> None:
        closed.append(Skipped(Path(error.filename), f"can't be entered ({error.strerror})"))

    for here, folders, files in os.walk(folder, onerror=note, followlinks=True):
        real = os.path.realpath(here)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        if Path(here) != folder and _holds_run(folders, files):
            folders.clear()
            runs.setdefault(Path(here).parent, []).append(Path(here))
            continue
        folders[:] = [f for f in folders if not _hidden(f)]
        images = [Path(here, f) for f in files if not _hidden(f) and Path(f).suffix.lower() in EXTENSIONS]
        found += images
        if images:
            entered |= {Path(here), *Path(here).parents}
    gone = sorted([*closed, *_of_runs(runs, entered)], key=lambda x: x.path)
    left_out += gone
    if not found:
        without = f". These folders are left out: {listed(gone)}" if gone else ""
        endings = ", ".join(sorted(EXTENSIONS))
        raise FileNotFoundError(f"no images in {folder}: there is no file that ends in {endings}{without}")
    return sorted(found)


def _check_there(folder: Path) -> None:
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}: say where the images are with --data-dir")


def _of_runs(runs: dict[Path, list[Path]], entered: set[Path]) -> list[Skipped]:
    """One entry for a folder that has nothing but runs, and one for each run that lies among images."""
    left: list[Skipped] = []
    for parent, within in runs.items():
        if parent in entered:
            left += [Skipped(path, "holds a run of fmicl") for path in within]
        else:
            left.append(Skipped(parent, f"holds {'a run' if len(within) == 1 else f'{len(within)} runs'} of fmicl"))
    return left


def _holds_run(folders: Sequence[str], files: Sequence[str]) -> bool:
    """Whether these are the contents of a run (see :class:`fmicl.runs.folder.Run`), or of a sweep."""
    beside = "metrics.csv" in files or "encoder.json" in files or "checkpoints" in folders
    return "sweep.json" in files or ("settings.json" in files and beside)


def _hidden(name: str) -> bool:
    return name.startswith(".") or name == "__MACOSX"
