"""`fmicl train`: options of a recipe and their help, resumed settings, and a run from training to embedding."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path

import pytest

from fmicl.cli import main as cli
from fmicl.cli.train import parse
from fmicl.config import RECIPES, recipe, schema_of
from fmicl.runs.folder import create_run
from fmicl.runs.settings import write_settings
from fmicl.runs.tables import print_results

NAMES = RECIPES.names()


def words_of(shown: str) -> str:
    return " ".join(shown.replace("│", " ").split())


def help_of(name: str, capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as exit_code:
        cli.main(["train", name, "--help"])
    assert exit_code.value.code == 0
    return capsys.readouterr().out


def test_train_help_lists_each_recipe_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "--help"]) == 0
    text = words_of(capsys.readouterr().out)
    for entry in RECIPES:
        assert f"{entry.name} {entry.summary}" in text


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_every_option_once_under_its_owner(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    schema = schema_of(RECIPES[name].value.task)
    owners: dict[str, list[str]] = {}
    title = ""
    for line in help_of(name, capsys).splitlines():
        heading = line.strip("╭╮─ ")
        if heading.endswith(" options"):
            title = heading.removesuffix(" options")
        flag = re.match(r"[│ ] {1,2}(--[a-z][a-z0-9-]*)", line)  # further in, flags are mentioned in texts
        if flag and title:
            owners.setdefault(flag[1], []).append(title)
    expected = {each.flag: [schema.owner_titles(each.name).replace("_", "-")] for each in schema.options.values()}
    assert owners == expected


def test_help_texts_flow_into_full_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line ends where the next word doesn't fit, not where a line of the source does."""
    monkeypatch.setenv("COLUMNS", "80")
    shown = help_of("digits", capsys)
    lines = [line.strip("│") for line in shown.splitlines()]
    indent = " " * 20
    pairs = [pair for pair in itertools.pairwise(lines) if all(x.startswith(indent) and x.strip() for x in pair)]
    assert len(pairs) > 50
    width = max(len(line.rstrip()) for line in lines if line.startswith(indent))
    for line, after in pairs:
        assert width - len(line.rstrip()) <= len(after.split()[0]), line
    for each in schema_of("images").options.values():
        assert each.help in words_of(shown), each.name


def test_options_override_the_recipe() -> None:
    words = (
        "--divergence js --epochs 200 --data-dir DIR --method moco --encoder resnet50 --size 64 --crop-scale 0.1 0.9 "
        "--mu normalised --no-checksum --shift optimal --depth None --resume --out RUN"
    )
    settings, out, resume = parse("cifar10", words.split())
    assert settings == recipe(
        "cifar10", divergence="js", epochs=200, data_dir="DIR", method="moco", encoder="resnet50", size=64,
        crop_scale=(0.1, 0.9), mu="normalised", checksum=False, shift="optimal",
    )  # fmt: skip
    assert (out, resume) == (Path("RUN"), True)
    text = "--data wiki.txt --model roberta-base --objective infonce --pooling mean --sts DIR"
    assert parse("wikipedia", text.split())[0] == recipe(
        "wikipedia", data="wiki.txt", model="roberta-base", objective="infonce", pooling="mean", sts="DIR"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_without_options_is_itself(name: str) -> None:
    assert parse(name, []) == (recipe(name), None, False)


@pytest.mark.parametrize("named", [True, False])
def test_a_resumed_run_has_its_own_settings_except_those_that_are_given(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    photos = recipe("images", data_dir="photos", epochs=3, baselines=True)
    text = recipe("wikipedia", data="a.txt", pooling="mean")
    for settings in (photos, text):
        name = settings.recipe
        folder = tmp_path / "own" / name if named else None
        write_settings(create_run(name, folder), settings, "cpu")
        options = ["--resume", *(["--out", str(folder)] if named else [])]
        assert parse(name, options) == (settings, folder, True)
        assert parse(name, ["--seed", "5", *options, "--epochs", "7"])[0] == settings.replace(seed=5, epochs=7)
        assert parse(name, [])[0] == recipe(name)


@pytest.mark.parametrize("count", [15, 100])
def test_the_table_says_how_many_images_were_held_out(
    count: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results = {"knn": 800 / 15, "linear": 46.67, "k": 5, "epoch": 3, "split": "held-out", "test_samples": count}
    (tmp_path / "results.json").write_text(json.dumps(results))
    print_results(tmp_path)
    shown = words_of(capsys.readouterr().out)
    assert "held-out split" in shown
    assert f"{count} images" in shown
    assert ("only 15 test images" in shown, "6.7 points" in shown) == (count == 15, count == 15)


def test_train_evaluate_report_embed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "run")
    options = ["--epochs", "1", "--device", "cpu", "--hidden", "32", "--monitor-every", "0", "--out", folder]
    assert cli.main(["train", "digits", *options, "--queue", "512"]) == 0
    shown = capsys.readouterr().out
    assert all(words in shown for words in ("raw pixels", "untrained encoder", "trained, epoch 1", "k-NN (k=20)"))
    assert "warning: queue has no effect: it is an option of method moco" in shown
    assert shown.rstrip().endswith(f"page: {folder}/report.html")
    assert cli.main(["train", "digits", *options]) == 2
    assert "--resume" in capsys.readouterr().err
    assert cli.main(["train", "digits", *options, "--resume"]) == 0
    assert "finished already" in capsys.readouterr().out
    page = tmp_path / "run" / "report.html"
    results = tmp_path / "run" / "results.json"
    results.write_text(json.dumps({**json.loads(results.read_text()), "knn": 12.34}))
    assert cli.main(["report", folder]) == 0
    assert "12.3 %" in page.read_text()
    assert cli.main(["evaluate", folder, "--device", "cpu"]) == 0
    assert f"page: {page}" in capsys.readouterr().out
    assert "12.3 %" not in page.read_text()  # the page has the new results
    page.unlink()
    assert cli.main(["report", folder]) == 0
    assert page.exists()
    (tmp_path / "photos").mkdir()
    output = tmp_path / "x.csv"
    assert cli.main(["embed", folder, str(tmp_path / "photos"), "-o", str(output)]) == 2
    assert not output.exists()
