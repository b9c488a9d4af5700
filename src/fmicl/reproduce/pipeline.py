"""`fmicl reproduce`: train the runs of an experiment as a sweep, then write its table or figure.

OUT/runs/<recipe>/  one sweep for each recipe, shared by all experiments, so that no run is trained twice
OUT/<experiment>/   <experiment>.md  .json  and an SVG for each figure; made anew from the runs by each call

At the small scale everything is in OUT/small/.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fmicl.config import Settings
from fmicl.reproduce.archive import read_archive, read_sweep
from fmicl.reproduce.costs import device_hours
from fmicl.reproduce.experiment import (
    EXPERIMENTS,
    Experiment,
    Key,
    Measured,
    Outcome,
    Outcomes,
    Planned,
    Result,
    Scale,
    archive_hash,
)
from fmicl.sweep.grid import Cell
from fmicl.sweep.scheduler import run_sweep
from fmicl.utils.device import describe_device, pick_device
from fmicl.utils.files import write_atomically, write_json
from fmicl.utils.machine import available_cpus
from fmicl.utils.provenance import command_line, commit, versions

MOST_SMALL_RUNS = 8
"""Runs at once at the small scale, which take about 1 GB of memory each."""


def listing(scale: Scale) -> list[tuple[str, str, str, str, str]]:
    """Name, place in the paper, data, number of runs and device hours of every experiment.

    The hours are those of epochs on one H200, from measured times per epoch; blank where none was measured.
    """
    rows = []
    for entry in EXPERIMENTS:
        plan = entry.value().plan(scale)
        data = ", ".join(dict.fromkeys(run.settings.recipe for run in plan)) or "none"
        hours = device_hours([run.settings for run in plan])
        rows.append(
            (entry.name, entry.value.paper, data, str(len(plan) or ""), "" if hours is None else f"{hours:.1f}")
        )
    return rows


@dataclass(frozen=True)
class Reproduction:
    """How experiments are run.

    Args:
        scale: data, seeds and lengths.
        out: folder of runs and results.
        archive: folder of archived runs, which are not trained again.
        train: whether to train runs that are missing; else tables show those that are there.
        sweep: options of `fmicl.sweep.scheduler.run_sweep`: parallel, launcher, slurm.
        say: prints a line.
    """

    scale: Scale
    out: Path
    archive: Path | None = None
    train: bool = True
    sweep: Mapping[str, Any] = field(default_factory=dict)
    say: Callable[[str], None] = print

    @property
    def folder(self) -> Path:
        """Where runs and results of this scale are."""
        return self.out / "small" if self.scale.small else self.out

    def run(self, names: Sequence[str]) -> int:
        """Run experiments by name, one after the other.

        Returns:
            0; the exit code of the last sweep that failed or was stopped otherwise.

        Raises:
            ValueError: an unknown name, or settings that `fmicl sweep` refuses.
        """
        chosen = {name: EXPERIMENTS[name].value() for name in names}  # all are known before the first is trained
        archived = {} if self.archive is None else read_archive(self.archive)
        worst = 0
        for name, experiment in chosen.items():
            code = self._run(name, experiment, archived)
            if code >= 128:  # stopped by a signal
                return code
            worst = code or worst
        return worst

    def _run(self, name: str, experiment: Experiment, archived: Mapping[str, Outcome]) -> int:
        scale = self.scale if not self.scale.small else self._small_scale(experiment)
        plan = experiment.plan(scale)
        code, finished, failed = 0, dict(archived), dict[str, str]()
        by_recipe: dict[str, list[Planned]] = {}
        for run in plan:
            by_recipe.setdefault(run.settings.recipe, []).append(run)
        for recipe_name, runs in by_recipe.items():
            sweep = self.folder / "runs" / recipe_name
            missing = [run for run in runs if archive_hash(run.settings) not in archived]
            lacks = next((words for run in missing if (words := lacking_data(run.settings))), None)
            if lacks and missing:
                self.say(f"{name}: {len(missing)} runs of {recipe_name} are left out: {lacks}")
            elif missing and self.train and code < 128:
                code = run_sweep(_cells(missing), out=sweep, **self._sweep_options()) or code
            if sweep.is_dir():
                done, errors = read_sweep(sweep, recipe_name)
                finished |= done
                failed |= errors
        outcomes = collect(plan, finished, failed)
        if plan and not outcomes:
            self.say(f"{name}: no run has finished, so there is nothing to show yet")
            return code or 1
        result = experiment.present(outcomes, scale)
        place = write_result(self.folder / name, name, experiment, result, scale)
        for table in result.tables:
            self.say(table.markdown())
        for line in result.findings:
            self.say(line)
        self.say(f"{name}: {place}")
        return 0 if code == 1 and experiment.failures_count else code

    def _sweep_options(self) -> dict[str, Any]:
        """The sweep's options; small runs train side by side, since most of their time is start-up in one thread."""
        local = self.sweep.get("launcher", "local") == "local"
        if self.scale.small and local and self.sweep.get("parallel") is None:
            return {**self.sweep, "parallel": min(MOST_SMALL_RUNS, available_cpus())}
        return dict(self.sweep)

    def _small_scale(self, experiment: Experiment) -> Scale:
        """The small scale with a tiny text, if the experiment has a run on text."""
        if all(run.settings.recipe != "wikipedia" for run in experiment.plan(self.scale)):
            return self.scale
        from fmicl.reproduce.tiny_text import make_tiny_text

        return dataclasses.replace(self.scale, places={"wikipedia": make_tiny_text(self.folder / "tiny-text")})


