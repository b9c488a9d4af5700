"""Archive of runs: a JSON file for each, written from run folders; and the finished runs of a sweep's folder.

The file is <dataset>/<name>-s<seed>-<hash>.json. It has the contents of the run folder (settings, versions, device,
commit, date, seed, results, and metrics by epoch) without the paths of the machine; the hash is that of these settings.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fmicl.config import Settings, schema_of
from fmicl.reproduce.experiment import Outcome, archive_hash
from fmicl.runs.folder import SWEEP_FILE, Run, read_rows
from fmicl.sweep.state import SweepRecord
from fmicl.utils.files import read_json, write_atomically

PLACES = {"data-dir": "DIR", "out": "RUN"}
"""Replacements of the user's folders in a command. Others become PATH; a file and a model keep their own names."""
SHORT = {
    "batch_size": "batch", "encoder_momentum_end": "momentum_end", "key_statistics": "keys", "learning_rate": "lr",
    "rotation_weight": "rotation", "uniformity_weight": "uniformity", "warmup_epochs": "warmup",
}  # fmt: skip
"""Names of options in a file's name."""
LONGEST = 60
"""Characters of a file's name before its ending."""


def read_runs(folder: Path) -> list[Outcome]:
    """The archived runs below a folder (see results/README.md), by file name; other JSON files are skipped.

    Runs whose settings this version doesn't accept are skipped too: they can't be part of a table.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: a file is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with archived runs")
    found = []
    for file in sorted(folder.rglob("*.json")):
        try:
            saved = json.loads(file.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if isinstance(saved, dict) and {"recipe", "task", "settings", "results"} <= saved.keys():
            with contextlib.suppress(ValueError):
                found.append(outcome_of(saved, file))
    return found


def outcome_of(record: Mapping[str, Any], source: Path) -> Outcome:
    """The run of an archived JSON object.

    Raises:
        ValueError: the settings are not valid in this version.
    """
    settings = Settings.from_json(record["recipe"], record["settings"], record["task"])
    return Outcome(settings, record["results"] or {}, record.get("metrics", ()), source, record.get("data"))


def read_archive(folder: Path) -> dict[str, Outcome]:
    """The runs of :func:`read_runs`, by `archive_hash`."""
    return {archive_hash(run.settings): run for run in read_runs(folder)}


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
    rows = read_rows(path) if path.exists() else []
    return [{name: None if x is None or not math.isfinite(x) else x for name, x in row.items()} for row in rows]


def make_record(run: Run, commit: str | None = None) -> dict[str, Any]:
    """The contents of a finished run folder as one JSON object.

    Args:
        run: what `fmicl train` wrote.
        commit: of the code, if the run doesn't know it.

    Raises:
        FileNotFoundError: it is not a run folder, or the run is not finished.
        ValueError: the run was made at another commit, or its results are on other data.
    """
    for file in (run.settings, run.results, run.metrics):
        if not file.is_file():
            raise FileNotFoundError(
                f"{run.path} has no {file.name}: it is not a run of `fmicl train`, or is not finished"
            )
    saved = read_json(run.settings)
    known = saved.get("commit")
    if commit and known and not (known.startswith(commit) or commit.startswith(known)):
        raise ValueError(f"{run.path} was made at commit {known}, not {commit}")
    results = read_json(run.results)
    if results.get("data_changed"):
        raise ValueError(
            f"{run.results} is on other data than the run was trained on ({results['data_changed']}): "
            "run `fmicl evaluate` with the run's own data"
        )
    results.pop("data_dir", None)  # the same data in another place
    settings = {key: without_folder(value) for key, value in saved["settings"].items()}
    for key, option in schema_of(saved["task"]).options.items():
        if settings.get(key) is not None and Path in getattr(option.type, "__args__", ()):
            settings[key] = Path(settings[key]).name if Path(settings[key]).suffix else None  # files keep their names
    record = {
        "recipe": saved["recipe"],
        "task": saved["task"],
        "hash": Settings.from_json(saved["recipe"], settings).hash,
        "settings": settings,
        "data": without_folders(saved.get("data")),
        "command": shown_command(saved["command"]),
        "versions": saved["versions"],
        "device": saved["device"],
        "commit": known or commit,
        "seed": saved["seed"],
        "started": saved["started"],
        "results": without_folders(results),
        "metrics": read_metrics(run.metrics),
    }
    return {key: value for key, value in record.items() if key != "data" or value is not None}


def without_folder(value: Any) -> Any:
    """The last part of a path; other values, such as names on a hub, unchanged."""
    if isinstance(value, str) and re.match(r"(/|~|\.\.?/|[A-Za-z]:\\)", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def without_folders(value: Any) -> Any:
    """The same of all values in a JSON object, which loses the entries "model"."""
    if isinstance(value, Mapping):
        return {key: without_folders(inner) for key, inner in value.items() if key != "model"}
    return [without_folders(inner) for inner in value] if isinstance(value, list) else without_folder(value)


def shown_command(words: Iterable[str]) -> str:
    """The command as one line, with the user's folders replaced."""
    shown, before = list[str](), ""
    for word in words:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        name = option.lstrip("-")
        changed = PLACES.get(name) if value else None
        if changed is None:
            changed = without_folder(value)
            if changed != value and name != "model" and not Path(changed).suffix:
                changed = "PATH"  # the name of a folder says nothing about the run
        shown.append(f"{option}={changed}" if equals else changed if not word.startswith("--") else word)
        before = word if word.startswith("--") and not equals else ""
    return shlex.join(shown)


