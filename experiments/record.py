"""Put runs on record: one JSON file for each run folder, with all that says what was measured, on what and how.

    python experiments/record.py RUN [RUN ...] --into results/
    python experiments/record.py sweeps/cifar10-001 --into results/           # all finished runs of a sweep
    fmicl evaluate MODEL --pooling cls --sts DIR --json scores.json
    python experiments/record.py MODEL --into results/ --scores scores.json   # a warm start and these scores

A record is what the run folder says of itself (settings, versions, device, commit, date, seed, results, and metrics by
epoch), without the names of folders of the machine that it was made on. A file that is there and says something else
is never overwritten. `--commit` is for runs of a copy of the tree that has no .git.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import json
import math
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from fmicl.utils.files import read_json, write_atomically

__all__ = ["differences", "machine_fields", "main", "make_record", "record_name", "render"]

NAMED = ("method", "objective", "divergence", "epochs", "seed")
"""Settings that are in every record's name."""
WATCHING = frozenset({"monitor_every", "baselines"})
"""Settings that change what is looked at in training and nothing of what comes out."""
PLACES = {"data-dir": "DIR", "out": "RUN"}
"""What stands in a command for the user's folders. Others are PATH, but a file and a model keep their own names."""


def make_record(run: Path, commit: str | None = None) -> dict[str, Any]:
    """What a finished run folder holds, as one JSON object.

    Args:
        run: the folder that `fmicl train` left.
        commit: of the code, where the run doesn't know it itself.

    Raises:
        FileNotFoundError: it is no run folder, or the run has not ended.
        ValueError: the run knows its commit, and it is another one; or its results are on other data.
    """
    for name in ("settings.json", "results.json", "metrics.csv"):
        if not (run / name).is_file():
            raise FileNotFoundError(f"{run} has no {name}: it is no run of `fmicl train`, or has not ended")
    told = read_json(run / "settings.json")
    known = told.get("commit")
    if commit and known and not (known.startswith(commit) or commit.startswith(known)):
        raise ValueError(f"{run} was made at commit {known}, not {commit}")
    results = read_json(run / "results.json")
    if results.get("data_changed"):
        raise ValueError(
            f"{run}/results.json is on other data than the run was trained on ({results['data_changed']}): "
            "`fmicl evaluate` with the run's own data makes its own results again"
        )
    results.pop("data_dir", None)  # the same data, which has moved
    settings = {key: _without_folder(value) for key, value in told["settings"].items()}
    for key in (*getattr(_default(told["recipe"]), "paths", ()), "data_dir", "cache_dir"):
        if settings.get(key) is not None:  # a file's name tells what it was, a folder's only where it was
            settings[key] = Path(settings[key]).name if Path(settings[key]).suffix else None
    head = {"recipe": told["recipe"], "kind": told.get("kind", "images"), "settings": settings}
    tail = {
        "data": _without_folders(told.get("data")),
        "command": _command(told["command"]),
        "versions": told["versions"],
        "device": told["device"],
        "commit": known or commit,
        "seed": told["seed"],
        "started": told["started"],
        "results": _without_folders(results),
        "metrics": _metrics(run / "metrics.csv"),
    }
    return {**head, **{key: value for key, value in tail.items() if key != "data" or value is not None}}


def _without_folder(value: Any) -> Any:
    """A path is its last part; other values, names on a hub among them, are themselves."""
    if isinstance(value, str) and re.match(r"(/|~|\.\.?/|[A-Za-z]:\\)", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items() if key != "model"}
    return [_without_folders(inner) for inner in value] if isinstance(value, list) else _without_folder(value)


def _command(words: Iterable[str]) -> str:
    """The command as one line, with the user's folders replaced by words."""
    first, *rest = words
    module = {"__main__.py": "fmicl", "cli.py": "fmicl.cli.main"}.get(first)
    shown = ["python", "-m", module] if module else [first]
    before = ""
    for word in rest:
        option, equals, value = word.partition("=") if word.startswith("--") else (before, "", word)
        name = option.lstrip("-")
        changed = PLACES.get(name) if value else None
        if changed is None:
            changed = _without_folder(value)
            if changed != value and name != "model" and not Path(changed).suffix:
                changed = "PATH"  # a folder's name tells nothing but where it was
        shown.append(f"{option}={changed}" if equals else changed if not word.startswith("--") else word)
        before = word if word.startswith("--") and not equals else ""
    return shlex.join(shown)


