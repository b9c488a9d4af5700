"""Table 5: methods of representation learning by f-divergence and similarity, each row a run."""

from __future__ import annotations

from typing import Any, NamedTuple

from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment


class Relation(NamedTuple):
    """A row of the paper's table, and the options by which we run it."""

    objective: str
    divergence: str
    similarity: str
    options: dict[str, Any]


ROWS = {
    "CPC": Relation("InfoNCE", "KL", "log-bilinear", {"method": "cpc", "objective": "infonce"}),
    "RPC": Relation("RPC", "Pearson", "cosine", {"objective": "rpc"}),
    "MINE": Relation("DV bound of MI", "KL", "neural net (here: f-Gaussian)", {"divergence": "kl", "shift": "optimal"}),
    "DIM": Relation(
        "JSD/InfoNCE (here: JSD)", "JS, KL (here: JS)", "neural net", {"method": "dim", "divergence": "js"}
    ),
    "Poole et al.": Relation(
        "MI bounds (here: NWJ)", "KL", "joint/separable (here: f-Gaussian)", {"divergence": "kl", "alpha": 1.0}
    ),
    "SimCLR": Relation("InfoNCE", "KL", "cosine", {"objective": "infonce"}),
    "MoCo": Relation("InfoNCE", "KL", "cosine", {"method": "moco", "objective": "infonce"}),
    "AU": Relation("InfoNCE (here: its own)", "KL", "Gaussian", {"objective": "align_uniform"}),
    "f-MICL": Relation("f-MI", "general (here: JS)", "f-Gaussian", {"divergence": "js"}),
}


@register_experiment("relations", summary="Methods by f-divergence and similarity, each row a run.")
class Relations(Experiment):
    """Contrastive and predictive methods that maximise an f-mutual information."""

    paper = "Table 5"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs each."""
        epochs = scale.length(200)
        return [run for name, row in ROWS.items() for run in scale.images((name,), "cifar10", epochs, **row.options)]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """The paper's columns, and the accuracies of our runs."""
        epochs = scale.length(200)
        rows: list[Row] = [
            (name, *row[:3], outcomes.measured((name,), "knn"), outcomes.measured((name,), "linear"))
            for name, row in ROWS.items()
        ]
        head = ("method", "objective", "f-divergence", "similarity", "k-NN", "linear")
        data = "digits" if scale.small else "CIFAR-10"
        return Result((Table(f"methods by f-divergence; accuracy on {data} after {epochs} epochs", head, tuple(rows)),))
