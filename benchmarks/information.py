"""Estimators of mutual information on the field's tests: bias, spread, coverage of the interval, time.

    python benchmarks/information.py samples DIR --bmi PYTHON                       # seconds
    PYTHON benchmarks/information_bmi.py estimate DIR --json rivals.json            # minutes for each seed
    python benchmarks/information.py measure DIR --tasks "gaussian-*" --json FILE
    python benchmarks/information.py measure DIR --seeds 1 --only "InfoNCE, separable" --json FILE
    python benchmarks/information.py table FILE ... --figure FILE.svg

PYTHON is an interpreter with the package benchmark-mi (see `information_bmi.py`). Tasks: the staircase of
20-dimensional Gaussians with 2, 4, 6, 8 and 10 nats, as they are and with y cubed; 22 tasks of `bmi`, of all its
families; two of our own, also with 1,000 and 20,000 samples in place of 5,000. Estimators run one after the other in
one thread, and time is that of the processor, since the machine may be busy. Rivals run in the environment of
benchmark-mi on the same samples.
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src")]  # this tree, installed or not

import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import processor  # noqa: E402

from fmicl.information import correlations_for, estimate  # noqa: E402
from fmicl.utils.provenance import commit, versions  # noqa: E402

SAMPLES = 5000
SEEDS = 10
STAIRS = (2, 4, 6, 8, 10)
BMI_TASKS = {
    "1v1-normal-0.75": "Normal 1 x 1",
    "1v1-additive-0.1": "Additive uniform noise 1 x 1",
    "1v1-bimodal-0.75": "Bimodal 1 x 1",
    "wiggly-1v1-normal-0.75": "Wiggly normal 1 x 1",
    "student-identity-1-1-1": "Student (1 dof) 1 x 1",
    "swissroll_x-normal_cdf-1v1-normal-0.75": "Swiss roll 2 x 1",
    "multinormal-dense-5-5-0.5": "Normal, dense 5 x 5",
    "multinormal-dense-50-50-0.5": "Normal, dense 50 x 50",
    "multinormal-sparse-25-25-2-2.0": "Normal, 2 pairs 25 x 25",
    "student-identity-5-5-2": "Student (2 dof) 5 x 5",
    "asinh-student-identity-3-3-2": "asinh Student (2 dof) 3 x 3",
    "normal_cdf-multinormal-sparse-5-5-2-2.0": "Normal CDF 5 x 5",
    "half_cube-multinormal-sparse-25-25-2-2.0": "Half-cube 25 x 25",
    "spiral-multinormal-sparse-3-3-2-2.0": "Spiral 3 x 3",
    "spiral-multinormal-sparse-25-25-2-2.0": "Spiral 25 x 25",
    "spiral-normal_cdf-multinormal-sparse-5-5-2-2.0": "Spiral of normal CDF 5 x 5",
    "1v1-additive-0.75": "Additive uniform noise, wide, 1 x 1",
    "student-identity-2-2-1": "Student (1 dof) 2 x 2",
    "student-identity-3-3-3": "Student (3 dof) 3 x 3",
    "spiral-multinormal-sparse-5-5-2-2.0": "Spiral 5 x 5",
    "spiral-normal_cdf-multinormal-sparse-3-3-2-2.0": "Spiral of normal CDF 3 x 3",
    "spiral-normal_cdf-multinormal-sparse-25-25-2-2.0": "Spiral of normal CDF 25 x 25",
}
OWN_TASKS = {
    "own-mixture": "Mixture of 4 Gaussians 2 x 2",
    "own-category": "Category and a Gaussian around it 1 x 1",
    "own-mixture-1000": "Mixture of 4 Gaussians 2 x 2, N = 1,000",
    "own-category-1000": "Category and a Gaussian around it 1 x 1, N = 1,000",
    "own-mixture-20000": "Mixture of 4 Gaussians 2 x 2, N = 20,000",
}
"""Tasks of this script."""
NOT_GAUSSIAN = {
    name for name in BMI_TASKS if name.startswith(("1v1-additive", "student", "asinh-student", "spiral", "swissroll"))
} | set(OWN_TASKS)
"""Tasks that are no bijections, column by column, of Gaussians."""
TUNED_ON = {
    "1v1-normal-0.75", "1v1-additive-0.1", "multinormal-sparse-25-25-2-2.0", "student-identity-5-5-2",
    "spiral-multinormal-sparse-3-3-2-2.0", "spiral-multinormal-sparse-25-25-2-2.0",
}  # fmt: skip
"""Tasks on which the critics were developed: at first on seed 0; the joint network on 8 and 9."""
OURS: dict[str, dict[str, Any]] = {
    "fmicl (default)": {},
    "Donsker-Varadhan, separable": {"estimator": "donsker_varadhan", "critic": "separable"},
    "InfoNCE, separable": {"estimator": "infonce", "critic": "separable"},
    "NWJ, separable": {"estimator": "nwj", "critic": "separable"},
    "SMILE, separable": {"estimator": "smile", "critic": "separable"},
    "f-DIME, separable": {"estimator": "f_dime", "critic": "separable"},
}
EVERY_SEED = "fmicl (default)"
"""The estimator whose coverage is measured."""


# --- samples ---------------------------------------------------------------------------------------------------------


def staircase(folder: Path) -> None:
    for information in STAIRS:
        rho = correlations_for(information, 20)[0]
        for seed in range(SEEDS):
            generator = np.random.default_rng([information, seed])
            x, noise = generator.standard_normal((2, SAMPLES, 20))
            y = rho * x + (1 - rho**2) ** 0.5 * noise
            for name, values in (("gaussian", y), ("cubic", y**3)):
                np.savez(folder / f"{name}-{information:02d}@{seed}.npz", x=x, y=values, information=information)


def mixture(generator: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Two columns each, around one of four pairs of centres; the information by a million samples more."""
    centres = 1.5 * np.array([[1, 1, 1, -1], [1, -1, -1, -1], [-1, 1, -1, 1], [-1, -1, 1, 1]])
    weights = np.array([0.4, 0.3, 0.2, 0.1])

    def draw(generator: np.random.Generator, number: int) -> np.ndarray:
        z: np.ndarray = centres[generator.choice(4, number, p=weights)] + generator.standard_normal((number, 4))
        return z

    def log_density(z: np.ndarray, part: slice) -> Any:
        exponents = -0.5 * ((z[:, None, part] - centres[:, part]) ** 2).sum(axis=2) + np.log(weights)
        return np.logaddexp.reduce(exponents, axis=1)  # up to pi, which cancels

    z = draw(np.random.default_rng(0), 1_000_000)
    x, y = slice(0, 2), slice(2, 4)
    information = np.mean(log_density(z, slice(0, 4)) - log_density(z, x) - log_density(z, y))
    z = draw(generator, samples)
    return z[:, x], z[:, y], float(information)


