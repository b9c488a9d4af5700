"""Figure 6: training loss of each divergence."""

from __future__ import annotations

from pathlib import Path

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import (
    Experiment,
    Line,
    Outcomes,
    Panel,
    Planned,
    Plot,
    Result,
    Scale,
    planned,
    register_experiment,
)

__all__ = ["DIVERGENCES", "Curves"]

DIVERGENCES = {name: options for name, options in paper.COLUMNS.items() if "divergence" in options}


@register_experiment("curves", summary="Training loss of every divergence.")
class Curves(Experiment):
    """The paper's six divergences on CIFAR-10."""

    paper = "Figure 6"

    def plan(self, scale: Scale) -> list[Planned]:
        """200 epochs each."""
        (epochs, *_) = scale.lengths(200)
        return [
            run
            for name, options in DIVERGENCES.items()
            for run in planned((name,), scale.images("cifar10", epochs, **options))
        ]

    def present(self, outcomes: Outcomes, scale: Scale, folder: Path | None = None) -> Result:  # noqa: ARG002
        """A panel for each divergence, as their values have no common scale; a line for each seed."""
        panels = []
        for name in DIVERGENCES:
            lines = []
            for outcome in outcomes[(name,)]:
                points = [
                    (float(row["epoch"] or 0), loss) for row in outcome.metrics if (loss := row.get("loss")) is not None
                ]
                if points:
                    x, y = zip(*points, strict=True)
                    lines.append(Line(f"seed {outcome.settings.seed}", x, y))
            if lines:
                panels.append(Panel(name, "epoch", "loss", tuple(lines)))
        (epochs, *_) = scale.lengths(200)
        caption = f"Training loss over {epochs} epochs, one panel for each divergence."
        return Result(plots=(Plot("curves", caption, tuple(panels)),) if panels else ())
