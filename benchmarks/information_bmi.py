"""Samples and rival estimators of the `bmi` benchmark, by its own package; `information.py` starts this.

    PYTHON benchmarks/information_bmi.py sample DIR --tasks ID ... --seeds 10 --samples 5000
    PYTHON benchmarks/information_bmi.py estimate DIR --seeds 2 --json FILE [--only NAME ...]

PYTHON is an interpreter with benchmark-mi 0.1.3 (Czyż et al., 2023), in an environment of its own: it needs numpy < 2,
and jax 0.4.25. The neural estimators have the package's defaults: layers of 16 and 8, batches of 256, 10,000 steps with
early stopping, half of the samples for training. Nothing of fmicl is imported.
"""

import argparse
import json
import shlex
import sys
import time
from importlib import metadata
from pathlib import Path

import bmi  # type: ignore[import-not-found, unused-ignore]
import numpy as np


def sample(folder: Path, tasks: list[str], seeds: int, samples: int) -> None:
    for name in tasks:
        task = bmi.benchmark.BENCHMARK_TASKS[name]
        for seed in range(seeds):
            x, y = task.sample(samples, seed)
            np.savez(folder / f"{name}@{seed}.npz", x=x, y=y, information=float(task.mutual_information))


def estimate(folder: Path, seeds: int, out: Path, only: list[str]) -> None:
    neural = {
        "bmi InfoNCE": bmi.estimators.InfoNCEEstimator,
        "bmi NWJ": bmi.estimators.NWJEstimator,
        "bmi Donsker-Varadhan": bmi.estimators.DonskerVaradhanEstimator,
        "bmi MINE": bmi.estimators.MINEEstimator,
    }
    rows = []
    for seed in range(seeds):
        for file in sorted(folder.glob(f"*@{seed}.npz")):
            data = np.load(file)
            rivals = {name: kind(verbose=False, seed=seed) for name, kind in neural.items()}
            rivals["KSG (k = 5)"] = bmi.estimators.KSGEnsembleFirstEstimator(neighborhoods=(5,))
            for name, rival in rivals.items():
                if only and name not in only:
                    continue
                start = time.process_time()
                value = float(rival.estimate(data["x"], data["y"]))
                rows.append(
                    {
                        "task": file.stem.partition("@")[0], "seed": seed, "estimator": name, "value": value,
                        "information": float(data["information"]), "cpu_seconds": time.process_time() - start,
                    }
                )  # fmt: skip
                print(rows[-1], flush=True)
            record = {
                "command": shlex.join(["python", "benchmarks/information_bmi.py", *sys.argv[1:]]), "threads": 1,
                "versions": {name: metadata.version(name) for name in ("benchmark-mi", "jax", "numpy")}, "rows": rows,
            }  # fmt: skip
            out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("sample", "estimate"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", nargs="*", default=[])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--samples", type=int, default=5000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="*", default=[])
    given = parser.parse_args()
    if given.what == "sample":
        sample(given.folder, given.tasks, given.seeds, given.samples)
    else:
        estimate(given.folder, given.seeds, given.json, given.only)


if __name__ == "__main__":
    main()