def collect(plan: Sequence[Planned], finished: Mapping[str, Outcome], failed: Mapping[str, str]) -> Outcomes:
    """The outcomes of a plan by key."""
    runs: dict[Key, list[Outcome]] = {}
    errors: dict[Key, str] = {}
    for run in plan:
        found = archive_hash(run.settings)
        if found in finished:
            runs.setdefault(run.key, []).append(finished[found])
        elif found in failed:
            errors[run.key] = failed[found]
    return Outcomes(runs, errors)


def lacking_data(settings: Settings) -> str | None:
    """What is missing to train this, in words; None if nothing is."""
    task = settings.task
    if not task.needs_data(settings) or settings.values[task.data_option] is not None:
        return None
    return f"no data (--data {settings.recipe}=PATH)"


def _cells(runs: Sequence[Planned]) -> list[Cell]:
    """The cells of a sweep; a run that stands under several keys is one cell."""
    cells: dict[str, Cell] = {}
    for run in runs:
        words = "-".join(re.sub(r"[^A-Za-z0-9.]+", "_", part) for part in run.key)
        cells.setdefault(run.settings.hash, Cell(run.settings, f"{words}-seed{run.settings.seed}"))
    return list(cells.values())


def write_result(folder: Path, name: str, experiment: Experiment, result: Result, scale: Scale) -> Path:
    """Write tables as Markdown, figures as SVG, and all numbers as JSON; returns the Markdown file."""
    from fmicl.reproduce.drawing import draw

    folder.mkdir(parents=True, exist_ok=True)
    parts = [f"# {name}: {EXPERIMENTS[name].summary}", f"Paper: {experiment.paper}."]
    if scale.small:
        parts.append("Small scale (digits, or a tiny BERT on generated sentences): the paper's numbers are not "
                     "comparable, its comparisons are.")  # fmt: skip
    parts += [table.markdown() for table in result.tables]
    for plot in result.plots:
        picture = draw(plot)
        write_atomically(folder / f"{plot.name}.svg", lambda path, text=picture: path.write_text(text, "utf-8"))  # type: ignore[misc]
        parts.append(f"![{plot.caption}]({plot.name}.svg)\n\n{plot.caption}")
    parts += [f"- {line}" for line in result.findings]
    page = "\n\n".join(parts) + "\n"
    place = folder / f"{name}.md"
    write_atomically(place, lambda path: path.write_text(page, "utf-8"))
    write_json(
        folder / f"{name}.json", {**provenance(scale), "experiment": name, "small": scale.small, **as_json(result)}
    )
    return place


def provenance(scale: Scale) -> dict[str, Any]:
    """Command, versions, device of the runs, and commit."""
    return {
        "command": command_line(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": describe_device(str(pick_device(scale.common.get("device", "auto")))),
        "versions": versions(["torch", "lightning", "timm"]),
        "commit": commit(),
    }


def as_json(result: Result) -> dict[str, Any]:
    """Tables and plots as JSON types; a measured number with the values of its seeds and its runs."""

    def entry(value: Any) -> Any:
        if not isinstance(value, Measured):
            return value
        return {"text": str(value), "values": value.values, "runs": [source.name for source in value.sources]}

    tables = [
        {"title": table.title, "head": table.head, "rows": [[entry(value) for value in row] for row in table.rows]}
        for table in result.tables
    ]
    return {"tables": tables, "plots": [dataclasses.asdict(p) for p in result.plots], "findings": result.findings}
