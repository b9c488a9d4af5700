"""Archive of runs: a JSON file for each run folder, with settings, versions, device, results and metrics.

    python experiments/record.py RUN [RUN ...] --into results/
    python experiments/record.py sweeps/cifar10-001 --into results/           # all finished runs of a sweep
    fmicl evaluate MODEL --pooling cls --sts DIR --json scores.json
    python experiments/record.py MODEL --into results/ --scores scores.json   # a warm start and its scores

`fmicl.reproduce.archive` says what a file has. A file with other contents is never overwritten. `--commit` is for runs
of a copy of the tree without .git.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from fmicl.reproduce.archive import (
    finished_runs,
    make_record,
    outcome_of,
    record_path,
    shown_command,
    without_folders,
    write_record,
)
from fmicl.runs.folder import Run
from fmicl.utils.files import read_json


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
    record = {"task": "warm_start", **saved, **about, "results": without_folders(results)}
    if isinstance(saved.get("command"), str):
        record["command"] = shown_command(shlex.split(saved["command"]))
    return Path("wikipedia", f"warm-start-s{seed}.json"), record


def _is_warm_start(folder: Path) -> bool:
    return (folder / "warm_start.json").is_file() and not Run.is_run(folder)


def main(arguments: list[str] | None = None) -> int:
    """Archive the runs of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folders, or folders of sweeps")
    parser.add_argument("--into", type=Path, default=Path("results"), help="folder of the archive")
    parser.add_argument("--commit", help="of the code, for runs of a tree without .git")
    parser.add_argument("--scores", type=Path, help="of a warm start: the JSON file of `fmicl evaluate --json`")
    options = parser.parse_args(arguments)
    try:
        records, found = [], list(finished_runs(options.runs))
        if options.scores is not None and not (len(found) == 1 and _is_warm_start(found[0])):
            raise ValueError("--scores needs one warm start, and no other run with it")
        for run in found:  # all are read before one is written
            if _is_warm_start(run):
                records.append((run, *_warm_start(run, options.scores, options.commit)))
            else:
                record = make_record(Run(run), options.commit)
                records.append((run, record_path(outcome_of(record, run)), record))
        for run, place, record in records:
            written = write_record(options.into / place, record)
            print(f"{run} -> {options.into / place}" + ("" if written else " (exists)"))
    except (OSError, ValueError) as error:
        print(f"record.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
