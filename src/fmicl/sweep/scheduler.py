"""Many runs of one recipe: each cell of a grid in a process of its own, resumed where it is unfinished.

SWEEP/sweep.json  .lock  <run>/  <run>.log  jobs/ (with submitit)

``sweep.json`` has the settings, the state and the results of each run, and is written whole whenever one of them
changes. Runs are there by their folders, which keep the names that they were made with; what a person sees is ``name``,
which says all settings that the sweep's runs differ in, whichever calls trained them. To call a sweep again is to go on
with it: finished runs stay as they are, the others are resumed from their checkpoints, and those that failed are tried
once more.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmicl.config.fields import arguments
from fmicl.runs.folder import Run, read_settings
from fmicl.sweep.checks import check_cells
from fmicl.sweep.folder import (
    as_it_was,
    difference,
    find_folder,
    key_of,
    last_error,
    locked,
    not_told_apart_by,
    plain,
)
from fmicl.sweep.grid import Cell, SweepOptions, cells, parse_case, values_of
from fmicl.sweep.launchers import (
    Handle,
    Launcher,
    LocalLauncher,
    SubmititLauncher,
    check_submitit,
    local_slots,
    slurm_options,
)
from fmicl.sweep.names import names_of
from fmicl.sweep.table import Display, Progress, read_progress, scores, summarise, summary_table
from fmicl.training.signals import handlers_to_replace
from fmicl.utils.files import read_json, write_json
from fmicl.utils.formatting import format_duration
from fmicl.utils.provenance import command_line

__all__ = ["Sweep", "SweepRun", "run_sweep"]

GRACE = 120.0
"""Seconds that runs have for a last checkpoint when the sweep is stopped."""
TICK = 0.2
"""Seconds between two looks at the runs."""
DETACHED_TICK = 2.0
"""The same where they are jobs on other machines, perhaps hundreds, whose files come over a network."""
SAVE_EVERY = 30.0
"""Seconds after which sweep.json is written also if only epochs have passed."""


@dataclass
class SweepRun:
    """A run of a sweep, and how it stands: waiting, running, finished, failed or stopped."""

    cell: Cell
    path: Path
    log: Path
    command: list[str]
    name: str = ""
    """What it is called among all runs of the sweep; its folder keeps the name that it was made with."""
    group: str = ""
    """Its name without the seed."""
    state: str = "waiting"
    where: str = ""
    error: str = ""
    attempts: int = 0
    job: str | None = None
    started: str | None = None
    seconds: float = 0.0
    """Time that it took, over all its starts."""
    progress: Progress = field(default_factory=Progress)
    results: Mapping[str, Any] = field(default_factory=dict)
    handle: Handle | None = None
    since: float = 0.0
    _seen: tuple[int, int, int] | None = field(default=None, repr=False)

    @property
    def epochs(self) -> int | None:
        """Epochs that it is to have."""
        return getattr(self.cell.recipe, "epochs", None)

    def look(self) -> bool:
        """Read how far it is, if its file is another than at the last look; whether that is farther than before."""
        file = self.path / "metrics.csv"
        try:
            state = file.stat()
            seen = (state.st_ino, state.st_size, state.st_mtime_ns)
        except OSError:
            seen = None
        if seen == self._seen:
            return False
        self._seen = seen
        before, self.progress = self.progress, read_progress(file)
        return before != self.progress

    def read_results(self) -> None:
        """Take the results from its folder, if it has any."""
        with contextlib.suppress(OSError, ValueError):
            self.results = read_json(self.path / "results.json")

    def entry(self) -> dict[str, Any]:
        """What sweep.json says of it."""
        p = self.progress
        return {
            "name": self.name, "state": self.state,
            "group": self.group, "case": self.cell.case, "case_sets": list(self.cell.case_sets),
            "seed": getattr(self.cell.recipe, "seed", None), "changes": plain(self.cell.changes),
            "epoch": p.epoch, "epochs": self.epochs, "seconds_per_epoch": p.seconds, "loss": p.loss, "score": p.score,
            "attempts": self.attempts, "started": self.started, "seconds": round(self.seconds, 1),
            "where": self.where or None, "job": self.job, "log": os.path.relpath(self.log, self.path.parent),
            "error": self.error or None,
            "results": dict(self.results) or None,
        }  # fmt: skip


class Sweep:
    """The runs of a grid, in one folder.

    Args:
        name: the recipe's name.
        recipe: the recipe that the cells differ from.
        cells: what to train.
        folder: the sweep's folder, new or of the same sweep before.
        program: what is called with ``train NAME ...``; other programs are for tests.
        machine: settings that don't tell runs apart, such as :func:`fmicl.sweep.folder.not_told_apart_by` finds.

    Raises:
        ValueError: the folder holds something else, or a run of the same name with other settings.
    """

    def __init__(
        self,
        name: str,
        recipe: Any,
        cells: Sequence[Cell],
        folder: Path,
        *,
        program: Sequence[str] = (sys.executable, "-m", "fmicl"),
        machine: frozenset[str] = frozenset(),
    ) -> None:
        self.name, self.folder = name, folder
        self.file = folder / "sweep.json"
        self.others: dict[str, Any] = {}
        """Runs that an earlier call left here and that are not in this grid."""
        self.created = _now()
        before = self._before()
        places = {key_of(entry["changes"], machine): run for run, entry in before.items()}
        self.runs: list[SweepRun] = []
        for cell in cells:
            place = places.get(key_of(cell.changes, machine), cell.name)
            old = before.get(place, {})
            if old and key_of(old["changes"], machine) != key_of(cell.changes, machine):
                what = difference(old["changes"], cell.changes, machine)
                raise ValueError(
                    f"{folder} holds a run {place} with other settings ({what}): take another --out, "
                    "or give both values of what differs"
                )
            path = folder / place
            if Run(path).settings.exists():  # by a version with other defaults, maybe, which the changes don't tell
                others = cell.recipe.differences(read_settings(Run(path), type(cell.recipe)))
                if others:
                    raise ValueError(f"{path} was started with other settings ({others}): take another --out")
            command = [*program, "train", name, *arguments(cell.recipe, recipe), "--out", str(path), "--resume"]
            run = SweepRun(cell, path, folder / f"{place}.log", command)
            run.attempts, run.seconds = old.get("attempts", 0), old.get("seconds", 0.0)
            run.job = old.get("job") if old.get("state") == "running" else None  # else it is known to have ended
            run.started, run.where = old.get("started"), old.get("where") or ""
            run.look()
            if Run(path).finished or (old.get("state") == "finished" and Run(path).results.exists()):
                run.state = "finished"
                run.read_results()
            if old:
                run.cell = as_it_was(cell, old, finished=run.state == "finished")
            self.runs.append(run)
        own = {run.path.name: run for run in self.runs}
        names = names_of({**before, **{place: run.entry() for place, run in own.items()}}, recipe, machine)
        for place, run in own.items():
            run.name, run.group = names[place]["name"], names[place]["group"]
        self.others = {place: {**entry, **names[place]} for place, entry in before.items() if place not in own}
        self.signals: list[int] = []
        self._saved = 0.0

    def _before(self) -> dict[str, Any]:
        """The runs that the folder holds already."""
        if not self.file.exists():
            return {}
        saved = read_json(self.file)
        if saved.get("recipe") != self.name:
            raise ValueError(
                f"{self.folder} is a sweep of {saved.get('recipe')}, not of {self.name}: take another --out"
            )
        self.created = saved.get("created", self.created)
        runs: dict[str, Any] = saved["runs"]
        return runs

    def save(self) -> None:
        """Write sweep.json, whole."""
        entries = {**self.others, **{run.path.name: run.entry() for run in self.runs}}
        write_json(
            self.file,
            {
                "format": 1,
                "recipe": self.name,
                "command": command_line(),
                "created": self.created,
                "updated": _now(),
                "runs": entries,
                "summary": summarise(
                    (entry["group"], entry["results"] or {})
                    for entry in entries.values()
                    if entry["state"] == "finished"
                ),
            },
        )
        self._saved = time.monotonic()

    def __call__(self, launcher: Launcher, *, slots: int | None = None, live: bool | None = None) -> int:
        """Train what is unfinished, and show how far it is.

        Args:
            launcher: where runs are trained.
            slots: runs at once, for the guess at the time left; None is all of them.
            live: draw a table; None asks the terminal.

        Returns:
            The exit code: 0, 1 if a run failed, or 130, 143 or 129 if the sweep was stopped by Ctrl-C, SIGTERM or
            SIGHUP.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        display = Display(f"{self.name} in {self.folder}", live=live)
        done = sum(run.state == "finished" for run in self.runs)
        display.say(
            f"sweep of {len(self.runs)} run{'s' * (len(self.runs) > 1)} in {self.folder}"
            + (f"; {done} finished before" if done else "")
        )
        with self._signals(), display:
            try:
                self.save()
                self._attach(launcher, display)
                self._train(launcher, display, slots)
            finally:  # a full disk, say, ends the sweep, and must not leave runs behind
                self._end(launcher, display)
            self.save()
            display.update(self.runs, slots)
        return self._report(launcher, display)

    def _attach(self, launcher: Launcher, display: Display) -> None:
        """Watch jobs again that went on without the sweep."""
        for run in self.runs:
            if run.state == "waiting" and run.job is not None and (handle := launcher.attach(run.job)) is not None:
                self._begin(run, handle)
                display.say(f"{run.name}: {handle.where} goes on")

    def _train(self, launcher: Launcher, display: Display, slots: int | None) -> None:
        while not self.signals:
            self._poll(display)
            for run in self.runs:
                if run.state == "waiting" and not self.signals and launcher.free():
                    self._start(run, launcher, display)
            display.update(self.runs, slots)
            if all(run.state in ("finished", "failed") for run in self.runs):
                return
            if time.monotonic() - self._saved > SAVE_EVERY:
                self.save()
            time.sleep(DETACHED_TICK if launcher.detached else TICK)

    def _start(self, run: SweepRun, launcher: Launcher, display: Display) -> None:
        try:
            handle = launcher.start(run.command, run.log, name=run.name)
        except OSError as error:
            run.state, run.error = "failed", f"could not be started: {error}"
            return
        run.attempts += 1
        run.started = _now()
        run.job = handle.where.removeprefix("job ") if launcher.detached else None
        self._begin(run, handle)
        display.say(f"[{_time()}] {run.name}: {'resumed' if run.progress.epoch else 'started'} ({handle.where})")
        self.save()

    @staticmethod
    def _begin(run: SweepRun, handle: Handle) -> None:
        run.handle, run.where, run.log, run.since = handle, handle.where, handle.log, time.monotonic()
        run.state, run.error = "running", ""

    def _poll(self, display: Display, *, stopping: bool = False) -> None:
        for run in self.runs:
            if run.state != "running" or run.handle is None:
                continue
            code = run.handle.poll()
            run.look()
            if code is None:
                continue
            run.seconds += time.monotonic() - run.since
            whole = (run.path / "results.json").exists()
            if code == 0 and whole:
                run.state = "finished"
                run.read_results()
                found = ", ".join(f"{label} {value:.2f}" for label, value in scores(run.results).items())
                display.say(
                    f"[{_time()}] {run.name}: finished in {format_duration(run.seconds)}{found and '; ' + found}"
                )
            elif stopping:
                run.state = "stopped"
            else:
                run.state = "failed"
                said = last_error(run.log, run.handle.log_start, code)
                run.error = run.handle.error or ("ended without results.json" if code == 0 else said)
                display.say(f"[{_time()}] {run.name}: failed: {run.error} (see {run.log})")
            self.save()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Ctrl-C, SIGTERM and SIGHUP are noted, and heeded between two looks at the runs."""

        def note(number: int, _: object) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, note) for number in handlers_to_replace()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _end(self, launcher: Launcher, display: Display) -> None:
        """Stop what still runs: with a checkpoint, or at once on a second signal or after a time."""
        running = [run for run in self.runs if run.state == "running" and run.handle is not None]
        if not running or launcher.detached:
            return
        alive = sum(run.handle is not None and run.handle.poll() is None for run in running)  # one may have just ended
        for run in running:
            assert run.handle is not None
            run.handle.stop()
        display.say(f"stopping {alive} runs, each with a checkpoint; once more ends them at once", always=True)
        asked, deadline = len(self.signals), time.monotonic() + GRACE
        while any(run.state == "running" for run in running):
            if len(self.signals) > asked or time.monotonic() > deadline:
                for run in running:
                    assert run.handle is not None
                    run.handle.stop(hard=True)
            self._poll(display, stopping=True)
            display.update(self.runs)
            time.sleep(TICK / 4)

    def _report(self, launcher: Launcher, display: Display) -> int:
        """The last words: means over seeds, what failed, and how to go on."""
        summary = read_json(self.file)["summary"]
        if any(row.keys() - {"group", "runs"} for row in summary):  # runs on sentences may have no scores
            display.console.print(summary_table(summary))
        failed = [run for run in self.runs if run.state == "failed"]
        for run in failed:
            display.say(f"failed: {run.name}: {run.error}\n  log: {run.log}", always=True)
        display.say(f"all of it: {self.file}", always=True)
        if self.signals:
            jobs = [run.job for run in self.runs if run.state == "running" and run.job]
            if launcher.detached and jobs:
                hint = f"its jobs go on; the same command watches them again, `scancel {' '.join(jobs)}` ends them"
            else:
                hint = "the same command goes on where the runs are"
            print(f"fmicl: stopped; {hint} (--out {self.folder})", file=sys.stderr)
            return 128 + max(self.signals)  # SIGTERM before Ctrl-C before SIGHUP
        if failed:
            print(
                f"fmicl: {len(failed)} of {len(self.runs)} runs failed; the same command tries them again "
                f"(--out {self.folder})",
                file=sys.stderr,
            )
        return 1 if failed else 0


def run_sweep(name: str, recipe: Any, grid: Any, options: SweepOptions) -> int:
    """What ``fmicl sweep`` does.

    Args:
        name: the recipe's name.
        recipe: the recipe.
        grid: the values of its fields, as :func:`fmicl.sweep.grid.grid_of` has them.
        options: how to train.

    Returns:
        The exit code, as of :class:`Sweep`.
    """
    found = cells(recipe, values_of(grid, recipe), [parse_case(words, recipe) for words in options.case])
    submitted = options.launcher == "submitit"
    check_cells(found, here=not submitted)
    machine = not_told_apart_by(recipe, found)
    first = found[0].recipe
    device, devices = getattr(first, "device", "auto"), getattr(first, "devices", 1)
    slots, slurm = [], slurm_options(options.slurm)
    if submitted:
        check_submitit()
    else:
        slots = local_slots(options.parallel or 1, device=device, devices=devices)
    folder = find_folder(name, found, options.out, machine)
    launcher: Launcher
    with locked(folder) as lock:
        sweep = Sweep(name, recipe, found, folder, machine=machine)
        if submitted:
            launcher = SubmititLauncher(
                folder / "jobs", slurm, devices=devices, gpu=device != "cpu", limit=options.parallel
            )
            return sweep(launcher, slots=options.parallel)
        launcher = LocalLauncher(slots, keep_open=lock)
        return sweep(launcher, slots=len(slots))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _time() -> str:
    return time.strftime("%H:%M:%S")
