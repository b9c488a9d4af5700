"""Result tables for the terminal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fmicl.runs.folder import Run
from fmicl.utils.files import read_json

FEW_IMAGES = 100
"""Below this number of test images, a line says how coarse the accuracy is."""


def print_results(path: Path) -> None:
    """Print the accuracies of an image run: chance, raw pixels, the start of training, its end."""
    from rich.console import Console
    from rich.table import Table

    results = read_json(Run(path).results)
    if results["knn"] is None:
        print(f"no labels, so no accuracy; effective rank {results['effective_rank']:.1f}")
        return
    count = results["test_samples"]
    table = Table(title=f"accuracy on the {count} images of the {results['split']} split, percent")
    columns = {"knn": f"k-NN (k={results['k']})", "linear": "linear probe", "linear_views": "on views too"}
    shown = [key for key in columns if key in results]
    table.add_column("")
    for key in shown:
        table.add_column(columns[key], justify="right")
    rows = {
        "chance": results.get("chance"),
        "raw pixels": results.get("raw_pixels"),
        "untrained encoder": results.get("untrained"),
        "start": results.get("start"),
        f"trained, epoch {results['epoch']}": results,
    }
    for name, row in rows.items():
        if row is not None:
            table.add_row(name, *(f"{row[key]:.2f}" if key in row else "" for key in shown))
    Console().print(table)
    if count < FEW_IMAGES:
        print(f"warning: only {count} test images: each is {100 / count:.1f} points of accuracy")


def print_sts(results: dict[str, Any]) -> None:
    """Print the score of each STS task and their average."""
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
