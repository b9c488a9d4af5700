"""Scores by which runs are compared: accuracies and scores without labels, and which direction is better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fmicl.utils.registry import unknown_name


@dataclass(frozen=True)
class Score:
    """A number in results.json, or a sum of several.

    Attributes:
        words: what it is called in tables.
        keys: entries of results.json that are added.
        sign: 1 if higher is better, -1 if lower is.
        labels: whether it needs labels.
    """

    words: str
    keys: tuple[str, ...]
    sign: int = 1
    labels: bool = False


ACCURACIES = {
    "knn": Score("k-NN", ("knn",), labels=True),
    "linear": Score("linear probe", ("linear",), labels=True),
}
SCORES = {
    "effective_rank": Score("effective rank", ("effective_rank",)),
    "rankme": Score("RankMe", ("rankme",)),
    "rankme_features": Score("RankMe of features", ("rankme_features",)),
    "lidar": Score("LiDAR", ("lidar",)),
    "lidar_features": Score("LiDAR of features", ("lidar_features",)),
    "alignment": Score("alignment", ("alignment",), -1),
    "uniformity": Score("uniformity", ("uniformity",), -1),
    "alignment_uniformity": Score("alignment + uniformity", ("alignment", "uniformity"), -1),
}
"""Scores without labels, by the name that ``fmicl select --by`` takes."""


def score(results: Mapping[str, Any], name: str) -> float | None:
    """A score of a run from its results.json, with the sign by which higher is better; None if it isn't there.

    Args:
        results: the content of results.json.
        name: of :data:`SCORES` or :data:`ACCURACIES`.

    Raises:
        ValueError: there is no such score.

    Example:
        >>> score({"alignment": 0.25, "uniformity": -3.5}, "alignment_uniformity")
        3.25
        >>> score({"knn": None}, "knn")
    """
    known = ACCURACIES | SCORES
    if name not in known:
        raise unknown_name("score", name, known)
    values = [results.get(key) for key in known[name].keys]
    if not all(isinstance(value, int | float) and math.isfinite(value) for value in values):
        return None
    return known[name].sign * math.fsum(values)  # type: ignore[arg-type]
