"""Plots as data: panels of curves, which `fmicl.reproduce.drawing` draws."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """A curve of a plot: its points, and whether it is drawn dashed (for a reference), or as points only."""

    label: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    style: str = "-"


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True)
class Plot:
    """A figure: panels side by side, and a caption."""

    name: str
    caption: str
    panels: tuple[Panel, ...]
