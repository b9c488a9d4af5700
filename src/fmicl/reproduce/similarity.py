"""Table 4: the cosine similarity in the paper's form against the f-Gaussian one, six divergences."""

from __future__ import annotations

from typing import Any

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment

SIMILARITIES: dict[str, dict[str, Any]] = {
    "cosine": {"similarity": "cosine_identity", "gamma": 0.5},  # T = x.y: temperature 1, no activation
    "f-Gaussian": {},
}
PAPER = {"cosine": paper.COSINE, "f-Gaussian": {name: paper.LINEAR["cifar10"][name] for name in paper.DIVERGENCES}}
PAPER_EPOCHS = 800


@register_experiment("similarity", summary="Cosine (the paper's form) against f-Gaussian, six divergences.")
class SimilarityTable(Experiment):
    """Both similarities with each of the paper's divergences on CIFAR-10."""

    paper = "Table 4"
    archived_epochs = (200, 800)
    failures_count = True  # as the paper's VLC

    def plan(self, scale: Scale) -> Plan:
        """800 epochs each."""
        return [
            run
            for epochs in scale.lengths(PAPER_EPOCHS)
            for similarity, how in SIMILARITIES.items()
            for name, options in paper.DIVERGENCES.items()
            for run in scale.images((similarity, name, epochs), "cifar10", epochs, **options, **how)
        ]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Linear accuracy as in the paper, and k-NN; a run whose loss stopped being finite is "failed"."""
        rows: list[Row] = []
        for similarity in SIMILARITIES:
            rows.append((f"paper, {similarity}, linear, 800 epochs", *PAPER[similarity].values()))
            for epochs in scale.lengths(PAPER_EPOCHS):
                for score, words in (("linear", "linear"), ("knn", "k-NN")):
                    ours = (outcomes.measured((similarity, name, epochs), score) for name in paper.DIVERGENCES)
                    rows.append((f"ours, {similarity}, {words}, {epochs} epochs", *ours))
        data = "digits" if scale.small else "CIFAR-10"
        return Result((Table(f"accuracy on {data} by similarity, percent", ("", *paper.DIVERGENCES), tuple(rows)),))
