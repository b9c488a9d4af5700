"""State of a sweep on disk: its folder, the runs in it, and sweep.json.

SWEEP/sweep.json  .lock  <run>/  <run>.log  <run>.sbatch (with SLURM)

A run is identified by the hash of its settings. Its folder keeps the name that the first call gave it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import signal
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from fmicl.config import Settings
from fmicl.runs.folder import SWEEP_FILE, Run, create_run, read_rows
from fmicl.runs.settings import read_settings
from fmicl.sweep.grid import Cell
from fmicl.sweep.launchers import Handle
from fmicl.sweep.summary import summarise
from fmicl.utils import locks
from fmicl.utils.files import check_writable, read_json, write_json
from fmicl.utils.provenance import command_line

State = Literal["waiting", "running", "finished", "failed", "stopped"]

ROOT = Path("sweeps")
"""Default parent of sweep folders, relative to the current folder."""
FORMAT = 2
"""Version of sweep.json."""
SCORE_COLUMNS = ("knn", "stsb_dev")
"""Columns of metrics.csv with a score of the encoder; the first that a run has is shown."""
RECENT_EPOCHS = 5
"""Epochs whose median time is shown as the time per epoch."""
SAVED = ("case", "state", "error", "results", "attempts", "started", "seconds", "where", "job")
"""Attributes of a run that sweep.json has as they are."""


def find_folder(cells: Sequence[Cell], out: Path | None = None, root: Path = ROOT) -> Path:
    """The folder of a sweep: ``out``, the one under ``root`` with the same runs, or the next number there.

    Example:
        >>> find_folder([], Path("mine"))
        PosixPath('mine')
    """
    if out is not None:
        return out
    recipe, hashes = cells[0].settings.recipe, {cell.settings.hash for cell in cells}
    for file in sorted(root.glob(f"{recipe}-*/{SWEEP_FILE}"), reverse=True):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            saved = read_json(file)
            if saved["recipe"] == recipe and {run["hash"] for run in saved["runs"]} == hashes:
                return file.parent
    return create_run(recipe, root=root).path


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[int | None]:
    """Create and lock a sweep's folder; yields the lock's file descriptor, for the runs to inherit.

    Raises:
        ValueError: the folder is not a sweep, or another sweep or one of its runs is still working in it.
        PermissionError: the folder can't be written to.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not the folder of a sweep")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if Run.is_run(folder):
        raise ValueError(f"{folder} is a run, not a sweep: take another --out")
    if names and not {locks.LOCK_NAME, SWEEP_FILE} & names:
        raise ValueError(f"{folder} exists and is not a sweep (it has no {SWEEP_FILE}): take another --out")
    check_writable(folder, "take another --out")
    folder.mkdir(parents=True, exist_ok=True)
    taken = f"another sweep, or a run of one that was killed, is working in {folder}: wait until it ends, or end it"
    with locks.lock_folder(folder, taken, inheritable=True) as descriptor:
        yield descriptor


@dataclass(frozen=True)
class Progress:
    """Progress of a run according to its metrics.csv; None is unknown.

    Attributes:
        epoch: epochs done.
        seconds_per_epoch: median over the last epochs; the first one compiles.
        loss: of the last row.
        score: the last k-NN accuracy, or STS-B correlation for text.
    """

    epoch: float | None = None
    seconds_per_epoch: float | None = None
    loss: float | None = None
    score: float | None = None


