"""Figures 1 and 7: log density of positive pairs by RealNVP against their squared distance."""

from __future__ import annotations

from typing import Any

from fmicl.reproduce.experiment import Experiment, Outcomes, Plan, Result, Row, Scale, Table, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot
from fmicl.runs.folder import Run
from fmicl.training.tasks.assumption import check_run
from fmicl.utils.files import read_json

VIEWS: dict[str, dict[str, Any]] = {
    "SimCLR": {},
    "SimCLR, crops": {"flip": 0.0, "jitter": 0.0, "grey": 0.0},
    "SimCLR, crops and flips": {"jitter": 0.0, "grey": 0.0},
    "SimCLR, crops and jitter": {"flip": 0.0, "grey": 0.0},
    "SimCLR, no grey": {"grey": 0.0},
}
"""Five combinations of augmentations."""
SMALL_VIEWS: dict[str, dict[str, Any]] = {  # digits are grey and not flipped
    "SimCLR": {},
    "SimCLR, crops": {"jitter": 0.0},
    "SimCLR, jitter": {"crop_scale": (1.0, 1.0)},
    "SimCLR, weak crops": {"crop_scale": (0.8, 1.0)},
    "SimCLR, strong crops": {"crop_scale": (0.2, 1.0)},
}

CHECK, SMALL_CHECK = (4096, 1000), (1024, 150)
"""Pairs, and training steps of the flows; at the small scale fewer."""


@register_experiment("gaussian", summary="Log density of positive pairs (RealNVP) against squared distance.")
class GaussianKernel(Experiment):
    """Encoders of SimCLR, under five combinations of augmentations, and of KL."""

    paper = "Figures 1 and 7"

    def plan(self, scale: Scale) -> Plan:
        """200 epochs each."""
        epochs = scale.length(200)
        runs = scale.images(("KL",), "cifar10", epochs, divergence="kl")
        for name, views in (SMALL_VIEWS if scale.small else VIEWS).items():
            runs += scale.images((name,), "cifar10", epochs, objective="infonce", **views)
        return runs

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:
        """Slope and R^2 of the straight lines for both priors, and the direct test of the cosines.

        The flows are trained once and kept beside each run (`fmicl check-assumption`). Archived runs have no weights,
        so they are not shown.
        """
        rows: list[Row] = []
        panels = []
        for key, found in outcomes.runs.items():
            for outcome in found[:1]:
                if not outcome.source.is_dir():
                    continue
                run = Run(outcome.source)
                if not run.assumption.exists():
                    pairs, steps = SMALL_CHECK if scale.small else CHECK
                    check_run(run.path, device=outcome.settings.device, pairs=pairs, flow_steps=steps)
                assumption = read_json(run.assumption)
                fits = [f"{flow['fit']['slope']:.3g} ({flow['fit']['r_squared']:.3f})" for flow in assumption["flows"]]
                gamma = assumption["gamma"]
                rows.append((key[0], *fits, f"{gamma['gamma']:.3g}", f"{gamma['p_value']:.3f}"))
                lines = tuple(
                    Line(f"{flow['prior']} prior", tuple(flow["squared_distances"]), tuple(flow["log_densities"]))
                    for flow in assumption["flows"]
                )
                panels.append(Panel(key[0], "squared distance", "mean log density", lines))
        if not rows:
            return Result()
        head = ("encoder", "Gaussian prior: slope (R^2)", "uniform prior: slope (R^2)", "gamma of the cosines", "its p")
        caption = "Mean log density of positive pairs by RealNVP in bins of their squared distance."
        table = Table("straight lines through the log density", head, tuple(rows))
        return Result((table,), (Plot("gaussian", caption, tuple(panels)),))
