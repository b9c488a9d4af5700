"""Times, and what came out of a run as a small table, for the terminal. Nothing of weight is imported before."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

__all__ = ["clock", "print_results", "print_sts"]

FEW = 100
"""Of fewer held-out images than this, an accuracy says little, and a line says so."""


def clock(seconds: float | None) -> str:
    """Hours, minutes and seconds; "" for None.

    Example:
        >>> clock(3725.0)
        '1:02:05'
    """
    if seconds is None or not math.isfinite(seconds):
        return ""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def print_results(run: Path) -> None:
    """A small table: accuracies of raw pixels, of the untrained and of the trained encoder."""
    from rich.console import Console
    from rich.table import Table

    results = json.loads((run / "results.json").read_text(encoding="utf-8"))
    if results["knn"] is None:
        print(f"no labels, so no accuracy; effective rank {results['effective_rank']:.1f}")
        return
    count = results.get("test_samples")  # old runs don't say it
    samples = "" if count is None else f"{count} images of the "
    table = Table(title=f"accuracy on the {samples}{results['split']} split, percent")
    table.add_column("")
    table.add_column(f"k-NN (k={results['k']})", justify="right")
    table.add_column("linear probe", justify="right")
    shown = ["knn", "linear"]
    if "linear_views" in results:
        table.add_column("on views too", justify="right")
        shown.append("linear_views")
    rows = {"raw pixels": results.get("raw_pixels"), "untrained encoder": results.get("untrained")}
    for name, row in [*rows.items(), (f"trained, epoch {results['epoch']}", results)]:
        if row is not None:
            table.add_row(name, *(f"{row[key]:.2f}" if key in row else "" for key in shown))
    Console().print(table)
    if count is not None and count < FEW:
        print(f"warning: {count} images are few: one more or less that is right makes {100 / count:.1f} percent")


def print_sts(results: dict[str, Any]) -> None:
    """A small table: a row for each STS task, and their average."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, otherwise: str) -> str:
        return otherwise if value is None else f"{value:.2f}"

    table = Table()
    table.add_column("task")
    table.add_column("score", justify="right")
    table.add_column("pairs", justify="right")
    for name, pairs in results["pairs"].items():
        table.add_row(name, number(results[name], "undefined"), str(pairs))
    for name in results["missing"]:
        table.add_row(name, "missing", "")
    table.add_row("avg", number(results["avg"], "-"), "")
    print("Spearman's correlation x 100, test splits")
    Console().print(table)
    if results["uniformity"] is not None:
        print(f"STS-B: alignment {number(results['alignment'], '-')}, uniformity {results['uniformity']:.2f}")
    if results["incomplete"]:
        print(f"not the official number of pairs, so not the official score: {', '.join(results['incomplete'])}")
    if results["missing"]:
        print(f"no average, as these are missing: {', '.join(results['missing'])}")
