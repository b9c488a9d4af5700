"""Archived runs: complete, without paths of the machine, and the page of the reproduction agrees with them."""

from __future__ import annotations

import fnmatch
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fmicl.config import Settings, recipe
from fmicl.reproduce import archive
from fmicl.runs.folder import Run

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "experiments"))

import record
import reproduction

ROOT = Path(__file__).resolve().parents[2]


def run_folder(path: Path, name: str = "cifar10", commit: str | None = "abc123", **changes: Any) -> Path:
    """A folder as a run leaves it."""
    results = changes.pop("results", {"knn": 84.0, "linear": 88.0, "split": "test"})
    images = {"data_dir": "/home/someone/cifar", "epochs": 2} if name != "wikipedia" else {"epochs": 1}
    settings = recipe(name, **images | changes)
    path.mkdir(parents=True)
    saved = {
        "recipe": name,
        "task": settings.task.name,
        "hash": settings.hash,
        "settings": settings.to_json(),
        "data": {"samples": 3, "digest": "f00"},
        "command": ["python", "-m", "fmicl", "train", name, "--data-dir", "/home/someone/cifar", "--out=/tmp/x/y"],
        "versions": {"torch": "2.11.0"},
        "device": "cuda:0 (NVIDIA H200)",
        "commit": commit,
        "seed": settings.seed,
        "started": "2026-11-15T05:03:49+00:00",
    }
    (path / "settings.json").write_text(json.dumps(saved))
    (path / "results.json").write_text(json.dumps(results))
    (path / "metrics.csv").write_text("epoch,loss,knn\n1,2.5,\n2,nan,84.0\n")
    return path


def make_record(run: Path, commit: str | None = None) -> dict[str, Any]:
    return archive.make_record(Run(run), commit)


def differences(told: dict[str, Any]) -> dict[str, Any]:
    return archive.outcome_of(told, Path()).differences


def filed(told: dict[str, Any]) -> Path:
    return archive.record_path(archive.outcome_of(told, Path()))


def text_record(**changes: Any) -> dict[str, Any]:
    results = changes.pop("results", {"STS12": 60.0, "STSB": 70.0, "SICK-R": 65.0, "avg": 64.0, "step": 125})
    settings = recipe("wikipedia", **{"model": "warm", **changes})
    about = {"recipe": "wikipedia", "task": "text", "hash": settings.hash, "settings": settings.to_json()}
    return {**about, "results": results, "seed": settings.seed}


START = {"task": "warm_start", "settings": {}, "seed": 0}


def put(folder: Path, **records: dict[str, Any]) -> None:
    for name, told in records.items():
        (folder / f"{name}.json").write_text(json.dumps(told))


# ---- the archive


def test_a_record_has_everything_of_a_run_and_no_path_of_the_machine(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", seed=3, divergence="js")
    assert record.main([str(run), "--into", str(tmp_path / "results")]) == 0
    expected = recipe("cifar10", epochs=2, seed=3, divergence="js").hash
    file = tmp_path / "results" / "cifar10" / f"js-2e-s3-{expected}.json"
    text = file.read_text()
    told = json.loads(text)
    assert list(told) == [
        "recipe", "task", "hash", "settings", "data", "command", "versions", "device", "commit", "seed", "started",
        "results", "metrics",
    ]  # fmt: skip
    assert told["settings"]["data_dir"] is None
    assert told["command"] == "python -m fmicl train cifar10 --data-dir DIR --out=RUN"
    assert "/home" not in text
    assert "/tmp" not in text
    assert (told["task"], told["seed"], told["results"]["knn"], told["hash"]) == ("images", 3, 84.0, expected)
    assert told["metrics"] == [{"epoch": 1, "loss": 2.5, "knn": None}, {"epoch": 2, "loss": None, "knn": 84.0}]
    assert '  {"epoch": 2.0, "loss": null, "knn": 84.0}\n' in text  # a line for each epoch
    assert '"crop_scale": [0.2, 1.0],\n' in text


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("--cache-dir /home/u/c", "--cache-dir PATH"),
        ("--cache-dir=/home/u/c/ --seed 0", "--cache-dir=PATH --seed 0"),
        ("--sts ~/sts --data /home/u/wiki.txt", "--sts PATH --data wiki.txt"),
        ("--model /home/u/warm --divergence kl", "--model warm --divergence kl"),
        ("--model a/hub-name --sts sts", "--model a/hub-name --sts sts"),
    ],
)
def test_a_command_on_record_names_no_folder_of_the_machine(tmp_path: Path, words: str, shown: str) -> None:
    run = run_folder(tmp_path / "run")
    told = json.loads((run / "settings.json").read_text())
    told["command"] = ["fmicl", "train", "cifar10", *words.split()]
    (run / "settings.json").write_text(json.dumps(told))
    assert make_record(run)["command"] == f"fmicl train cifar10 {shown}"


