"""Summaries: runs are averaged if and only if they differ in nothing but the seed."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fmicl.config import Settings, recipe
from fmicl.runs.folder import Run
from fmicl.sweep.state import SweepRun
from fmicl.sweep.summary import scores, summarise, summary_table
from sweeps import Cases, grid, local, read_record, sweep_of

SIMCLR, JS = ("SimCLR", {"objective": "infonce"}), ("JS", {"divergence": "js"})


def finished(*found: tuple[str | None, Settings]) -> list[SweepRun]:
    return [
        SweepRun(each, Run(Path(str(i))), Path("log"), case=case, state="finished", results={"knn": 60.0 + i})
        for i, (case, each) in enumerate(found)
    ]


def rows(*calls: tuple[dict[str, tuple[Any, ...]], Cases], name: str = "digits") -> list[dict[str, Any]]:
    """The summary after some calls of a sweep, each with its values and its cases."""
    cells = [cell for values, cases in calls for cell in grid(cases, name, **values)]
    return summarise(finished(*((cell.case, cell.settings) for cell in cells)))


def printed(summary: list[dict[str, Any]]) -> list[list[str]]:
    text = io.StringIO()
    Console(file=text, width=160).print(summary_table(summary))
    lines = [line for line in text.getvalue().splitlines() if line.startswith(("┃", "│"))]
    return [[cell.strip() for cell in line.strip("┃│").replace("┃", "│").split("│")] for line in lines]


def test_runs_of_several_calls_are_averaged_only_if_nothing_but_the_seed_differs(tmp_path: Path) -> None:
    def groups(**values: Any) -> list[tuple[dict[str, Any], list[float]]]:
        assert sweep_of(tmp_path / "sweep", **values).train(local()) == 0
        summary = read_record(tmp_path / "sweep")["summary"]
        return [(row["settings"], row["scores"]["k-NN"]["values"]) for row in summary]

    assert groups(epochs=(1,), alpha=(5.0,), seed=(0, 1)) == [({}, [60.0, 61.0])]
    short, long = {"alpha": 5.0, "epochs": 1}, {"alpha": 40.0, "epochs": 3}
    assert groups(epochs=(3,), alpha=(40.0,), seed=(2, 3)) == [(short, [60.0, 61.0]), (long, [62.0, 63.0])]
    more = groups(epochs=(3,), alpha=(40.0,), seed=(4, 5), workers=(1,))  # an option that changes no result
    assert more == [(short, [60.0, 61.0]), (long, [62.0, 63.0, 64.0, 65.0])]
    assert groups(divergence=("kl", "tsallis"), epochs=(3,), alpha=(40.0,), seed=(6,)) == [
        ({"divergence": "kl", **short}, [60.0, 61.0]),
        ({"divergence": "kl", **long}, [62.0, 63.0, 64.0, 65.0, 66.0]),  # KL is the recipe's divergence
        ({"divergence": "tsallis", **long}, [66.0]),
    ]


def test_options_without_effect_are_empty() -> None:
    """InfoNCE has no divergence, whichever the other runs have; nor has f-MICL a temperature."""
    summary = rows(({"divergence": ("kl", "js")}, []), ({"temperature": (0.1, 0.5)}, [SIMCLR]))
    assert [(row["case"], row["settings"]) for row in summary] == [
        (None, {"objective": "fmicl", "divergence": "kl"}),
        (None, {"objective": "fmicl", "divergence": "js"}),
        ("SimCLR", {"objective": "infonce", "temperature": 0.1}),
        ("SimCLR", {"objective": "infonce", "temperature": 0.5}),
    ]
    assert printed(summary) == [
        ["case", "objective", "divergence", "temperature", "n", "k-NN"],
        ["", "fmicl", "kl", "", "1", "60.00"],
        ["", "fmicl", "js", "", "1", "61.00"],
        ["SimCLR", "infonce", "", "0.1", "1", "62.00"],
        ["SimCLR", "infonce", "", "0.5", "1", "63.00"],
    ]
    assert len(rows(({"divergence": ("js",)}, [SIMCLR]), ({"seed": (1,)}, [SIMCLR]))) == 1


def test_a_case_is_a_column_and_does_not_decide_the_groups() -> None:
    assert [row["case"] for row in rows(({}, [SIMCLR, JS]))] == ["SimCLR", "JS"]
    changed = ("JS", {"divergence": "js", "alpha": 5.0})
    assert [row["settings"] for row in rows(({}, [JS]), ({"seed": (1,)}, [changed]))] == [
        {"alpha": 20.0},
        {"alpha": 5.0},
    ]
    (row,) = rows(({"objective": ("infonce",)}, []), ({"seed": (1,)}, [SIMCLR]))
    assert (row["case"], row["n"]) == ("SimCLR", 2)
    (row,) = rows(({}, [("A", {"seed": 1}), ("B", {"seed": 2})]))
    assert (row["case"], row["n"]) == ("A, B", 2)


VALUES: dict[str, list[Any]] = {
    "objective": ["fmicl", "infonce"], "divergence": ["kl", "js"], "temperature": [0.2, 0.5],
    "method": ["simclr", "moco"], "queue": [4096, 256], "epochs": [100, 2], "precision": ["auto", "32"],
    "data_dir": ["a/x", "b/x", "b/y"], "rotation_weight": [0.0, 0.4], "rotation_size": [None, 8], "workers": [0, 1],
    "seed": [0, 1],
}  # fmt: skip
CHANGES = st.fixed_dictionaries({}, optional={name: st.sampled_from(values) for name, values in VALUES.items()})


@settings(deadline=None, max_examples=300)
@given(st.lists(st.tuples(st.sampled_from([None, "A", "B"]), CHANGES), min_size=1, max_size=6))
def test_runs_are_averaged_if_and_only_if_they_differ_in_nothing_but_the_seed(
    calls: list[tuple[str | None, dict[str, Any]]],
) -> None:
    runs = finished(*((case, recipe("digits", **changes)) for case, changes in calls))
    for one, other in itertools.combinations(runs, 2):
        with_seeds_equal = one.settings.replace(seed=0).hash == other.settings.replace(seed=0).hash
        assert (one.group == other.group) == with_seeds_equal
        used, others = ({**each.settings.used(), "seed": 0, "workers": 0} for each in (one, other))
        assert (used == others) == with_seeds_equal
    summary = summarise(runs)
    assert sum(row["n"] for row in summary) == len(runs)
    columns = [json.dumps(row["settings"]) for row in summary]
    assert len(set(columns)) == len({run.group for run in runs}) == len(summary), "the columns show what differs"


def test_paths_are_shortened_where_their_names_differ() -> None:
    def shown(*paths: str) -> list[str]:
        summary = rows(*(({"data_dir": (Path(path),)}, []) for path in paths), name="images")
        return [row[0] for row in printed(summary)[1:]]

    assert shown("/a/cats", "/a/dogs") == ["cats", "dogs"]
    assert shown("/a/cats", "/b/cats") == ["/a/cats", "/b/cats"]


def test_scores_of_text_runs() -> None:
    assert scores({"STSB": 70.0, "avg": None, "STS12": 60.0}) == {"STS-B": 70.0}
    one, other = finished((None, recipe("digits")), (None, recipe("digits", seed=1)))
    one.results, other.results = {}, {"avg": 3.0}
    (row,) = summarise([one, other])
    assert (row["n"], row["scores"]) == (2, {"STS avg": {"mean": 3.0, "std": None, "values": [3.0]}})