def category(generator: np.random.Generator, samples: int) -> tuple[np.ndarray, np.ndarray, float]:
    """A category of four, and a Gaussian whose mean and deviation depend on it; the information by quadrature."""
    means, scales = np.array([-2.0, 0.0, 0.0, 2.5]), np.array([1.0, 0.3, 2.0, 0.5])
    grid = np.linspace(-20, 20, 400_001)
    densities = np.exp(-0.5 * ((grid - means[:, None]) / scales[:, None]) ** 2) / (scales[:, None] * np.sqrt(2 * np.pi))
    total = densities.mean(axis=0)
    terms = np.where(densities > 0, densities * np.log(np.maximum(densities, 1e-300) / total), 0)
    x = generator.integers(4, size=samples)
    y = means[x] + scales[x] * generator.standard_normal(samples)
    return x, y, float(terms.mean(axis=0).sum() * (grid[1] - grid[0]))


def own(folder: Path) -> None:
    for name in OWN_TASKS:
        _, kind, *size = name.split("-")
        for seed in range(SEEDS):
            generator = np.random.default_rng([seed, *name.encode()])
            make = {"mixture": mixture, "category": category}[kind]
            x, y, information = make(generator, int(size[0]) if size else SAMPLES)
            np.savez(folder / f"{name}@{seed}.npz", x=x, y=y, information=information)


