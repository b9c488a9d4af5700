"""Scheduler of a sweep: starts, watches and stops its runs, each of which is a process or a job of a cluster.

The same sweep can be called again: finished runs stay, unfinished ones resume from their checkpoints, failed ones are
tried again.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

from fmicl.runs.folder import Run
from fmicl.sweep.display import Display
from fmicl.sweep.grid import Cell, check_cells
from fmicl.sweep.launchers import Handle, Launcher, LocalLauncher, local_slots
from fmicl.sweep.slurm import SlurmError, SlurmLauncher, slurm_options
from fmicl.sweep.state import SweepRecord, SweepRun, find_folder, last_error, lock_folder
from fmicl.sweep.summary import scores, summary_table
from fmicl.training.signals import replaceable_handlers
from fmicl.utils.formatting import format_duration

GRACE = 120.0
"""Seconds that runs have for a last checkpoint when the sweep is stopped."""
POLL_INTERVAL = 0.2
"""Seconds between two polls of the runs."""
DETACHED_POLL_INTERVAL = 2.0
"""The same for jobs on other machines, perhaps hundreds, whose files come over a network."""
SAVE_INTERVAL = 30.0
"""Seconds after which sweep.json is written even if nothing but epochs has changed."""


class Sweep:
    """The runs of a grid, in one folder.

    Args:
        cells: what to train.
        folder: the sweep's folder; a sweep of the same recipe that it holds is continued.
        program: the command of fmicl; tests use another.

    Raises:
        ValueError: the folder is a sweep of another recipe, or has a run that was started with other defaults.
    """

    def __init__(
        self, cells: Sequence[Cell], folder: Path, *, program: Sequence[str] = (sys.executable, "-m", "fmicl")
    ) -> None:
        self.folder, self.program = folder, list(program)
        self.record = SweepRecord.read(folder, cells[0].settings.recipe)
        labels = Counter(cell.label for cell in cells)
        self.runs: list[SweepRun] = []
        """The runs of this call; the record also has those of earlier calls."""
        for cell in cells:
            new = SweepRun(cell.settings, Run(folder / cell.folder), folder / f"{cell.folder}.log")
            run = self.record.runs.setdefault(cell.settings.hash, new)
            run.name = cell.label if labels[cell.label] == 1 else cell.folder
            run.prepare(cell)
            self.runs.append(run)
        for run in self.record.runs.values():
            run.check_settings()
        self.signals: list[int] = []
        self._saved = 0.0

    def save(self) -> None:
        """Write sweep.json."""
        self.record.write()
        self._saved = time.monotonic()

    def train(self, launcher: Launcher, *, summary: bool = True) -> int:
        """Train the runs that have not finished.

        Args:
            launcher: where runs are trained.
            summary: whether to print a table of the results at the end.

        Returns:
            The exit code: 0, 1 if a run failed, or 130, 143 or 129 if Ctrl-C, SIGTERM or SIGHUP stopped the sweep.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        display = Display(f"{self.record.recipe} in {self.folder}")
        done = sum(run.state == "finished" for run in self.runs)
        display.print(
            f"sweep of {len(self.runs)} run{'s' * (len(self.runs) > 1)} in {self.folder}"
            + (f"; {done} already finished" if done else "")
        )
        with self._signal_handlers(), display:
            try:
                self.save()
                self._attach(launcher, display)
                self._loop(launcher, display)
            finally:  # an error of the sweep itself, such as a full disk, must not leave runs behind
                self._stop(launcher, display)
            self.save()
            display.update(self.runs, launcher.capacity)
        return self._report(launcher, display, summary=summary)

    def _attach(self, launcher: Launcher, display: Display) -> None:
        """Find the jobs that an earlier call has started and that are still queued or running."""
        for run in self.runs:
            if run.state == "waiting" and (handle := launcher.attach(run.run)) is not None:
                self._watch(run, handle)
                display.print(f"{run.name}: found {handle.where}")

    def _loop(self, launcher: Launcher, display: Display) -> None:
        while not self.signals:
            self._poll(display)
            for run in self.runs:
                if run.state == "waiting" and not self.signals and launcher.free():
                    self._start(run, launcher, display)
            display.update(self.runs, launcher.capacity)
            if all(run.state in ("finished", "failed") for run in self.runs):
                return
            if time.monotonic() - self._saved > SAVE_INTERVAL:
                self.save()
            time.sleep(DETACHED_POLL_INTERVAL if launcher.detached else POLL_INTERVAL)

    def _start(self, run: SweepRun, launcher: Launcher, display: Display) -> None:
        words = [*run.settings.arguments(), "--out", str(run.run.path), "--resume"]
        try:
            command = [*self.program, "train", run.settings.recipe, *words]
            handle = launcher.start(command, run.run, run.log, name=run.name)
        except SlurmError as error:
            if all(other.state != "running" for other in self.runs):
                raise
            display.print(f"[{_time()}] {run.name} has to wait: {error}")  # too many jobs, or a busy controller
            return
        except OSError as error:
            run.state, run.error = "failed", f"could not be started: {error}"
            return
        run.attempts += 1
        run.started = datetime.now(UTC).isoformat(timespec="seconds")
        self._watch(run, handle)
        display.print(f"[{_time()}] {run.name}: {'resumed' if run.progress.epoch else 'started'} ({handle.where})")
        self.save()

    @staticmethod
    def _watch(run: SweepRun, handle: Handle) -> None:
        run.handle, run.where, run.job = handle, handle.where, handle.job
        run.state, run.error, run.since = "running", None, time.monotonic()

    def _poll(self, display: Display, *, stopping: bool = False) -> None:
        for run in self.runs:
            if run.state != "running" or run.handle is None:
                continue
            code = run.handle.poll()
            run.where = run.handle.where
            run.update_progress()
            if code is None:
                continue
            run.seconds = round(run.seconds + time.monotonic() - run.since, 1)
            if code == 0 and run.run.results.exists():
                run.finish()
                found = "".join(f", {heading} {value:.2f}" for heading, value in scores(run.results).items())
                display.print(f"[{_time()}] {run.name}: finished in {format_duration(run.seconds)}{found}")
            elif stopping:
                run.state = "stopped"
            else:
                run.state = "failed"
                missing = f"ended without {run.run.results.name}"
                printed = missing if code == 0 else last_error(run.log, code)
                run.error = run.handle.error or printed
                display.print(f"[{_time()}] {run.name}: failed: {run.error} (see {run.log})")
            self.save()

    @contextlib.contextmanager
    def _signal_handlers(self) -> Iterator[None]:
        """Remember Ctrl-C, SIGTERM and SIGHUP, which the loop then acts on."""

        def remember(number: int, _: object) -> None:
            self.signals.append(number)

        before = {number: signal.signal(number, remember) for number in replaceable_handlers()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, launcher: Launcher, display: Display) -> None:
        """Stop the runs of this machine, with a checkpoint; kill them on a second signal or after :data:`GRACE`."""
        if launcher.detached or all(run.state != "running" for run in self.runs):
            return
        alive = sum(run.handle is not None and run.handle.poll() is None for run in self.runs)
        launcher.stop()
        display.print(f"stopping {alive} run(s) with a checkpoint; a second Ctrl-C kills them", always=True)
        received, deadline = len(self.signals), time.monotonic() + GRACE
        while any(run.state == "running" for run in self.runs):
            if len(self.signals) > received or time.monotonic() > deadline:
                launcher.stop(kill=True)
            self._poll(display, stopping=True)
            display.update(self.runs)
            time.sleep(POLL_INTERVAL / 4)

    def _report(self, launcher: Launcher, display: Display, *, summary: bool) -> int:
        """Print the summary, the errors and how to continue; returns the exit code."""
        rows = self.record.summary() if summary else []
        if any(row["scores"] for row in rows):  # text runs may have none
            display.console.print(summary_table(rows))
        failed = [run for run in self.runs if run.state == "failed"]
        for run in failed:
            display.print(f"failed: {run.name}: {run.error}\n  log: {run.log}", always=True)
        if summary:
            display.print(f"all settings and results: {self.record.file}", always=True)
        if self.signals:
            hint = "the same command continues the runs"
            if jobs := [run.job for run in self.runs if launcher.detached and run.state == "running" and run.job]:
                hint = f"its jobs continue; the same command watches them, `scancel {' '.join(jobs)}` cancels them"
            print(f"fmicl: stopped; {hint} (--out {self.folder})", file=sys.stderr)
            return 128 + max(self.signals)  # SIGTERM takes precedence over SIGINT, and SIGINT over SIGHUP
        if failed and summary:
            print(
                f"fmicl: {len(failed)} of {len(self.runs)} runs failed; the same command tries them again "
                f"(--out {self.folder})",
                file=sys.stderr,
            )
        return 1 if failed else 0


