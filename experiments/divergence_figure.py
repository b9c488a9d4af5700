"""Figure of the divergences: reward of a positive pair and cost of a negative pair against squared distance.

python experiments/divergence_figure.py          # writes docs/figures/divergences.svg
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib as mpl
import torch
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

import fmicl

SHOWN = {
    "kl": "KL", "js": "JS", "pearson": "Pearson", "squared_hellinger": "squared Hellinger", "tsallis": "Tsallis-3",
    "vlc": "Vincze-Le Cam",
}  # fmt: skip
COLOURS = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2")


def draw(out: Path) -> None:
    """Draw both panels, at gamma = 1 and mu = 1, shifted to 0 at distance 0."""
    distance = torch.linspace(0, 4, 201, dtype=torch.float64)
    mpl.rcParams["svg.hashsalt"] = "fmicl"  # the same bytes each time
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    FigureCanvasSVG(figure)
    axes = figure.subplots(1, 2, sharex=True)
    for (name, label), colour in zip(SHOWN.items(), COLOURS, strict=True):
        divergence = fmicl.divergence(name)
        for panel, values in zip(axes, (divergence.score(-distance), divergence.penalty(-distance)), strict=True):
            panel.plot(distance, values - values[0], color=colour, label=label, linewidth=1.6)
    axes[0].set_title("reward of a positive pair, f'(u)", fontsize=10)
    axes[1].set_title("cost of a negative pair, f*(f'(u))", fontsize=10)
    for panel in axes:
        panel.set_xlabel("squared distance |x - y|²")
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    axes[1].legend(frameon=False, fontsize=8)
    figure.savefig(out, format="svg", metadata={"Date": None})


def main() -> None:
    root = Path(__file__).resolve().parents[1]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=root / "docs" / "figures" / "divergences.svg")
    draw(parser.parse_args().out)


if __name__ == "__main__":
    main()
