"""What a lower bound with 95 % confidence can reach from N samples, for KL and for bounded f.

    python benchmarks/information_limits.py --json results/benchmarks/information-limits.json      # seconds

The most favourable case: 20-dimensional Gaussians with 10 nats of mutual information, and the true log density ratio as
critic, clipped to [-M, M]. The bound is E_joint[f'(u)] - E_independent[f*(f'(u))], each mean less (plus) its empirical
Bernstein width (Maurer and Pontil, 2009) at half the error probability, for the best M of a grid with a union bound
over it. So it holds for every distribution. N samples of the joint distribution, and N of the independent one. Repeated
20 times. Beside it: the truth, and what no such bound may exceed (`fmicl.information.largest_bound`).
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
from measure import provenance  # noqa: E402
from torch import Tensor  # noqa: E402

from fmicl.divergences import Divergence, divergence  # noqa: E402
from fmicl.information import correlations_for, gaussian_information, largest_bound, largest_information  # noqa: E402

NATS, DIMENSIONS = 10.0, 20
SIZES = (100, 1000, 10_000, 100_000)
CLIPS = (0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 12.0)
DELTA = 0.05
REPEATS = 20
NAMES = ("kl", "js", "squared_hellinger", "vlc")


def log_ratios(number: int, generator: torch.Generator, nats: float = NATS) -> tuple[Tensor, Tensor]:
    """True log density ratios of joint and of independent samples."""
    rho = correlations_for(nats, DIMENSIONS)[0]
    x, noise, other = torch.randn(3, number, DIMENSIONS, generator=generator, dtype=torch.float64)

    def ratio(y: Tensor) -> Tensor:
        quadratic = (2 * rho * x * y - rho**2 * (x.square() + y.square())) / (2 * (1 - rho**2))
        total: Tensor = nats + quadratic.sum(dim=1)
        return total

    return ratio(rho * x + math.sqrt(1 - rho**2) * noise), ratio(other)


def width(values: Tensor, span: float, delta: float) -> float:
    """Empirical Bernstein width of a mean of values within an interval of this length, one-sided."""
    n, log = len(values), math.log(2 / delta)
    return math.sqrt(2 * float(values.var()) * log / n) + 7 * span * log / (3 * (n - 1))


def lower_bound(f: Divergence, joint: Tensor, independent: Tensor) -> float:
    best = 0.0  # f-mutual information is never negative
    delta = DELTA / (2 * len(CLIPS))
    for clip in CLIPS:
        ends = torch.tensor([-clip, clip], dtype=torch.float64)
        score, penalty = f.score(joint.clamp(-clip, clip)), f.penalty(independent.clamp(-clip, clip))
        spans = [float(value[1] - value[0]) for value in (f.score(ends), f.penalty(ends))]
        found = float(score.mean() - penalty.mean()) - width(score, spans[0], delta) - width(penalty, spans[1], delta)
        best = max(best, found)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    truth = {name: gaussian_information(correlations_for(NATS, DIMENSIONS), name) for name in NAMES}
    rows: list[dict[str, Any]] = []
    print(
        "| f | largest | truth | N | no bound above | bound reached (mean of 20) |",
        "|---|---|---|---|---|---|",
        sep="\n",
    )
    for name in NAMES:
        f = divergence(name)
        for number in SIZES:
            generator = torch.Generator().manual_seed(number)
            reached = [lower_bound(f, *log_ratios(number, generator)) for _ in range(REPEATS)]
            row = {
                "divergence": name, "samples": number, "truth": truth[name],
                "limit": largest_bound(name, number, 1 - DELTA), "reached": reached,
                "largest": value if math.isfinite(value := largest_information(name)) else None,
            }  # fmt: skip
            rows.append(row)
            largest = "" if row["largest"] is None else f"{row['largest']:.3f}"
            mean = statistics.fmean(reached)
            print(f"| `{name}` | {largest} | {truth[name]:.3f} | {number:,} | {row['limit']:.3f} | {mean:.3f} |")
    if options.json:
        record = provenance("cpu") | {
            "nats": NATS, "dimensions": DIMENSIONS,
            "confidence": 1 - DELTA, "seed": "the number of samples", "rows": rows,
        }  # fmt: skip
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
