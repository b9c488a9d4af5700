"""The score of the encoder that is measured during training."""

# The base class measures nothing, so it needs none of its arguments.
# ruff: noqa: ARG002
from __future__ import annotations

from typing import Any

from fmicl.methods import Method


class Monitor:
    """A score of the encoder that is measured during training; this one measures nothing, and its column stays empty.

    Args:
        column: the score's column in metrics.csv.
    """

    def __init__(self, column: str = "knn") -> None:
        self.column = column

    def due(self, epoch: float) -> bool:
        """Whether to measure it after this many epochs, at the end of a row."""
        return False

    def measure(self, method: Method, step: int) -> float | None:
        """The score; None if it is undefined."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state back."""

    def load_best(self, method: Method) -> dict[str, Any] | None:
        """Load the best weights so far and describe them for results.json; None if it keeps none."""
        return None