def test_what_differs_from_the_recipe_is_in_the_name(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run", blur=0.5, alpha=10.0, monitor_every=1, workers=0, queue=128)
    told = make_record(run)
    assert differences(told) == {"blur": 0.5, "alpha": 10.0}
    assert filed(told) == Path("cifar10", f"kl-2e-alpha=10-blur=0.5-s0-{told['hash']}.json")
    infonce = make_record(run_folder(tmp_path / "other", objective="infonce", alpha=10.0))
    assert filed(infonce).name == f"infonce-2e-s0-{infonce['hash']}.json"  # alpha has no effect there
    many: dict[str, Any] = {
        "method": "moco",
        "symmetric": True,
        "queue": 8192,
        "dim": 128,
        "gamma": 2.5,
        "learning_rate": 0.3,
    }
    long = filed(make_record(run_folder(tmp_path / "long", "digits", shift="optimal", **many)))
    assert long.parent == Path("digits")
    assert long.stem.startswith("moco-kl-2e-queue=8192-symmetric-")
    assert len(long.stem) <= 60


@pytest.mark.parametrize(
    ("changes", "differs"),
    [
        ({"method": "moco", "key_statistics": "past"}, {}),
        ({"method": "moco", "key_statistics": "batch"}, {"key_statistics": "batch"}),
        ({"method": "moco", "symmetric": False, "key_statistics": "batch"}, {"symmetric": False}),
        ({"method": "moco", "symmetric": False, "key_statistics": "past"},
         {"symmetric": False, "key_statistics": "past"}),
        ({"rotation_weight": 0.4, "rotation_size": 16}, {"rotation_weight": 0.4}),
        ({"rotation_weight": 0.4, "rotation_size": 20}, {"rotation_weight": 0.4, "rotation_size": 20}),
    ],
)  # fmt: skip
def test_a_value_that_auto_would_choose_is_no_difference(
    changes: dict[str, Any], differs: dict[str, Any], tmp_path: Path
) -> None:
    assert differences(make_record(run_folder(tmp_path / "run", **changes))) == differs


@pytest.mark.parametrize(
    ("stsb_dev", "sts_every", "differs"),
    [
        ("a digest", 125, {}),
        ("a digest", 50, {"sts_every": 50}),
        (None, 125, {"exported": "last step"}),
        (None, 50, {"exported": "last step"}),
    ],
)
def test_the_choice_of_the_text_encoder_tells_runs_apart(
    stsb_dev: str | None, sts_every: int, differs: dict[str, Any]
) -> None:
    """How often STS-B dev is evaluated matters only if it chooses the encoder."""
    told = text_record(model="bert-base-uncased", sts_every=sts_every)
    assert differences({**told, "data": {"samples": 3, "stsb_dev": stsb_dev}}) == differs


def test_a_record_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    into = ["--into", str(tmp_path / "results")]
    one, other = run_folder(tmp_path / "one"), run_folder(tmp_path / "other", results={"knn": 1.0})
    assert record.main([str(one), *into]) == 0
    assert record.main([str(one), *into]) == 0
    assert "(exists)" in capsys.readouterr().out
    (file,) = (tmp_path / "results").rglob("*.json")
    before = file.read_bytes()
    assert record.main([str(other), *into]) == 2
    assert "not overwritten" in capsys.readouterr().err
    assert [path.read_bytes() for path in (tmp_path / "results").rglob("*.json")] == [before]


def test_a_run_is_not_archived_again_under_another_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The page can't be made of both."""
    into = tmp_path / "results"
    assert record.main([str(run_folder(tmp_path / "one", "digits")), "--into", str(into)]) == 0
    (file,) = into.rglob("*.json")
    file.rename(into / "digits" / "mine.json")
    again = run_folder(tmp_path / "again", "digits", results={"knn": 83.0}, data_dir="/elsewhere")
    assert record.main([str(again), "--into", str(into)]) == 2
    assert "mine.json" in capsys.readouterr().err
    assert [path.name for path in into.rglob("*.json")] == ["mine.json"]
    for changes in ({"seed": 1}, {"alpha": 3.0}):
        other = run_folder(tmp_path / str(changes), "digits", **changes)
        assert record.main([str(other), "--into", str(into)]) == 0


def test_all_finished_runs_of_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        run_folder(tmp_path / "sweep" / f"seed={seed}", seed=seed)
    states = ("finished", "finished", "failed")
    runs = [{"folder": f"seed={seed}", "state": state} for seed, state in enumerate(states)]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": runs}))
    assert record.main([str(tmp_path / "sweep"), "--into", str(tmp_path / "results")]) == 0
    names = sorted(path.name.rpartition("-")[0] for path in (tmp_path / "results" / "cifar10").iterdir())
    assert names == ["kl-2e-s0", "kl-2e-s1"]
    (tmp_path / "sweep" / "sweep.json").write_text(json.dumps({"runs": runs[2:]}))
    assert record.main([str(tmp_path / "sweep"), "--into", str(tmp_path / "results")]) == 2
    assert "no run of the sweep" in capsys.readouterr().err


def test_results_on_other_data_are_not_the_runs_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"knn": 84.0, "split": "test", "data_dir": "/home/someone/moved"}
    assert make_record(run_folder(tmp_path / "moved", results=results))["results"] == {
        "knn": 84.0,
        "split": "test",
    }
    other = run_folder(tmp_path / "other", results={**results, "data_changed": "there are 5 now"})
    assert record.main([str(other), "--into", str(tmp_path / "results")]) == 2
    assert "there are 5 now" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()