def _metrics(path: Path) -> list[dict[str, float | None]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [{key: _number(text) for key, text in row.items()} for row in csv.DictReader(file)]


def _number(text: str) -> float | None:
    """JSON has no word for what is not finite."""
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None


def _default(recipe: str) -> Any:
    from fmicl.config.text_recipes import TEXT_RECIPES

    from fmicl.config.recipes import RECIPES

    entries: dict[str, Any] = {**RECIPES, **TEXT_RECIPES}
    return entries[recipe].recipe if recipe in entries else None


def machine_fields(recipe: str) -> frozenset[str]:
    """Settings that say where a run was trained, and those of what is looked at meanwhile."""
    from fmicl.sweep.folder import machine_settings

    return machine_settings(_default(recipe)) | WATCHING


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= value if isinstance(value, Mapping) else {key: value}
    return flat


def differences(record: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a record that differ from its recipe's, but for those in its name and those without a part.

    Fields that a record of an older version doesn't have are as the recipe says, but for those that meant something
    else then; and what the recipe would choose by itself, key_statistics, say, doesn't differ from it. How often STS-B
    dev is looked at counts where it chose the encoder, and a run on sentences without it is said to be that of its last
    step.
    """
    default = _default(record["recipe"])
    if default is None:
        return {}
    usual, ours = _flat(default.to_json()), _flat(record["settings"])
    ignored = machine_fields(record["recipe"]) | set(NAMED)
    data = record.get("data")
    last = isinstance(data, Mapping) and data.get("stsb_dev", "") is None
    if last:
        ignored |= {"sts_every"}
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # of another version: all fields count
        read = type(default).from_json(dict(record["settings"]))
        meant = {f.name: f.default for f in dataclasses.fields(read)}  # of fields that the record doesn't have
        ours = {k: v for k, v in _flat(read.to_json()).items() if k in ours or v != meant.get(k, v)} | _settled(read)
        ignored |= set(read.without_part(default))
    found = {key: value for key, value in ours.items() if key not in ignored and usual.get(key) != value}
    return {**found, "exported": "last step"} if last else found


def _settled(recipe: Any) -> dict[str, Any]:
    """Fields as the recipe has them, where they are what it would choose by itself."""
    meant = recipe.settled()
    chosen = {name: dataclasses.replace(recipe, **{name: value}).settled() for name, value in recipe.automatic.items()}
    return {n: recipe.automatic[n] for n, settled in chosen.items() if getattr(settled, n) == getattr(meant, n)}


def record_name(record: Mapping[str, Any]) -> str:
    """The file's name: recipe, method, objective, divergence, what differs from the recipe, epochs and seed.

    Example:
        >>> settings = {"method": "simclr", "objective": "fmicl", "divergence": "kl", "epochs": 200}
        >>> record_name({"recipe": "cifar10", "settings": settings, "seed": 0})
        'cifar10-simclr-fmicl-kl-200-seed0.json'
    """
    settings = record["settings"]
    parts = [record["recipe"], settings.get("method"), settings.get("objective")]
    if settings.get("objective") == "fmicl":
        parts.append(settings.get("divergence"))
    parts += [f"{key}={_short(value)}" for key, value in differences(record).items()]
    parts += [settings.get("epochs"), f"seed{record['seed']}"]
    name = "-".join(str(part) for part in parts if part is not None)
    return re.sub(r"[^A-Za-z0-9._=+-]+", "_", name) + ".json"


def _short(value: Any) -> str:
    if isinstance(value, list):
        return "_".join(_short(x) for x in value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        return f"{value:g}"
    return str(value).rsplit("/", 1)[-1]  # of a model's place or name on a hub, the last part


def render(record: Mapping[str, Any]) -> str:
    """JSON for people: an entry a line, and each epoch on one."""
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


def _warm_start(folder: Path, scores: Path | None, commit: str | None) -> tuple[str, dict[str, Any]]:
    """The record of a warm start: what it says of its training, and its scores before any contrastive step."""
    told = read_json(folder / "warm_start.json")
    command = f"`fmicl evaluate {folder} --pooling cls --sts DIR --json FILE`"
    if scores is None:
        raise ValueError(f"{folder} is a warm start: name its scores ({command})")
    results = read_json(scores)
    scored = Path(str(results.get("model", ""))).name
    if scored != folder.resolve().name:
        raise ValueError(f"{scores} has the scores of {scored or 'no model by name'}, not of {folder}: {command} has")
    if "pooling" not in results:
        raise ValueError(f"{scores} doesn't say by which pooling it came about: {command} does")
    seed = told.get("settings", {}).get("seed", 0)
    about = {"commit": told.get("commit") or commit, "seed": seed}
    record = {"kind": "warm_start", **told, **about, "results": _without_folders(results)}
    if isinstance(told.get("command"), str):
        record["command"] = _command(shlex.split(told["command"]))
    return f"warm-start-seed{seed}.json", record


def _is_warm_start(folder: Path) -> bool:
    return (folder / "warm_start.json").is_file() and not (folder / "settings.json").exists()


def _runs(paths: Iterable[Path]) -> Iterator[Path]:
    """The run folders among these: of a sweep, those that are finished."""
    for path in paths:
        if not (path / "sweep.json").is_file():
            yield path
            continue
        runs = read_json(path / "sweep.json")["runs"]
        finished = [path / run["folder"] for run in runs if run["state"] == "finished"]
        if not finished:
            raise ValueError(f"no run of the sweep in {path} is finished")
        yield from finished


def write_record(name: str, record: Mapping[str, Any], into: Path) -> Path | None:
    """Write a record to a file of that name; None if it is there already.

    Raises:
        FileExistsError: there is one that says something else.
    """
    path, text = into / name, render(record)
    if path.exists():
        if json.loads(path.read_text(encoding="utf-8")) == json.loads(text):
            return None
        raise FileExistsError(f"{path} is the record of another run, and is not overwritten: move it, or this run's")
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), overwrite=False)
    return path


def _refuse_twin(name: str, record: Mapping[str, Any], into: Path) -> None:
    """Refuse a run of settings and seed that are on record under a name of an older version, or of somebody's own.

    Raises:
        FileExistsError: there is one.
    """
    for path in sorted(into.glob(f"{record.get('recipe')}-*seed{record['seed']}.json")) if into.is_dir() else []:
        other = read_json(path)
        if path.name != name and other.get("settings") and record_name(other) == name:
            raise FileExistsError(
                f"{path} is on record with the same settings and seed: move it, or leave this run out"
            )


def main(arguments: list[str] | None = None) -> int:
    """Record the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of sweeps")
    parser.add_argument("--into", type=Path, default=Path("results"), help="folder of the records")
    parser.add_argument("--commit", help="of the code, for runs of a tree without .git")
    parser.add_argument("--scores", type=Path, help="of a warm start: the JSON file of `fmicl evaluate --json`")
    options = parser.parse_args(arguments)
    try:
        records, found = [], list(_runs(options.runs))
        if options.scores is not None and not (len(found) == 1 and _is_warm_start(found[0])):
            raise ValueError("--scores are those of a warm start: name it, and no other run with it")
        for run in found:  # all are read before one is written
            if _is_warm_start(run):
                records.append((run, *_warm_start(run, options.scores, options.commit)))
            else:
                record = make_record(run, options.commit)
                records.append((run, record_name(record), record))
                _refuse_twin(records[-1][1], record, options.into)
        for run, name, record in records:
            written = write_record(name, record, options.into)
            print(f"{run} -> {options.into / name}" + ("" if written else " (was there)"))
    except (OSError, ValueError) as error:
        print(f"record.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
