"""What a skew does to an estimate of f-mutual information: variance, bias, and what can still be told apart.

    python benchmarks/information_skew.py --json results/benchmarks/information-skew.json      # seconds

20-dimensional Gaussians of 2, 6 and 10 nats, and their true log density ratio as critic, so that a learned critic's
error plays no part. The estimate is E_joint[f'(u)] - E_independent[f*(f'(u))] from 1,000 samples of each, repeated 200
times, beside the true value of the skewed information. Its standard deviation, over the slope of the true value in
nats, is the uncertainty in nats of KL: what two Gaussians must differ by to be told apart.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import torch  # noqa: E402
from information_limits import DIMENSIONS, log_ratios  # noqa: E402
from measure import provenance  # noqa: E402

from fmicl.divergences import Divergence, divergence  # noqa: E402
from fmicl.information import correlations_for, gaussian_information  # noqa: E402

ALL_NATS = (2.0, 6.0, 10.0)
SKEWS = (0.0, 0.001, 0.01, 0.1, 0.5)
NAMES = ("kl", "pearson", "js")
SAMPLES, REPEATS, STEP = 1000, 200, 0.05


def truth(f: Divergence, nats: float) -> float:
    """The true value for Gaussians of so many nats."""
    return gaussian_information(correlations_for(nats, DIMENSIONS), f)


def measure(name: str, skew: float, nats: float) -> dict[str, Any]:
    """A row of the table."""
    f = divergence(name).skew(skew) if skew else divergence(name)
    generator = torch.Generator().manual_seed(0)  # the same samples for each f
    found = []
    for _ in range(REPEATS):
        joint, independent = log_ratios(SAMPLES, generator, nats)
        found.append(float(f.score(joint).mean() - f.penalty(independent).mean()))
    value = truth(f, nats)
    slope = (truth(f, nats + STEP) - truth(f, nats - STEP)) / (2 * STEP)
    std = statistics.stdev(found)
    return {
        "divergence": name, "skew": skew, "nats": nats, "truth": value, "mean": statistics.fmean(found), "std": std,
        "median": statistics.median(found), "slope": slope, "nats_std": std / slope,
    }  # fmt: skip


def number(value: float) -> str:
    """Three digits."""
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1e}"


def main() -> None:
    """Measure, print a table, and write a record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [measure(name, skew, nats) for name in NAMES for nats in ALL_NATS for skew in SKEWS]
    print("| f | KL, nats | skew | truth | bias | std | std in nats of KL |", "|---|---|---|---|---|---|---|", sep="\n")
    for row in rows:
        shown = [row["truth"], row["mean"] - row["truth"], row["std"], row["nats_std"]]
        words = [number(value) if math.isfinite(value) else "infinite" for value in shown]
        print(f"| `{row['divergence']}` | {row['nats']:g} | {row['skew']:g} | {' | '.join(words)} |")
    if options.json:
        record = provenance("cpu") | {
            "dimensions": DIMENSIONS, "samples": SAMPLES,
            "repeats": REPEATS, "seed": 0, "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
