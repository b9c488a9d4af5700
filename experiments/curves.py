"""Training curves of the runs in docs/reproduction.md: docs/figures/cifar10.svg from the archived runs in results/.

    python experiments/curves.py            # draw the figure
    python experiments/curves.py --check    # exit code 1 if it was drawn from other runs

One line for each column of the page's table: the run of 200 epochs with the recipe's settings and the lowest seed. The
figure's description has the names of the runs and a digest of what is drawn, by which --check finds an outdated figure.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import math
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from reproduction import COLUMNS, ROOT, column, is_main, load

from fmicl.reproduce.experiment import Outcome
from fmicl.utils.files import write_atomically

PANELS = {
    "knn": "k-NN accuracy of the test images, percent",
    "alignment": "alignment: squared distance of a pair",
    "uniformity": "uniformity: log mean potential",
    "effective_rank": "effective rank: dimensions in use",
}
"""Columns of a run's metrics, and what to call them."""
MEAN_OF = 5
"""Epochs that make a point of a curve: a row of the metrics is of one batch."""
STYLES = {
    "SimCLR": ("#1b1f24", "--"), "MoCo": ("#8a929c", "--"), "AU": ("#8a929c", ":"), "KL": ("#1f6feb", "-"),
    "JS": ("#0f9b8e", "-"), "Pearson": ("#c2540a", "-"), "SH": ("#7d4cdb", "-"), "Tsallis-3": ("#d4a017", "-"),
    "VLC": ("#3fa34d", "-"), "reverse KL": ("#d1242f", "--"), "Neyman": ("#d1242f", ":"), "Jeffrey": ("#e36cae", "-"),
}  # fmt: skip
Curve = list[tuple[float, float]]


def chosen(runs: Sequence[Outcome], epochs: int = 200) -> dict[str, Outcome]:
    """The run of each column that is drawn."""
    having = [r for r in runs if r.metrics and r.settings.epochs == epochs and is_main(r)]
    found = {column(r): r for r in sorted(having, key=lambda r: r.seed, reverse=True)}
    return {name: found[name] for name in COLUMNS if name in found}


def curves(run: Outcome) -> dict[str, Curve]:
    """(epoch, value) of each panel: means over a few epochs, or the looks themselves where there are fewer."""
    found = {}
    for name in PANELS:
        points = [
            (float(row["epoch"] or 0), float(x))
            for row in run.metrics
            if (x := row.get(name)) is not None and math.isfinite(x)
        ]
        size = MEAN_OF if len(points) > run.settings.epochs // MEAN_OF else 1
        parts = [points[start : start + size] for start in range(0, len(points), size)]
        found[name] = [(part[-1][0], statistics.fmean(value for _, value in part)) for part in parts]
    return found


def described(runs: dict[str, Outcome]) -> str:
    """The names of the runs in a figure, and a digest of what is drawn."""
    drawn = json.dumps({name: curves(r) for name, r in runs.items()}).encode()
    return f"{' '.join(r.source.name for r in runs.values())} {hashlib.sha256(drawn).hexdigest()[:16]}"


def draw(runs: dict[str, Outcome]) -> bytes:
    """The figure, as SVG."""
    with mpl.rc_context({"svg.hashsalt": "fmicl", "svg.fonttype": "none", "font.size": 8, "path.simplify": False}):
        figure = Figure(figsize=(8.4, 5.6), layout="constrained", facecolor="white")
        FigureCanvasSVG(figure)
        axes = figure.subplots(2, 2).flat
        for (name, words), ax in zip(PANELS.items(), axes, strict=True):
            for label, run in runs.items():
                colour, line = STYLES[label]
                points = curves(run)[name]
                ax.plot(*zip(*points, strict=True), color=colour, linestyle=line, linewidth=1.1, label=label)
            ax.set_title(words, fontsize=8, loc="left")
            if name == "effective_rank":
                ax.set_yscale("log")
                ax.yaxis.set_major_formatter("{x:g}")
            ax.grid(color="#e3e6ea", linewidth=0.6)
            ax.spines[["top", "right"]].set_visible(False)
        for ax in axes[2:]:
            ax.set_xlabel("epoch")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right upper", frameon=False)
        file = io.BytesIO()
        metadata = {"Title": "CIFAR-10, 200 epochs", "Description": described(runs), "Date": None, "Creator": None}
        figure.savefig(file, format="svg", metadata=metadata)
    return file.getvalue()


def main(arguments: list[str] | None = None) -> int:
    """Draw the figure, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="draw nothing; exit code 1 if the figure is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the archived runs")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "cifar10.svg", help="the figure")
    options = parser.parse_args(arguments)
    try:
        runs = chosen(load(options.results))
        if not runs:
            raise ValueError(f"{options.results} has no run of 200 epochs with the recipe cifar10's settings")
        if options.check:
            drawn = options.out.read_text(encoding="utf-8")
            if described(runs) not in drawn:
                print(f"{options.out} is out of date: run python experiments/curves.py", file=sys.stderr)
            else:
                print(f"{options.out} is up to date")
            return int(described(runs) not in drawn)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        picture = draw(runs)
        write_atomically(options.out, lambda path: path.write_bytes(picture))
    except (OSError, ValueError) as error:
        print(f"curves.py: error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}: drawn from {len(runs)} runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
