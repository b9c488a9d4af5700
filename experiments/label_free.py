"""Rank correlations of scores without labels with accuracy: docs/choosing.md from the archived runs.

    python experiments/label_free.py            # write the tables
    python experiments/label_free.py --check    # exit code 1 if the page differs from the archived runs
    python experiments/label_free.py --collect SWEEP --json results/benchmarks/label-free-digits-cpu.json

Rank correlations (Spearman's rho, Kendall's tau-b) of each score in results.json with k-NN and linear accuracy. The
sign of a score is such that a positive correlation is right: it prefers the run with the higher accuracy. `--collect`
makes one file of the finished runs of a sweep, for sweeps with too many runs to archive each.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from reproduction import is_main, load, page_parser, table, update
from scipy.stats import kendalltau, spearmanr

from fmicl.evaluation.scores import SCORES, score
from fmicl.reproduce.archive import shown_command, without_folder
from fmicl.reproduce.experiment import Outcome
from fmicl.utils.files import read_json

SWEEP = "benchmarks/label-free-digits-cpu.json"
FEWEST = 5
"""Runs that a correlation needs."""
USABLE = 80.0
"""k-NN accuracy on CIFAR-10 from which a run has not failed."""


def correlations(runs: Sequence[Mapping[str, Any]], name: str) -> list[str]:
    """Number of runs that have a score and accuracies; rho and tau with each; k-NN of the run chosen, and the best.

    Args:
        runs: the results of each.
        name: the score.

    Example:
        >>> made = [{"effective_rank": k, "knn": 50 + k, "linear": 60 - k} for k in range(6)]
        >>> correlations(made, "effective_rank")
        ['6', '+1.00', '+1.00', '-1.00', '-1.00', '55.00 of 55.00']
    """
    having = [
        (value, results)
        for results in runs
        if (value := score(results, name)) is not None and results.get("knn") is not None
    ]
    if len(having) < FEWEST:
        return [str(len(having)), *[""] * 5]
    values = [value for value, _ in having]
    found = [str(len(having))]
    for accuracy in ("knn", "linear"):
        answers = [results[accuracy] for _, results in having]
        found += [f"{float(method(values, answers).statistic):+.2f}" for method in (spearmanr, kendalltau)]
    chosen = max(having, key=lambda pair: pair[0])[1]["knn"]
    return [*found, f"{chosen:.2f} of {max(results['knn'] for _, results in having):.2f}"]


def correlation_table(runs: Sequence[Mapping[str, Any]]) -> str:
    """A row for each score that enough runs have, from the results of each."""
    head = ["score", "runs", "k-NN: rho", "tau", "linear: rho", "tau", "k-NN of its choice"]
    rows = [[SCORES[name].words, *found] for name in SCORES if (found := correlations(runs, name))[1]]
    return table(head, rows) if rows else "No run is archived yet."


def tables(results: Path) -> dict[str, str]:
    """All tables, by the name of their markers."""
    runs = [r for r in load(results) if r.settings.recipe == "cifar10"]

    def cifar10(keep: Callable[[Outcome], bool]) -> str:
        return correlation_table([r.results for r in runs if keep(r)])

    sweep = read_json(results / SWEEP)["runs"] if (results / SWEEP).exists() else []
    return {
        "cifar10-200": cifar10(lambda r: is_main(r) and r.settings.epochs == 200),
        "cifar10-200-usable": cifar10(
            lambda r: is_main(r) and r.settings.epochs == 200 and (r.results.get("knn") or 0) > USABLE
        ),
        "cifar10-all": cifar10(lambda _: True),
        "digits-sweep": correlation_table([run["results"] for run in sweep]),
    }


def collect(sweep: Path) -> dict[str, Any]:
    """The finished runs of a sweep as one object: settings that vary, and results."""
    saved = read_json(sweep / "sweep.json")
    runs = []
    for entry in saved["runs"]:
        if entry["state"] == "finished":
            results = read_json(sweep / entry["folder"] / "results.json")
            kept = {key: value for key, value in results.items() if key not in ("distances", "class_names")}
            settings = {key: without_folder(value) for key, value in entry["settings"].items()}
            runs.append({"hash": entry["hash"], "settings": settings, "results": kept})
    first = read_json(sweep / saved["runs"][0]["folder"] / "settings.json")
    return {
        "command": f"fmicl {shown_command(saved['command'][saved['command'].index('sweep') :])}",
        **{name: first[name] for name in ("device", "versions", "commit", "started")},
        "runs": runs,
    }


def main(arguments: list[str] | None = None) -> int:
    """Write the page, check it, or collect a sweep."""
    parser = page_parser(__doc__, "choosing.md")
    parser.add_argument("--collect", type=Path, metavar="SWEEP", help="folder of a sweep")
    parser.add_argument("--json", type=Path, help="file to write a collected sweep to")
    options = parser.parse_args(arguments)
    if (options.collect is None) != (options.json is None):
        parser.error("--collect and --json go together")
    if options.collect is not None:
        options.json.write_text(json.dumps(collect(options.collect), indent=1) + "\n", encoding="utf-8")
        return 0
    return update(options, tables(options.results), "label_free.py")


if __name__ == "__main__":
    sys.exit(main())
