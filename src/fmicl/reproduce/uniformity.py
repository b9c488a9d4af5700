"""Figure 4, left and middle: sorted pair distances within a batch, by divergence."""

from __future__ import annotations

import numpy as np

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot
from fmicl.training.tasks.image_evaluation import untrained_distances

COLUMNS = {**paper.DIVERGENCES, "reverse KL": {"divergence": "reverse_kl"}, "Neyman": {"divergence": "neyman"}}
GEOMETRY = ("alignment", "uniformity", "effective_rank")
RANDOM = "random initialisation"


@register_experiment("uniformity", summary="Sorted pair distances: untrained, each divergence, reverse KL, Neyman.")
class Uniformity(Experiment):
    """Distances of pairs of normalised embeddings."""

    paper = "Figure 4, left and middle"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs each."""
        epochs = scale.length(200)
        return [run for name, options in COLUMNS.items() for run in scale.images((name,), "cifar10", epochs, **options)]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:  # noqa: ARG002
        """Quantiles of the distances of the first seed, and where the embeddings ended.

        Distances at random initialisation need the data, so they are drawn only where a run folder is at hand.
        """
        negative: list[Line] = []
        positive: list[Line] = []
        rows: list[Row] = []
        for name in COLUMNS:
            key = (name,)
            rows.append((name, *(outcomes.measured(key, score) for score in GEOMETRY)))
            found = next((o.results["distances"] for o in outcomes[key] if "distances" in o.results), None)
            if found is None:
                continue
            negative.append(_line(name, found["negative"]))
            positive.append(_line(name, found["positive"]))
        head = ("divergence", "alignment", "uniformity", "effective rank")
        tables = (Table("Geometry of the embeddings of held-out samples", head, tuple(rows)),)
        if not negative:
            return Result(tables)
        trained = next((o.source for name in COLUMNS for o in outcomes[(name,)] if o.source.is_dir()), None)
        if trained is not None:
            negative.append(_line(RANDOM, untrained_distances(trained), "--"))
        panels = (
            Panel("two samples (negative pairs)", "share of pairs, percent", "distance", tuple(negative)),
            Panel("two views of a sample (positive pairs)", "share of pairs, percent", "distance", tuple(positive)),
        )
        caption = "Sorted distances of pairs of normalised embeddings."
        return Result(tables, (Plot("uniformity", caption, panels),))


def _line(label: str, quantiles: list[float], style: str = "-") -> Line:
    return Line(label, tuple(np.linspace(0, 100, len(quantiles)).tolist()), tuple(quantiles), style)
