"""One page that tells a run: results, figures, metrics and settings, in a single HTML file.

It is made from the run folder alone, so it can be made again at any time and anywhere. The page needs
nothing else: pictures are inside, it loads no font, script or style from anywhere, it follows the reader's
light or dark setting and fits a phone. Whatever a run doesn't have (yet) is named in a note and left out.
"""

from __future__ import annotations

import json
import math
import shlex
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any, Literal

from fmicl.runs.html import NAMES, data, document, flat, is_number, pairs, percent, show, table, words
from fmicl.runs.figures import Theme, distance_figure, loss_curve, metric_curve, neighbour_figure, read_metrics
from fmicl.utils.files import write_atomically

__all__ = ["distance_figure", "loss_curve", "neighbour_figure", "write_report"]

_EXPLAINED = {
    "alignment": "mean squared distance of positive pairs, 0 to 4",
    "uniformity": "log mean Gaussian potential; lower is more uniform",
    "effective_rank": "dimensions in use; near 1, collapsed",
}
_BATCH = "Of the last training batch before each point:"
_CURVES = {
    "loss": ("Training loss", "Loss", "Mean over each epoch."),
    "knn": ("k-NN accuracy", "Accuracy, %", "As monitored while training."),
    "alignment": ("Alignment in training", "Alignment", f"{_BATCH} {_EXPLAINED['alignment']}."),
    "uniformity": ("Uniformity in training", "Uniformity", f"{_BATCH} {_EXPLAINED['uniformity']}."),
    "effective_rank": ("Effective rank in training", "Dimensions", f"{_BATCH} {_EXPLAINED['effective_rank']}."),
}
_ROTATION = {
    "loss_rotation": (
        "Turned images", "Summand of the loss",
        f"{_BATCH} minus the weight times the bound of what features tell of the turn. The training loss holds it.",
    ),
}  # fmt: skip
"""Where a run has that term."""
_TEXT_CURVES = {
    "loss": ("Training loss", "Loss", "Mean over the steps between two points."),
    "stsb_dev": ("STS-B dev", "Spearman x 100", "What the checkpoint was chosen by."),
    **{name: _CURVES[name] for name in ("alignment", "uniformity", "effective_rank")},
}
_ROWS = 25  # of the metrics table
_DAMAGED = (OSError, ValueError, KeyError, TypeError)


def write_report(run: Path | str) -> Path:
    """Draw RUN/figures and write RUN/report.html, from what the run folder holds.

    Args:
        run: a run folder, finished or not.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: if there is no such folder, or it is not a run's.
    """
    run = Path(run)
    if not run.is_dir():
        raise FileNotFoundError(f"there is no run folder {run}")
    if not any((run / name).is_file() for name in ("settings.json", "metrics.csv", "results.json")):
        raise FileNotFoundError(
            f"{run} is not a run folder: it has none of settings.json, metrics.csv and results.json. "
            "Give the folder that `fmicl train` printed"
        )
    page = _Page(run)
    settings = page.read_json("settings.json", "the settings")
    results = page.read_json("results.json", "the results: the run may not have ended")
    text = settings.get("kind") == "text"
    parts = [
        _header(run, settings),
        _text_results(results) if text else _results(results),
        _text_figures(page) if text else _figures(page),
        _metrics(page, text=text),
        _settings(settings),
        page.notes_section(),
    ]
    out = run / "report.html"
    page_text = document(_title(run, settings), "\n".join(filter(None, parts)))
    write_atomically(out, lambda path: path.write_text(page_text, encoding="utf-8"))
    return out


