"""Finished runs: those of a sweep's folder, and those archived as JSON files."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

from fmicl.config import Settings
from fmicl.reproduce.experiment import Outcome, archive_hash
from fmicl.sweep.state import SweepRecord


def read_archive(folder: Path) -> dict[str, Outcome]:
    """The archived runs below a folder (see results/README.md), by `archive_hash`; other JSON files are skipped.

    Runs whose settings this version doesn't accept are skipped too: they can't be part of a table.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a file is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with archived runs")
    found: dict[str, Outcome] = {}
    for file in sorted(folder.rglob("*.json")):
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if not isinstance(saved, dict) or not {"recipe", "task", "settings", "results"} <= saved.keys():
            continue
        try:
            settings = Settings.from_json(saved["recipe"], saved["settings"], saved["task"])
        except ValueError:
            continue
        found[archive_hash(settings)] = Outcome(settings, saved["results"] or {}, saved.get("metrics", ()), file)
    return found


def read_sweep(folder: Path, recipe: str) -> tuple[dict[str, Outcome], dict[str, str]]:
    """The finished runs of a sweep by `archive_hash`, and why others failed."""
    record = SweepRecord.read(folder, recipe)
    finished, failed = {}, {}
    for run in record.runs.values():
        key = archive_hash(run.settings)
        if run.state == "finished":
            finished[key] = Outcome(run.settings, run.results, read_metrics(run.run.metrics), run.run.path)
        elif run.state == "failed":
            failed[key] = run.error or "failed"
    return finished, failed


def read_metrics(path: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics.csv, none if there is no file; None for a cell that is blank or not finite."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [{name: _number(text) for name, text in row.items()} for row in csv.DictReader(file)]
    except OSError:
        return []


def _number(text: str | None) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None
