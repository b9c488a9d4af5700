"""What a person sees of a sweep: one table while it goes on, and the means over seeds at its end."""

from __future__ import annotations

import csv
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from fmicl.utils.formatting import format_duration

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Display", "Progress", "Row", "read_progress", "scores", "spread", "summarise", "summary_table"]

SCORES = {"knn": "k-NN", "linear": "linear", "linear_views": "linear on views", "avg": "STS avg", "STSB": "STS-B"}
"""Results that are shown, where a run has them."""
WATCHED = ("knn", "stsb_dev", "stsb")
"""Columns of metrics.csv that tell how good the encoder is so far; the first that a run has is shown."""
RECENT = 5
"""Epochs that the time of an epoch is taken from."""
HEADINGS = ("state", "epoch", "s/epoch", "score", "loss", "time left")
"""Of the live table, between a run's name and where it is."""
BORDER = 3
"""What a column of the table has around its letters."""
STYLES = {"running": "cyan", "finished": "green", "failed": "red", "stopped": "yellow", "waiting": "dim"}


@dataclass(frozen=True)
class Progress:
    """How far a run is, as its metrics.csv has it; what it doesn't say is None."""

    epoch: float | None = None
    seconds: float | None = None
    """Of an epoch, of late: the first one compiles."""
    loss: float | None = None
    score: float | None = None
    """The last k-NN accuracy, or what a run on text has instead."""


class Row(Protocol):
    """What the table needs to know of a run."""

    state: str
    where: str
    error: str
    progress: Progress
    results: Mapping[str, Any]

    @property
    def name(self) -> str:
        """Its name."""

    @property
    def epochs(self) -> int | None:
        """Epochs that it is to have."""


def read_progress(path: Path) -> Progress:
    r"""Read metrics.csv, whichever columns it has.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> _ = path.write_text("epoch,loss,knn,seconds\n1,2.5,,40\n2,2.0,61.5,3\n3,1.5,,3\n")
        >>> read_progress(path)
        Progress(epoch=3.0, seconds=3.0, loss=1.5, score=61.5)
        >>> read_progress(path.with_name("none.csv"))
        Progress(epoch=None, seconds=None, loss=None, score=None)
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (OSError, csv.Error, UnicodeDecodeError):
        return Progress()
    if not rows:
        return Progress()
    times, done = [], 0.0
    for row in rows:
        epoch, seconds = _number(row.get("epoch")), _number(row.get("seconds"))
        if epoch is not None and seconds is not None and epoch > done:
            times.append(seconds / (epoch - done))  # a row may be for a part of an epoch
        done = done if epoch is None else epoch
    watched = next((name for name in WATCHED if name in rows[0]), None)
    seen = [score for row in rows if watched and (score := _number(row.get(watched))) is not None]
    return Progress(
        epoch=_number(rows[-1].get("epoch")),
        seconds=statistics.median(times[1:][-RECENT:] or times) if times else None,
        loss=_number(rows[-1].get("loss")),
        score=seen[-1] if seen else None,
    )


def _number(text: str | None) -> float | None:
    try:
        return float(text or "")
    except ValueError:
        return None


def scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a results.json that a sweep compares, be they of images or of sentences.

    Example:
        >>> scores({"knn": 84.2, "linear": 88.0, "k": 200, "split": "test"})
        {'k-NN': 84.2, 'linear': 88.0}
        >>> scores({"sts": {"STSB": 80.0, "avg": None}})
        {'STS-B': 80.0}
    """
    inner = [value for value in results.values() if isinstance(value, Mapping) and value.keys() & {"avg", "STSB"}]
    found = {}
    for key, label in SCORES.items():
        value = next((place[key] for place in (results, *inner) if isinstance(place.get(key), int | float)), None)
        if value is not None:
            found[label] = float(value)
    return found


