"""Grids: values and cases from the command line, the cells of a grid, and what is refused before a run starts."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.cli import train
from fmicl.cli.sweep import parse, parse_case
from fmicl.config import RECIPES, recipe
from sweeps import grid


def changes(*words: str) -> list[dict[str, Any]]:
    cells, _ = parse(words[0], words[1:])
    return [cell.settings.changes for cell in cells]


def test_every_recipe_is_a_grid_of_one_cell() -> None:
    for entry in RECIPES:
        cells, _ = parse(entry.name, [])
        assert [cell.settings for cell in cells] == [recipe(entry.name)]


def test_every_option_takes_several_values() -> None:
    options = "--divergence pearson js --seed 0 1 2 --blur 0 0.5 --crop-scale 0.2 1 0.4 1 --mu normalised 2 --download "
    options += "--shift None optimal --scale-learning-rate True False --mean 0.5 --std 0.5 --depth None 3"
    cells, _ = parse("cifar10", options.split())
    assert len(cells) == 2 * 3 * 2 * 2 * 2 * 2 * 2 * 2
    assert len({cell.folder for cell in cells}) == len({cell.settings.hash for cell in cells}) == len(cells)
    assert len({cell.label for cell in cells}) == len(cells)
    for name, values in {
        "divergence": {"pearson", "js"}, "seed": {0, 1, 2}, "blur": {0.0, 0.5}, "mu": {"normalised", 2.0},
        "crop_scale": {(0.2, 1.0), (0.4, 1.0)}, "shift": {None, "optimal"}, "download": {True}, "depth": {None, 3},
        "scale_learning_rate": {True, False}, "mean": {(0.5,)}, "std": {(0.5,)},
    }.items():  # fmt: skip
        assert {getattr(cell.settings, name) for cell in cells} == values, name
    assert {cell.settings.seed for cell in cells[: len(cells) // 3]} == {0}, "one seed after the other"


def test_booleans_have_the_flags_of_train() -> None:
    assert changes("digits", "--no-baselines", "--no_sync_batchnorm") == [{"baselines": False, "sync_batchnorm": False}]
    assert changes("digits", "--baselines", "--download") == [{"download": True}]
    assert changes("digits", "--no-baselines", "--baselines", "True", "False") == [{}, {"baselines": False}]
    with pytest.raises(SystemExit):
        changes("digits", "--no-seed")


def test_a_value_that_an_option_does_not_take_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        changes("digits", "--divergence", "kl", "kll")
    assert "kll" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_a_case_takes_a_boolean_in_any_spelling(word: str) -> None:
    assert parse_case(["Both", f"symmetric={word}"], recipe("cifar10")) == ("Both", {"symmetric": True})
    assert parse_case(["One", "symmetric=false"], recipe("cifar10")) == ("One", {"symmetric": False})


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("digits", ["--help"])
    text = capsys.readouterr().out
    for each in recipe("digits").schema.options.values():
        assert each.flag in text
    assert all(flag in text for flag in ("--case", "--parallel", "--out", "--launcher", "--slurm"))


@pytest.mark.parametrize(
    "changed",
    [
        {
            "data_dir": Path("a b"), "download": True, "checksum": False, "second_blur": 0.5, "depth": 3,
            "mu": "normalised", "shift": "optimal", "baselines": False, "precision": "32", "learning_rate": 1e-05,
            "encoder_momentum": 0.9, "seed": 7, "crop_scale": (0.1, 0.9), "mean": (0.1, 0.2, 0.3),
            "std": (1.0, 1.0, 1.0),
        },
        {"data_dir": Path("a b"), "checksum": False, "learning_rate": 1e-05, "mean": (0.1,)},
    ],
)  # fmt: skip
def test_a_run_gets_exactly_the_settings_of_its_cell(changed: dict[str, Any]) -> None:
    """The command line of each run is read back as the same settings."""
    values: dict[str, Any] = {name: (value,) for name, value in changed.items()}
    (cell,) = grid(**values)
    assert train.parse("digits", cell.settings.arguments())[0] == cell.settings


def test_labels_are_readable_and_safe_file_names() -> None:
    def labels(cases: Any = (), **values: Any) -> list[str]:
        return [cell.label for cell in grid(cases, **values)]

    assert labels() == ["seed0"]
    assert labels(epochs=(2,)) == ["seed0"]
    assert labels(alpha=(20.0, 0.5), divergence=("js",)) == ["alpha20-seed0", "alpha0.5-seed0"]
    assert labels(method=("simclr", "moco"), seed=(1,)) == ["simclr-seed1", "moco-seed1"]
    assert labels(baselines=(True, False)) == ["baselines-seed0", "no_baselines-seed0"]
    assert labels(precision=("32", "bf16")) == ["precision32-seed0", "bf16-seed0"]
    assert labels(crop_scale=((0.2, 1.0), (0.4, 1.0))) == ["crop_scale0.2_1-seed0", "crop_scale0.4_1-seed0"]
    assert labels(data_dir=(Path("/a/cats"), Path("b/dogs"))) == ["cats-seed0", "dogs-seed0"]
    assert labels([("f = JS / 2", {"divergence": "js"})], seed=(3,)) == ["f_JS_2-seed3"]
    assert labels([("../..", {"divergence": "js"})]) == ["seed0"]


def test_long_and_equal_labels_are_distinct_folders() -> None:
    values: Any = dict.fromkeys(("alpha", "gamma", "learning_rate", "weight_decay", "warmup_epochs"), (1.5, 0.125))
    cells = grid([("a" * 60, {"divergence": "kl"}), ("b" * 60, {"divergence": "js"})], **values)
    assert len({cell.folder for cell in cells}) == len(cells) == 64
    assert max(len(cell.folder) for cell in cells) < 100
    assert all(re.fullmatch(r"[\w.+-]+-seed0-[0-9a-f]{8}", cell.folder) for cell in cells)
    one, other = grid([("A/B", {"divergence": "kl"}), ("A:B", {"divergence": "js"})])
    assert one.label == other.label
    assert one.folder != other.folder


@pytest.mark.parametrize(
    ("options", "fact"),
    [
        ("--epochs 2 0", "epochs must be above 0"),
        ("--flip 0.5 2", "flip must be at least 0 and at most 1"),
        ("--seed 0 1 0", "--seed has the value 0 twice"),
        ("--divergence", "--divergence needs at least one value"),
        ("--objective fmicl infonce --divergence kl js", "no effect on the results: divergence"),
        ("--workers 0 1", "no effect on the results: workers"),
        ("--device cpu cuda", "--device has 2 values"),
        ("--parallel 0", "parallel must be positive"),
        ("--slurm partition=x", "--launcher slurm"),
        ("--case SimCLR", "a case is NAME OPTION=VALUE"),
        ("--case objective=infonce x=1", "a case is NAME OPTION=VALUE"),
        ("--case SimCLR infonce", "'infonce' is not OPTION=VALUE"),
        ("--case SimCLR objektive=infonce", "did you mean 'objective'"),
        ("--case SimCLR objective=info", "objective can't be 'info'"),
        ("--case Both method=moco symmetric=yes", "symmetric can't be 'yes'; it is True or False"),
        ("--case A device=cpu", "case A sets device"),
        ("--case A seed=1 --case A seed=2", "two cases A"),
        ("--case A divergence=js --divergence kl js", "divergence is set by case A and"),
        ("--case A divergence=js --case B divergence=js", "A-seed0 and B-seed0 would train the same thing"),
        ("--case A divergence=js divergence=kl", "sets divergence twice"),
        ("images --data-dir /nowhere", "there is no folder /nowhere"),
        ("--batch-size 256 --devices 3", "batch_size is 256 over 3"),
        ("--method moco --queue 4096 10", "queue (10)"),
        ("cifar10 --seed 0 1", "--data-dir"),
        ("wikipedia --seed 0 1", "--data FILE"),
        ("wikipedia --data FILE --model BERT --length 16 64", "length is 64, but BERT takes at most 16"),
        ("wikipedia --data FILE --model BERT --length 8 --encode-length 12 14", "BERT takes at most 12"),
        ("--encoder resnt", "'resnt'; did you mean"),
        ("--encoder small_conv vit_small_patch16_224", "images of 8 x 8 pixels"),
        ("wikipedia --data FILE --model ./none --seed 0 1", "folder ./none"),
        ("--out FILE", "is a file"),
        ("--out FULL", "is not a sweep"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    options: str, fact: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").write_text("")
    (tmp_path / "FULL").mkdir()
    (tmp_path / "FULL" / "thesis.tex").write_text("mine")
    (tmp_path / "BERT").mkdir()
    (tmp_path / "BERT" / "config.json").write_text('{"max_position_embeddings": 16}')
    if "encode-length" in options:
        (tmp_path / "BERT" / "tokenizer_config.json").write_text('{"model_max_length": 12}')
    before = sorted(tmp_path.rglob("*"))
    name = [] if options.startswith(("cifar10", "images", "wikipedia")) else ["digits"]
    assert cli.main(["sweep", *name, *options.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fmicl: error: ")
    assert fact in error
    assert sorted(tmp_path.rglob("*")) == before
