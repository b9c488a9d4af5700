"""What the runs of a sweep's folder are called, whichever calls trained them: by their cases and what they differ in.

A folder keeps the name that its first call had for the run. That doesn't say what has one value in that call, and
others in later ones.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fmicl.config.fields import leaves
from fmicl.sweep.folder import ROUNDING, key_of, plain
from fmicl.sweep.grid import name_of

__all__ = ["names_of"]

_Rows = Mapping[str, Mapping[str, Any]]


def names_of(entries: _Rows, recipe: Any, machine: frozenset[str]) -> dict[str, dict[str, str]]:
    """Names of runs and of the groups that may be averaged: those of runs that differ in nothing but the seed.

    Args:
        entries: what sweep.json says of the runs, by their folders.
        recipe: what they were changed from.
        machine: settings that don't tell runs apart.

    Returns:
        For each run its ``name`` and its ``group``, which is the name without the seed. A case's name stands for what
        the case sets, unless its own runs differ in it. What has no part in a run, such as InfoNCE's divergence, is
        not said of it, unless without that two would have the same name.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> changes = {"seed=0": {"epochs": 2}, "seed=1": {"epochs": 2, "seed": 1}, "epochs=4": {"epochs": 4}}
        >>> entries = {run: {"case": None, "changes": changed} for run, changed in changes.items()}
        >>> found = names_of(entries, RECIPES["digits"].recipe, frozenset())
        >>> {run: names["name"] for run, names in found.items()}
        {'seed=0': 'epochs=2,seed=0', 'seed=1': 'epochs=2,seed=1', 'epochs=4': 'epochs=4,seed=0'}
        >>> found["seed=1"]["group"]
        'epochs=2'
    """
    fields = [leaf for leaf in leaves(type(recipe)) if leaf.name not in machine - ROUNDING]
    own = plain({leaf.name: leaf.of(recipe) for leaf in fields})
    paths = {leaf.name for leaf in fields if Path in (leaf.type, *typing.get_args(leaf.type))}
    rows = {run: {x: entry["changes"].get(x, own[x]) for x in own} for run, entry in entries.items()}
    keys = {run: key_of(row, frozenset({"seed"})) for run, row in rows.items()}
    cases_of: dict[str, set[str]] = {key: set() for key in keys.values()}
    for run, entry in entries.items():
        cases_of[keys[run]] |= {entry["case"]} - {None}
    common = {key: cases.pop() if len(cases) == 1 else None for key, cases in cases_of.items()}
    # A run without a case that has the settings of one goes by its name.
    cases = {run: entry["case"] or common[keys[run]] for run, entry in entries.items()}
    sets = {case: set[str]() for case in (None, *cases.values())}
    for entry in entries.values():
        sets[entry["case"]] |= set(entry.get("case_sets", entry["changes"] if entry["case"] else ()))
    set_by_some = set[str]().union(*sets.values())

    def named(rows: _Rows) -> dict[str, dict[str, str]]:
        """The names by these settings."""
        varied = _varied(rows.values())
        within = {case: _varied(rows[run] for run in rows if cases[run] == case) for case in sets}
        told = {x for x in paths if _told_by_last_part(row.get(x) for row in rows.values())}

        def name(run: str, case: str | None, without: str = "") -> str:
            shown = {}
            for x, value in rows[run].items():
                if case is None:  # the same as a case has, too, since that doesn't say it
                    said = x in varied or (x in set_by_some and value != own[x])
                else:  # of what another case sets, the recipe's own value goes without saying
                    stood_for = x in sets[case] or (x in set_by_some and value == own[x])
                    said = x in (within[case] if stood_for else varied)
                if said and x != without:
                    shown[x] = Path(value) if value and x in told else value
            return name_of(case, shown)

        return {run: {"name": name(run, cases[run]), "group": name(run, common[keys[run]], "seed")} for run in rows}

    found = named({run: _with_part(recipe, row) for run, row in rows.items()})
    owner: dict[tuple[str, str], str] = {}
    shared = any(owner.setdefault(name, keys[run]) != keys[run] for run in found for name in found[run].items())
    return named(rows) if shared else found


def _with_part(recipe: Any, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a run's settings that have a part in it."""
    run = copy.copy(recipe)
    vars(run).update(settings)  # as they are on record: nothing is checked again
    parts = run.parts()
    return {x: value for x, value in settings.items() if parts.get(x, True)}


def _varied(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """Settings of which these have several values."""
    first: dict[str, Any] = {}
    return {x for row in rows for x, value in row.items() if first.setdefault(x, value) != value}


def _told_by_last_part(values: Iterable[Any]) -> bool:
    """Whether the last parts of some paths are as many as they are, so that names can do with these."""
    found = {value for value in values if value}
    return len({Path(path).name for path in found}) == len(found)
