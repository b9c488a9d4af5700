"""Scores that runs are chosen by: their direction, and what is missing."""

from __future__ import annotations

import math

import pytest

from fmicl.evaluation.scores import ACCURACIES, SCORES, score

GOOD = {"knn": 90.0, "linear": 91.0, "alignment": 0.2, "uniformity": -3.9, "effective_rank": 100.0, "rankme": 90.0,
        "rankme_features": 80.0, "lidar": 70.0, "lidar_features": 60.0}  # fmt: skip
BAD = {"knn": 50.0, "linear": 60.0, "alignment": 0.9, "uniformity": -1.0, "effective_rank": 2.0, "rankme": 2.0,
       "rankme_features": 3.0, "lidar": 2.0, "lidar_features": 1.5}  # fmt: skip


@pytest.mark.parametrize("name", [*ACCURACIES, *SCORES])
def test_higher_is_better(name: str) -> None:
    good, bad = score(GOOD, name), score(BAD, name)
    assert good is not None
    assert bad is not None
    assert good > bad


@pytest.mark.parametrize("value", [None, math.nan, math.inf, "85"])
def test_what_is_no_number_is_no_score(value: object) -> None:
    assert score({"alignment": value, "uniformity": -3.0}, "alignment_uniformity") is None
    assert score({}, "knn") is None


def test_an_unknown_score_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'effective-rank'.*effective_rank"):
        score(GOOD, "effective-rank")
