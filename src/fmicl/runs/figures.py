"""The figures of a run: curves over epochs, sorted distances of pairs, nearest neighbours as pictures.

Each function draws one PNG and returns its path. Sizes are for a phone as much as for a screen; the two
themes have the colours of the report's page. matplotlib's global state is left alone (no pyplot).
"""

from __future__ import annotations

import csv
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

from fmicl.utils.files import write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Theme", "distance_figure", "loss_curve", "metric_curve", "neighbour_figure", "read_metrics"]

Theme = Literal["light", "dark"]


@dataclass(frozen=True)
class _Colours:
    surface: str
    ink: str
    muted: str
    line: str
    first: str
    """Blue and orange: told apart with any colour vision, and at 3:1 or more on their surface."""
    second: str


COLOURS: dict[Theme, _Colours] = {
    "light": _Colours("#ffffff", "#1b1f24", "#5b6470", "#e3e6ea", "#1f6feb", "#c2540a"),
    "dark": _Colours("#1a1e24", "#e8ebef", "#9aa4b1", "#2f353d", "#6aa6ff", "#f0954f"),
}
_WIDTH, _HEIGHT, _DPI = 4.2, 2.7, 220
_POINTS = 1500  # of a curve: more than there are pixels across


def read_metrics(path: Path | str) -> dict[str, list[float | None]]:
    r"""Columns of a metrics.csv, with None where a cell is blank; text columns are left out.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, has no rows, or no columns that hold numbers.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "metrics.csv"
        >>> _ = file.write_text("epoch,loss,knn,host\n1,0.5,,a\n2,0.25,80,b\n")
        >>> read_metrics(file)
        {'epoch': [1.0, 2.0], 'loss': [0.5, 0.25], 'knn': [None, 80.0]}
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    if not rows:
        raise ValueError(f"{path} has no rows yet")
    columns: dict[str, list[float | None]] = {}
    for name in rows[0]:
        try:
            # A row that was cut off lacks its last cells: None, as a blank one.
            columns[name] = [float(cell) if (cell := row[name]) not in (None, "") else None for row in rows]
        except (TypeError, ValueError):
            continue
    if not columns:
        raise ValueError(f"{path} has no columns of numbers")
    return columns


def loss_curve(metrics_csv: Path | str, out: Path | str, *, theme: Theme = "light") -> Path:
    """Draw the training loss over epochs.

    Raises:
        FileNotFoundError: if there is no such metrics file.
        ValueError: if it holds no finite loss.
    """
    return metric_curve(metrics_csv, "loss", out, label="Training loss", theme=theme)


def metric_curve(
    metrics_csv: Path | str,
    column: str,
    out: Path | str,
    *,
    label: str | None = None,
    theme: Theme = "light",
    over: Literal["epoch", "step"] = "epoch",
) -> Path:
    """Draw one column of a metrics.csv over epochs, where it was measured.

    Args:
        metrics_csv: the file, with a column `epoch`.
        column: which column.
        out: the PNG to write.
        label: what to call it; the column's name if None.
        theme: light or dark.
        over: which column to draw it over.

    Returns:
        `out`, as a path.

    Raises:
        FileNotFoundError: if there is no such metrics file.
        ValueError: if it has no such column, or no finite value in it.
    """
    metrics = read_metrics(metrics_csv)
    for name in (over, column):
        if name not in metrics:
            raise ValueError(f"{metrics_csv} has no column {name!r} of numbers; it has {', '.join(metrics)}")
    points = [
        (place, value)
        for place, value in zip(metrics[over], metrics[column], strict=True)
        if place is not None and value is not None and math.isfinite(place) and math.isfinite(value)
    ]
    if not points:
        raise ValueError(f"{metrics_csv} has no finite value of {column!r} yet")
    x, y = zip(*points, strict=True)
    colours = COLOURS[theme]
    figure, axes = _axes(colours, label or column, over.capitalize())
    # Dots where they can be told apart: they show how often it was measured.
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
    """Draw sorted distances of positive and of negative pairs, each over its share of pairs.

    The two curves lie far apart where the encoder tells views of one sample from views of others.

    Args:
        positive: (N,) distances of positive pairs, in any order.
        negative: (M,) distances of negative pairs.
        out: the PNG to write.
        theme: light or dark.

    Raises:
        ValueError: if either has no values, or values that are not finite.
    """
    colours = COLOURS[theme]
    figure, axes = _axes(colours, "Distance", "Share of pairs, from nearest to farthest")
    for name, values, colour in (
        ("negative pairs", _numbers(negative), colours.second),
        ("positive pairs", _numbers(positive), colours.first),
    ):
        values = values.ravel()
        if not values.size or not np.isfinite(values).all():
            raise ValueError(f"distances of {name} should be finite numbers, at least one; got {values.size} values")
        share = np.linspace(0.0, 1.0, min(_POINTS, max(2, values.size)))
        height = np.quantile(values, share)
        axes.plot(100 * share, height, color=colour, linewidth=2.0, label=name)
    axes.set_xlim(0, 100)
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f} %")
    legend = axes.legend(frameon=False, fontsize=9, loc="lower left", bbox_to_anchor=(-0.02, 1.0), ncols=2)
    for text in legend.get_texts():
        text.set_color(colours.ink)
    return _save(figure, out)


def neighbour_figure(
    images: Tensor | NDArray[Any],
    similarities: Tensor | NDArray[Any] | None,
    out: Path | str,
    *,
    theme: Theme = "light",
) -> Path:
    """Draw samples with their nearest neighbours: a row for each, the sample itself on the left.

    Args:
        images: (R, 1 + K, C, H, W) uint8, with C 1 or 3; the sample comes first, then its neighbours.
        similarities: (R, K) cosine similarities, written below; (R, 1 + K) ones may include the sample's own
            (left out). None writes none.
        out: the PNG to write.
        theme: light or dark.

    Raises:
        ValueError: if the shapes are others.
    """
    pictures = _array(images)
    if pictures.ndim != 5 or pictures.dtype != np.uint8 or pictures.shape[2] not in (1, 3) or not pictures.size:
        raise ValueError(
            f"images should be (R, 1 + K, C, H, W) uint8 with C 1 or 3; got {pictures.shape} {pictures.dtype}"
        )
    rows, columns = pictures.shape[:2]
    scores = None
    if similarities is not None:
        scores = _numbers(similarities)
        if scores.shape == (rows, columns):
            scores = scores[:, 1:]
        if scores.shape != (rows, columns - 1):
            raise ValueError(f"similarities should be {(rows, columns - 1)} for these images; got {scores.shape}")
    colours = COLOURS[theme]
    # All on one pair of axes, in inches: a pair for each picture takes ten times as long to draw.
    cell, gap, apart, margin, head = 0.72, 0.06, 0.2, 0.06, 0.27
    below = 0.2 if scores is not None else 0.08
    width = 2 * margin + columns * cell + (columns - 2) * gap + apart if columns > 1 else 2 * margin + cell
    height = head + rows * (cell + below)
    figure = _figure(colours, width, height)
    axes = figure.add_axes((0.0, 0.0, 1.0, 1.0), frameon=False, aspect="auto")
    small = max(pictures.shape[3:]) < 64
    for row in range(rows):
        bottom = height - head - cell - row * (cell + below)
        for column in range(columns):
            left = margin if column == 0 else margin + cell + apart + (column - 1) * (cell + gap)
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


def _ticks(places: Sequence[float]) -> Locator:
    """Whole numbers; where it was measured each so many epochs or steps, multiples of that, at most seven."""
    gap = min((after - before for before, after in pairwise(places)), default=1.0)
    if gap <= 1:
        return MaxNLocator(integer=True, nbins=7)
    most = (places[-1] - places[0]) / gap / 6  # points from a tick to the next, at least
    nice = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    return MultipleLocator(gap * next(n for n in nice if n >= most))


def _figure(colours: _Colours, width: float, height: float) -> Figure:
    figure = Figure(figsize=(width, height), dpi=_DPI, facecolor=colours.surface)
    FigureCanvasAgg(figure)
    return figure


def _axes(colours: _Colours, title: str, below: str) -> tuple[Figure, Axes]:
    with mpl.rc_context({"font.family": ["DejaVu Sans"], "axes.axisbelow": True}):
        figure = _figure(colours, _WIDTH, _HEIGHT)
        figure.set_layout_engine("constrained", w_pad=0.08, h_pad=0.08)
        axes = figure.add_subplot()
    axes.set_facecolor(colours.surface)
    axes.grid(axis="y", color=colours.line, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set(visible=side == "bottom", color=colours.line)
    axes.tick_params(colors=colours.muted, labelsize=9, length=0, pad=6)
    axes.margins(x=0.02, y=0.1)
    axes.set_xlabel(below, color=colours.muted, fontsize=9)
    axes.set_ylabel(title, color=colours.muted, fontsize=9)
    return figure, axes


def _save(figure: Figure, out: Path | str) -> Path:
    out = Path(out)
    # No date inside, so that the same run draws the same bytes.
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
