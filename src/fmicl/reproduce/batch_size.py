"""Figure 4, right: accuracy against batch size."""

from __future__ import annotations

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, curve, register_experiment
from fmicl.reproduce.plots import Panel, Plot

OBJECTIVES = ("KL", "JS", "Pearson", "SimCLR")
SIZES = (32, 64, 128, 256, 512, 1024, 2048)
SMALL_SIZES = (32, 64, 128, 256, 512)


@register_experiment("batch-size", summary="Accuracy against batch size: KL, JS, Pearson and SimCLR.")
class BatchSize(Experiment):
    """Four objectives, batches of 32 to 2,048."""

    paper = "Figure 4, right"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs, with the recipe's learning rate at every size."""
        epochs = scale.length(200)
        return [
            run
            for size in (SMALL_SIZES if scale.small else SIZES)
            for name in OBJECTIVES
            for run in scale.images((name, size), "cifar10", epochs, batch_size=size, **paper.COLUMNS[name])
        ]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """k-NN and linear accuracy over the batch size. The paper has no numbers, only the figure."""
        epochs = scale.length(200)
        sizes = SMALL_SIZES if scale.small else SIZES
        tables, panels = [], []
        for score, words in (("knn", "k-NN"), ("linear", "linear")):
            found = {name: {size: outcomes.measured((name, size), score) for size in sizes} for name in OBJECTIVES}
            rows: list[Row] = [(name, *by_size.values()) for name, by_size in found.items()]
            title = f"{words} accuracy after {epochs} epochs"
            tables.append(Table(title, ("batch size", *map(str, sizes)), tuple(rows)))
            lines = [line for name, by_size in found.items() for line in curve(name, by_size)]
            panels.append(Panel(title, "batch size", "percent", tuple(lines), log_x=True))
        caption = f"Accuracy against batch size after {epochs} epochs."
        return Result(tuple(tables), (Plot("batch-size", caption, tuple(panels)),))
