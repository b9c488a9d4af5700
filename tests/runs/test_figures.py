"""Figures: pixels of what is drawn, and wrong input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib.image as mpimg
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fmicl.runs.figures import (
    COLOURS,
    Theme,
    _ticks,
    distance_figure,
    metric_curve,
    neighbour_figure,
    read_metrics,
)

CSV = "epoch,step,loss,knn,note\n1,10,2.5,,a\n2,20,nan,,b\n3,30,1.0,80.5,c\n4,40,0.5,,d\n"


@pytest.fixture
def metrics(tmp_path: Path) -> Path:
    path = tmp_path / "metrics.csv"
    path.write_text(CSV)
    return path


def pixels(path: Path) -> NDArray[np.uint8]:
    image: NDArray[Any] = mpimg.imread(path)
    return np.round(255 * image[..., :3]).astype(np.uint8)


def coloured(image: NDArray[np.uint8], colour: str) -> NDArray[np.bool_]:
    target = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])
    close: NDArray[np.bool_] = np.abs(image.astype(int) - target).max(axis=-1) <= 2
    return close


def test_metrics_have_blanks_and_no_text_columns(metrics: Path) -> None:
    columns = read_metrics(metrics)
    assert list(columns) == ["epoch", "step", "loss", "knn"]
    assert columns["knn"] == [None, None, 80.5, None]


def test_a_truncated_row_reads_as_blank(metrics: Path) -> None:
    metrics.write_text(CSV + "5,50")
    assert read_metrics(metrics)["loss"][-1] is None


@pytest.mark.parametrize(
    ("positions", "ticks"),
    [
        (range(10, 51, 10), [10, 20, 30, 40, 50]),
        (range(10, 201, 10), [50, 100, 150, 200]),
        (range(125, 1001, 125), [250, 500, 750, 1000]),
        (range(1, 13), [2, 4, 6, 8, 10, 12]),
        ([3], [3]),
    ],
)
def test_ticks_are_where_it_was_measured(positions: Sequence[float], ticks: list[float]) -> None:
    found = _ticks(list(positions)).tick_values(positions[0], positions[-1])
    assert [tick for tick in found if positions[0] <= tick <= positions[-1]] == ticks


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_loss_curve_falls_from_left_to_right_on_its_surface(metrics: Path, tmp_path: Path, theme: Theme) -> None:
    out = metric_curve(metrics, "loss", tmp_path / "deep" / "loss.png", theme=theme)
    image = pixels(out)
    assert coloured(image, COLOURS[theme].surface).mean() > 0.8
    rows, columns = np.nonzero(coloured(image, COLOURS[theme].first))
    # The number at the end of the curve has its colour, too: look at the part before it.
    left, right = columns < np.quantile(columns, 0.1), (columns > 0.5 * columns.max()) & (columns < 0.7 * columns.max())
    assert rows[left].mean() < rows[right].mean() - 50


def test_a_single_epoch_is_a_dot(metrics: Path, tmp_path: Path) -> None:
    metrics.write_text("epoch,loss\n1,0.5\n")
    assert coloured(pixels(metric_curve(metrics, "loss", tmp_path / "a.png")), COLOURS["light"].first).sum() > 50


def test_negative_distances_are_above_positive_ones(tmp_path: Path) -> None:
    positive, negative = torch.full((50,), 0.25, dtype=torch.bfloat16), np.linspace(1, 2, 7)
    image = pixels(distance_figure(positive, negative, tmp_path / "d.png"))
    body = image[image.shape[0] // 5 :]  # without the legend
    low = np.nonzero(coloured(body, COLOURS["light"].first))[0].mean()
    high = np.nonzero(coloured(body, COLOURS["light"].second))[0].mean()
    assert high < low - 100


def test_neighbours_are_drawn_in_order(tmp_path: Path) -> None:
    images = np.zeros((2, 4, 3, 8, 8), dtype=np.uint8)
    colours = ["#c01020", "#10c020", "#1020c0", "#c0c010", "#10c0c0", "#c010c0", "#804020", "#208040"]
    for index, colour in enumerate(colours):
        images[index // 4, index % 4] = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])[:, None, None]
    image = pixels(neighbour_figure(torch.from_numpy(images), torch.rand(2, 3), tmp_path / "n.png"))
    centres = []
    for colour in colours:
        rows, columns = np.nonzero(coloured(image, colour))
        assert len(rows) > 5000
        centres.append((rows.mean(), columns.mean()))
    # In reading order, on two lines.
    assert [round(row) for row, _ in centres[:4]] == [round(centres[0][0])] * 4
    assert centres[4][0] > centres[0][0] + 100
    assert sorted(centres[:4], key=lambda c: c[1]) == centres[:4]


@pytest.mark.parametrize("similarities", [None, np.ones((1, 2))])
def test_neighbours_of_grey_images_with_and_without_numbers(tmp_path: Path, similarities: Any) -> None:
    images = np.full((1, 3, 1, 90, 70), 128, dtype=np.uint8)
    image = pixels(neighbour_figure(images, similarities, tmp_path / "n.png"))
    assert coloured(image, "#808080").mean() > 0.2


def test_the_same_data_gives_the_same_bytes_and_no_other_files(metrics: Path, tmp_path: Path) -> None:
    first = metric_curve(metrics, "loss", tmp_path / "a.png").read_bytes()
    assert metric_curve(metrics, "loss", tmp_path / "a.png").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "metrics.csv"]


def test_figures_do_not_change_matplotlib(metrics: Path, tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    metric_curve(metrics, "loss", tmp_path / "a.png", theme="dark")
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    ("csv", "column", "fact"),
    [
        (CSV, "rank", "'rank'"),
        (CSV, "note", "numeric column 'note'"),
        ("epoch,loss\n", "loss", "no rows"),
        ("epoch,loss\n1,\n2,inf\n", "loss", "no finite value of 'loss'"),
        ("epoch\na\n", "loss", "no numeric columns"),
    ],
)
def test_metrics_that_can_not_be_drawn_are_errors(tmp_path: Path, csv: str, column: str, fact: str) -> None:
    with pytest.raises(FileNotFoundError):
        metric_curve(tmp_path / "none.csv", column, tmp_path / "x.png")
    (tmp_path / "metrics.csv").write_text(csv)
    with pytest.raises(ValueError, match=fact):
        metric_curve(tmp_path / "metrics.csv", column, tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize(
    ("draw", "fact"),
    [
        (lambda out: distance_figure(np.zeros(0), np.ones(3), out), "positive .* 0 values"),
        (lambda out: distance_figure(np.array([np.nan]), np.ones(3), out), "finite"),
        (lambda out: neighbour_figure(np.zeros((2, 3, 8, 8), np.uint8), None, out), r"\(2, 3, 8, 8\) uint8"),
        (lambda out: neighbour_figure(np.zeros((1, 2, 3, 8, 8)), None, out), "float64"),
        (lambda out: neighbour_figure(np.zeros((1, 2, 3, 8, 8), np.uint8), np.ones((2, 2)), out), r"\(1, 1\)"),
    ],
)
def test_arrays_of_other_shapes_are_errors(tmp_path: Path, draw: Callable[[Path], Path], fact: str) -> None:
    with pytest.raises(ValueError, match=fact):
        draw(tmp_path / "x.png")
    assert not (tmp_path / "x.png").exists()
