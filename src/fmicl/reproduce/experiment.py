"""Experiments of the paper: which runs each needs, and the table or figure that is made of them.

An experiment is a class with two methods. :meth:`Experiment.plan` lists the runs, each under a key such as
("js", "cosine"); :meth:`Experiment.present` makes tables and plots of those that have finished. Everything else
(training, resuming, archives, Markdown, HTML) is common to all: see `fmicl.reproduce.pipeline`.
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from fmicl.config import Settings, recipe
from fmicl.reproduce.plots import Line, Plot
from fmicl.sweep.summary import mean_and_std
from fmicl.utils.options import options_of
from fmicl.utils.registry import Registry

Key = tuple[str, ...]
Name = tuple[str | float, ...]
SMALL_EPOCHS = 10
"""Epochs of digits at the small scale."""
NAMED = frozenset({"method", "objective", "divergence", "epochs", "seed"})
"""Options that have their own place in tables and in the names of archived runs."""
UNIMPORTANT = frozenset({"baselines"})
"""Options that add results and change no other."""


def key_of(name: Name) -> Key:
    """The key of a table's cell or of a curve.

    Example:
        >>> key_of(("KL", 800)), key_of(("KL", 10.0))
        (('KL', '800'), ('KL', '10'))
    """
    return tuple(part if isinstance(part, str) else f"{part:.15g}" for part in name)


@dataclass(frozen=True)
class Scale:
    """How large an experiment is.

    Args:
        small: digits for images and a tiny BERT for text, in minutes on two cores; else the paper's data and lengths.
        seeds: a run of each setting for each of these.
        epochs: lengths of the runs, in place of the experiment's own.
        places: options of each recipe that say where its data is: {"cifar10": {"data_dir": ...}}.
        common: options of every run, such as the device.
    """

    small: bool = False
    seeds: tuple[int, ...] = (0,)
    epochs: tuple[int, ...] = ()
    places: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    common: Mapping[str, Any] = field(default_factory=dict)

    def lengths(self, *paper: int) -> tuple[int, ...]:
        """Epochs of the runs: those asked for, or at full scale those of the paper.

        Example:
            >>> Scale().lengths(800), Scale(epochs=(200,)).lengths(800), Scale(small=True).lengths(200, 800)
            ((800,), (200,), (10,))
        """
        return self.epochs or ((SMALL_EPOCHS,) if self.small else paper)

    def length(self, paper: int) -> int:
        """The first of them, for experiments that have one."""
        return self.lengths(paper)[0]

    def images(self, key: Name, name: str, epochs: int, **changes: Any) -> Plan:
        """The runs of a key, one for each seed: of this recipe, or of digits at the small scale."""
        if self.small:
            return self._runs(key, "digits", epochs=epochs, monitor_every=0, baselines=False, **changes)
        return self._runs(key, name, epochs=epochs, **changes)

    @property
    def ours_text(self) -> str:
        """The label of our runs on sentences, with the encoder that they start from if it isn't the paper's."""
        model = self.places.get("wikipedia", {}).get("model")
        return "ours" if model is None else f"ours, from {Path(model).name}"

    def text(self, key: Name, **changes: Any) -> Plan:
        """The runs of a key, one of the recipe wikipedia for each seed."""
        return self._runs(key, "wikipedia", **changes)

    def _runs(self, key: Name, name: str, **changes: Any) -> Plan:
        options = {**self.places.get(name, {}), **self.common, **changes}
        return [Planned(key_of(key), recipe(name, seed=seed, **options)) for seed in self.seeds]


@dataclass(frozen=True)
class Planned:
    """A run of an experiment: its settings, and the key of the table's cell or the figure's curve it belongs to."""

    key: Key
    settings: Settings


Plan = list[Planned]


@dataclass(frozen=True)
class Outcome:
    """A finished run, in a run folder or in an archive.

    Attributes:
        settings: its options.
        results: the contents of results.json.
        metrics: the rows of metrics.csv, with None for blank cells.
        source: the run folder or the archived file.
        data: the fingerprint of its data, if it is known.
    """

    settings: Settings
    results: Mapping[str, Any]
    metrics: Sequence[Mapping[str, float | None]]
    source: Path
    data: Mapping[str, Any] | None = None

    @property
    def seed(self) -> int:
        """Its seed."""
        return int(self.settings.seed)

    @functools.cached_property
    def differences(self) -> dict[str, Any]:
        """Options by which it computes something else than its recipe, but for those in :data:`NAMED`.

        An option that has the value that the recipe would resolve "auto" to is no difference. How often STS-B dev is
        evaluated counts only if the encoder was chosen by it; a text run without STS-B dev exports its last step.
        """
        settings, default = self.settings, recipe(self.settings.recipe)
        used, options = settings.used(), settings.schema.options
        found = {
            name: settings.values[name]
            for name in used
            if name in settings.changes
            and options[name].role == "compute"
            and name not in NAMED | UNIMPORTANT
            and settings.replace(**{name: getattr(default, name)}).used() != used
        }
        if self.data is not None and self.data.get("stsb_dev", "") is None:
            found.pop("sts_every", None)
            return {**found, "exported": "last step"}
        return found

    def score(self, name: str) -> float | None:
        """A number of its results."""
        return score(self.results, name)


def score(results: Mapping[str, Any], name: str) -> float | None:
    """A number of a results.json.

    An STS score counts only with the official number of pairs, and the average only if all tasks have theirs.

    Example:
        >>> score({"avg": 60.0}, "avg"), score({"avg": 60.0, "STSB": 70.0, "incomplete": ["STS12"]}, "avg")
        (60.0, None)
    """
    incomplete = results.get("incomplete", ())
    if name in incomplete or (name == "avg" and incomplete):
        return None
    value = results.get(name, results.get("sts", {}).get(name))
    return float(value) if isinstance(value, int | float) else None


@dataclass(frozen=True)
class Measured:
    """A number of a table, measured once for each seed.

    Example:
        >>> str(Measured((84.0, 86.0), ())), str(Measured((), (), "failed")), str(Measured((), ()))
        ('85.00 ± 1.41', 'failed', '')
    """

    values: tuple[float, ...]
    sources: tuple[Path, ...]
    missing: str = ""

    @property
    def mean(self) -> float:
        """The mean over the seeds."""
        return statistics.fmean(self.values)

    def __str__(self) -> str:
        return mean_and_std(self.values) if self.values else self.missing


@dataclass(frozen=True)
class Outcomes:
    """The finished runs of an experiment by key, and the reasons why others failed."""

    runs: Mapping[Key, Sequence[Outcome]]
    failed: Mapping[Key, str] = field(default_factory=dict)

    def __getitem__(self, key: Name) -> Sequence[Outcome]:
        return self.runs.get(key_of(key), ())

    def __bool__(self) -> bool:
        return any(self.runs.values()) or bool(self.failed)

    def measured(self, key: Name, name: str) -> Measured:
        """A score over the seeds of a key: blank without a run, "failed" if the run failed."""
        known = [(value, run.source) for run in self[key] if (value := run.score(name)) is not None]
        missing = "failed" if key_of(key) in self.failed else ""
        return Measured(tuple(value for value, _ in known), tuple(source for _, source in known), missing)


def curve(label: str, measured: Mapping[Any, Measured]) -> list[Line]:
    """The line of the means over x; none if nothing was measured."""
    known = {float(x): found.mean for x, found in measured.items() if found.values}
    return [Line(label, tuple(known), tuple(known.values()))] if known else []


Entry = str | float | Measured | None
Row = tuple[Entry, ...]


@dataclass(frozen=True)
class Table:
    """A table: a heading for each column, and rows of words and numbers; None is blank. The title may be ""."""

    title: str
    head: tuple[str, ...]
    rows: tuple[Row, ...]

    def texts(self) -> list[list[str]]:
        """The rows as text, numbers with two decimals."""
        return [[_text(entry) for entry in row] for row in self.rows]

    def markdown(self) -> str:
        """The table in Markdown, the first column to the left.

        Example:
            >>> print(Table("accuracy", ("", "KL"), (("paper", 90.61), ("ours", None))).markdown())
            **accuracy**
            <BLANKLINE>
            | | KL |
            |---|---:|
            | paper | 90.61 |
            | ours | |
        """
        rows = [self.head, *self.texts()]
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        lines.insert(1, "|---" + "|---:" * (len(self.head) - 1) + "|")
        title = f"**{self.title}**\n\n" if self.title else ""
        return title + "\n".join(" ".join(line.split()) for line in lines)


def _text(entry: Entry) -> str:
    if entry is None:
        return ""
    return f"{entry:.2f}" if isinstance(entry, float) else str(entry)


@dataclass(frozen=True)
class Result:
    """What an experiment shows: tables, plots, and sentences that follow from the numbers."""

    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    findings: tuple[str, ...] = ()


class Experiment:
    """A table or figure of the paper; a subclass for each, registered by :func:`register_experiment`.

    Attributes:
        paper: where it is in the paper.
        archived_epochs: lengths of archived runs that the page of results shows.
        failures_count: whether a run that fails is a result, "failed" in its table, and no error of the command.
    """

    paper: ClassVar[str] = ""
    archived_epochs: ClassVar[tuple[int, ...]] = (200,)
    failures_count: ClassVar[bool] = False

    def plan(self, scale: Scale) -> Plan:  # noqa: ARG002 (subclasses use it)
        """The runs; none for experiments that are computed without training."""
        return []

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Tables and plots of the runs that have finished.

        Args:
            outcomes: the runs.
            scale: as in :meth:`plan`.
        """
        raise NotImplementedError


EXPERIMENTS: Registry[type[Experiment]] = Registry("experiment")

T = TypeVar("T", bound=type[Experiment])


def register_experiment(name: str, *, summary: str) -> Callable[[T], T]:
    """Class decorator that registers an experiment under the name that `fmicl reproduce` takes."""
    return EXPERIMENTS.register(name, summary=summary)  # type: ignore[return-value]


def archive_hash(settings: Settings) -> str:
    """The hash of a run wherever its data lies, by which archived runs are found.

    Example:
        >>> archive_hash(recipe("cifar10", data_dir="data")) == recipe("cifar10").hash
        True
    """
    places = {name for name, option in settings.schema.options.items() if option.role == "location"}
    defaults = {option.name: option.default for group in settings.schema.groups for option in options_of(group.options)}
    return settings.replace(**{name: defaults[name] for name in places}).hash
