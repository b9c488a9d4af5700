"""Drawing of plots as SVG, in the colours of the reports."""

from __future__ import annotations

import io
from typing import Literal

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from fmicl.reproduce.plots import Plot
from fmicl.runs.figures import COLOURS

_LIGHT = ("#1f6feb", "#c2540a", "#0f9b8e", "#7d4cdb", "#d4a017", "#3fa34d", "#d1242f", "#e36cae", "#8a929c", "#1b1f24")
_DARK = ("#6aa6ff", "#f0954f", "#37c8b9", "#a98bf0", "#e6c04d", "#6fd07c", "#ff7b72", "#f29cc8", "#aab4c0", "#e8ebef")
_COLUMNS = 3
"""Panels side by side."""


def draw(plot: Plot, theme: Literal["light", "dark"] = "light") -> str:
    """A plot as SVG; the same plot gives the same text."""
    colours, palette = COLOURS[theme], _LIGHT if theme == "light" else _DARK
    columns = min(_COLUMNS, len(plot.panels))
    rows = -(-len(plot.panels) // columns)
    labels = list(dict.fromkeys(line.label for panel in plot.panels for line in panel.lines))
    with mpl.rc_context({"svg.hashsalt": "fmicl", "svg.fonttype": "none", "font.size": 8}):
        figure = Figure(
            figsize=(3.3 * columns + (1.2 if columns > 1 else 2.4), 2.7 * rows),
            layout="constrained",
            facecolor=colours.surface,
        )
        FigureCanvasSVG(figure)
        for axes, panel in zip(figure.subplots(rows, columns, squeeze=False).flat, plot.panels, strict=False):
            axes.set_facecolor(colours.surface)
            for line in panel.lines:
                colour = palette[labels.index(line.label) % len(palette)]
                points = {"linestyle": "none", "marker": ".", "markersize": 4} if line.style == "." else {}
                few = {"marker": "o", "markersize": 3} if len(line.x) <= 12 and not points else {}
                style = {"linestyle": line.style, "linewidth": 1.3, **few, **points}
                axes.plot(line.x, line.y, color=colour, label=line.label, **style)
            if len(plot.panels) > 1:  # of one panel the caption tells
                axes.set_title(panel.title, fontsize=8, loc="left", color=colours.ink)
            axes.set_xlabel(panel.x_label, color=colours.muted)
            axes.set_ylabel(panel.y_label, color=colours.muted)
            axes.tick_params(which="both", colors=colours.muted, labelsize=7)
            axes.grid(color=colours.line, linewidth=0.6)
            for name, spine in axes.spines.items():
                spine.set_visible(name in ("left", "bottom"))
                spine.set_color(colours.line)
            if panel.log_x:
                axes.set_xscale("log")
                places = sorted({x for line in panel.lines for x in line.x})
                axes.set_xticks(places, [f"{x:g}" for x in places], rotation=45 if len(places) > 6 else 0)
                axes.xaxis.minorticks_off()
            if panel.log_y:
                axes.set_yscale("log")
        handles = {
            label: handle
            for axes in figure.axes
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
        }
        for axes in figure.axes[len(plot.panels) :]:
            axes.set_visible(False)
        legend = figure.legend(handles.values(), handles.keys(), loc="outside right upper", frameon=False, fontsize=7)
        for text in legend.get_texts():
            text.set_color(colours.ink)
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Title": plot.caption, "Date": None, "Creator": None})
    return file.getvalue()
