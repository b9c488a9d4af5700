"""What a sweep calls its runs: by all that they differ in, whichever calls trained them, and wherever they lie."""

from __future__ import annotations

import io
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from fmicl.config.recipes import RECIPES
from fmicl.sweep.folder import plain
from fmicl.sweep.grid import cells
from fmicl.sweep.names import names_of
from fmicl.sweep.scheduler import Sweep
from fmicl.sweep.table import Display
from sweeps import DIGITS, FAKE, grid, local, record_of

IMAGES = RECIPES["images"].recipe
SIMCLR, JS = ("SimCLR", {"objective": "infonce"}), ("JS", {"divergence": "js"})


def sweep(folder: Path, **values: tuple[Any, ...]) -> Sweep:
    return Sweep("digits", DIGITS, grid(**values), folder, program=FAKE)


def names(folder: Path) -> dict[str, str]:
    return {place: run["name"] for place, run in record_of(folder)["runs"].items()}


def shown(*calls: tuple[dict[str, tuple[Any, ...]], list[Any]], recipe: Any = DIGITS) -> list[tuple[str, str]]:
    """Names and groups of all runs of some calls, each with its values and its cases."""
    runs = [cell for values, cases in calls for cell in cells(recipe, values, cases)]
    entries = {
        str(i): {"case": run.case, "case_sets": run.case_sets, "changes": plain(run.changes)}
        for i, run in enumerate(runs)
    }
    return [(found["name"], found["group"]) for found in names_of(entries, recipe, frozenset()).values()]