def run_sweep(
    cells: Sequence[Cell],
    *,
    out: Path | None = None,
    parallel: int | None = None,
    launcher: str = "local",
    slurm: Sequence[str] = (),
) -> int:
    """Train a grid; the options are those of ``fmicl sweep``.

    Args:
        cells: the runs.
        out: folder of the sweep.
        parallel: runs at once on each device, or jobs at once.
        launcher: "local" or "slurm".
        slurm: ``KEY=VALUE`` options of sbatch.

    Returns:
        The exit code, as of :meth:`Sweep.train`.

    Raises:
        ValueError, OSError: wrong settings, launcher or folder; nothing was started.
    """
    make_launcher = prepare_launcher(cells, parallel=parallel, launcher=launcher, slurm=slurm)
    folder = find_folder(cells, out)
    with lock_folder(folder) as lock:
        return Sweep(cells, folder).train(make_launcher(lock))


def prepare_launcher(
    cells: Sequence[Cell], *, parallel: int | None, launcher: str, slurm: Sequence[str]
) -> Callable[[int | None], Launcher]:
    """Check cells and devices; returns what makes the launcher, from the descriptor of the folder's lock.

    Raises:
        ValueError, OSError: wrong settings or launcher.
    """
    local, options = launcher == "local", slurm_options(slurm)
    check_cells(cells, local=local)
    device, devices = cells[0].settings.device, cells[0].settings.devices
    slots = local_slots(parallel or 1, device=device, devices=devices) if local else []
    slurm_launcher = None if local else SlurmLauncher(options, devices=devices, device=device, limit=parallel)
    return lambda lock: slurm_launcher or LocalLauncher(slots, inherited=lock)


def _time() -> str:
    return time.strftime("%H:%M:%S")
