"""The grid of a sweep: which settings may have several values, what each run is told, and what is refused."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from fmicl.cli import main as cli
from fmicl.config.fields import arguments, leaves
from fmicl.config.recipes import RECIPES, Recipe
from fmicl.sweep.grid import cells, grid_of, parse_case, values_of
from sweeps import DIGITS


def parse(*words: str) -> Any:
    return cli._parse(words)


def test_every_field_of_every_recipe_may_have_several_values() -> None:
    for name, entry in RECIPES.items():
        command = parse("sweep", name)
        assert values_of(command.grid, entry.recipe) == {}
        assert [cell.recipe for cell in cells(entry.recipe, {})] == [entry.recipe]
    options = "--divergence pearson js --seed 0 1 2 --blur 0 0.5 --crop-scale 0.2 1 0.4 1 --mu normalised 2 --download "
    options += "--shift None optimal --scale-learning-rate True False --mean 0.5 --std 0.5 --depth None 3"
    command = parse("sweep", "cifar10", *options.split())
    values = values_of(command.grid, RECIPES["cifar10"].recipe)
    assert values == {
        "divergence": ("pearson", "js"), "seed": (0, 1, 2), "blur": (0.0, 0.5), "crop_scale": ((0.2, 1.0), (0.4, 1.0)),
        "mu": ("normalised", 2.0), "shift": (None, "optimal"), "download": (True,),
        "scale_learning_rate": (True, False), "mean": ((0.5,),), "std": ((0.5,),), "depth": (None, 3),
    }  # fmt: skip
    found = cells(RECIPES["cifar10"].recipe, values)
    assert len(found) == 2 * 3 * 2 * 2 * 2 * 2 * 2 * 2
    assert len({cell.name for cell in found}) == len(found)
    assert found[0].recipe.views.channels == 1
    assert {cell.recipe.seed for cell in found[: len(found) // 3]} == {0}  # a round for each seed


def test_a_boolean_has_the_flags_of_train() -> None:
    def values(options: str) -> dict[str, Any]:
        return values_of(cli._parse(["sweep", "digits", *options.split()]).grid, DIGITS)

    assert values("--no-baselines --no_sync_batchnorm --seed 0 1") == {
        "baselines": (False,), "sync_batchnorm": (False,), "seed": (0, 1),
    }  # fmt: skip
    assert values("--baselines --download") == {"download": (True,)}
    assert values("--no-baselines --baselines True False") == {"baselines": (True, False)}
    with pytest.raises(SystemExit):
        values("--no-seed")


@pytest.mark.parametrize("word", ["true", "True", "TRUE"])
def test_a_case_takes_a_boolean_in_any_spelling(word: str) -> None:
    recipe = RECIPES["cifar10"].recipe
    assert parse_case(["Both", f"symmetric={word}"], recipe) == ("Both", {"symmetric": True})
    assert parse_case(["One", "symmetric=false"], recipe) == ("One", {"symmetric": False})


def test_the_help_of_a_sweep_is_that_of_the_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("sweep", "digits", "--help")
    text = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for leaf in leaves(Recipe):
        assert f"--{leaf.name.replace('_', '-')}" in text
        assert leaf.help, leaf.name


def test_a_child_is_told_exactly_its_cell() -> None:
    """Whatever differs from the recipe becomes options that `fmicl train` reads back as the very same settings."""
    changed = dataclasses.replace(
        DIGITS, data_dir=Path("a b"), download=True, checksum=False, second_blur=0.5, depth=3, mu="normalised",
        shift="optimal", baselines=False, precision="32", learning_rate=1e-05, encoder_momentum=0.9, seed=7,
        views=dataclasses.replace(DIGITS.views, crop_scale=(0.1, 0.9), mean=(0.1, 0.2, 0.3), std=(1.0, 1.0, 1.0)),
    )  # fmt: skip
    assert parse("train", "digits", *arguments(changed, DIGITS)).recipe == changed
    back = dataclasses.replace(changed, shift=None, depth=None, baselines=True)
    assert parse("train", "digits", *arguments(back, DIGITS)).recipe == back


def test_another_kind_of_recipe_will_do() -> None:
    @dataclass(frozen=True)
    class Inner:
        """Inner.

        Args:
            size: How large.
        """

        size: int = 1

    @dataclass(frozen=True)
    class Base:
        rate: float = 0.1
        """How fast."""

    @dataclass(frozen=True)
    class Other(Base):
        corpus: Path | None = None
        pooling: Literal["cls", "mean"] = "cls"
        tasks: tuple[str, ...] = ("a", "b")
        inner: Inner = field(default_factory=Inner)
        seed: int = 0

    globals().update(Inner=Inner, Other=Other)  # where type hints are looked up
    found = cells(Other(), {"pooling": ("cls", "mean"), "size": (1, 2), "corpus": (Path("x/y.txt"),), "seed": (0,)})
    assert [cell.name for cell in found][:2] == ["pooling=cls,size=1", "pooling=cls,size=2"]
    assert found[-1].recipe == Other(corpus=Path("x/y.txt"), pooling="mean", inner=Inner(2))
    assert parse_case(["all", "tasks=a,c", "size=3"], Other()) == ("all", {"tasks": ("a", "c"), "size": 3})
    assert next(leaf for leaf in leaves(Other) if leaf.name == "size").help == "How large."
    assert next(leaf for leaf in leaves(Other) if leaf.name == "rate").help == "How fast."
    assert grid_of(Other()).tasks == ("a", "b")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--epochs 2 0", "epochs must be positive, but it is 0"),
        ("--flip 0.5 2", "flip must lie in [0, 1]"),
        ("--seed 0 1 0", "--seed has 0 twice"),
        ("--divergence", "--divergence needs at least one value"),
        ("--divergence kl kll", "did you mean 'kl'"),
        ("--objective fmicl infonce --divergence kl js", "divergence has no part in it"),
        ("--device cpu cuda", "have it in common"),
        ("--parallel 0", "parallel must be positive"),
        ("--slurm partition=x", "--slurm goes with --launcher submitit"),
        ("--case SimCLR", "a case is NAME FIELD=VALUE"),
        ("--case objective=infonce x=1", "a case is NAME FIELD=VALUE"),
        ("--case SimCLR infonce", "'infonce' is not FIELD=VALUE"),
        ("--case SimCLR objektive=infonce", "did you mean objective"),
        ("--case SimCLR objective=info", "objective can't be 'info'"),
        ("--case Both method=moco symmetric=yes", "symmetric can't be 'yes'; it is True or False"),
        ("--case A seed=1 --case A seed=2", "there are two cases A"),
        ("--case A divergence=js --divergence kl js", "divergence is set by case A and by --divergence"),
        ("--case A divergence=js --case B divergence=js", "A and B would train the same thing"),
        ("--case A divergence=js divergence=kl", "says divergence twice"),
        ("--data-dir /nowhere", "there is no folder /nowhere"),
        ("--batch-size 256 --devices 3", "batch_size is 256 over 3 process(es)"),
        ("--method moco --queue 4096 10", "queue (10) must hold at least one batch of keys (256)"),
        ("cifar10 --seed 0 1", "set --data-dir"),
        ("wikipedia --seed 0 1", "which text to train on is not said: --data FILE"),
        ("wikipedia --data FILE --model BERT --length 16 64", "length is 64, but BERT takes no more than 16 tokens"),
        ("wikipedia --data FILE --model BERT --length 8 --encode-length 12 14", "BERT takes no more than 12 tokens"),
        ("--encoder resnt", "there is no encoder 'resnt'; did you mean resnet"),
        ("--encoder small_conv vit_small_patch16_224", "does not take images of 8 x 8 pixels with 1 channel"),
        ("wikipedia --data FILE --model ./none --seed 0 1", "there is no model folder ./none"),
        ("--out FILE", "is a file, not the folder of a sweep"),
        ("--out FULL", "is no sweep"),
    ],
)
def test_wrong_input_is_refused_before_anything_starts(
    options: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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
    recipe = [] if options.startswith(("cifar10", "wikipedia")) else ["digits"]
    assert cli.main(["sweep", *recipe, *options.split()]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("fmicl: error: ")
    assert sorted(tmp_path.rglob("*")) == before
