"""HTML report of a run: results, figures, metrics and settings in one self-contained page.

The page is made from the run folder alone, so it can be made again at any time. Images are embedded, nothing is loaded
from elsewhere, and it follows the reader's light or dark theme. Whatever is missing or damaged is listed at the end.
This module decides what is on the page; the layout is in templates/.
"""

from __future__ import annotations

import base64
import json
import math
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fmicl.methods import METHODS
from fmicl.runs.figures import COLOURS, distance_figure, metric_curve, neighbour_figure, read_metrics
from fmicl.runs.folder import Run
from fmicl.utils.files import write_atomically

NAMES = {
    "knn": "k-NN",
    "linear": "Linear probe",
    "linear_views": "Linear probe, on views too",
    "lr": "Learning rate",
    "rankme": "RankMe",
    "lidar": "LiDAR",
    "stsb_dev": "STS-B dev",
    "raw_pixels": "Raw pixels",
    "untrained": "Untrained encoder",
    "start": "Start of training",
    "chance": "Chance (most frequent class)",
}
"""Display names of keys; other keys are displayed without underscores."""
EXPLANATIONS = {
    "alignment": "mean squared distance of positive pairs, 0 to 4",
    "uniformity": "log mean Gaussian potential; lower is more uniform",
    "effective_rank": "number of dimensions in use; near 1: collapsed",
    "rankme": "effective rank without scaling to unit length",
    "lidar": "rank of what tells samples apart from their views",
}
METRIC_ROWS = 25
"""Maximum number of rows in the metrics table."""

_UNREADABLE = (OSError, ValueError, KeyError, TypeError)


def write_report(path: Path | str) -> Path:
    """Draw RUN/figures and write RUN/report.html from the contents of the run folder.

    Args:
        path: a run folder, finished or not.

    Returns:
        The path of the page.

    Raises:
        FileNotFoundError: there is no such folder, or it is not a run folder.
    """
    run = Run(Path(path))
    if not run.path.is_dir():
        raise FileNotFoundError(f"there is no run folder {run.path}")
    expected = (run.settings, run.metrics, run.results)
    if not any(file.is_file() for file in expected):
        names = ", ".join(file.name for file in expected)
        raise FileNotFoundError(f"{run.path} is not a run folder of `fmicl train`: it has none of {names}")
    notes: list[str] = []
    settings = _read_object(run.settings, "the settings", notes)
    results = _read_object(run.results, "the results: the run may not have ended", notes)
    task = _TASKS.get(str(settings.get("task")), _TASKS["images"])
    page = _environment().get_template("report.html.j2").render(
        title=_title(run, settings),
        facts=_facts(settings),
        results=task.results(results) if results else None,
        figures=[*_curves(run, task, notes), *(_array_figures(run, notes) if task.has_arrays else ())],
        metrics=_metrics_table(run, task),
        settings=_settings(settings),
        notes=notes,
        colours=COLOURS,
    )  # fmt: skip
    write_atomically(run.report, lambda temporary: temporary.write_text(page, encoding="utf-8"))
    return run.report


def _environment() -> Environment:
    loader = PackageLoader("fmicl.runs")
    found = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    found.filters["show"] = _show
    return found