def test_the_commit_is_the_runs_own_or_the_one_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unknown = run_folder(tmp_path / "unknown", commit=None)
    assert make_record(unknown, "9ca1ca6")["commit"] == "9ca1ca6"
    assert make_record(unknown)["commit"] is None
    known = run_folder(tmp_path / "known", commit="abc123")
    assert make_record(known, "abc")["commit"] == "abc123"
    assert record.main([str(known), "--commit", "9ca1ca6"]) == 2
    assert "was made at commit abc123, not 9ca1ca6" in capsys.readouterr().err
    (known / "results.json").unlink()
    assert record.main([str(known)]) == 2
    assert "has no results.json" in capsys.readouterr().err


def test_runs_on_sentences_and_their_warm_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = {"STSB": 70.0, "avg": 64.0, "pairs": {"STSB": 1379}}
    run = run_folder(tmp_path / "run", "wikipedia", results=results, objective="infonce", model="/home/x/warm")
    made = make_record(run)
    assert filed(made) == Path("wikipedia", f"infonce-1e-s0-{made['hash']}.json")
    assert made["settings"]["model"] == "warm"
    assert made["results"]["STSB"] == 70.0

    (tmp_path / "warm").mkdir()
    about = {
        "command": "python experiments/warm_start.py train /home/x/wiki.txt M",
        "settings": {"layers": 6, "seed": 1},
    }
    (tmp_path / "warm" / "warm_start.json").write_text(json.dumps(about))
    (tmp_path / "scores.json").write_text(json.dumps({"model": "/home/x/warm", "pooling": "cls", "avg": 40.0}))
    (tmp_path / "unsaid.json").write_text(json.dumps({"model": "/home/x/warm", "avg": 40.0}))
    command = [str(tmp_path / "warm"), "--into", str(tmp_path / "results")]
    assert record.main(command) == 2
    assert "--scores" in capsys.readouterr().err
    assert record.main([*command, "--scores", str(tmp_path / "unsaid.json")]) == 2
    assert "pooling" in capsys.readouterr().err
    (tmp_path / "others.json").write_text(json.dumps({"model": "/home/x/cold", "pooling": "cls", "avg": 40.0}))
    assert record.main([*command, "--scores", str(tmp_path / "others.json")]) == 2
    assert "cold" in capsys.readouterr().err
    for runs in ([str(run)], [str(run), str(tmp_path / "warm")]):  # of a run the scores are its own
        assert record.main([*runs, "--into", str(tmp_path / "r"), "--scores", str(tmp_path / "scores.json")]) == 2
        assert "--scores" in capsys.readouterr().err
    assert record.main([*command, "--scores", str(tmp_path / "scores.json"), "--commit", "abc1234"]) == 0
    start = json.loads((tmp_path / "results" / "wikipedia" / "warm-start-s1.json").read_text())
    assert (start["results"], start["seed"]) == ({"pooling": "cls", "avg": 40.0}, 1)
    assert start["commit"] == "abc1234"
    assert start["command"] == "python experiments/warm_start.py train wiki.txt M"