def record_path(run: Outcome) -> Path:
    """Where a run is filed: dataset, then method and objective, epochs, some differences, seed and hash.

    Example:
        >>> from fmicl.config import recipe
        >>> settings = recipe("cifar10", method="moco", epochs=200, alpha=7.4)
        >>> record_path(Outcome(settings, {}, (), Path())).as_posix()
        'cifar10/moco-kl-200e-alpha=7.4-s0-2c82d798.json'
    """
    s = run.settings
    parts = [] if s.method == "simclr" else [s.method]
    if not s.method_options.own_loss:
        parts.append(s.divergence if s.objective == "fmicl" else s.objective)
    parts.append(f"{s.epochs}e")
    end = f"-s{run.seed}-{s.hash}"
    for name, value in sorted(run.differences.items(), key=lambda item: not _of_method(s, item[0])):
        part = _words(SHORT.get(name, name), value)
        if name != "model" and len("-".join([*parts, part])) + len(end) <= LONGEST:  # a model is often a folder's name
            parts.append(part)
    return Path(s.values.get("dataset", s.recipe)) / f"{'-'.join(parts)}{end}.json"


def _of_method(settings: Settings, name: str) -> bool:
    return name in settings.schema.owners and settings.schema.owner_titles(name).startswith("method ")


def _words(name: str, value: Any) -> str:
    if value is True:
        return name
    values = value if isinstance(value, tuple) else (value,)
    text = "_".join(f"{x:g}" if isinstance(x, float) and float(f"{x:g}") == x else str(x) for x in values)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", f"{name}={text}")


def render(record: Mapping[str, Any]) -> str:
    """Readable JSON: a line for each entry and each epoch."""
    lines = []
    for key, value in record.items():
        if key == "metrics":
            rows = ",\n".join("  " + json.dumps(row) for row in value)
            lines.append(f' "metrics": [\n{rows}\n ]' if value else ' "metrics": []')
        else:
            text = json.dumps(value, indent=1, ensure_ascii=False).replace("\n", "\n ")
            text = re.sub(r"\[\n\s+([^][{}]*?)\n\s+\]", lambda m: "[" + re.sub(r"\n\s+", " ", m[1]) + "]", text)
            lines.append(f" {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def write_record(path: Path, record: Mapping[str, Any]) -> bool:
    """Write a record; False if the file has it already.

    Raises:
        FileExistsError: the file has other contents, or another file has a run with these settings.
    """
    text = render(record)
    if path.exists():
        if read_json(path) == json.loads(text):
            return False
        raise FileExistsError(f"{path} has the record of another run, and is not overwritten: move one of them")
    for other in path.parent.glob("*.json"):
        if "hash" in record and read_json(other).get("hash") == record["hash"]:
            raise FileExistsError(f"{other} has a run with the same settings and seed: move it, or leave this run out")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), overwrite=False)
    return True


def finished_runs(paths: Iterable[Path]) -> Iterator[Path]:
    """The run folders among these: of a sweep, those that are finished."""
    for path in paths:
        if not (path / SWEEP_FILE).is_file():
            yield path
            continue
        runs = read_json(path / SWEEP_FILE)["runs"]
        finished = [path / run["folder"] for run in runs if run["state"] == "finished"]
        if not finished:
            raise ValueError(f"no run of the sweep in {path} is finished")
        yield from finished
