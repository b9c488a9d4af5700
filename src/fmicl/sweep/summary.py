"""Summary of a sweep: mean and standard deviation over the seeds of each group of runs."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmicl.sweep.state import SweepRun

SCORES = {"knn": "k-NN", "linear": "linear", "linear_views": "linear on views", "avg": "STS avg", "STSB": "STS-B"}
"""Entries of results.json that are compared, with their headings."""


def scores(results: Mapping[str, Any]) -> dict[str, float]:
    """The scores in a results.json, of images or of text.

    Example:
        >>> scores({"knn": 84.2, "linear": 88.0, "k": 200, "split": "test"})
        {'k-NN': 84.2, 'linear': 88.0}
        >>> scores({"STSB": 80.0, "avg": None})
        {'STS-B': 80.0}
    """
    return {
        heading: float(results[key]) for key, heading in SCORES.items() if isinstance(results.get(key), int | float)
    }


def mean_and_std(values: Sequence[float]) -> str:
    """Mean ± standard deviation (of a sample: n - 1); the value alone if there is one.

    Example:
        >>> mean_and_std([84.0, 85.0, 86.0]), mean_and_std([84.0])
        ('85.00 ± 1.00', '84.00')
    """
    mean = f"{statistics.fmean(values):.2f}"
    return mean if len(values) == 1 else f"{mean} ± {statistics.stdev(values):.2f}"


def summarise(runs: Sequence[SweepRun]) -> list[dict[str, Any]]:
    """One row per group of runs that differ in nothing but the seed.

    Returns:
        For each group ``case`` (the cases of its runs, None without), ``settings`` (options with several values among
        the groups; those without effect in this group are left out), ``runs`` (their hashes), ``n`` (their number) and
        ``scores`` (for each score ``mean``, ``std``, which is None for one run, and ``values``).
    """
    groups: dict[str, list[SweepRun]] = {}
    for run in runs:
        groups.setdefault(run.group, []).append(run)
    varied = _varied([members[0].columns for members in groups.values()])
    return [
        {
            "case": ", ".join(dict.fromkeys(run.case for run in members if run.case)) or None,
            "settings": {name: value for name, value in members[0].columns.items() if name in varied},
            "runs": [run.settings.hash for run in members],
            "n": len(members),
            "scores": _statistics([scores(run.results) for run in members]),
        }
        for members in groups.values()
    ]


def _varied(rows: Sequence[Mapping[str, Any]]) -> set[str]:
    """Options that have several values, where they have one."""
    values: dict[str, set[str]] = {}
    for row in rows:
        for name, value in row.items():
            values.setdefault(name, set()).add(json.dumps(value))
    return {name for name, found in values.items() if len(found) > 1}


def _statistics(found: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    columns = {heading: [each[heading] for each in found if heading in each] for heading in SCORES.values()}
    return {
        heading: {
            "mean": statistics.fmean(values),
            "std": statistics.stdev(values) if len(values) > 1 else None,
            "values": values,
        }
        for heading, values in columns.items()
        if values
    }


def summary_table(summary: Sequence[Mapping[str, Any]]) -> Any:
    """A summary as a table of rich: case, options that vary, n, scores."""
    from rich.table import Table

    headings = [heading for heading in SCORES.values() if any(heading in row["scores"] for row in summary)]
    names = list(dict.fromkeys(name for row in summary for name in row["settings"]))
    columns = {name: _texts([row["settings"].get(name, "") for row in summary]) for name in names}
    if any(row["case"] for row in summary):
        columns = {"case": [row["case"] or "" for row in summary], **columns}
    table = Table(title="mean ± standard deviation over seeds")
    for name in columns:
        table.add_column(name)
    for heading in ("n", *headings):
        table.add_column(heading, justify="right")
    for i, row in enumerate(summary):
        shown = [
            mean_and_std(row["scores"][heading]["values"]) if heading in row["scores"] else "" for heading in headings
        ]
        table.add_row(*(texts[i] for texts in columns.values()), str(row["n"]), *shown)
    return table


def _texts(values: Sequence[Any]) -> list[str]:
    """Values of an option as text; paths without their folders, if that leaves them distinct."""
    texts = [" ".join(map(str, value)) if isinstance(value, list) else str(value) for value in values]
    names = [text.rsplit("/", 1)[-1] for text in texts]
    return names if len(set(names)) == len(set(texts)) else texts
