"""Table 3: linear accuracy on ImageNet, MoCo v3 with other objectives beside other methods."""

from __future__ import annotations

from typing import Any

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment

COLUMNS: dict[str, dict[str, Any]] = {
    "SwAV": {"method": "swav"},
    "BYOL": {"method": "byol"},
    "Barlow Twins": {"method": "simclr", "objective": "barlow_twins"},
    "VICReg": {"method": "simclr", "objective": "vicreg"},
    "RenyiCL": {"method": "mocov3", "objective": "renyi"},
    "MoCo v3": {"method": "mocov3", "objective": "infonce"},
    "KL": {"method": "mocov3", "divergence": "kl"},
    "JS": {"method": "mocov3", "divergence": "js"},
    "Pearson": {"method": "mocov3", "divergence": "pearson"},
}
SMALL: dict[str, dict[str, Any]] = {
    "SwAV": {"prototypes": 100},
    "Barlow Twins": {"barlow_scale": 0.1, "learning_rate": 0.05, "hidden": 512, "dim": 512},
    "VICReg": {"learning_rate": 0.05},
}
"""What digits need in addition: few prototypes; wide embeddings, and small steps for losses of a large scale."""
PAPER_EPOCHS = 1000


@register_experiment("imagenet", summary="ViT-S with 6 blocks: MoCo v3, KL, JS and Pearson beside five other methods.")
class ImageNet(Experiment):
    """All nine with the recipe's encoder and views; the paper quotes ResNet-50 for the first five."""

    paper = "Table 3"
    archived_epochs = (PAPER_EPOCHS,)

    def plan(self, scale: Scale) -> Plan:
        """1,000 epochs each."""
        own = SMALL if scale.small else {}
        return [
            run
            for epochs in scale.lengths(PAPER_EPOCHS)
            for name, options in COLUMNS.items()
            for run in scale.images((name, epochs), "imagenet", epochs, **options, **own.get(name, {}))
        ]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Linear accuracy; the paper has no k-NN here."""
        rows: list[Row] = [("paper, ImageNet, 1,000 epochs", *paper.IMAGENET.values())]
        for epochs in scale.lengths(PAPER_EPOCHS):
            ours = (outcomes.measured((name, epochs), "linear") for name in COLUMNS)
            rows.append((f"ours, {epochs} epochs", *ours))
        data = "digits" if scale.small else "ImageNet"
        return Result((Table(f"linear accuracy on {data}, percent", ("", *COLUMNS), tuple(rows)),))