@dataclass
class _Page:
    """A run folder being told, and what was missing in it."""

    run: Path
    notes: list[str] = field(default_factory=list)

    def read_json(self, name: str, what: str) -> dict[str, Any]:
        try:
            value = json.loads((self.run / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            self.notes.append(f"There is no {name}, which holds {what}.")
        except _DAMAGED as error:
            self.notes.append(f"{name} can't be read ({error}); it holds {what}.")
        else:
            if isinstance(value, dict):
                return value
            self.notes.append(f"{name} holds a {type(value).__name__}, where an object was expected.")
        return {}

    def arrays(self) -> dict[str, Any]:
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        path = self.run / "arrays.safetensors"
        if not path.is_file():
            self.notes.append("There is no arrays.safetensors, which distances and neighbours are drawn from.")
            return {}
        try:
            return dict(load_file(path))
        except (SafetensorError, *_DAMAGED) as error:
            self.notes.append(f"arrays.safetensors can't be read ({error}): no distances, no neighbours.")
            return {}

    def picture(self, name: str, title: str, text: str, draw: Callable[[Path, Theme], Path], kind: str = "") -> str:
        """A figure in both themes, the light one kept as RUN/figures/NAME.png; "" and a note if it fails."""
        try:
            light = draw(self.run / "figures" / f"{name}.png", "light").read_bytes()
            with tempfile.TemporaryDirectory() as folder:
                dark = draw(Path(folder) / f"{name}.png", "dark").read_bytes()
        except _DAMAGED as error:
            self.notes.append(f"{title}: no figure ({error}).")
            return ""
        return (
            f'<figure class="{kind}"><div class="scroll"><picture>'
            f'<source media="(prefers-color-scheme: dark)" srcset="{data(dark)}">'
            f'<img src="{data(light)}" alt="{escape(title)}. {escape(text)}"></picture></div>'
            f"<figcaption><b>{escape(title)}.</b> {escape(text)}</figcaption></figure>"
        )

    def notes_section(self) -> str:
        if not self.notes:
            return ""
        items = "".join(f"<li>{escape(note)}</li>" for note in self.notes)
        return f'<section class="notes"><h2>Left out</h2><ul>{items}</ul></section>'


def _title(run: Path, settings: Mapping[str, Any]) -> str:
    name = run.resolve().name
    recipe = settings.get("recipe")
    return name if recipe is None or str(recipe) in name else f"{recipe}: {name}"


def _header(run: Path, settings: Mapping[str, Any]) -> str:
    chosen = settings.get("settings")
    chosen = chosen if isinstance(chosen, dict) else {}
    objective = " ".join(
        str(chosen[key])
        for key in ("method", "objective", "divergence", "encoder", "model")
        if chosen.get(key) is not None and not (key == "divergence" and chosen.get("objective") != "fmicl")
    )
    if is_number(chosen.get("rotation_weight")) and chosen["rotation_weight"]:
        objective += f" + rotation {chosen['rotation_weight']:g}"
    facts = [objective, f"seed {settings['seed']}" if settings.get("seed") is not None else ""]
    facts += [str(settings.get(key) or "") for key in ("device", "started")]
    line = " · ".join(escape(fact) for fact in facts if fact)
    return f"<header><h1>{escape(_title(run, settings))}</h1><p>{line}</p></header>"


def _results(results: Mapping[str, Any]) -> str:
    if not results:
        return ""
    where = ", ".join(
        text.format(show(results[key]))
        for key, text in (("split", "On the {} split"), ("epoch", "after epoch {}"), ("k", "k-NN with k = {}"))
        if results.get(key) is not None
    )
    cards = "".join(
        f'<div class="card"><span>{NAMES[key]}</span><strong>{percent(results[key])}</strong></div>'
        for key in ("knn", "linear", "linear_views")
        if is_number(results.get(key))
    )
    cards += "".join(
        f'<div class="card small"><span>{escape(words(key))}</span>'
        f"<strong>{show(float(f'{results[key]:.3g}'))}</strong><small>{_EXPLAINED[key]}</small></div>"
        for key in _EXPLAINED
        if is_number(results.get(key))
    )
    if results.get("knn") is None and results.get("linear") is None:
        where += ", without accuracies: these need labels" if where else "No accuracies: these need labels"
    if any(is_number(results.get(key)) for key in _EXPLAINED):
        which = "held-out samples" if results.get("split") is not None else "training samples, as none are held out"
        where += f". Alignment, uniformity and effective rank are of two views of {which}, after training"
    if results.get("data_changed"):
        place = f" ({show(results['data_dir'])})" if results.get("data_dir") else ""
        where += f".</p><p><b>On other data than the run was trained on</b>{place}: {show(results['data_changed'])}"
    rivals = [key for key in ("untrained", "raw_pixels") if isinstance(results.get(key), dict)]
    beside = _comparison(results, rivals) if rivals else ""
    told = {"knn", "linear", "linear_views", "split", "epoch", "k", "data_changed", *_EXPLAINED, *rivals}
    rest = [(key, value) for key, value in flat(results) if key.split(".")[0] not in told]
    more = f"<details><summary>How it was measured</summary>{pairs(rest)}</details>" if rest else ""
    return (
        f'<section><h2>Results</h2><p class="where">{where}</p><div class="cards">{cards}</div>{beside}{more}</section>'
    )


def _text_results(results: Mapping[str, Any]) -> str:
    if not results:
        return ""
    where = f"The encoder of step {show(results.get('step'))}"
    if is_number(results.get("stsb_dev")):
        where += f", the best on STS-B dev ({results['stsb_dev']:.2f})"
    elif results.get("chosen_by") == "last step":
        where += ", the last one"
    scores = results.get("pairs")
    if not isinstance(scores, dict):
        hint = "No STS scores yet: <code>fmicl evaluate RUN --sts DIR</code> adds them."
        return f'<section><h2>Results</h2><p class="where">{where}. {hint}</p></section>'
    rows = [[escape(name), _score(results.get(name)), show(count)] for name, count in scores.items()]
    rows.append(["<b>Average</b>", f"<b>{_score(results.get('avg'))}</b>", ""])
    scored = table(["Task", "Spearman x 100", "Pairs"], rows, kind="numbers few")
    told = {"step", "stsb_dev", "chosen_by", "pairs", "avg", *scores}
    rest = [(key, value) for key, value in flat(results) if key.split(".")[0] not in told]
    more = f"<details><summary>How it was measured</summary>{pairs(rest)}</details>" if rest else ""
    return f'<section><h2>Results</h2><p class="where">{where}; test splits.</p>{scored}{more}</section>'


def _score(value: Any) -> str:
    return f"{value:.2f}" if is_number(value) else "–"


def _comparison(results: Mapping[str, Any], rivals: list[str]) -> str:
    """Trained encoder and rivals, with the best of each column in bold, whosever it is."""
    rows = [("Trained encoder", results), *((NAMES[key], results[key]) for key in rivals)]
    cells = [[escape(name)] for name, _ in rows]
    for key in ("knn", "linear"):
        values = [row.get(key) for _, row in rows]
        best = max((value for value in values if is_number(value)), default=None)
        for line, value in zip(cells, values, strict=True):
            line.append(f"<b>{percent(value)}</b>" if value == best is not None else percent(value))
    return "<h3>Beside what needs no training</h3>" + table(
        ["", NAMES["knn"], NAMES["linear"]], cells, kind="numbers few"
    )


def _text_figures(page: _Page) -> str:
    curves = "".join(_curves(page, _TEXT_CURVES, "step"))
    return f'<section><h2>Figures</h2><div class="figures">{curves}</div></section>' if curves else ""


def _curves(
    page: _Page,
    wanted: Mapping[str, tuple[str, str, str]],
    over: Literal["epoch", "step"],
    maybe: Mapping[str, tuple[str, str, str]] | None = None,
) -> list[str]:
    """Curves of the columns of metrics.csv that are wanted, and of those that may be there."""
    path = page.run / "metrics.csv"
    curves: list[str] = []
    try:
        metrics = read_metrics(path)
    except FileNotFoundError:
        page.notes.append("There is no metrics.csv, which the curves are drawn from.")
    except _DAMAGED as error:
        page.notes.append(f"No curves: {error}.")
    else:
        there = {column: words for column, words in (maybe or {}).items() if column in metrics}
        for column, (title, label, text) in {**wanted, **there}.items():
            if not any(value is not None and math.isfinite(value) for value in metrics.get(column, [])):
                page.notes.append(f"{title}: metrics.csv has no finite values of it.")
                continue

            def draw(out: Path, theme: Theme, column: str = column, label: str = label) -> Path:
                return metric_curve(path, column, out, label=label, theme=theme, over=over)

            curves.append(page.picture(column, title, text, draw))
    return curves


def _figures(page: _Page) -> str:
    curves = _curves(page, _CURVES, "epoch", _ROTATION)
    arrays = page.arrays()
    if "positive" in arrays and "negative" in arrays:
        curves.append(
            page.picture(
                "distances",
                "Distances of pairs",
                "Sorted distances of positive pairs (two views of one sample) and of negative pairs "
                "(two samples); the further apart the curves, the better.",
                lambda out, theme: distance_figure(arrays["positive"], arrays["negative"], out, theme=theme),
            )
        )
    elif arrays:
        page.notes.append("Distances of pairs: arrays.safetensors has no positive and negative ones.")
    wide = ""
    if "neighbour_images" in arrays:
        wide = page.picture(
            "neighbours",
            "Nearest neighbours",
            "Samples on the left, then what the encoder finds most similar, with cosine similarities.",
            lambda out, theme: neighbour_figure(
                arrays["neighbour_images"], arrays.get("neighbour_similarity"), out, theme=theme
            ),
            kind="wide",
        )
    elif arrays:
        page.notes.append("Nearest neighbours: arrays.safetensors has no neighbour_images.")
    if not any(curves) and not wide:
        return ""
    return f'<section><h2>Figures</h2><div class="figures">{"".join(curves)}{wide}</div></section>'


def _metrics(page: _Page, *, text: bool = False) -> str:
    try:
        metrics = read_metrics(page.run / "metrics.csv")
    except _DAMAGED:
        return ""  # the curves have said so
    count = len(next(iter(metrics.values())))
    # Rows with a k-NN accuracy say most, if there are any; of these, evenly spaced ones, and the last of all.
    most = metrics.get("stsb_dev" if text else "knn", [])
    full = [row for row, value in enumerate(most) if value is not None] or list(range(count))
    step = (len(full) - 1) / max(1, min(_ROWS, len(full)) - 1)
    rows = sorted({full[round(i * step)] for i in range(min(_ROWS, len(full)))} | {count - 1})
    columns = [name for name, values in metrics.items() if any(value is not None for value in values)]
    rows_table = table(
        [escape(words(name)) for name in columns],
        [["" if (value := metrics[name][row]) is None else show(value) for name in columns] for row in rows],
        kind="numbers",
    )
    unit = "step" if text else "epoch"
    some = f", {len(rows)} of {count} rows" if len(rows) < count else ""
    return f"<section><h2>Metrics</h2><details><summary>By {unit}{some}</summary>{rows_table}</details></section>"


def _settings(settings: Mapping[str, Any]) -> str:
    if not settings:
        return ""
    parts: list[str] = []
    command = settings.get("command")
    if isinstance(command, list):
        parts.append(f"<pre>{escape(shlex.join(map(str, command)))}</pre>")
    told = {"command", "settings", "versions"}
    parts.append(pairs([(key, value) for key, value in flat(settings) if key.split(".")[0] not in told]))
    for key, title in (("settings", "Every setting"), ("versions", "Versions")):
        if isinstance(settings.get(key), dict):
            parts.append(f"<details><summary>{title}</summary>{pairs(flat(settings[key]))}</details>")
    return f"<section><h2>Settings</h2>{''.join(parts)}</section>"
