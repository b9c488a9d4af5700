"""Figures of a run: metric curves, sorted pair distances, nearest neighbours.

Each function draws one PNG and returns its path. Sizes suit phones and screens, and the two themes have the colours of
the report. matplotlib's global state is not changed (no pyplot).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import matplotlib as mpl
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import Locator, MaxNLocator, MultipleLocator

from fmicl.information.assumption import fitted_law
from fmicl.runs.folder import read_rows
from fmicl.utils.files import write_atomically

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from fmicl.information.assumption import AssumptionCheck

Theme = Literal["light", "dark"]


@dataclass(frozen=True)
class _Colours:
    page: str
    surface: str
    ink: str
    muted: str
    line: str
    first: str  # first and second differ for any colour vision, with a contrast of at least 3:1
    second: str


COLOURS: dict[Theme, _Colours] = {
    "light": _Colours("#f4f5f7", "#ffffff", "#1b1f24", "#5b6470", "#e3e6ea", "#1f6feb", "#c2540a"),
    "dark": _Colours("#111418", "#1a1e24", "#e8ebef", "#9aa4b1", "#2f353d", "#6aa6ff", "#f0954f"),
}
"""Colours of the report and of its figures."""
_WIDTH, _HEIGHT, _DPI = 4.2, 2.7, 220
_POINTS = 1500  # per curve: more than the width in pixels


def read_metrics(path: Path | str) -> dict[str, list[float | None]]:
    r"""The columns of a metrics.csv that have a number, with None for blank cells.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged, has no rows, or no numeric columns.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> _ = file.write_text("epoch,loss,knn,host\n1,0.5,,a\n2,0.25,80,b\n")
        >>> read_metrics(file)
        {'epoch': [1.0, 2.0], 'loss': [0.5, 0.25], 'knn': [None, 80.0]}
    """
    rows = read_rows(Path(path))
    if not rows:
        raise ValueError(f"{path} has no rows yet")
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    found = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    if not found:
        raise ValueError(f"{path} has no numeric columns")
    return found


def metric_curve(
    metrics_csv: Path | str,
    column: str,
    out: Path | str,
    *,
    label: str | None = None,
    theme: Theme = "light",
    over: Literal["epoch", "step"] = "epoch",
) -> Path:
    """Draw one column of a metrics.csv over epochs or steps.

    Args:
        metrics_csv: the file.
        column: name of the column; rows without a finite value are skipped.
        out: the PNG to write.
        label: label of the axis; None means the column's name.
        theme: light or dark.
        over: name of the x column.

    Returns:
        `out`, as a path.

    Raises:
        FileNotFoundError: there is no such metrics file.
        ValueError: it has no such numeric column, or no finite value in it.
    """
    metrics = read_metrics(metrics_csv)
    for name in (over, column):
        if name not in metrics:
            raise ValueError(f"{metrics_csv} has no numeric column {name!r}, only {', '.join(metrics)}")
    points = [
        (place, value)
        for place, value in zip(metrics[over], metrics[column], strict=True)
        if place is not None and value is not None and math.isfinite(place) and math.isfinite(value)
    ]
    if not points:
        raise ValueError(f"{metrics_csv} has no finite value of {column!r} yet")
    x, y = zip(*points, strict=True)
    colours = COLOURS[theme]
    figure, axes = _axes(colours, (over.capitalize(), label or column))
    # Markers show how often it was measured, unless there are too many to distinguish.
    axes.plot(x, y, color=colours.first, linewidth=1.8, marker="o" if len(x) <= 30 else None, markersize=3.5)
    axes.xaxis.set_major_locator(_ticks(x))
    axes.annotate(
        f"{y[-1]:.4g}".replace("-", "\N{MINUS SIGN}"), (x[-1], y[-1]), xytext=(6, 0),
        textcoords="offset points", va="center", color=colours.first, fontsize=9, fontweight="bold",
        annotation_clip=False,
    )  # fmt: skip
    return _save(figure, out)


def distance_figure(
    positive: Tensor | NDArray[Any], negative: Tensor | NDArray[Any], out: Path | str, *, theme: Theme = "light"
) -> Path:
    """Draw sorted distances of positive and negative pairs, each over the percentage of pairs.

    Args:
        positive: distances (N,) of positive pairs, in any order.
        negative: distances (M,) of negative pairs.
        out: the PNG to write.
        theme: light or dark.

    Raises:
        ValueError: either is empty or has non-finite values.
    """
    colours = COLOURS[theme]
    figure, axes = _axes(colours, ("Share of pairs, from nearest to farthest", "Distance"))
    for name, values, colour in (
        ("negative pairs", _numbers(negative), colours.second),
        ("positive pairs", _numbers(positive), colours.first),
    ):
        values = values.ravel()
        if not values.size or not np.isfinite(values).all():
            raise ValueError(f"distances of {name} must be finite and not empty, got {values.size} values")
        fraction = np.linspace(0.0, 1.0, min(_POINTS, max(2, values.size)))
        axes.plot(100 * fraction, np.quantile(values, fraction), color=colour, linewidth=2.0, label=name)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "ncols": 2}
    axes.legend(frameon=False, fontsize=9, labelcolor=colours.ink, **place)
    return _save(figure, out)


def assumption_figure(check: AssumptionCheck, out: Path | str, *, theme: Theme = "light") -> Path:
    """Draw the three tests of the Gaussian kernel on the sphere, one panel each, with what it predicts.

    Args:
        check: results of :func:`fmicl.information.assumption.check_assumption`.
        out: the PNG to write.
        theme: light or dark.
    """
    colours = COLOURS[theme]
    figure, flow_axes, law_axes, ratio_axes = _axes(
        colours,
        ("Squared distance of positive pairs", "Log density by RealNVP"),
        ("Cosine of positive pairs", "Density"),
        ("Cosine", "Log density ratio"),
    )
    for flow, colour in zip(check.flows, (colours.first, colours.second), strict=True):
        x, y = np.array(flow.squared_distances), np.array(flow.log_densities)
        label = f"{flow.prior} prior, R\N{SUPERSCRIPT TWO} = {flow.fit.r_squared:.2f}"
        flow_axes.plot(x, y - y.mean(), "o", color=colour, markersize=3.5, label=label)
        flow_axes.plot(x, flow.fit.intercept + flow.fit.slope * x - y.mean(), color=colour, linewidth=1.2)
    law_axes.hist(_numbers(check.cosines), bins=40, density=True, color=colours.line, label="observed")
    law = fitted_law(check)
    cosines, angle = _numbers(law.cosines), math.pi / (len(law.cosines) - 1)
    density = _numbers(law.weights) / (angle * np.sqrt(np.clip(1 - cosines**2, 1e-12, None)))
    low, high = float(check.cosines.min()), float(check.cosines.max())
    inside = (cosines >= low) & (cosines <= high) & (np.abs(cosines) < 0.9999)
    law_axes.plot(cosines[inside], density[inside], color=colours.first, label=f"gamma = {check.gamma.gamma:.3g}")
    ratio = check.ratio
    ratio_axes.errorbar(
        _numbers(ratio.cosines), _numbers(ratio.log_ratios), _numbers(ratio.errors), fmt="o", markersize=3,
        color=colours.first, linewidth=0.8, label="two histograms",
    )  # fmt: skip
    if math.isfinite(check.ratio_fit.slope):
        line = check.ratio_fit.intercept + check.ratio_fit.slope * _numbers(ratio.cosines)
        label = f"line, R\N{SUPERSCRIPT TWO} = {check.ratio_fit.r_squared:.2f}"
        ratio_axes.plot(_numbers(ratio.cosines), line, color=colours.second, linewidth=1.4, label=label)
    for axes in (flow_axes, law_axes, ratio_axes):
        axes.legend(frameon=False, fontsize=8, labelcolor=colours.ink)
    return _save(figure, out)


def neighbour_figure(
    images: Tensor | NDArray[Any],
    similarities: Tensor | NDArray[Any] | None,
    out: Path | str,
    *,
    theme: Theme = "light",
) -> Path:
    """Draw samples with their nearest neighbours: one row per sample, the sample itself on the left.

    Args:
        images: (R, 1 + K, C, H, W) uint8 with C 1 or 3: each sample, then its neighbours.
        similarities: cosine similarities (R, K) to print below the neighbours; None prints none.
        out: the PNG to write.
        theme: light or dark.

    Raises:
        ValueError: the shapes or types differ from these.
    """
    pictures = _array(images)
    if pictures.ndim != 5 or pictures.dtype != np.uint8 or pictures.shape[2] not in (1, 3) or not pictures.size:
        raise ValueError(
            f"images must be (R, 1 + K, C, H, W) uint8 with C 1 or 3, got {pictures.shape} {pictures.dtype}"
        )
    rows, columns = pictures.shape[:2]
    scores = None
    if similarities is not None:
        scores = _numbers(similarities)
        if scores.shape != (rows, columns - 1):
            raise ValueError(f"similarities must be {(rows, columns - 1)} for these images, got {scores.shape}")
    colours = COLOURS[theme]
    # One pair of axes, in inches: a pair per image takes ten times as long.
    cell, gap, first_gap, margin, head = 0.72, 0.06, 0.2, 0.06, 0.27
    below = 0.2 if scores is not None else 0.08
    width = 2 * margin + columns * cell + (columns - 2) * gap + first_gap if columns > 1 else 2 * margin + cell
    height = head + rows * (cell + below)
    figure = _figure(colours, width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False, aspect="auto")
    small = max(pictures.shape[3:]) < 64
    for row in range(rows):
        bottom = height - head - cell - row * (cell + below)
        for column in range(columns):
            left = margin if column == 0 else margin + cell + first_gap + (column - 1) * (cell + gap)
            picture = pictures[row, column].transpose(1, 2, 0)
            place = (left, left + cell, bottom, bottom + cell)
            axes.imshow(
                picture[..., 0] if picture.shape[2] == 1 else picture, extent=place,
                cmap="gray", vmin=0, vmax=255, aspect="auto", interpolation="nearest" if small else "antialiased",
            )  # fmt: skip
            edge, line = (colours.first, 2.0) if column == 0 else (colours.line, 0.6)
            axes.add_patch(Rectangle((left, bottom), cell, cell, fill=False, edgecolor=edge, linewidth=line))
            if scores is not None and column:
                score = f"{scores[row, column - 1]:.2f}"
                axes.text(left + cell / 2, bottom - 0.04, score, color=colours.muted, fontsize=7, ha="center", va="top")
            if row == 0 and column < 2:
                title = ("sample", "nearest first")[column]
                axes.text(left, bottom + cell + 0.06, title, color=colours.muted, fontsize=8, va="bottom")
    axes.set(xlim=(0, width), ylim=(0, height), xticks=[], yticks=[])
    return _save(figure, out)


def _ticks(positions: Sequence[float]) -> Locator:
    """At most seven ticks at whole numbers, multiples of the interval between measurements."""
    gap = min((after - before for before, after in pairwise(positions)), default=1.0)
    if gap <= 1:
        return MaxNLocator(integer=True, nbins=7)
    most = (positions[-1] - positions[0]) / gap / 6  # minimum number of points between ticks
    nice = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    return MultipleLocator(gap * next(n for n in nice if n >= most))


def _figure(colours: _Colours, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=colours.surface)
    FigureCanvasAgg(figure)
    return figure


def _axes(colours: _Colours, *labels: tuple[str, str]) -> tuple[Any, ...]:
    """A figure, and axes side by side for each pair of labels (x, y)."""
    with mpl.rc_context({"font.family": ["DejaVu Sans"], "axes.axisbelow": True}):
        figure = _figure(colours, len(labels) * _WIDTH, _HEIGHT)
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
        panels = figure.subplots(1, len(labels), squeeze=False)[0]
    for axes, (x_label, y_label) in zip(panels, labels, strict=True):
        axes.set_facecolor(colours.surface)
        axes.grid(axis="y", color=colours.line, linewidth=0.8)
        for side, spine in axes.spines.items():
            spine.set(visible=side == "bottom", color=colours.line)
        axes.tick_params(colors=colours.muted, labelsize=9, length=0, pad=6)
        axes.margins(x=0.02, y=0.1)
        axes.set_xlabel(x_label, color=colours.muted, fontsize=9)
        axes.set_ylabel(y_label, color=colours.muted, fontsize=9)
    return figure, *panels


def _save(figure: Figure, out: Path | str) -> Path:
    out = Path(out)
    # Without metadata, so that the same data gives the same bytes.
    options: dict[str, Any] = {"format": "png", "facecolor": figure.get_facecolor(), "metadata": {"Software": None}}
    write_atomically(out, lambda path: figure.savefig(path, **options))
    return out


def _array(values: Tensor | NDArray[Any]) -> NDArray[Any]:
    if isinstance(values, np.ndarray):
        return values
    tensor = values.detach().cpu()
    return (tensor.double() if tensor.is_floating_point() else tensor).numpy()


def _numbers(values: Tensor | NDArray[Any]) -> NDArray[np.float64]:
    return _array(values).astype(np.float64)