def read_progress(path: Path) -> Progress:
    r"""Read metrics.csv, whichever columns it has.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> _ = path.write_text("epoch,loss,knn,seconds\n1,2.5,,40\n2,2.0,61.5,3\n3,1.5,,3\n")
        >>> read_progress(path)
        Progress(epoch=3.0, seconds_per_epoch=3.0, loss=1.5, score=61.5)
        >>> read_progress(path.with_name("none.csv"))
        Progress(epoch=None, seconds_per_epoch=None, loss=None, score=None)
    """
    try:
        rows = read_rows(path)
    except (OSError, ValueError):
        rows = []
    if not rows:
        return Progress()
    ends, seconds = ([row.get(name) for row in rows] for name in ("epoch", "seconds"))
    times = [  # a row may be part of an epoch
        spent / (end - start)
        for start, end, spent in zip([0.0, *ends], ends, seconds, strict=False)
        if start is not None and end is not None and spent is not None and end > start
    ]
    column = next((name for name in SCORE_COLUMNS if name in rows[0]), "")
    scores = [score for row in rows if (score := row.get(column)) is not None]
    recent = times[1:][-RECENT_EPOCHS:] or times
    return Progress(
        epoch=ends[-1],
        seconds_per_epoch=statistics.median(recent) if recent else None,
        loss=rows[-1].get("loss"),
        score=scores[-1] if scores else None,
    )


@dataclass
class SweepRun:
    """A run of a sweep and its state.

    Attributes:
        settings: all its options.
        run: its folder.
        log: the output of all its starts.
        name: what it is called in this call of the sweep, from its cell.
        case: the name of its case.
        where: device, or job.
        error: why it failed.
        attempts: number of starts.
        job: number of its job, if it is one.
        started: time of the last start.
        seconds: run time over all starts.
        results: its results.json.
        handle: its process or job, since this sweep started or found it.
        since: when that was, by the monotonic clock.
    """

    settings: Settings
    run: Run
    log: Path
    name: str = ""
    case: str | None = None
    state: State = "waiting"
    where: str | None = None
    error: str | None = None
    attempts: int = 0
    job: str | None = None
    started: str | None = None
    seconds: float = 0.0
    progress: Progress = field(default_factory=Progress)
    results: Mapping[str, Any] = field(default_factory=dict)
    handle: Handle | None = None
    since: float = 0.0
    _metrics_stat: tuple[int, int, int] | None = field(default=None, repr=False)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any], recipe: str, folder: Path) -> SweepRun:
        """The run of an entry of sweep.json.

        Raises:
            ValueError: the settings are not valid in this version.
        """
        return cls(
            Settings.from_json(recipe, entry["settings"]),
            Run(folder / entry["folder"]),
            folder / entry["log"],
            progress=Progress(**{name: entry[name] for name in Progress.__dataclass_fields__}),
            **{name: entry[name] for name in SAVED},
        )

    def to_json(self) -> dict[str, Any]:
        """The entry of sweep.json."""
        return {
            "folder": self.run.path.name,
            "hash": self.settings.hash,
            "seed": self.settings.seed,
            "settings": _plain(self.settings.changes),
            "epochs": self.settings.epochs,
            **dataclasses.asdict(self.progress),
            **{name: getattr(self, name) for name in SAVED},
            "log": os.path.relpath(self.log, self.run.path.parent),
        }

    def prepare(self, cell: Cell) -> None:
        """Set what to do about a run that this call asks for: nothing if it has finished, else wait for a start.

        Other options of the machine may be given in each call; a finished run keeps those that it was trained with.
        """
        self.case, self.progress = cell.case or self.case, Progress()
        self.update_progress()
        if self.run.finished or (self.state == "finished" and self.run.results.exists()):
            self.finish()
            return
        self.settings, self.state, self.error, self.results = cell.settings, "waiting", None, {}

    def finish(self) -> None:
        """Read the results of a run that has ended well."""
        self.state, self.error = "finished", None
        with contextlib.suppress(OSError, ValueError):
            self.results = read_json(self.run.results)

    def check_settings(self) -> None:
        """Refuse a run that was started with other settings, by a version with other defaults.

        Raises:
            ValueError: what differs.
        """
        if self.run.settings.exists() and (changed := self.settings.differences(read_settings(self.run))):
            raise ValueError(f"{self.run.path} was started with other settings ({changed}): take another --out")

    def update_progress(self) -> None:
        """Read metrics.csv if it has changed."""
        with contextlib.suppress(OSError):
            stat = self.run.metrics.stat()
            now = (stat.st_ino, stat.st_size, stat.st_mtime_ns)
            if now != self._metrics_stat:
                self._metrics_stat, self.progress = now, read_progress(self.run.metrics)

    @property
    def group(self) -> str:
        """The same for runs that differ in nothing but the seed."""
        return json.dumps({**self.settings.identity(), "seed": None}, sort_keys=True)

    @property
    def columns(self) -> dict[str, Any]:
        """The options that have an effect on the results, as JSON types, without the seed."""
        roles = {name: option.role for name, option in self.settings.schema.options.items()}
        used = _plain(self.settings.used())
        return {name: value for name, value in used.items() if roles[name] != "machine" and name != "seed"}


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(dict(values), default=str))
    return plain


