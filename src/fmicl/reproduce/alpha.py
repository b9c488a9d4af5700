"""Tables 8 and 9: accuracy against alpha, the weight of the negatives, on images and on text."""

from __future__ import annotations

from collections.abc import Mapping

from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, curve, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot

LONG = 4
"""The run at alpha 1 that the paper repeats is this many times as long."""


def _result(
    name: str,
    title: str,
    outcomes: Outcomes,
    theirs: Mapping[str, Mapping[float, float]],
    score: str,
    ours_label: str = "ours",
) -> Result:
    """A table of both papers' rows and ours, and curves over alpha."""
    alphas = list(next(iter(theirs.values())))
    rows: list[Row] = []
    lines = []
    for divergence, values in theirs.items():
        ours = {alpha: outcomes.measured((divergence, alpha), score) for alpha in alphas}
        rows += [(f"paper, {divergence}", *values.values()), (f"{ours_label}, {divergence}", *ours.values())]
        lines += [Line(f"paper, {divergence}", tuple(values), tuple(values.values()), "--")]
        lines += curve(f"{ours_label}, {divergence}", ours)
    table = Table(title, ("alpha", *(f"{alpha:g}" for alpha in alphas)), tuple(rows))
    panel = Panel(title, "alpha", "score", tuple(lines), log_x=True)
    return Result((table,), (Plot(name, f"{title}, against alpha.", (panel,)),))


@register_experiment("alpha-vision", summary="k-NN accuracy against alpha: KL and JS, 0.1 to 50, KL at 1 for longer.")
class AlphaVision(Experiment):
    """KL and JS on CIFAR-10, seven values of alpha."""

    paper = "Table 8 and Appendix D.2"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs each; KL at alpha 1 also four times as long."""
        epochs = scale.length(200)
        runs = [
            run
            for name, values in paper.ALPHA_VISION.items()
            for alpha in values
            for run in scale.images((name, alpha), "cifar10", epochs, **paper.COLUMNS[name], alpha=alpha)
        ]
        return runs + scale.images(("KL", "1", "long"), "cifar10", LONG * epochs, divergence="kl", alpha=1.0)

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Table, curves, and the longer run."""
        epochs = scale.length(200)
        result = _result("alpha-vision", f"k-NN accuracy after {epochs} epochs", outcomes, paper.ALPHA_VISION, "knn")
        longer = outcomes.measured(("KL", "1", "long"), "knn")
        row = (("KL", paper.KL_ALPHA_1_800, longer),)
        head = ("alpha 1, four times as long", "paper, 800 epochs", f"ours, {LONG * epochs} epochs")
        return Result((*result.tables, Table("k-NN accuracy of the longer run", head, row)), result.plots)


@register_experiment("alpha-text", summary="STS against alpha: KL and Pearson on sentences, 1 to 1e6.")
class AlphaText(Experiment):
    """KL and Pearson on Wikipedia, eight values of alpha."""

    paper = "Table 9"

    def plan(self, scale: Scale) -> Plan:
        """One epoch each."""
        return [
            run
            for name, values in paper.ALPHA_TEXT.items()
            for alpha in values
            for run in scale.text((name, alpha), **paper.COLUMNS[name], alpha=alpha)
        ]

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Table and curves."""
        score, words = ("STSB", "STS-B") if scale.small else ("avg", "average of seven STS tasks")
        title = f"Spearman's correlation x 100, {words}"
        return _result("alpha-text", title, outcomes, paper.ALPHA_TEXT, score, scale.ours_text)