def make_samples(folder: Path, interpreter: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    staircase(folder)
    own(folder)
    script = [interpreter, str(HERE / "information_bmi.py"), "sample", str(folder), "--seeds", str(SEEDS)]
    subprocess.run([*script, "--samples", str(SAMPLES), "--tasks", *BMI_TASKS], check=True)


def files(folder: Path, seeds: int) -> Iterator[tuple[str, int, Path]]:
    for seed in range(seeds):
        for file in sorted(folder.glob(f"*@{seed}.npz")):
            yield file.stem.partition("@")[0], seed, file


# --- measurement -----------------------------------------------------------------------------------------------------


def measure(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    record: dict[str, Any] = {
        "command": shlex.join(["python", "benchmarks/information.py", *sys.argv[1:]]),
        "device": processor(),
        "threads": 1,
        "versions": versions(["torch", "numpy"]) | {"benchmark-mi": "0.1.3"},
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "rows": [],
    }
    for task, seed, file in files(options.folder, options.seeds):
        if not any(fnmatch(task, pattern) for pattern in options.tasks):
            continue
        data = np.load(file)
        for name in options.only:
            start = time.process_time()
            found = estimate(data["x"], data["y"], seed=seed, **OURS[name])
            record["rows"].append(
                {
                    "task": task, "seed": seed, "estimator": name, "value": found.value, "low": found.low,
                    "high": found.high, "held_out": found.held_out, "in_sample": found.in_sample,
                    "half": None if np.isnan(found.half) else found.half, "samples": len(data["x"]),
                    "information": float(data["information"]),
                    "cpu_seconds": time.process_time() - start,
                }
            )  # fmt: skip
        print(task, seed, round(record["rows"][-1]["value"], 3), flush=True)
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


# --- tables ----------------------------------------------------------------------------------------------------------


def title(task: str) -> str:
    kind, _, information = task.partition("-")
    if kind in ("gaussian", "cubic"):
        return f"Gaussian 20 x 20{', cubed' if kind == 'cubic' else ''}, {int(information)} nats"
    return (BMI_TASKS | OWN_TASKS)[task]


def groups(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault((row["task"], row["estimator"]), []).append(row)
    return found


def bias(rows: list[dict[str, Any]]) -> float:
    return statistics.fmean(row["value"] - row["information"] for row in rows)


def summary_table(rows: list[dict[str, Any]]) -> str:
    """Mean absolute error of each estimator over the tasks that all have, on the first seed."""
    cells = groups([row for row in rows if row["seed"] == 0])
    names = list(dict.fromkeys(name for _, name in cells))
    common = [task for task in dict.fromkeys(task for task, _ in cells) if all((task, name) in cells for name in names)]
    cells = {(task, name): group for (task, name), group in cells.items() if task in common}
    stairs = ("gaussian", "cubic")
    lines = ["| estimator | staircase | `bmi` tasks | all | CPU seconds |", "|---|---|---|---|---|"]
    scored = []
    for name in names:
        own = {task: group for (task, which), group in cells.items() if which == name}
        errors = {
            task: statistics.fmean(abs(r["value"] - r["information"]) for r in group) for task, group in own.items()
        }
        first = [value for task, value in errors.items() if task.startswith(stairs)]
        second = [value for task, value in errors.items() if not task.startswith(stairs)]
        seconds = statistics.fmean(row["cpu_seconds"] for group in own.values() for row in group)
        scored.append((statistics.fmean(errors.values()), name, first, second, seconds))
    for mean, name, first, second, seconds in sorted(scored):
        columns = [f"{statistics.fmean(part):.3f}" if part else "" for part in (first, second)]
        lines.append(f"| {name} | {columns[0]} | {columns[1]} | {mean:.3f} | {seconds:.1f} |")
    return "\n".join(lines)


def task_table(rows: list[dict[str, Any]]) -> str:
    """Bias, standard deviation and coverage by task of the default estimator, beside the best rival."""
    cells = groups(rows)
    rivals = sorted({name for _, name in cells if name.startswith(("bmi", "KSG"))})
    head = ["task", "nats", "bias", "std", "coverage of 95 %", "mean width", "s", *(f"{name}: bias" for name in rivals)]
    lines = ["| " + " | ".join(head) + " |", "|---" * len(head) + "|"]
    for task in dict.fromkeys(task for task, _ in cells):
        own = cells.get((task, EVERY_SEED))
        if not own:
            continue
        values = [row["value"] for row in own]
        covered = sum(row["low"] <= row["information"] <= row["high"] for row in own)
        line = [
            title(task), f"{own[0]['information']:.2f}", f"{bias(own):+.3f}",
            f"{statistics.pstdev(values):.3f}" if len(values) > 1 else "",
            f"{covered} of {len(own)}", f"{statistics.fmean(row['high'] - row['low'] for row in own):.3f}",
            f"{statistics.fmean(row['cpu_seconds'] for row in own):.1f}",
        ]  # fmt: skip
        line += [f"{bias(cells[task, name]):+.3f}" if (task, name) in cells else "" for name in rivals]
        lines.append("| " + " | ".join(line) + " |")
    return "\n".join(lines)


def coverage(rows: list[dict[str, Any]]) -> str:
    """Coverage, error and width of the default by kind of task, where the truth is below log N."""
    own = [row for row in rows if row["estimator"] == EVERY_SEED and row["information"] < np.log(row["samples"])]
    kinds = {
        "a Gaussian copula": [row for row in own if row["task"] not in NOT_GAUSSIAN],
        "none, developed on": [row for row in own if row["task"] in NOT_GAUSSIAN & TUNED_ON],
        "none, not developed on": [row for row in own if row["task"] in NOT_GAUSSIAN - TUNED_ON],
    }
    lines = [
        "| the truth is | estimates | cover | mean error | median width | truth above | truth below |",
        "|---" * 7 + "|",
    ]
    for words, part in kinds.items():
        # samples that differ by increasing maps of columns have the same normal scores, and the same interval
        distinct = {(row["seed"], row["information"], round(row["value"], 4)): row for row in part}.values()
        above = sum(row["information"] > row["high"] for row in distinct)
        below = sum(row["information"] < row["low"] for row in distinct)
        error = statistics.fmean(abs(row["value"] - row["information"]) for row in distinct)
        width = statistics.median(row["high"] - row["low"] for row in distinct)
        share = 100 - 100 * (above + below) / len(distinct)
        lines.append(f"| {words} | {len(distinct)} | {share:.0f} % | {error:.3f} | {width:.3f} | {above} | {below} |")
    return "\n".join(lines)


def draw(rows: list[dict[str, Any]], out: Path) -> None:
    from matplotlib.figure import Figure

    cells = groups(rows)
    names = list(dict.fromkeys(name for _, name in cells))
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, kind in zip(figure.subplots(1, 2, sharey=True), ("gaussian", "cubic"), strict=True):
        axes.axline((0, 0), slope=1, color="#5b6470", linewidth=1, linestyle=":")
        axes.axhline(float(np.log(SAMPLES)), color="#5b6470", linewidth=0.8)
        axes.annotate("log N", (2, float(np.log(SAMPLES))), fontsize=8, color="#5b6470", va="bottom")
        for name in names:
            points = [
                (step, statistics.fmean(row["value"] for row in cells[task, name]))
                for step in STAIRS
                if (task := f"{kind}-{step:02d}", name) in cells
            ]
            if points:
                ours = name == EVERY_SEED
                axes.plot(
                    *zip(*points, strict=True), marker="o", markersize=4, label=name, linewidth=2.2 if ours else 1.2,
                    color="#1f6feb" if ours else None, linestyle="-" if not name.startswith(("bmi", "KSG")) else "--",
                )  # fmt: skip
        axes.set(title={"gaussian": "Gaussian", "cubic": "y cubed"}[kind], xlabel="mutual information in nats")
        axes.set_ylim(-0.5, 11)
    figure.axes[0].set_ylabel("estimate")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", fontsize=8, frameon=False)
    figure.savefig(out, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="what", required=True)
    samples = commands.add_parser("samples")
    samples.add_argument("folder", type=Path)
    samples.add_argument("--bmi", required=True, help="Python interpreter with benchmark-mi")
    measured = commands.add_parser("measure")
    measured.add_argument("folder", type=Path)
    measured.add_argument("--seeds", type=int, default=SEEDS)
    measured.add_argument("--tasks", nargs="+", default=["*"], help="shell-style patterns")
    measured.add_argument("--only", nargs="+", choices=list(OURS), default=[EVERY_SEED], help="estimators")
    measured.add_argument("--json", type=Path, required=True)
    tables = commands.add_parser("table")
    tables.add_argument("json", type=Path, nargs="+")
    tables.add_argument("--figure", type=Path, help="SVG to draw")
    options = parser.parse_args()
    if options.what == "samples":
        make_samples(options.folder, options.bmi)
    elif options.what == "measure":
        measure(options)
    else:
        rows = [row for file in options.json for row in json.loads(file.read_text())["rows"]]
        print(summary_table(rows), task_table(rows), coverage(rows), sep="\n\n")
        if options.figure:
            draw(rows, options.figure)


if __name__ == "__main__":
    main()
