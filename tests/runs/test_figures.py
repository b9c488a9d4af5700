"""Figures: what is drawn is looked for in the pixels; wrong input is told apart."""

from __future__ import annotations

from collections.abc import Sequence
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
    loss_curve,
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


def test_metrics_are_read_with_blanks_and_without_text(metrics: Path) -> None:
    columns = read_metrics(metrics)
    assert list(columns) == ["epoch", "step", "loss", "knn"]
    assert columns["knn"] == [None, None, 80.5, None]


def test_a_row_that_was_cut_off_reads_as_blank(metrics: Path) -> None:
    metrics.write_text(CSV + "5,50")
    assert read_metrics(metrics)["loss"][-1] is None


@pytest.mark.parametrize(
    ("places", "ticks"),
    [
        (range(10, 51, 10), [10, 20, 30, 40, 50]),
        (range(10, 201, 10), [50, 100, 150, 200]),
        (range(125, 1001, 125), [250, 500, 750, 1000]),
        (range(1, 13), [2, 4, 6, 8, 10, 12]),
        ([3], [3]),
    ],
)
def test_ticks_stand_where_it_was_measured(places: Sequence[float], ticks: list[float]) -> None:
    found = _ticks(list(places)).tick_values(places[0], places[-1])
    assert [tick for tick in found if places[0] <= tick <= places[-1]] == ticks


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_loss_curve_falls_from_left_to_right_on_its_surface(metrics: Path, tmp_path: Path, theme: Theme) -> None:
    out = loss_curve(metrics, tmp_path / "deep" / "loss.png", theme=theme)
    image = pixels(out)
    assert coloured(image, COLOURS[theme].surface).mean() > 0.8
    rows, columns = np.nonzero(coloured(image, COLOURS[theme].first))
    # The number at the end of the curve is of its colour too: look at the part before it.
    left, right = columns < np.quantile(columns, 0.1), (columns > 0.5 * columns.max()) & (columns < 0.7 * columns.max())
    assert rows[left].mean() < rows[right].mean() - 50


def test_a_single_epoch_is_a_dot(metrics: Path, tmp_path: Path) -> None:
    metrics.write_text("epoch,loss\n1,0.5\n")
    assert coloured(pixels(loss_curve(metrics, tmp_path / "a.png")), COLOURS["light"].first).sum() > 50


def test_distances_lie_where_they_should(tmp_path: Path) -> None:
    positive, negative = torch.full((50,), 0.25, dtype=torch.bfloat16), np.linspace(1, 2, 7)
    image = pixels(distance_figure(positive, negative, tmp_path / "d.png"))
    body = image[image.shape[0] // 5 :]  # without the legend
    low = np.nonzero(coloured(body, COLOURS["light"].first))[0].mean()
    high = np.nonzero(coloured(body, COLOURS["light"].second))[0].mean()
    assert high < low - 100


def test_neighbours_show_the_pictures_themselves(tmp_path: Path) -> None:
    images = np.zeros((2, 4, 3, 8, 8), dtype=np.uint8)
    colours = ["#c01020", "#10c020", "#1020c0", "#c0c010", "#10c0c0", "#c010c0", "#804020", "#208040"]
    for place, colour in enumerate(colours):
        images[place // 4, place % 4] = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])[:, None, None]
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


@pytest.mark.parametrize("similarities", [None, np.ones((1, 2)), np.ones((1, 3))])
def test_neighbours_of_grey_images_with_and_without_numbers(tmp_path: Path, similarities: Any) -> None:
    images = np.full((1, 3, 1, 90, 70), 128, dtype=np.uint8)
    image = pixels(neighbour_figure(images, similarities, tmp_path / "n.png"))
    assert coloured(image, "#808080").mean() > 0.2


def test_the_same_data_draws_the_same_bytes_and_leaves_nothing_else(metrics: Path, tmp_path: Path) -> None:
    first = loss_curve(metrics, tmp_path / "a.png").read_bytes()
    assert loss_curve(metrics, tmp_path / "a.png").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "metrics.csv"]


def test_figures_leave_matplotlib_as_it_was(metrics: Path, tmp_path: Path) -> None:
    import matplotlib as mpl

    before = dict(mpl.rcParams)
    loss_curve(metrics, tmp_path / "a.png", theme="dark")
    assert dict(mpl.rcParams) == before


def test_wrong_input_is_told_apart(metrics: Path, tmp_path: Path) -> None:
    out = tmp_path / "x.png"
    with pytest.raises(FileNotFoundError):
        loss_curve(tmp_path / "none.csv", out)
    with pytest.raises(ValueError, match="no column 'rank'"):
        metric_curve(metrics, "rank", out)
    with pytest.raises(ValueError, match="no column 'note' of numbers"):
        metric_curve(metrics, "note", out)
    with pytest.raises(ValueError, match="at least one; got 0"):
        distance_figure(np.zeros(0), np.ones(3), out)
    with pytest.raises(ValueError, match="should be finite"):
        distance_figure(np.array([np.nan]), np.ones(3), out)
    with pytest.raises(ValueError, match=r"got \(2, 3, 8, 8\) uint8"):
        neighbour_figure(np.zeros((2, 3, 8, 8), np.uint8), None, out)
    with pytest.raises(ValueError, match="float64"):
        neighbour_figure(np.zeros((1, 2, 3, 8, 8)), None, out)
    with pytest.raises(ValueError, match=r"should be \(1, 1\)"):
        neighbour_figure(np.zeros((1, 2, 3, 8, 8), np.uint8), np.ones((2, 2)), out)
    metrics.write_text("epoch,loss\n")
    with pytest.raises(ValueError, match="no rows yet"):
        loss_curve(metrics, out)
    metrics.write_text("epoch,loss\n1,\n2,inf\n")
    with pytest.raises(ValueError, match="no finite value of 'loss'"):
        loss_curve(metrics, out)
    metrics.write_text("epoch\na\n")
    with pytest.raises(ValueError, match="no columns of numbers"):
        loss_curve(metrics, out)
    assert not out.exists()
