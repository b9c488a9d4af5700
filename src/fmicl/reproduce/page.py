"""One HTML page of all archived results: every table and figure of the paper, each number with its run.

The page is self-contained: no network, light and dark, tables that sort. It is made from an archive of runs (see
results/README.md) and from the files that `fmicl reproduce` has left below its folder reproduce/.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fmicl.config import recipe
from fmicl.reproduce.archive import read_archive
from fmicl.reproduce.drawing import draw
from fmicl.reproduce.experiment import EXPERIMENTS, Entry, Measured, Outcome, Result, Scale, Table
from fmicl.reproduce.pipeline import collect
from fmicl.reproduce.plots import Line, Panel, Plot
from fmicl.runs.figures import COLOURS
from fmicl.utils.files import read_json, write_atomically

SEEDS = tuple(range(10))
"""Seeds whose runs are looked for in the archive."""
SHOWN = ("knn", "linear", "alignment", "uniformity", "effective_rank", "STSB", "avg")
"""Results in the table of all runs."""


def write_page(archive: Path, out: Path | None = None) -> Path:
    """Write the page of an archive of runs.

    Args:
        archive: the folder, such as results/.
        out: the HTML file; None is report.html in the archive.

    Returns:
        Its path.

    Raises:
        FileNotFoundError: there is no such folder, or it has no archived run.
    """
    outcomes = read_archive(archive)
    if not outcomes:
        raise FileNotFoundError(f"{archive} is neither a run folder nor an archive of runs: it has no archived run")
    script = _loader().get_source(Environment(), "sort.js")[0]
    runs = sorted(outcomes.values(), key=lambda outcome: outcome.source)
    page = _environment().get_template("results.html.j2").render(
        title="f-MICL: results",
        facts=f"{len(runs)} archived runs; a number opens its run, a heading sorts its table",
        parts=[_part(entry.name, outcomes, archive) for entry in EXPERIMENTS],
        all_runs=_all_runs(runs, archive),
        runs=[_run(outcome, archive) for outcome in runs],
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        colours=COLOURS,
    )  # fmt: skip
    place = out or archive / "report.html"
    write_atomically(place, lambda path: path.write_text(page, encoding="utf-8"))
    return place


def _loader() -> ChoiceLoader:
    return ChoiceLoader([PackageLoader("fmicl.reproduce"), PackageLoader("fmicl.runs")])


def _environment() -> Environment:
    return Environment(
        loader=_loader(), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def _part(name: str, outcomes: Mapping[str, Outcome], archive: Path) -> dict[str, Any]:
    """A section: the experiment from archived runs, or as `fmicl reproduce` left it, at full or at small scale."""
    experiment = EXPERIMENTS[name].value()
    scale = Scale(seeds=SEEDS, epochs=experiment.archived_epochs, places={"wikipedia": _text_start(outcomes)})
    plan = experiment.plan(scale)
    found = collect(plan, outcomes, {})
    result, small = experiment.present(found, scale) if plan and found else Result(), False
    for folder in ("reproduce", "reproduce/small"):
        file = archive / folder / f"{name}.json"
        if not (result.tables or result.plots) and file.is_file():
            result, small = _read_result(file), bool(plan) and folder.endswith("small")
    return {
        "name": name,
        "summary": EXPERIMENTS[name].summary,
        "paper": experiment.paper,
        "small": small,
        "tables": [
            {
                "title": table.title,
                "head": table.head,
                "rows": [[_entry(e, archive) for e in row] for row in table.rows],
            }
            for table in result.tables
        ],
        "plots": [
            {"caption": plot.caption, "light": _data_url(draw(plot)), "dark": _data_url(draw(plot, "dark"))}
            for plot in result.plots
        ],
        "findings": result.findings,
    }


def _text_start(outcomes: Mapping[str, Outcome]) -> dict[str, Any]:
    """The encoder that most archived runs on sentences start from, if it isn't the paper's."""
    own = recipe("wikipedia").model
    models = Counter(o.settings.model for o in outcomes.values() if o.settings.recipe == "wikipedia")
    (model, _), *_ = models.most_common(1) or [(own, 0)]
    return {} if model == own else {"model": model}


def _entry(entry: Entry, archive: Path) -> dict[str, Any]:
    if isinstance(entry, Measured):
        value = entry.mean if entry.values else None
        return {"text": str(entry), "value": value, "runs": [_id(source, archive) for source in entry.sources]}
    value = entry if isinstance(entry, int | float) else None
    return {"text": f"{entry:.2f}" if isinstance(entry, float) else entry or "", "value": value, "runs": []}


def _id(source: Path, archive: Path) -> str:
    """The anchor of a run: its path in the archive without characters that an address would change."""
    place = source.relative_to(archive) if source.is_relative_to(archive) else source
    return "run-" + "".join(c if c.isalnum() else "-" for c in place.with_suffix("").as_posix())


def _all_runs(runs: Sequence[Outcome], archive: Path) -> dict[str, Any]:
    columns = [name for name in SHOWN if any(run.score(name) is not None for run in runs)]
    rows = []
    for run in runs:
        s = run.settings
        what = s.divergence if s.objective == "fmicl" else s.objective
        link = {"text": run.source.stem, "value": run.source.stem, "runs": [_id(run.source, archive)]}
        words = [_entry(text, archive) for text in (s.recipe, s.method, what)]
        numbers = [{"text": str(n), "value": n, "runs": []} for n in (s.epochs, s.seed)]
        rows.append([link, *words, *numbers, *(_entry(run.score(c), archive) for c in columns)])
    return {"head": ["run", "recipe", "method", "objective", "epochs", "seed", *columns], "rows": rows}


def _run(run: Outcome, archive: Path) -> dict[str, Any]:
    """What the page tells of a run: command, device, versions, commit, settings, results."""
    saved = read_json(run.source)
    facts = {key: saved.get(key) for key in ("device", "versions", "commit", "seed", "started", "hash")}
    facts |= {f"result: {key}": value for key, value in run.results.items() if isinstance(value, int | float | str)}
    facts |= {f"option: {key}": value for key, value in run.settings.changes.items()}
    return {
        "id": _id(run.source, archive),
        "file": run.source.relative_to(archive).as_posix(),
        "command": saved.get("command", ""),
        "facts": [(key, x if isinstance(x, str) else json.dumps(x, default=str)) for key, x in facts.items()],
    }


def _read_result(file: Path) -> Result:
    """Tables and plots from the JSON of `fmicl reproduce`."""
    saved = read_json(file)

    def entry(value: Any) -> Entry:
        if isinstance(value, dict):
            return str(value["text"])
        return float(value) if isinstance(value, int | float) else value

    tables = [
        Table(each["title"], tuple(each["head"]), tuple(tuple(map(entry, row)) for row in each["rows"]))
        for each in saved["tables"]
    ]
    plots = [
        Plot(each["name"], each["caption"], tuple(
            Panel(**{**panel, "lines": tuple(Line(**line) for line in panel["lines"])}) for panel in each["panels"]
        ))
        for each in saved["plots"]
    ]  # fmt: skip
    return Result(tuple(tables), tuple(plots), tuple(saved["findings"]))


def _data_url(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode("ascii")
