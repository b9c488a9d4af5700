"""Time of a whole run of `fmicl train`, by stage.

    python benchmarks/command.py --json results/benchmarks/command-h200.json -- cifar10 --data-dir DIR --out RUN

All that follows `--` goes to `fmicl train`, in a process of its own; what it prints is shown with the seconds since it
was started. The epochs' own times are those of RUN/metrics.csv. A first run on a machine compiles; what was compiled is
kept (by Triton in ~/.triton, or in TRITON_CACHE_DIR), so a second one shows a start without.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from measure import provenance

from fmicl.utils.files import write_json

FOLDER, TRAINED = ("run folder ", "continuing in "), "trained; now"


def watch(command: list[str]) -> tuple[list[tuple[float, str]], float]:
    """Run a command; (seconds since its start, line) for each line that it prints, and its whole time.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    began = time.monotonic()
    lines: list[tuple[float, str]] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic() - began, line.rstrip("\n")))
            print(f"{lines[-1][0]:7.1f}  {lines[-1][1]}", flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return lines, time.monotonic() - began


def stages(lines: Iterable[tuple[float, str]], whole: float, rows: list[dict[str, str]]) -> dict[str, float]:
    """Where the time went.

    Args:
        lines: what the command printed, with seconds.
        whole: how long it took.
        rows: of metrics.csv.

    Raises:
        ValueError: what it printed is not that of a run from its start to its end.
    """
    folder = trained = None
    for seconds, line in lines:
        if folder is None and line.startswith(FOLDER):
            folder = seconds
        if line.startswith(TRAINED):
            trained = seconds
    if folder is None or trained is None or not rows:
        raise ValueError("this was not a whole run: it did not name its folder, or did not come to its evaluation")
    epochs = [float(row["seconds"]) for row in rows]
    found = {
        "whole": whole,
        "before the run folder": folder,
        "first epoch": epochs[0],
        "an epoch, median of the others": statistics.median(epochs[1:] or epochs),
        "epochs": sum(epochs),
        "k-NN looks, checkpoints and the like": trained - folder - sum(epochs),
        "evaluation and page": whole - trained,
    }
    return {name: round(value, 3) for name, value in found.items()}


def main(arguments: list[str] | None = None) -> int:
    """Run the command, and say where its time went."""
    given = sys.argv[1:] if arguments is None else arguments
    cut = given.index("--") if "--" in given else len(given)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="file to write the times to")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    options = parser.parse_args(given[:cut])
    train = given[cut + 1 :]
    if "--out" not in train:
        parser.error("after -- come a recipe and its settings, with --out RUN")
    run = Path(train[train.index("--out") + 1])
    try:
        lines, whole = watch([sys.executable, "-u", "-m", "fmicl", "train", *train])
    except subprocess.CalledProcessError as error:
        return int(error.returncode)  # the command has said why
    with (run / "metrics.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    seconds = stages(lines, whole, rows)
    for name, value in seconds.items():
        print(f"{value:9.2f} s  {name}")
    if options.json is not None:
        shown = list(train)
        for place in ("--out", "--data-dir"):
            if place in shown:
                shown[shown.index(place) + 1] = place[2:].partition("-")[0].upper()
        record = {
            **provenance("cuda" if torch.cuda.is_available() else "cpu", options.commit),
            "command": " ".join(["fmicl", "train", *shown]),
            "epochs": len(rows),
            "looks": sum(bool(row.get("knn")) for row in rows),
            "seconds": seconds,
        }
        write_json(options.json, record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
