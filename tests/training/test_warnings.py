"""What a run prints about its data, and warnings about options that have no effect on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fmicl.cli import main as cli
from fmicl.config import recipe
from fmicl.data import ArraySamples, Splits, describe_splits, load_images
from fmicl.training.pipeline import settings_warnings
from fmicl.training.tasks import image_evaluation
from fmicl.training.tasks.image_evaluation import evaluate_run
from fmicl.training.tasks.image_parts import load_splits
from image_sets import make_classes, write_image
from small_settings import digits, small
from train_run import train


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("photos")
    make_classes(root, {"cat": 8, "dog": 8})
    return root


def test_a_run_prints_its_classes(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(small("images", folder, epochs=1, monitor_every=0), out=tmp_path / "run")
    found = json.loads(run.results.read_text())
    assert f"2 classes: cat, dog; {found['test_samples']} images held out\n" in capsys.readouterr().out
    assert (found["classes"], found["class_names"]) == (2, ["cat", "dog"])


def test_many_classes_are_counted_and_the_first_are_named() -> None:
    images = ArraySamples(torch.zeros(1200, 1, 2, 2, dtype=torch.uint8))
    names = tuple(f"n{i}" for i in range(1000))
    line = describe_splits(Splits(images, images, images, names, split="val"))
    assert line == f"1,000 classes: {', '.join(names[:10])} and 990 more; 1,200 images in the val split"


def test_digits_have_classes_and_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_evaluation, "FEW_CLASSES", 9)
    run = train(digits(epochs=1, validation=0.75), out=tmp_path / "run")
    found = json.loads(run.results.read_text())
    assert found["classes"] == 10
    assert "class_names" not in found
    lines: list[str] = []
    assert evaluate_run(run, data_dir=Path("nope"), device="cpu", say=lines.append) == found
    (line,) = lines
    assert line.startswith("warning: data_dir (nope)")
    assert "digits" in line


@pytest.mark.parametrize("names", [("Train", "Test"), ("TRAIN", "VAL"), ("train", "Validation")])
def test_splits_are_found_in_upper_and_lower_case(tmp_path: Path, names: tuple[str, str]) -> None:
    for name in names:
        make_classes(tmp_path / name, {"cat": 3, "dog": 3})
    splits = load_images("images", tmp_path, size=32)
    assert (splits.classes, splits.split) == (("cat", "dog"), names[1].lower())


def test_one_subfolder_is_no_class(tmp_path: Path) -> None:
    make_classes(tmp_path, {"cat": 3})
    write_image(tmp_path / "x.png")
    assert describe_splits(load_images("images", tmp_path, size=32)) == "no classes: 4 images without labels"


def test_a_folder_that_the_data_does_not_need_is_warned_of() -> None:
    lines: list[str] = []
    load_splits(digits(), lines.append)
    assert not lines
    load_splits(small("digits", Path("nope")), lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("warning: data_dir (nope)")


def test_a_name_of_trained_weights_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "digits", "--encoder", "resnet18.a1_in1k", "--out", str(tmp_path / "run"), "--device", "cpu"]
    assert cli.main(words) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "a1_in1k" in said
    assert "take --encoder resnet18" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("only_training")
def test_evaluation_after_training_has_its_number_of_workers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a resume with another number than in settings.json."""
    given: list[Any] = []

    def evaluate(_: Any, **options: Any) -> None:
        given.append(options.get("workers"))
        if len(given) == 1:
            raise RuntimeError("cut off")

    monkeypatch.setattr("fmicl.training.tasks.images.evaluate_run", evaluate)
    with pytest.raises(RuntimeError, match="cut off"):
        train(small("images", folder, epochs=1, monitor_every=0, workers=3), out=tmp_path / "run")
    train(small("images", folder, epochs=1, monitor_every=0, workers=0), out=tmp_path / "run", resume=True)
    assert given == [3, 0]


def test_sentence_encoders_have_no_batch_statistics() -> None:
    (line,) = settings_warnings(recipe("wikipedia", method="moco", key_statistics="past", shift="optimal"), 768)
    assert line.startswith("warning: key_statistics ")
    assert "sentence encoders" in line
    assert settings_warnings(recipe("wikipedia", method="moco", queue=512, shift="optimal"), 768) == []
