"""Archive of runs: a JSON file for each run folder, with settings, versions, device, results and metrics.

    python experiments/record.py RUN [RUN ...] --into results/
    python experiments/record.py sweeps/cifar10-001 --into results/           # all finished runs of a sweep
    fmicl evaluate MODEL --pooling cls --sts DIR --json scores.json
    python experiments/record.py MODEL --into results/ --scores scores.json   # a warm start and its scores

The file is results/<dataset>/<name>-s<seed>-<hash>.json. It has the contents of the run folder (settings, versions,
device, commit, date, seed, results, and metrics by epoch) without the paths of the machine; the hash is that of these
settings. A file with other contents is never overwritten. `--commit` is for runs of a copy of the tree without .git.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from fmicl.config import Settings, recipe, schema_of
from fmicl.methods import METHODS
from fmicl.reproduce.archive import read_metrics
from fmicl.utils.files import read_json, write_atomically

NAMED = frozenset({"method", "objective", "divergence", "epochs", "seed"})
"""Options that are in every name or in the tables' own columns."""
UNIMPORTANT = frozenset({"baselines"})
"""Options that add results and change no other."""
PLACES = {"data-dir": "DIR", "out": "RUN"}
"""Replacements of the user's folders in a command. Others become PATH; a file and a model keep their own names."""
SHORT = {
    "batch_size": "batch", "encoder_momentum_end": "momentum_end", "key_statistics": "keys", "learning_rate": "lr",
    "rotation_weight": "rotation", "uniformity_weight": "uniformity", "warmup_epochs": "warmup",
}  # fmt: skip
"""Names of options in a file's name."""
LONGEST = 60
"""Characters of a file's name before its ending."""


def make_record(run: Path, commit: str | None = None) -> dict[str, Any]:
    """The contents of a finished run folder as one JSON object.

    Args:
        run: the folder that `fmicl train` wrote.
        commit: of the code, if the run doesn't know it.

    Raises:
        FileNotFoundError: it is not a run folder, or the run is not finished.
        ValueError: the run was made at another commit, or its results are on other data.
    """
    for name in ("settings.json", "results.json", "metrics.csv"):
        if not (run / name).is_file():
            raise FileNotFoundError(f"{run} has no {name}: it is not a run of `fmicl train`, or is not finished")
    saved = read_json(run / "settings.json")
    known = saved.get("commit")
    if commit and known and not (known.startswith(commit) or commit.startswith(known)):
        raise ValueError(f"{run} was made at commit {known}, not {commit}")
    results = read_json(run / "results.json")
    if results.get("data_changed"):
        raise ValueError(
            f"{run}/results.json is on other data than the run was trained on ({results['data_changed']}): "
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
        "data": _without_folders(saved.get("data")),
        "command": _command(saved["command"]),
        "versions": saved["versions"],
        "device": saved["device"],
        "commit": known or commit,
        "seed": saved["seed"],
        "started": saved["started"],
        "results": _without_folders(results),
        "metrics": read_metrics(run / "metrics.csv"),
    }
    return {key: value for key, value in record.items() if key != "data" or value is not None}


def without_folder(value: Any) -> Any:
    """The last part of a path; other values, such as names on a hub, unchanged."""
    if isinstance(value, str) and re.match(r"(/|~|\.\.?/|[A-Za-z]:\\)", value):
        return re.split(r"[/\\]", value.rstrip("/\\"))[-1]
    return value


def _without_folders(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_folders(inner) for key, inner in value.items() if key != "model"}
    return [_without_folders(inner) for inner in value] if isinstance(value, list) else without_folder(value)


def _command(words: Iterable[str]) -> str:
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


def differences(record: Mapping[str, Any]) -> dict[str, Any]:
    """Options by which a run computes something else than its recipe, but for those in its name.

    An option that has the value that the recipe would resolve "auto" to is no difference. How often STS-B dev is
    evaluated counts only if the encoder was chosen by it; a text run without STS-B dev exports its last step.
    """
    settings = Settings.from_json(record["recipe"], record["settings"])
    default, options = recipe(record["recipe"]), settings.schema.options
    found = {
        name: record["settings"][name]
        for name in settings.used()
        if name in settings.changes
        and options[name].role == "compute"
        and name not in NAMED | UNIMPORTANT
        and settings.replace(**{name: getattr(default, name)}).used() != settings.used()
    }
    data = record.get("data")
    if isinstance(data, Mapping) and data.get("stsb_dev", "") is None:
        found.pop("sts_every", None)
        return {**found, "exported": "last step"}
    return found