def test_a_sweep_that_grows_says_of_every_run_what_it_differs_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of those that were there when it had one value; they stay where they are, and are not trained again."""
    folder = tmp_path / "sweep"
    assert sweep(folder, epochs=(2,), seed=(0, 1))(local()) == 0
    assert names(folder) == {"seed=0": "seed=0", "seed=1": "seed=1"}
    grown = {
        "seed=0": "epochs=2,seed=0", "seed=1": "epochs=2,seed=1",
        "epochs=4,seed=0": "epochs=4,seed=0", "epochs=4,seed=1": "epochs=4,seed=1",
    }  # fmt: skip
    for done in (2, 4):
        again = sweep(folder, epochs=(2, 4), seed=(0, 1))
        assert again(local()) == 0
        assert f"sweep of 4 runs in {folder}; {done} finished before" in capsys.readouterr().out
        assert names(folder) == grown
        assert sorted(run.name for run in again.runs) == sorted(grown.values())
    text = io.StringIO()
    Console(file=text, width=120).print(Display("x", console=Console(file=text, width=120)).table(again.runs))
    assert all(f"│ {name} " in text.getvalue() for name in grown.values())
    assert [row["group"] for row in record_of(folder)["summary"]] == ["epochs=2", "epochs=4"]
    assert {path.parent.name: path.read_text() for path in folder.rglob("tries")} == dict.fromkeys(grown, "x")
    part = sweep(folder, epochs=(2,), seed=(0, 1))  # the first call once more: others are still there
    assert [run.name for run in part.runs] == ["epochs=2,seed=0", "epochs=2,seed=1"]
    assert part(local()) == 0
    assert names(folder) == grown


def test_a_run_that_fails_goes_by_its_name_and_its_log_by_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sweep(tmp_path / "s", divergence=("kl", "neyman"), epochs=(2,))(local()) == 1
    capsys.readouterr()
    assert sweep(tmp_path / "s", divergence=("kl", "neyman"), epochs=(2, 4))(local()) == 1
    said = capsys.readouterr().out
    assert "] divergence=neyman,epochs=2: resumed" in said
    log = tmp_path / "s" / "divergence=neyman.log"
    assert f"failed: divergence=neyman,epochs=2: ended without results.json\n  log: {log}\n" in said


def test_a_record_of_an_older_version_is_named_too(tmp_path: Path) -> None:
    assert sweep(tmp_path / "s", epochs=(2,), seed=(0,))(local()) == 0
    record = record_of(tmp_path / "s")
    for run in record["runs"].values():
        del run["name"], run["case_sets"]
        run["group"] = "run"
    (tmp_path / "s" / "sweep.json").write_text(json.dumps(record))
    assert sweep(tmp_path / "s", epochs=(4,), seed=(1, 2))(local()) == 0
    assert names(tmp_path / "s") == {"run": "epochs=2,seed=0", "seed=1": "epochs=4,seed=1", "seed=2": "epochs=4,seed=2"}
    groups = [run["group"] for run in record_of(tmp_path / "s")["runs"].values()]
    assert groups == ["epochs=2", "epochs=4", "epochs=4"], "as the summary has them"


@pytest.mark.parametrize("cases", [[], [SIMCLR, JS]])
def test_the_runs_of_one_call_are_called_what_their_folders_are(cases: list[Any]) -> None:
    values = {"learning_rate": (0.5, 1.0), "epochs": (2,), "seed": (0, 1), "crop_scale": ((0.2, 1.0), (0.4, 1.0))}
    assert [name for name, _ in shown((values, cases))] == [cell.name for cell in cells(DIGITS, values, cases)]


def test_the_name_of_a_case_stands_for_what_it_sets_and_for_nothing_else() -> None:
    assert shown(({}, [SIMCLR, JS])) == [("SimCLR", "SimCLR"), ("JS", "JS")]
    assert shown(({"epochs": (2,)}, [SIMCLR]), ({"epochs": (4,)}, [JS])) == [
        ("SimCLR,epochs=2", "SimCLR,epochs=2"), ("JS,epochs=4", "JS,epochs=4"),
    ]  # fmt: skip
    assert [name for name, _ in shown(({}, []), ({"seed": (0, 1)}, [JS]))] == [
        "divergence=kl,seed=0", "JS,seed=0", "JS,seed=1",
    ]  # fmt: skip
    other = ("JS", {"divergence": "js", "alpha": 5.0})
    assert [group for _, group in shown(({}, [JS]), ({"seed": (1,)}, [other]))] == ["JS,alpha=20", "JS,alpha=5"]


def test_what_has_no_part_in_a_run_is_not_said_of_it() -> None:
    """InfoNCE has no divergence, whichever the sweep's other runs have; nor has KL InfoNCE's temperature."""
    kl_and_js, no_case = {"divergence": ("kl", "js")}, list[Any]()
    assert [name for name, _ in shown((kl_and_js, no_case), ({"temperature": (0.1, 0.5)}, [SIMCLR]))] == [
        "objective=fmicl,divergence=kl", "objective=fmicl,divergence=js",
        "SimCLR,temperature=0.1", "SimCLR,temperature=0.5",
    ]  # fmt: skip
    twice = shown(({"divergence": ("js",)}, [SIMCLR]), ({"seed": (0, 1)}, [SIMCLR]))
    assert [group for _, group in twice] == ["SimCLR,divergence=js", "SimCLR,divergence=kl", "SimCLR,divergence=kl"], (
        "seed 0 was trained twice, and may not count twice"
    )


def test_a_case_does_not_hide_what_another_case_sets() -> None:
    """Only the recipe's own value goes without saying."""
    calls: list[tuple[dict[str, tuple[Any, ...]], list[Any]]] = [({"epochs": (2,)}, [SIMCLR]), ({"epochs": (4,)}, [JS])]
    long = ("Long", {"epochs": 8, "divergence": "pearson"})
    assert [name for name, _ in shown(*calls, ({}, [long]))] == ["SimCLR,epochs=2", "JS,epochs=4", "Long"]


@st.composite
def any_runs(draw: st.DrawFn) -> dict[str, Any]:
    """Runs of several calls, with cases and without; settings among them that have no part."""
    values: dict[str, list[Any]] = {
        "objective": ["fmicl", "infonce"], "divergence": ["kl", "js"], "temperature": [0.2, 0.5],
        "method": ["simclr", "moco"], "queue": [4096, 256], "epochs": [100, 2], "precision": ["auto", "32"],
        "data_dir": ["a/x", "b/x", "b/y"], "seed": [0, 1],
    }  # fmt: skip
    sets = draw(st.fixed_dictionaries({case: st.sets(st.sampled_from(sorted(values)), max_size=3) for case in "AB"}))
    some = st.fixed_dictionaries({}, optional={field: st.sampled_from(found) for field, found in values.items()})
    found = draw(st.lists(st.tuples(st.sampled_from([None, "A", "B"]), some), min_size=1, max_size=6))
    return {
        str(i): {"case": case, "case_sets": sorted(sets[case]) if case else [], "changes": changed}
        for i, (case, changed) in enumerate(found)
    }