def _read_object(path: Path, content: str, notes: list[str]) -> dict[str, Any]:
    """A JSON object; {} and a note if there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"There is no {path.name}, which has {content}.")
    except _UNREADABLE as error:
        notes.append(f"{path.name} can't be read ({error}); it has {content}.")
    else:
        if isinstance(value, dict):
            return value
        notes.append(f"{path.name} contains a {type(value).__name__} instead of an object.")
    return {}


def _title(run: Run, settings: Mapping[str, Any]) -> str:
    name = run.path.resolve().name
    recipe = settings.get("recipe")
    return name if recipe is None or str(recipe) in name else f"{recipe}: {name}"


def _facts(settings: Mapping[str, Any]) -> list[str]:
    """The line below the title: method and objective, seed, device, start."""
    chosen = settings.get("settings")
    chosen = chosen if isinstance(chosen, dict) else {}
    method = str(chosen.get("method"))
    own = method in METHODS and METHODS[method].value.own_loss
    keys = ["method", *([] if own else ["objective", "divergence"]), "encoder", "model"]
    what = " ".join(str(chosen[key]) for key in keys if chosen.get(key) is not None)
    if _is_number(chosen.get("rotation_weight")) and chosen["rotation_weight"]:
        what += f" + rotation {chosen['rotation_weight']:g}"
    seed = f"seed {settings['seed']}" if settings.get("seed") is not None else ""
    return [fact for fact in (what, seed, *(str(settings.get(key) or "") for key in ("device", "started"))) if fact]


def _image_results(results: Mapping[str, Any]) -> dict[str, Any]:
    texts = {"split": "On the {} split", "epoch": "after epoch {}", "k": "k-NN with k = {}"}
    known = [text.format(_show(results[key])) for key, text in texts.items() if results.get(key) is not None]
    if results.get("knn") is None and results.get("linear") is None:
        known.append("without accuracies: these need labels")
    sentences = [", ".join(known)] if known else []
    accuracies = [key for key in ("knn", "linear", "linear_views") if _is_number(results.get(key))]
    geometry = [key for key in EXPLANATIONS if _is_number(results.get(key))]
    if geometry:
        held_out = results.get("split") is not None
        samples = "held-out samples" if held_out else "training samples, as none are held out"
        sentences.append(f"Alignment, uniformity and ranks are of views of {samples}, after training")
    baselines = [key for key in ("start", "untrained", "raw_pixels", "chance") if isinstance(results.get(key), dict)]
    cards = [{"name": NAMES[key], "value": _percent(results[key]), "explanation": ""} for key in accuracies]
    cards += [
        {"name": _name(key), "value": _show(float(f"{results[key]:.3g}")), "explanation": EXPLANATIONS[key]}
        for key in geometry
    ]
    shown = {"knn", "linear", "linear_views", *texts, "data_changed", "distances", *EXPLANATIONS, *baselines}
    return {
        "summary": " ".join(f"{sentence[0].upper()}{sentence[1:]}." for sentence in sentences),
        "needs_sts": False,
        "data_changed": results.get("data_changed"),
        "data_dir": results.get("data_dir"),
        "cards": cards,
        "table": _comparison(results, baselines) if baselines else None,
        "rest": _flatten(results, without=shown),
    }


def _comparison(results: Mapping[str, Any], baselines: list[str]) -> dict[str, Any]:
    """Trained encoder and baselines, the best accuracy of each column in bold."""
    models = {"Trained encoder": results, **{NAMES[key]: results[key] for key in baselines}}
    rows: list[list[str]] = [[name] for name in models]
    for key in ("knn", "linear"):
        values = [model.get(key) for model in models.values()]
        best = max((value for value in values if _is_number(value)), default=None)
        for row, value in zip(rows, values, strict=True):
            row.append(_bold(_percent(value)) if value == best is not None else _percent(value))
    return {"title": "Comparison with baselines", "head": ["", NAMES["knn"], NAMES["linear"]], "rows": rows}


def _text_results(results: Mapping[str, Any]) -> dict[str, Any]:
    summary = f"The encoder of step {_show(results.get('step'))}"
    if _is_number(results.get("stsb_dev")):
        summary += f", the best on STS-B dev ({results['stsb_dev']:.2f})"
    elif results.get("chosen_by") == "last step":
        summary += ", the last one"
    page: dict[str, Any] = {"data_changed": None, "cards": []}
    pairs = results.get("pairs")
    if not isinstance(pairs, dict):
        return {**page, "summary": f"{summary}.", "needs_sts": True, "table": None, "rest": []}
    rows = [[name, _score(results.get(name)), _show(count)] for name, count in pairs.items()]
    rows.append([_bold("Average"), _bold(_score(results.get("avg"))), ""])
    return {
        **page,
        "summary": f"{summary}; test splits.",
        "needs_sts": False,
        "table": {"title": "", "head": ["Task", "Spearman x 100", "Pairs"], "rows": rows},
        "rest": _flatten(results, without={"step", "stsb_dev", "chosen_by", "pairs", "avg", *pairs}),
    }


class _Curve(NamedTuple):
    column: str
    title: str
    label: str
    caption: str
    optional: bool = False  # whether runs without this column are complete


class _Kind(NamedTuple):
    """What differs between reports of image and text runs."""

    axis: Literal["epoch", "step"]
    score: str  # column of metrics.csv that is not measured in every row
    curves: tuple[_Curve, ...]
    results: Callable[[Mapping[str, Any]], dict[str, Any]]
    has_arrays: bool


_BATCH = "Of the last training batch before each point:"
_GEOMETRY_CURVES = (
    _Curve("alignment", "Alignment in training", "Alignment", f"{_BATCH} {EXPLANATIONS['alignment']}."),
    _Curve("uniformity", "Uniformity in training", "Uniformity", f"{_BATCH} {EXPLANATIONS['uniformity']}."),
    _Curve("effective_rank", "Effective rank in training", "Dimensions", f"{_BATCH} {EXPLANATIONS['effective_rank']}."),
)
_IMAGE_CURVES = (
    _Curve("loss", "Training loss", "Loss", "Mean over each epoch."),
    _Curve("knn", "k-NN accuracy", "Accuracy, %", "As monitored during training."),
    *_GEOMETRY_CURVES,
    _Curve(
        "loss_rotation", "Rotation loss", "Term of the loss", f"{_BATCH} minus the weight times the bound on the "
        "information of features about the rotation. It is included in the training loss.", optional=True,
    ),
)  # fmt: skip
_TEXT_CURVES = (
    _Curve("loss", "Training loss", "Loss", "Mean over the steps between two points."),
    _Curve("stsb_dev", "STS-B dev", "Spearman x 100", "The checkpoint was selected by this score."),
    *_GEOMETRY_CURVES,
)
_TASKS = {
    "images": _Kind("epoch", "knn", _IMAGE_CURVES, _image_results, has_arrays=True),
    "text": _Kind("step", "stsb_dev", _TEXT_CURVES, _text_results, has_arrays=False),
}


class _Figure(NamedTuple):
    """A figure in both themes, as data URLs."""

    title: str
    caption: str
    light: str
    dark: str
    wide: bool


def _curves(run: Run, kind: _Kind, notes: list[str]) -> Iterator[_Figure]:
    try:
        metrics = read_metrics(run.metrics)
    except FileNotFoundError:
        notes.append(f"There is no {run.metrics.name}, which the curves are drawn from.")
        return
    except _UNREADABLE as error:
        notes.append(f"No curves: {error}.")
        return
    for column, title, label, caption, optional in kind.curves:
        if optional and column not in metrics:
            continue
        if not any(value is not None and math.isfinite(value) for value in metrics.get(column, [])):
            notes.append(f"{title}: {run.metrics.name} has no finite values of it.")
            continue
        draw = partial(metric_curve, run.metrics, column, label=label, over=kind.axis)
        yield from _draw(run, column, title, caption, draw, notes)


def _array_figures(run: Run, notes: list[str]) -> Iterator[_Figure]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    file = run.arrays.name
    if not run.arrays.is_file():
        notes.append(f"There is no {file}, which pair distances and nearest neighbours are drawn from.")
        return
    try:
        arrays = load_file(run.arrays)
    except (SafetensorError, *_UNREADABLE) as error:
        notes.append(f"{file} can't be read ({error}): no pair distances, no nearest neighbours.")
        return
    if "positive" in arrays and "negative" in arrays:
        caption = (
            "Sorted distances of positive pairs (two views of one sample) and of negative pairs (two samples). The "
            "larger the gap between the curves, the better."
        )
        draw = partial(distance_figure, arrays["positive"], arrays["negative"])
        yield from _draw(run, "distances", "Pair distances", caption, draw, notes)
    else:
        notes.append(f"Pair distances: {file} has no arrays positive and negative.")
    if "neighbour_images" in arrays:
        caption = "Samples on the left, then the training samples with the most similar features (cosine similarity)."
        draw = partial(neighbour_figure, arrays["neighbour_images"], arrays.get("neighbour_similarity"))
        yield from _draw(run, "neighbours", "Nearest neighbours", caption, draw, notes, wide=True)
    else:
        notes.append(f"Nearest neighbours: {file} has no array neighbour_images.")


def _draw(
    run: Run, name: str, title: str, caption: str, draw: Callable[..., Path], notes: list[str], *, wide: bool = False
) -> Iterator[_Figure]:
    """Draw a figure in both themes, the light one as RUN/figures/NAME.png; only a note if that fails."""
    try:
        light = draw(run.figures / f"{name}.png", theme="light").read_bytes()
        with tempfile.TemporaryDirectory() as folder:
            dark = draw(Path(folder) / f"{name}.png", theme="dark").read_bytes()
    except _UNREADABLE as error:
        notes.append(f"{title}: no figure ({error}).")
    else:
        yield _Figure(title, caption, _data_url(light), _data_url(dark), wide)


def _data_url(png: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(png).decode("ascii")


def _metrics_table(run: Run, kind: _Kind) -> dict[str, Any] | None:
    """Evenly spaced rows of metrics.csv and the last one; only rows with a score, if there are any."""
    try:
        metrics = read_metrics(run.metrics)
    except _UNREADABLE:
        return None  # noted with the curves
    count = len(next(iter(metrics.values())))
    scored = [row for row, value in enumerate(metrics.get(kind.score, [])) if value is not None] or list(range(count))
    shown = min(METRIC_ROWS, len(scored))
    stride = (len(scored) - 1) / max(1, shown - 1)
    rows = sorted({scored[round(i * stride)] for i in range(shown)} | {count - 1})
    cells = [["" if values[row] is None else _show(values[row]) for values in metrics.values()] for row in rows]
    some = f", {len(rows)} of {count} rows" if len(rows) < count else ""
    return {"summary": f"By {kind.axis}{some}", "head": [_name(name) for name in metrics], "rows": cells}


def _settings(settings: Mapping[str, Any]) -> dict[str, Any] | None:
    if not settings:
        return None
    command, chosen, versions = (settings.get(key) for key in ("command", "settings", "versions"))
    return {
        "command": shlex.join(map(str, command)) if isinstance(command, list) else "",
        "facts": _flatten(settings, without={"command", "settings", "versions"}),
        "chosen": _flatten(chosen) if isinstance(chosen, dict) else [],
        "versions": _flatten(versions) if isinstance(versions, dict) else [],
    }


def _flatten(values: Mapping[str, Any], *, without: set[str] | None = None) -> list[tuple[str, Any]]:
    """Nested objects as one list with dotted names, without some of the top-level keys."""
    pairs: list[tuple[str, Any]] = []
    for key, value in values.items():
        if without is not None and key in without:
            continue
        if isinstance(value, dict) and value:
            pairs += [(f"{key}.{inner}", leaf) for inner, leaf in _flatten(value)]
        else:
            pairs.append((key, value))
    return pairs


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _show(value: Any) -> str:
    """A JSON value as text."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        if not math.isfinite(value):
            return "not finite"
        # Whole numbers in full (a step is not 1.2e+05), others short: 0.1, not 0.10000000149.
        text = f"{value:.0f}" if value.is_integer() and abs(value) < 1e12 else f"{value:.5g}"
        return text.replace("-", "\N{MINUS SIGN}")
    if isinstance(value, list):
        return ", ".join(_show(item) for item in value) if value else "–"
    return str(value)


def _percent(value: Any) -> str:
    return f"{value:.1f} %" if _is_number(value) and math.isfinite(value) else _show(value)


def _score(value: Any) -> str:
    return f"{value:.2f}" if _is_number(value) else "–"


def _bold(text: str) -> Markup:
    return Markup("<b>{}</b>").format(text)


def _name(key: str) -> str:
    return NAMES.get(key, key.replace("_", " ").capitalize())
