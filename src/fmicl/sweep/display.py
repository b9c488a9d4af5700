"""Live table of a sweep's runs, or progress lines if the output is not a terminal."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from fmicl.sweep.summary import scores
from fmicl.utils.formatting import format_duration

if TYPE_CHECKING:
    from rich.console import Console

    from fmicl.sweep.state import SweepRun

HEADINGS = ("state", "epoch", "s/epoch", "score", "loss", "time left")
"""Columns between a run's name and the note on where it is or why it failed."""
BORDER = 3
"""Width of a column's padding and border."""
STYLES = {"running": "cyan", "failed": "red", "stopped": "yellow", "finished": "green", "waiting": "dim"}
"""Colour of each state; the first ones are shown first if the terminal is small."""


class Display:
    """One live table on a terminal; elsewhere a line per event, and a line of progress every minute.

    Args:
        title: of the table.
        live: whether to draw the table; None: if the output is a terminal.
        every: seconds between two lines of progress.
        console: where to show it; None is the standard output.
    """

    def __init__(
        self, title: str, *, live: bool | None = None, every: float = 60.0, console: Console | None = None
    ) -> None:
        from rich.console import Console

        self.title, self.every = title, every
        self.console = console or Console()
        self.live = self.console.is_terminal if live is None else live
        self._live: Any = None
        self._last = time.monotonic()

    def __enter__(self) -> Display:
        if self.live:
            from rich.live import Live

            self._live = Live(console=self.console, refresh_per_second=4)
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def print(self, line: str, *, always: bool = False) -> None:
        """Print an event; if there is a table, which shows most of them, only with ``always``."""
        if not self.live or always:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, runs: Sequence[SweepRun], slots: int | None = None) -> None:
        """Show the state of all runs.

        Args:
            runs: the runs.
            slots: how many are trained at once, for the estimate of the time left; None is all.
        """
        if self._live is not None:
            self._live.update(self.table(runs, slots))
        elif not self.live and time.monotonic() - self._last > self.every:
            self._last = time.monotonic()
            self.print(f"[{time.strftime('%H:%M:%S')}] {_counts(runs)}{_total_time_left(runs, slots)}")

    def table(self, runs: Sequence[SweepRun], slots: int | None = None) -> Any:
        """The table, cut to the terminal: rows of waiting runs, columns and ends of errors are left out first."""
        from rich.table import Table

        table = Table(title=self.title, caption=f"{_counts(runs)}{_total_time_left(runs, slots)}")
        runs = self._fitting(runs)
        cells = {heading: [_cell(run, heading) for run in runs] for heading in HEADINGS}
        width = {heading: BORDER + max(map(len, [heading, *found])) for heading, found in cells.items()}
        notes = [run.error or run.where or "" for run in runs]
        name = min(40, max(map(len, ["run", *(run.name for run in runs)])))
        note = max(map(len, notes), default=0)
        available = self.console.width - 1 - 2 * BORDER - name
        for heading in ("loss", "s/epoch", "time left"):
            if sum(width.values()) + min(note, 16) > available:
                del width[heading]
        rest = available - sum(width.values())
        note = min(note, max(rest, 6))
        table.add_column("run", overflow="fold", width=max(min(name, 8), name + min(0, rest - note)))
        for heading in width:
            table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
        table.add_column("", overflow="ellipsis", no_wrap=True, max_width=note)
        for i, run in enumerate(runs):
            table.add_row(run.name, *(cells[heading][i] for heading in width), notes[i], style=STYLES[run.state])
        return table

    def _fitting(self, runs: Sequence[SweepRun]) -> list[SweepRun]:
        order = list(STYLES)
        ranked = sorted(runs, key=lambda run: order.index(run.state))
        kept = {id(run) for run in ranked[: max(4, self.console.height - 7)]}
        return [run for run in runs if id(run) in kept]


def time_left(run: SweepRun) -> float | None:
    """Seconds until a run's last epoch; None if unknown."""
    progress = run.progress
    if progress.seconds_per_epoch is None or progress.epoch is None or "epochs" in run.settings.unresolved:
        return None
    return max(0.0, float(run.settings.epochs) - progress.epoch) * progress.seconds_per_epoch


def _cell(run: SweepRun, heading: str) -> str:
    p = run.progress
    if heading == "state":
        return run.state
    if heading == "epoch":
        return "" if p.epoch is None else f"{p.epoch:g}/{run.settings.epochs}".removesuffix("/auto")
    if heading == "time left":
        left = time_left(run) if run.state == "running" else None
        return "evaluating" if left == 0 else format_duration(left)
    if heading == "s/epoch":
        return "" if p.seconds_per_epoch is None else f"{p.seconds_per_epoch:.1f}"
    if heading == "loss":
        return "" if p.loss is None else f"{p.loss:.4f}"
    score = next(iter(scores(run.results).values()), p.score)
    return "" if score is None else f"{score:.2f}"


def _counts(runs: Sequence[SweepRun]) -> str:
    states = [run.state for run in runs]
    order = ("finished", "running", "waiting", "failed", "stopped")
    return ", ".join(f"{states.count(state)} {state}" for state in order if state in states)


def _total_time_left(runs: Sequence[SweepRun], slots: int | None) -> str:
    """An estimate for the whole sweep, from the runs that have done an epoch."""
    running = [left for run in runs if run.state == "running" and (left := time_left(run)) is not None]
    if not running:
        return ""
    per_epoch = statistics.fmean(seconds for run in runs if (seconds := run.progress.seconds_per_epoch) is not None)
    known = [run for run in runs if "epochs" not in run.settings.unresolved]
    waiting = sum(run.settings.epochs for run in known if run.state == "waiting") * per_epoch
    total = max(max(running), (sum(running) + waiting) / (slots or len(runs)))
    return f"; about {format_duration(total)} left" if total else "; evaluating"
