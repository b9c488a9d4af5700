"""Tables 8 and 9: accuracy against alpha, the weight of the negatives, on images and on text."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import (
    Entry,
    Experiment,
    Line,
    Outcomes,
    Panel,
    Planned,
    Plot,
    Result,
    Scale,
    Table,
    planned,
    register_experiment,
)

__all__ = ["AlphaText", "AlphaVision"]

LONG = 4
"""The run at alpha 1 that the paper repeats is this many times as long."""


def _result(
    name: str, title: str, outcomes: Outcomes, theirs: Mapping[str, Mapping[float, float]], score: str
) -> Result:
    """A table of both papers' rows and ours, and curves over alpha."""
    alphas = list(next(iter(theirs.values())))
    rows: list[tuple[Entry, ...]] = []
    lines = []
    for divergence, values in theirs.items():
        ours = {alpha: outcomes.measured((divergence, f"{alpha:g}"), score) for alpha in alphas}
        rows += [(f"paper, {divergence}", *values.values()), (f"ours, {divergence}", *ours.values())]
        lines.append(Line(f"paper, {divergence}", tuple(values), tuple(values.values()), "--"))
        means = {alpha: sum(m.values) / len(m.values) for alpha, m in ours.items() if m.values}
        lines.append(Line(f"ours, {divergence}", tuple(means), tuple(means.values())))
    table = Table(title, ("alpha", *(f"{alpha:g}" for alpha in alphas)), tuple(rows))
    panel = Panel(title, "alpha", "score", tuple(line for line in lines if line.x), log_x=True)
    return Result((table,), (Plot(name, f"{title}, against alpha.", (panel,)),))


@register_experiment("alpha-vision", summary="k-NN accuracy against alpha: KL and JS, 0.1 to 50, KL at 1 for longer.")
class AlphaVision(Experiment):
    """KL and JS on CIFAR-10, seven values of alpha."""

    paper = "Table 8 and Appendix D.2"

    def plan(self, scale: Scale) -> list[Planned]:
        """200 epochs each; KL at alpha 1 also four times as long."""
        (epochs, *_) = scale.lengths(200)
        runs = []
        for name, values in paper.ALPHA_VISION.items():
            for alpha in values:
                settings = scale.images("cifar10", epochs, **paper.COLUMNS[name], alpha=alpha)
                runs += planned((name, f"{alpha:g}"), settings)
        return runs + planned(("KL", "1", "long"), scale.images("cifar10", LONG * epochs, divergence="kl", alpha=1.0))

    def present(self, outcomes: Outcomes, scale: Scale, folder: Path | None = None) -> Result:  # noqa: ARG002
        """Table, curves, and the longer run."""
        (epochs, *_) = scale.lengths(200)
        result = _result("alpha-vision", f"k-NN accuracy after {epochs} epochs", outcomes, paper.ALPHA_VISION, "knn")
        longer = outcomes.measured(("KL", "1", "long"), "knn")
        row = (("KL", paper.KL_ALPHA_1_800, longer),)
        head = ("alpha 1, four times as long", "paper, 800 epochs", f"ours, {LONG * epochs} epochs")
        return Result((*result.tables, Table("k-NN accuracy of the longer run", head, row)), result.plots)


@register_experiment("alpha-text", summary="STS against alpha: KL and Pearson on sentences, 1 to 1e6.")
class AlphaText(Experiment):
    """KL and Pearson on Wikipedia, eight values of alpha."""

    paper = "Table 9"

    def plan(self, scale: Scale) -> list[Planned]:
        """One epoch each."""
        return [
            run
            for name, values in paper.ALPHA_TEXT.items()
            for alpha in values
            for run in planned((name, f"{alpha:g}"), scale.text(**paper.COLUMNS[name], alpha=alpha))
        ]

    def present(self, outcomes: Outcomes, scale: Scale, folder: Path | None = None) -> Result:  # noqa: ARG002
        """Table and curves."""
        score, words = ("STSB", "STS-B") if scale.small else ("avg", "average of seven STS tasks")
        return _result("alpha-text", f"Spearman's correlation x 100, {words}", outcomes, paper.ALPHA_TEXT, score)