@settings(deadline=None, max_examples=1000)
@given(any_runs())
def test_runs_are_averaged_if_and_only_if_they_differ_in_nothing_but_the_seed(entries: dict[str, Any]) -> None:
    def changed(run: str) -> dict[str, Any]:
        own = {field: getattr(DIGITS, field) for field in entries[run]["changes"]}
        return {x: value for x, value in entries[run]["changes"].items() if value != own[x] and x != "seed"}

    found = names_of(entries, DIGITS, frozenset({"precision"}))
    for one, other in itertools.combinations(entries, 2):
        same = changed(one) == changed(other)
        assert (found[one]["group"] == found[other]["group"]) == same, found
        if found[one]["name"] == found[other]["name"]:
            assert same, found
            assert entries[one]["changes"].get("seed", 0) == entries[other]["changes"].get("seed", 0), found


def test_long_names_are_whole() -> None:
    values = {name: (getattr(DIGITS, name), 0.125) for name in ("alpha", "gamma", "learning_rate", "weight_decay")}
    cases: list[Any] = [("a" * 60, {"divergence": "kl"}), ("b" * 60, {"divergence": "js"})]
    values |= {"warmup_epochs": (0.5, 0.25), "epochs": (2, 3)}
    names = [name for name, _ in shown((values, cases))]
    assert len({*names}) == len(names) == 128
    assert all(name.count("=") == 6 for name in names)
    assert max(len(name) for name in names) > 120 >= max(len(cell.name) for cell in cells(DIGITS, values, cases))


def test_a_finished_run_keeps_its_case_and_how_it_was_trained(tmp_path: Path) -> None:
    """Whatever a later call says of its machine; one without cases doesn't take their names away."""
    folder, cases = tmp_path / "s", [("Cubic", {"divergence": "tsallis"}), SIMCLR]
    machine = frozenset({"precision"})

    def call(values: dict[str, tuple[Any, ...]], cases: list[Any]) -> None:
        found = cells(DIGITS, values, cases)
        assert Sweep("digits", DIGITS, found, folder, program=FAKE, machine=machine)(local()) == 0

    call({"precision": ("bf16",), "epochs": (2,)}, cases)
    call({"precision": ("32",), "epochs": (2,), "divergence": ("tsallis",), "seed": (0, 1)}, [])
    runs = record_of(folder)["runs"]
    assert {place: run["name"] for place, run in runs.items()} == {
        "Cubic": "Cubic,precision=bf16,seed=0",
        "SimCLR": "SimCLR,precision=bf16,seed=0",
        "seed=1": "objective=fmicl,divergence=tsallis,precision=32,seed=1",
    }
    assert runs["Cubic"]["changes"]["precision"] == "bf16"


def test_runs_of_the_same_settings_are_one_group_whatever_their_cases() -> None:
    assert shown(({"objective": ("infonce",)}, []), ({"seed": (1,)}, [SIMCLR])) == [
        ("SimCLR,seed=0", "SimCLR"), ("SimCLR,seed=1", "SimCLR"),
    ]  # fmt: skip
    assert shown(({}, [("A", {"seed": 1}), ("B", {"seed": 2})])) == [("A", "run"), ("B", "run")]


def test_folders_of_data_go_by_their_last_part_where_that_tells_them_apart() -> None:
    def groups(*paths: str) -> list[str]:
        return [group for _, group in shown(*(({"data_dir": (Path(path),)}, []) for path in paths), recipe=IMAGES)]

    assert groups("/a/cats", "/a/dogs") == ["data_dir=cats", "data_dir=dogs"]
    one, other = groups("/a/cats", "/b/cats")
    assert one != other
    assert one.startswith("data_dir=_a_cats-")