def record_path(record: Mapping[str, Any]) -> Path:
    """Where a record is filed: dataset, then method and objective, epochs, some differences, seed and hash.

    Example:
        >>> settings = recipe("cifar10", method="moco", epochs=200, alpha=7.4)
        >>> about = {"recipe": "cifar10", "task": "images", "seed": 0, "hash": settings.hash}
        >>> record_path({**about, "settings": settings.to_json()}).as_posix()
        'cifar10/moco-kl-200e-alpha=7.4-s0-2c82d798.json'
    """
    settings = record["settings"]
    parts = [] if settings["method"] == "simclr" else [settings["method"]]
    if not METHODS[settings["method"]].value.own_loss:
        parts.append(settings["divergence"] if settings["objective"] == "fmicl" else settings["objective"])
    parts.append(f"{settings['epochs']}e")
    end = f"-s{record['seed']}-{record['hash']}"
    differs = sorted(differences(record).items(), key=lambda item: not _of_method(record, item[0]))
    for name, value in differs:
        part = _words(SHORT.get(name, name), value)
        if name != "model" and len("-".join([*parts, part])) + len(end) <= LONGEST:  # a model is often a folder's name
            parts.append(part)
    return Path(str(settings.get("dataset", record["recipe"]))) / f"{'-'.join(parts)}{end}.json"


def _of_method(record: Mapping[str, Any], name: str) -> bool:
    schema = schema_of(record["task"])
    return name in schema.owners and schema.owner_titles(name).startswith("method ")


def _words(name: str, value: Any) -> str:
    if value is True:
        return name
    values = value if isinstance(value, list) else [value]
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


def _warm_start(folder: Path, scores: Path | None, commit: str | None) -> tuple[Path, dict[str, Any]]:
    """The record of a warm start: its training, and its scores before any contrastive step."""
    saved = read_json(folder / "warm_start.json")
    command = f"`fmicl evaluate {folder} --pooling cls --sts DIR --json FILE`"
    if scores is None:
        raise ValueError(f"{folder} is a warm start: it needs --scores ({command})")
    results = read_json(scores)
    scored = Path(str(results.get("model", ""))).name
    if scored != folder.resolve().name:
        raise ValueError(f"{scores} has the scores of {scored or 'no model by name'}, not of {folder}: {command} has")
    if "pooling" not in results:
        raise ValueError(f"{scores} doesn't say by which pooling it came about: {command} does")
    seed = saved.get("settings", {}).get("seed", 0)
    about = {"commit": saved.get("commit") or commit, "seed": seed}
    record = {"task": "warm_start", **saved, **about, "results": _without_folders(results)}
    if isinstance(saved.get("command"), str):
        record["command"] = _command(shlex.split(saved["command"]))
    return Path("wikipedia", f"warm-start-s{seed}.json"), record


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


def main(arguments: list[str] | None = None) -> int:
    """Archive the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of sweeps")
    parser.add_argument("--into", type=Path, default=Path("results"), help="folder of the archive")
    parser.add_argument("--commit", help="of the code, for runs of a tree without .git")
    parser.add_argument("--scores", type=Path, help="of a warm start: the JSON file of `fmicl evaluate --json`")
    options = parser.parse_args(arguments)
    try:
        records, found = [], list(_runs(options.runs))
        if options.scores is not None and not (len(found) == 1 and _is_warm_start(found[0])):
            raise ValueError("--scores needs one warm start, and no other run with it")
        for run in found:  # all are read before one is written
            if _is_warm_start(run):
                records.append((run, *_warm_start(run, options.scores, options.commit)))
            else:
                record = make_record(run, options.commit)
                records.append((run, record_path(record), record))
        for run, place, record in records:
            written = write_record(options.into / place, record)
            print(f"{run} -> {options.into / place}" + ("" if written else " (exists)"))
    except (OSError, ValueError) as error:
        print(f"record.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
