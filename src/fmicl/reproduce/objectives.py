"""Tables 2 and 10: linear and k-NN accuracy by data set and objective, and the STS row."""

from __future__ import annotations

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment

PAPER_EPOCHS = 800


@register_experiment("objectives", summary="Accuracy by data set and objective, nine columns, and the STS row.")
class Objectives(Experiment):
    """Nine objectives on each data set."""

    paper = "Tables 2 and 10"
    archived_epochs = (200, 800)

    def plan(self, scale: Scale) -> Plan:
        """Every column on every data set."""
        runs = []
        for data in ["digits"] if scale.small else paper.LINEAR:
            for epochs in scale.lengths(PAPER_EPOCHS):
                for name, options in paper.COLUMNS.items():
                    runs += scale.images((data, name, epochs), data, epochs, **options)
        for name, options in paper.COLUMNS.items():
            runs += scale.text(("wikipedia", name), **options)
        return runs

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """A table for each data set, the paper's row above ours."""
        tables = []
        for data in ["digits"] if scale.small else paper.LINEAR:
            reference = "cifar10" if scale.small else data
            rows: list[Row] = []
            for score, words, theirs in (("linear", "linear", paper.LINEAR), ("knn", "k-NN", paper.KNN)):
                rows.append((f"paper, {words}, {reference}, 800 epochs", *theirs[reference].values()))
                for epochs in scale.lengths(PAPER_EPOCHS):
                    ours = (outcomes.measured((data, name, epochs), score) for name in paper.COLUMNS)
                    rows.append((f"ours, {words}, {epochs} epochs", *ours))
            tables.append(Table(f"{data}: accuracy in percent", ("", *paper.COLUMNS), tuple(rows)))
        score = "STSB" if scale.small else "avg"
        title = f"sentences: Spearman's correlation x 100, {'STS-B' if scale.small else 'average of seven tasks'}"
        rows = [
            ("paper, BERT-base", *paper.STS.values()),
            (scale.ours_text, *(outcomes.measured(("wikipedia", name), score) for name in paper.COLUMNS)),
        ]
        tables.append(Table(title, ("", *paper.COLUMNS), tuple(rows)))
        return Result(tuple(tables))
