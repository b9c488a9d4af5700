"""`fmicl select RECIPE`: choose divergence, alpha and gamma, or other options, by successive halving."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fmicl.cli.recipes import split_recipe
from fmicl.cli.sweep import SweepOptions, parse_grid
from fmicl.config import RECIPES, Settings, recipe
from fmicl.sweep.grid import Cell, make_cells

DIVERGENCES = ("kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc")
"""The paper's divergences whose optimum is uniform; the others are candidates if they are named."""
ALPHAS = (0.1, 1.0, 10.0)
"""Candidates of alpha, as multiples of the recipe's."""
GAMMAS = (0.5, 1.0, 2.5)
VALIDATION = 0.1
"""Share of the training images that candidates are compared on, if the recipe holds none out."""


@dataclass(frozen=True, kw_only=True)
class SelectOptions(SweepOptions):
    """How candidates are compared."""

    budget: Annotated[
        str,
        tyro.conf.arg(
            metavar="HOURS_OR_RUNS",
            help="What the choice may cost: as many runs of the whole length (10), or a time (2.5h, 90m).",
        ),
    ]
    by: Annotated[
        str,
        tyro.conf.arg(
            metavar="SCORE",
            help="knn or linear accuracy on held-out training images; or without labels effective_rank, rankme, "
            "rankme_features, lidar, lidar_features, alignment, uniformity, alignment_uniformity.",
        ),
    ] = "knn"
    eta: Annotated[
        int, tyro.conf.arg(help="Each rung keeps one in this many candidates, for this many times the epochs.")
    ] = 3
    first_epochs: Annotated[
        int | None, tyro.conf.arg(help="Epochs of the first rung at least (None: one in 27 of the whole run).")
    ] = None
    out: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Folder of the selection, new or to continue (None: the one under selections/ that is the same, else "
            "the next number)."
        ),
    ] = None


def run(words: Sequence[str]) -> int:
    """Choose; returns the exit code."""
    chosen = split_recipe("select", words)
    if chosen is None:
        return 0
    cells, options = parse(*chosen)
    from fmicl.sweep.halving import Budget, Selection, run_selection

    budget = Budget.parse(options.budget)
    selection = Selection(cells, budget, by=options.by, eta=options.eta, first_epochs=options.first_epochs)
    return run_selection(
        selection, out=options.out, parallel=options.parallel, launcher=options.launcher, slurm=options.slurm
    )


def parse(name: str, words: Sequence[str]) -> tuple[list[Cell], SelectOptions]:
    """The candidates, and how to compare them, from the words after the recipe.

    Without a case, divergence, alpha and gamma have several values each unless they are given.

    Raises:
        ValueError: as :func:`fmicl.cli.sweep.parse`.
    """
    base = recipe(name)
    description = (
        f"{RECIPES[name].summary} Candidates, unless these are given or cases: "
        f"--divergence {' '.join(DIVERGENCES)}, --alpha 0.1, 1 and 10 times the recipe's, "
        f"--gamma {' '.join(f'{gamma:g}' for gamma in GAMMAS)}. --validation is {VALIDATION} unless it is given."
    )
    options, values, cases = parse_grid("select", SelectOptions, base, words, description)
    defaults = {"validation": (base.values.get("validation") or VALIDATION,)}
    if not cases:
        defaults |= candidate_values(base.replace(**{key: found[0] for key, found in values.items()}))
    given = {word.split("=")[0].lstrip("-").replace("-", "_") for word in words if word.startswith("--")}
    known = {key: value for key, value in defaults.items() if key not in given and key in base.schema.options}
    return make_cells(base, {**known, **values}, cases), options


def candidate_values(base: Settings) -> dict[str, tuple[Any, ...]]:
    """Values of divergence, alpha and gamma that are compared if none are given, as far as they have an effect.

    Example:
        >>> sorted(candidate_values(recipe("digits", shift="optimal")))        # which has no alpha
        ['divergence', 'gamma']
    """
    alpha = base.alpha if isinstance(base.alpha, int | float) else 1.0
    values = {"divergence": DIVERGENCES, "alpha": tuple(alpha * factor for factor in ALPHAS), "gamma": GAMMAS}
    return {name: found for name, found in values.items() if name in base.used()}