# ---- the page


def rows_of(table: str) -> dict[str, list[str]]:
    lines = [[part.strip() for part in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {line[0]: line[1:] for line in lines}


def test_cifar10_is_the_mean_over_seeds_of_runs_with_the_recipes_settings(tmp_path: Path) -> None:
    for i, (seed, knn) in enumerate(((0, 84.0), (1, 85.0), (2, 86.0))):
        told = make_record(run_folder(tmp_path / f"{i}", seed=seed, epochs=200, results={"knn": knn, "linear": 88.0}))
        put(tmp_path, **{f"kl{seed}": told})
    put(tmp_path, moco=make_record(run_folder(tmp_path / "m", method="moco", objective="infonce", epochs=800)))
    put(tmp_path, other=make_record(run_folder(tmp_path / "o", alpha=10.0, epochs=200, results={"knn": 50.0})))
    put(tmp_path, mixed=make_record(run_folder(tmp_path / "x", method="moco", epochs=200)))
    put(tmp_path, benchmark={"cells": []})
    made = reproduction.tables(tmp_path)
    rows = rows_of(made["cifar10"])
    column = list(reproduction.COLUMNS).index
    assert rows["paper, linear, 800 epochs"][:4] == ["89.71", "90.30", "90.41", "90.61"]
    assert rows["paper, k-NN, 200 epochs"][column("KL")] == "84.19"
    ours = rows["**ours, k-NN, 200 epochs**"]
    links = "[0](../results/kl0.json) [1](../results/kl1.json) [2](../results/kl2.json)"
    assert ours[column("KL")] == "85.00 ± 1.00"
    assert set(ours) == {ours[column("KL")], ""}  # no number without a run
    assert rows["**ours, runs by seed, 200 epochs**"] == [links if text else "" for text in ours]
    assert rows["**ours, linear, 800 epochs**"][column("MoCo")] == "88.00"
    assert rows["**ours, runs by seed, 800 epochs**"][column("MoCo")] == "[0](../results/moco.json)"
    assert list(rows)[5] == "**ours, k-NN, 200 epochs**"  # before those of 800
    assert "| cifar10 | KL | `alpha 10.0` | 200 | 50.00 | | [0](../results/other.json) |" in made["others"]
    assert "| cifar10 | KL by moco | | 200 | 84.00 | 88.00 | [0](../results/mixed.json) |" in made["others"]


def test_geometry_is_of_the_same_runs_and_of_their_last_epochs(tmp_path: Path) -> None:
    ends = {"knn": 84.0, "linear": 88.0, "alignment": 0.25, "uniformity": -3.8, "effective_rank": 90.0}
    for seed, late in ((0, 0.2), (1, 0.4)):
        told = make_record(run_folder(tmp_path / f"{seed}", seed=seed, epochs=200, results=ends))
        rows = [{"epoch": e, "alignment": 1.0 if e <= 180 else late} for e in range(1, 201)]
        put(tmp_path, **{f"kl{seed}": {**told, "metrics": rows}})
    put(tmp_path, short=make_record(run_folder(tmp_path / "s", divergence="js", epochs=10, results=ends)))
    put(tmp_path, other=make_record(run_folder(tmp_path / "o", alpha=10.0, epochs=200, results=ends)))
    shown = reproduction.tables(tmp_path)["geometry"].splitlines()[2:]
    spread = "0.25 ± 0.00 | -3.80 ± 0.00 | 90.00 ± 0.00"
    assert shown == [
        "| JS | 10 | | 0.25 | -3.80 | 90.00 | [0](../results/short.json) |",  # not 20 epochs to average over
        f"| KL | 200 | 0.30 ± 0.14 | {spread} | [0](../results/kl0.json) [1](../results/kl1.json) |",
    ]


def test_a_seed_counts_once(tmp_path: Path) -> None:
    told = make_record(run_folder(tmp_path / "run"))
    put(tmp_path, a=told, b=told)
    with pytest.raises(ValueError, match=r"a\.json and .*b\.json are the same run: seed 0 counts once"):
        reproduction.tables(tmp_path)


def test_sentences_are_beside_the_papers_bert_and_the_warm_start(tmp_path: Path) -> None:
    assert "No run of ours is archived yet." in reproduction.tables(tmp_path)["text"]
    put(
        tmp_path,
        kl0=text_record(),
        kl1=text_record(seed=1, results={"avg": 66.0, "STSB": 70.0}),
        simcse=text_record(objective="infonce"),
        **{"warm-start-s0": {**START, "results": {"avg": 40.0, "pooling": "cls"}}},
    )
    shown = reproduction.tables(tmp_path)["text"]
    rows = rows_of(shown)
    links = "[0](../results/kl0.json) [1](../results/kl1.json)"
    assert rows["KL"][-3:] == ["65.00 ± 1.41", "78.02", links]
    assert rows["KL"][0] == "60.00 ([0](../results/kl0.json))"  # of one of the two
    assert rows["warm start"][-3:] == ["40.00", "", "[0](../results/warm-start-s0.json)"]
    assert rows["SimCSE"][-3:] == ["64.00", "77.40", "[0](../results/simcse.json)"]
    assert rows["VLC"] == [*[""] * 8, "55.07", ""]
    assert "Each run of ours above is one epoch of the recipe `wikipedia`, with `model warm`." in shown
    put(tmp_path, simcse=text_record(objective="infonce", results={"STSB": 1.0, "avg": 2.0, "incomplete": ["STS12"]}))
    row = rows_of(reproduction.tables(tmp_path)["text"])["SimCSE"]
    assert row[5] == "1.00"
    assert row[7] == ""  # a part of the pairs is not the task


def test_runs_on_sentences_without_a_score_are_not_what_most_runs_are(tmp_path: Path) -> None:
    none = {"step": 125, "stsb_dev": None, "chosen_by": "last step"}
    put(tmp_path, kl=text_record(), a=text_record(epochs=30, results=none), b=text_record(epochs=30, results=none))
    shown = reproduction.tables(tmp_path)["text"]
    assert "one epoch of the recipe" in shown
    assert "30 epochs" not in shown


@pytest.mark.parametrize(
    ("model", "said"),
    [("MODEL", "`wikipedia`, from the warm start."), ("roberta-base", "`wikipedia`, with `model roberta-base`.")],
)
def test_a_warm_starts_folder_is_said_in_words_and_other_models_by_name(tmp_path: Path, model: str, said: str) -> None:
    command = "python experiments/warm_start.py train wiki.txt MODEL --vocabulary roberta-base"
    start = {**START, "command": command, "results": {"avg": 40.0}}
    put(tmp_path, **{"kl": text_record(model=model), "warm-start-s0": start})
    assert f"Each run of ours above is one epoch of the recipe {said}" in reproduction.tables(tmp_path)["text"]


def test_alphas_and_other_settings_of_sentences_have_their_own_tables(tmp_path: Path) -> None:
    put(tmp_path, kl=text_record(), js=text_record(divergence="js"), one=text_record(alpha=1.0, results={"avg": 50.0}))
    put(tmp_path, long=text_record(epochs=3, results={"avg": 67.0}), lr=text_record(learning_rate=1e-4))
    parts = [part for part in reproduction.tables(tmp_path)["text"].split("\n\n") if part.startswith("|")]
    assert len(parts) == 3
    assert rows_of(parts[0])["KL"][-3:] == ["64.00", "78.02", "[0](../results/kl.json)"]
    assert list(rows_of(parts[1])) == ["KL, alpha", "---", "1", "409,600"]
    assert rows_of(parts[1])["1"][-2:] == ["50.00", "[0](../results/one.json)"]
    others = {"KL, 3 epochs, with `model warm`", "KL, one epoch, with `learning_rate 0.0001`, `model warm`"}
    assert set(rows_of(parts[2])) == {"other settings", "---", *others}


def test_development_scores_in_training_are_shown_where_they_are_on_record(tmp_path: Path) -> None:
    looks = [{"step": step, "stsb_dev": score} for step, score in ((1, 70.0), (5, 66.0), (25, 60.0), (125, 50.0))]
    kl = text_record(results={"avg": 64.0, "step": 1, "stsb_dev": 70.0})
    put(tmp_path, kl={**kl, "metrics": [{"step": 1, "loss": 0.5}, *looks]}, js=text_record(divergence="js"))
    (shown,) = [part for part in reproduction.tables(tmp_path)["text"].split("\n\n") if "STS-B dev" in part]
    numbers = [f"{score:.2f}" for score in (70, 70, 66, 60, 50)]
    assert rows_of(shown)["KL"] == ["1", *numbers, "[0](../results/kl.json)"]
    assert rows_of(shown)["JS"] == [""] * 7


def test_relatives_are_runs_of_200_epochs_on_test_images(tmp_path: Path) -> None:
    held_out = {"knn": 70.0, "linear": 71.0, "split": "validation"}
    runs: dict[str, dict[str, Any]] = {
        "byol": {"method": "byol", "epochs": 200, "batch_size": 256},
        "trial": {"method": "byol", "epochs": 200, "results": held_out},
        "short": {"objective": "dcl", "epochs": 100},
        "kl": {"epochs": 200},
    }
    for name, changes in runs.items():
        put(tmp_path, **{name: make_record(run_folder(tmp_path / "runs" / name, **changes))})
    made = reproduction.tables(tmp_path)
    assert "| BYOL | `batch_size 256` | 84.00 | 88.00 | | [0](../results/byol.json) |" in made["relatives"]
    assert "| DCL | | | | | |" in made["relatives"]
    assert "| KL | | 84.00 | 88.00 | | [0](../results/kl.json) |" in made["relatives"]
    assert "byol.json" not in made["others"]
    assert "trial.json" in made["others"]
    assert "short.json" in made["others"]


def test_words_around_the_markers_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "page.md"
    words = "# Mine\n\n<!-- cifar10 -->\nold\n<!-- /cifar10 -->\nbetween\n<!-- others -->\n<!-- /others -->\n"
    words += "<!-- relatives -->\n<!-- /relatives -->\n"
    path.write_text(words + "<!-- geometry -->\n<!-- /geometry -->\n<!-- text -->\n<!-- /text -->\nthe end\n")
    options = ["--results", str(tmp_path), "--page", str(path)]
    assert reproduction.main([*options, "--check"]) == 1
    assert "out of date" in capsys.readouterr().err
    assert reproduction.main(options) == 0
    assert reproduction.main([*options, "--check"]) == 0
    after = path.read_text()
    assert after.startswith("# Mine\n\n<!-- cifar10 -->\n| CIFAR-10")
    assert "old" not in after
    assert "\n<!-- /cifar10 -->\nbetween\n<!-- others -->\nNo run is archived yet.\n<!-- /others -->\n" in after
    assert after.endswith("<!-- /text -->\nthe end\n")
    path.write_text("# no markers")
    assert reproduction.main(options) == 2
    assert "<!-- cifar10 -->" in capsys.readouterr().err
    assert path.read_text() == "# no markers"


def test_archived_runs_have_settings_of_this_version_and_their_names() -> None:
    archived = {file: json.loads(file.read_text()) for file in (ROOT / "results").rglob("*.json")}
    keys = {"recipe", "task", "results"}
    runs = {file: told for file, told in archived.items() if isinstance(told, dict) and keys <= told.keys()}
    assert len(runs) > 80
    assert {run.source for run in archive.read_runs(ROOT / "results")} == runs.keys()
    for file, told in runs.items():
        settings = Settings.from_json(told["recipe"], told["settings"])
        assert (settings.hash, settings.task.name) == (told["hash"], told["task"]), file
        assert settings.to_json().items() >= told["settings"].items(), file  # a later version may have more options
        assert ROOT / "results" / filed(told) == file


def test_the_index_names_each_file_once() -> None:
    rows = re.findall(r"^\| (`[^|]+) \|", (ROOT / "results" / "README.md").read_text(), re.MULTILINE)
    patterns = [pattern for row in rows for pattern in re.findall("`([^`]+)`", row)]
    files = [path for path in (ROOT / "results").glob("*/*") if path.is_file()]
    for file in files:
        name = file.relative_to(ROOT / "results").as_posix()
        assert sum(fnmatch.fnmatch(name, pattern) for pattern in patterns) == 1, name
    for pattern in patterns:
        assert list((ROOT / "results").glob(pattern)), pattern


def test_the_page_agrees_with_the_archived_runs() -> None:
    assert reproduction.main(["--check"]) == 0, "run python experiments/reproduction.py"


def test_what_the_page_says_of_our_choices_is_so() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text()
    r = recipe("cifar10")
    assert (r.crop_scale, r.jitter, r.grey, r.blur) == ((0.2, 1.0), 0.8, 0.2, 0.0)
    found = (r.weight_decay, r.warmup_epochs, r.hidden, r.dim, r.symmetric, r.queue, r.temperature)
    assert found == (5e-4, 10, 2048, 512, True, 32768, 0.2)
    assert (r.batch_size, r.learning_rate, r.alpha, r.gamma, r.mu, r.k, r.epochs) == (512, 0.1, 40, 1, 1, 200, 800)
    for words in ("[0.2, 1]", "probability 0.8", "grey with probability 0.2", "| 5e-4,", "warm-up of 10 epochs",
                  "512 - 2048 - 2048 - 512", "queue of 32768", "temperature 0.2", "alpha = 40", "k = 200"):  # fmt: skip
        assert words in page, words
