"""The figure of the archived runs: a line for each column, and outdated figures are found."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import curves
import reproduction

from fmicl.config import recipe


def put(folder: Path, name: str, *, knn: float = 80.0, **changes: Any) -> None:
    """An archived run of 200 epochs, whose alignment at epoch e is e / 1000 and with two k-NN accuracies."""
    settings = recipe("cifar10", **{"epochs": 200, **changes})
    rows = [
        {"epoch": e, "knn": knn if e % 100 == 0 else None, "alignment": e / 1000, "uniformity": -3.0,
         "effective_rank": float("nan") if e == 1 else 50.0}
        for e in range(1, 201)
    ]  # fmt: skip
    told = {"recipe": "cifar10", "task": "images", "settings": settings.to_json(), "seed": settings.seed}
    (folder / f"{name}.json").write_text(json.dumps({**told, "results": {"knn": knn}, "metrics": rows}))


def test_a_point_is_a_mean_over_epochs_or_one_look(tmp_path: Path) -> None:
    put(tmp_path, "kl")
    (run,) = reproduction.load(tmp_path)
    found = curves.curves(run)
    assert found["knn"] == [(100.0, 80.0), (200.0, 80.0)]
    assert len(found["alignment"]) == 40
    first, *_, last = found["alignment"]
    assert first == pytest.approx((5, 0.003))
    assert last == pytest.approx((200, 0.198))
    assert all(value == 50.0 for _, value in found["effective_rank"])  # what is not finite is left out


def test_a_line_for_each_column_of_the_lowest_seed(tmp_path: Path) -> None:
    put(tmp_path, "kl1", seed=1)
    put(tmp_path, "kl0", seed=0)
    put(tmp_path, "js", divergence="js")
    put(tmp_path, "simclr", objective="infonce")
    put(tmp_path, "other", alpha=10.0)
    put(tmp_path, "long", divergence="pearson", epochs=800)
    runs = curves.chosen(reproduction.load(tmp_path))
    assert {name: run.source.stem for name, run in runs.items()} == {"SimCLR": "simclr", "KL": "kl0", "JS": "js"}
    words = "".join(ET.fromstring(curves.draw(runs)).itertext())
    assert [name for name in reproduction.COLUMNS if name in words] == ["SimCLR", "KL", "JS"]
    assert all(title in words for title in curves.PANELS.values())


def test_an_outdated_figure_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = tmp_path / "figures" / "a.svg"
    options = ["--results", str(tmp_path), "--out", str(figure)]
    assert curves.main(options) == 2
    assert "no run of 200 epochs" in capsys.readouterr().err
    put(tmp_path, "kl")
    assert curves.main(options) == 0
    assert curves.main([*options, "--check"]) == 0
    first = figure.read_bytes()
    assert curves.main(options) == 0
    assert figure.read_bytes() == first
    put(tmp_path, "kl", knn=81.0)
    assert curves.main([*options, "--check"]) == 1
    assert "out of date" in capsys.readouterr().err


def test_the_figure_is_up_to_date() -> None:
    assert curves.main(["--check"]) == 0, "run python experiments/curves.py"
    assert set(curves.STYLES) == set(reproduction.COLUMNS)
