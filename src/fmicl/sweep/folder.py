"""A sweep's folder and what is in it: finding it, holding it, telling its runs apart, and reading their logs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmicl.runs.folder import create_run
from fmicl.sweep.grid import Cell
from fmicl.utils import locks
from fmicl.utils.files import check_writable, read_json

__all__ = [
    "DATA",
    "ROUNDING",
    "as_it_was",
    "difference",
    "find_folder",
    "key_of",
    "last_error",
    "locked",
    "machine_settings",
    "not_told_apart_by",
    "plain",
]

DATA = ("data_dir", "data", "sts")
"""Fields of recipes that name files which must be there."""
ROUNDING = frozenset({"device", "devices", "precision", "compile", "memory_gib"})
"""Settings of the machine that change how numbers are rounded, so that results with others are not of one kind."""
ROOT = Path("sweeps")
"""Where sweeps go by default, under the current folder."""


def find_folder(
    name: str, cells: Sequence[Cell], out: Path | None, machine: frozenset[str] = frozenset(), root: Path = ROOT
) -> Path:
    """The folder of a sweep: ``out``; the one that has the very same runs; or the next number under ``root``.

    Example:
        >>> find_folder("digits", [], Path("mine"))
        PosixPath('mine')
    """
    if out is not None:
        return out
    wanted = {key_of(cell.changes, machine) for cell in cells}
    for file in sorted(root.glob(f"{name}-*/sweep.json"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError):
            saved = read_json(file)
            if saved["recipe"] == name and {key_of(x["changes"], machine) for x in saved["runs"].values()} == wanted:
                return file.parent
    return create_run(name, root=root).path


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[int | None]:
    """Hold a sweep's folder, so that no run is trained twice at once; the lock's descriptor is for its runs to keep.

    Raises:
        ValueError: it is something else than a sweep's folder; or another sweep, or a run that outlived one, has it.
        PermissionError: nothing can be written there.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not the folder of a sweep")
    there = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if "settings.json" in there:
        raise ValueError(f"{folder} holds a run, and no sweep: take another --out")
    if there and not {locks.LOCK_NAME, "sweep.json"} & there:
        raise ValueError(f"{folder} exists and is no sweep (it has no sweep.json): take another --out")
    check_writable(folder, "take another --out")
    folder.mkdir(parents=True, exist_ok=True)
    taken = f"another sweep, or a run that outlived one, is at work in {folder}: wait for it, or end it first"
    with locks.lock_folder(folder, taken, inheritable=True) as descriptor:
        yield descriptor


def last_error(log: Path, start: int, code: int) -> str:
    r"""Why a run ended, in one line: its last error message, or the signal that killed it.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / "run.log"
        >>> _ = log.write_text("epoch 1/2\nTraceback ...\ntorch.OutOfMemoryError: CUDA out of memory.\nexit\n")
        >>> last_error(log, 0, 1)
        'torch.OutOfMemoryError: CUDA out of memory.'
        >>> last_error(log, 0, -9)
        'killed by SIGKILL (out of memory?)'
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
    try:
        with log.open("rb") as file:
            file.seek(max(start, log.stat().st_size - 2**16))
            lines = [line.rstrip() for line in file.read().decode(errors="replace").splitlines() if line.strip()]
    except OSError:
        lines = []
    named = [line for line in lines if re.match(r"(fmicl: error: |[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b)", line)]
    if named:
        return named[-1].removeprefix("fmicl: error: ")
    return lines[-1] if lines else f"exit code {code}, without a word"


def plain(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Settings as JSON has them."""
    made: dict[str, Any] = json.loads(json.dumps(dict(changes), default=str))
    return made


def key_of(changes: Mapping[str, Any], machine: frozenset[str]) -> str:
    """What tells runs of a recipe apart: the settings that differ from it, but for the machine's."""
    return json.dumps({k: v for k, v in plain(changes).items() if k not in machine}, sort_keys=True)


def machine_settings(recipe: Any) -> frozenset[str]:
    """Settings of a recipe that say where a run is trained and not what it computes."""
    found: frozenset[str] = getattr(recipe, "machine", frozenset())
    return found


def not_told_apart_by(recipe: Any, cells: Sequence[Cell]) -> frozenset[str]:
    """Settings that may be others when a sweep goes on: the machine's, but for data, and for what its runs differ in.

    A run that is resumed looks whether its data is what it was, wherever that is now. A finished one isn't looked into
    again, so that here a data set is its path.

    Example:
        >>> from fmicl.sweep.grid import cells
        >>> from fmicl.config.recipes import RECIPES
        >>> recipe = RECIPES["cifar10"].recipe
        >>> found = not_told_apart_by(recipe, cells(recipe, {"precision": ("32", "bf16")}))
        >>> [name in found for name in ("workers", "data_dir", "precision")]
        [True, False, False]
    """
    changes = [plain(cell.changes) for cell in cells]
    names = {name for changed in changes for name in changed}
    varied = {name for name in names if any(changed.get(name) != changes[0].get(name) for changed in changes)}
    return machine_settings(recipe) - set(DATA) - varied


def as_it_was(cell: Cell, entry: Mapping[str, Any], *, finished: bool) -> Cell:
    """A cell with what sweep.json says of its run: its case, if this call has none, and how a finished one was trained.

    Settings of the machine may be others in this call, and a finished run didn't have them.
    """
    if finished:
        cell = dataclasses.replace(cell, changes=entry["changes"])
    if entry["case"] and not cell.case:
        cell = dataclasses.replace(cell, case=entry["case"], case_sets=tuple(entry.get("case_sets", entry["changes"])))
    return cell


def difference(old: Mapping[str, Any], new: Mapping[str, Any], machine: frozenset[str]) -> str:
    """How two runs differ, in words."""
    new = plain(new)
    keys = [key for key in {**old, **new} if key not in machine and old.get(key) != new.get(key)]
    return "; ".join(f"{key} was {_said(old, key)}, is {_said(new, key)}" for key in keys)


def _said(changes: Mapping[str, Any], key: str) -> str:
    return str(changes[key]) if key in changes else "the recipe's"