def spread(values: Sequence[float]) -> str:
    """Mean and standard deviation (of a sample: n - 1) of one or more numbers.

    Example:
        >>> spread([84.0, 85.0, 86.0]), spread([84.0])
        ('85.00 ± 1.00', '84.00')
    """
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def summarise(finished: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Mean and spread over the runs of each group.

    Args:
        finished: pairs of a group (see :func:`fmicl.sweep.names.names_of`) and a run's results.

    Returns:
        For each group, its number of runs, and for each score mean, standard deviation (None for one run) and values.

    Example:
        >>> summarise([("kl", {"knn": 84.0}), ("kl", {"knn": 85.0})])
        [{'group': 'kl', 'runs': 2, 'k-NN': {'mean': 84.5, 'std': 0.7071067811865476, 'values': [84.0, 85.0]}}]
    """
    groups: dict[str, list[dict[str, float]]] = {}
    for group, results in finished:
        groups.setdefault(group, []).append(scores(results))
    rows = []
    for group, runs in groups.items():
        row: dict[str, Any] = {"group": group, "runs": len(runs)}
        for label in SCORES.values():
            values = [run[label] for run in runs if label in run]
            if values:
                std = statistics.stdev(values) if len(values) > 1 else None
                row[label] = {"mean": statistics.fmean(values), "std": std, "values": values}
        rows.append(row)
    return rows


def summary_table(summary: Sequence[Mapping[str, Any]]) -> Any:
    """The summary as a table of rich."""
    from rich.table import Table

    labels = [label for label in SCORES.values() if any(label in row for row in summary)]
    table = Table(title="mean ± standard deviation over seeds")
    table.add_column("runs of")
    table.add_column("n", justify="right")
    for label in labels:
        table.add_column(label, justify="right")
    for row in summary:
        shown = [spread(row[label]["values"]) if label in row else "" for label in labels]
        table.add_row(row["group"], str(row["runs"]), *shown)
    return table


def time_left(row: Row) -> float | None:
    """Seconds that a run still needs to its last epoch; None where nothing is known."""
    progress = row.progress
    if progress.seconds is None or row.epochs is None or progress.epoch is None:
        return None
    return max(0.0, row.epochs - progress.epoch) * progress.seconds


class Display:
    """One live table on a terminal; elsewhere a line for each event, and one a minute on how far things are.

    Args:
        title: what is swept.
        live: draw the table; None asks the terminal.
        every: seconds between two lines on how far things are, where there is no table.
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

    def say(self, line: str, *, always: bool = False) -> None:
        """A line of text; on a terminal only those that the table doesn't show."""
        if not self.live or always:
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def update(self, rows: Sequence[Row], slots: int | None = None) -> None:
        """Show how far all runs are."""
        if self._live is not None:
            self._live.update(self.table(rows, slots))
        elif not self.live and time.monotonic() - self._last > self.every:
            self._last = time.monotonic()
            self.say(f"[{time.strftime('%H:%M:%S')}] {counts(rows)}{_left(rows, slots)}")

    def table(self, rows: Sequence[Row], slots: int | None = None) -> Any:
        """The table, with what the terminal has room for: first the rows that something happens to.

        In a narrow one columns are left out that a run can do without, and what went wrong is cut short.
        """
        from rich.table import Table

        table = Table(title=self.title, caption=f"{counts(rows)}{_left(rows, slots)}")
        shown = self._chosen(rows)
        cells = {heading: [_cell(row, heading) for row in shown] for heading in HEADINGS}
        width = {heading: BORDER + max(map(len, [heading, *found])) for heading, found in cells.items()}
        name = min(40, max(map(len, ["run", *(row.name for row in shown)])))
        note = max((len(_note(row)) for row in shown), default=0)
        room = self.console.width - 1 - 2 * BORDER - name
        for heading in ("loss", "s/epoch", "time left"):
            if sum(width.values()) + min(note, 16) > room:
                del width[heading]
        spare = room - sum(width.values())
        note = min(note, max(spare, 6))
        table.add_column("run", overflow="fold", width=max(min(name, 8), name + min(0, spare - note)))
        for heading in width:
            table.add_column(heading, justify="left" if heading == "state" else "right", no_wrap=True)
        table.add_column("", overflow="ellipsis", no_wrap=True, max_width=note)
        for i, row in enumerate(shown):
            table.add_row(row.name, *(cells[heading][i] for heading in width), _note(row), style=STYLES.get(row.state))
        return table

    def _chosen(self, rows: Sequence[Row]) -> list[Row]:
        room = max(4, self.console.height - 7)
        if len(rows) <= room:
            return list(rows)
        order = ("running", "failed", "stopped", "finished", "waiting")
        ranked = sorted(rows, key=lambda row: order.index(row.state) if row.state in order else len(order))
        kept = {id(row) for row in ranked[:room]}
        return [row for row in rows if id(row) in kept]


def _cell(row: Row, heading: str) -> str:
    """What a run has under this heading."""
    p = row.progress
    if heading == "state":
        return row.state
    if heading == "epoch":
        return "" if p.epoch is None else f"{p.epoch:g}{'' if row.epochs is None else f'/{row.epochs}'}"
    if heading == "time left":
        left = time_left(row) if row.state == "running" else None
        return "evaluating" if left == 0 else format_duration(left)
    values = {"s/epoch": p.seconds, "loss": p.loss, "score": next(iter(scores(row.results).values()), p.score)}
    value, digits = values[heading], {"s/epoch": 1, "loss": 4, "score": 2}[heading]
    return "" if value is None else f"{value:.{digits}f}"


def _note(row: Row) -> str:
    """What went wrong with a run, or where it is."""
    return row.error or row.where


def counts(rows: Sequence[Row]) -> str:
    """How many runs are in which state, in words."""
    states = [row.state for row in rows]
    order = ("finished", "running", "waiting", "failed", "stopped")
    return ", ".join(f"{states.count(state)} {state}" for state in order if state in states)


def _left(rows: Sequence[Row], slots: int | None) -> str:
    """A guess at the time that the whole sweep still needs, once the runs under way have one."""
    running = [left for row in rows if row.state == "running" and (left := time_left(row)) is not None]
    pace = [row.progress.seconds for row in rows if row.progress.seconds is not None]
    waiting = [row.epochs for row in rows if row.state == "waiting"]
    if not running or any(epochs is None for epochs in waiting):
        return ""
    later = sum(epochs or 0 for epochs in waiting) * statistics.fmean(pace)
    total = max(max(running), (sum(running) + later) / max(1, slots or len(rows)))
    return f"; about {format_duration(total)} left" if total else "; evaluating"