@dataclass
class SweepRecord:
    """All runs of a sweep's folder, by the hash of their settings; stored in sweep.json."""

    folder: Path
    recipe: str
    created: str
    runs: dict[str, SweepRun] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """Path of sweep.json."""
        return self.folder / SWEEP_FILE

    @classmethod
    def read(cls, folder: Path, recipe: str) -> SweepRecord:
        """Read sweep.json, if there is one.

        Raises:
            ValueError: the folder is a sweep of another recipe, or of a version with other settings.
        """
        record = cls(folder, recipe, datetime.now(UTC).isoformat(timespec="seconds"))
        if not record.file.exists():
            return record
        saved = read_json(record.file)
        if saved.get("format") != FORMAT:
            raise ValueError(f"{folder} is a sweep of another version of fmicl: take another --out")
        if saved["recipe"] != recipe:
            raise ValueError(f"{folder} is a sweep of {saved['recipe']}, not of {recipe}: take another --out")
        record.created = saved["created"]
        try:
            runs = [SweepRun.from_json(entry, recipe, folder) for entry in saved["runs"]]
        except ValueError as error:
            raise ValueError(f"{folder} has a run with settings that are not valid: {error}") from error
        record.runs = {run.settings.hash: run for run in runs}
        if len(record.runs) < len(runs):
            raise ValueError(f"{folder} has runs that are the same in this version of fmicl: take another --out")
        return record

    def write(self) -> None:
        """Write sweep.json, atomically."""
        write_json(
            self.file,
            {
                "format": FORMAT,
                "recipe": self.recipe,
                "command": command_line(),
                "created": self.created,
                "updated": datetime.now(UTC).isoformat(timespec="seconds"),
                "runs": [run.to_json() for run in self.runs.values()],
                "summary": self.summary(),
            },
        )

    def summary(self) -> list[dict[str, Any]]:
        """Mean and spread over seeds of the finished runs."""
        return summarise([run for run in self.runs.values() if run.state == "finished"])


def last_error(log: Path, code: int) -> str:
    r"""Why a run ended, in one line: its last error message, or the signal that killed it.

    Args:
        log: its output; that of its last start begins after the last line with a command.
        code: its exit code, negative for a signal.

    Example:
        >>> import tempfile
        >>> log = Path(tempfile.mkdtemp()) / "run.log"
        >>> _ = log.write_text("$ fmicl\nepoch 1/2\nTraceback ...\ntorch.OutOfMemoryError: CUDA out of memory.\nexit\n")
        >>> last_error(log, 1)
        'torch.OutOfMemoryError: CUDA out of memory.'
        >>> last_error(log, -9)
        'killed by SIGKILL (out of memory?)'
    """
    if code < 0:
        with contextlib.suppress(ValueError):
            hint = " (out of memory?)" if -code == signal.SIGKILL else ""
            return f"killed by {signal.Signals(-code).name}{hint}"
    try:
        with log.open("rb") as file:
            file.seek(max(0, log.stat().st_size - 2**16))
            printed = file.read().decode(errors="replace")
    except OSError:
        printed = ""
    lines = [line.rstrip() for line in re.split(r"(?m)^\$ .*$", printed)[-1].splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"fmicl: error: |[A-Za-z_][\w.]*(Error|Exception|Interrupt)\b", line)]
    if errors:
        return errors[-1].removeprefix("fmicl: error: ")
    return lines[-1] if lines else f"exit code {code}, without output"
