"""Figure 6: training loss of each divergence."""

from __future__ import annotations

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Scale, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot


@register_experiment("curves", summary="Training loss of every divergence.")
class Curves(Experiment):
    """The paper's six divergences on CIFAR-10."""

    paper = "Figure 6"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs each."""
        epochs = scale.length(200)
        return [
            run
            for name, options in paper.DIVERGENCES.items()
            for run in scale.images((name,), "cifar10", epochs, **options)
        ]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """A panel for each divergence, as their values have no common scale; a line for each seed."""
        panels = []
        for name in paper.DIVERGENCES:
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
        epochs = scale.length(200)
        caption = f"Training loss over {epochs} epochs, one panel for each divergence."
        return Result(plots=(Plot("curves", caption, tuple(panels)),) if panels else ())
