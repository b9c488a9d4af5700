"""`fmicl train images` on a folder: settings by the data, baselines, trained weights to start from, frozen layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from fmicl.cli import main as cli
from fmicl.config import Settings, recipe
from fmicl.runs.folder import Run
from fmicl.runs.initial_weights import load_initial_weights, preprocessing_of
from fmicl.runs.settings import read_settings
from fmicl.sweep.grid import check_cells, make_cells
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from fmicl.training.tasks.images import ImageTask
from image_sets import make
from train_run import train

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("images", tmp_path_factory.mktemp("data"), n=30)


@pytest.fixture(scope="module")
def trained(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of the plain recipe, but for its length."""
    out = tmp_path_factory.mktemp("runs") / "first"
    train(recipe("images", data_dir=folder, epochs=1, device="cpu"), out=out)
    return out


def resolve(settings: Settings, said: list[str] | None = None) -> Settings:
    return ImageTask.resolve(settings, CPU, (said if said is not None else []).append)


def test_a_run_records_what_was_chosen_and_says_so_in_one_line(folder: Path, trained: Path) -> None:
    saved = read_settings(Run(trained))
    assert saved.unresolved == ()
    assert (saved.epochs, saved.size, saved.batch_size) == (1, 48, 8)  # 27 images to train on
    said: list[str] = []
    again = resolve(recipe("images", data_dir=folder, epochs=1, device="cpu"), said)
    assert again == saved
    (line,) = said
    assert "27 training images of about 40 pixels" in line
    assert "--encoder resnet10t" in line
    assert "--epochs" not in line  # the user's own


@pytest.mark.parametrize(
    ("name", "value"), [("encoder", "resnet18"), ("size", 32), ("batch_size", 4), ("learning_rate", 0.5), ("epochs", 7)]
)
def test_each_choice_can_be_overridden(folder: Path, name: str, value: Any) -> None:
    settings = resolve(recipe("images", data_dir=folder, **{name: value}))
    assert getattr(settings, name) == value
    assert settings.unresolved == ()


def test_the_page_has_the_baselines(trained: Path) -> None:
    results = json.loads(Run(trained).results.read_text())
    assert {"raw_pixels", "untrained", "chance"} <= results.keys()
    assert results["chance"]["knn"] == pytest.approx(100 / 3)  # three classes of equal size
    page = Run(trained).report.read_text()
    for row in ("Raw pixels", "Untrained encoder", "Chance"):
        assert row in page


def test_resuming_takes_what_was_chosen_at_the_start(
    folder: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("fmicl.training.tasks.images.choose_defaults")  # not asked again
    run = train(recipe("images", data_dir=folder, epochs=1, device="cpu"), out=trained, resume=True)
    assert run.path == trained


def test_sweeps_leave_the_choice_to_their_runs(folder: Path) -> None:
    cells = make_cells(recipe("images", data_dir=folder), {"seed": (0, 1)})
    check_cells(cells)
    assert all("epochs" in cell.settings.unresolved for cell in cells)


def test_auto_needs_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "digits", "--epochs", "auto", "--out", str(tmp_path / "run")]) == 2
    assert "--epochs" in capsys.readouterr().err


def weighted(folder: Path, weights: Path | str, **changes: Any) -> Settings:
    return resolve(recipe("images", data_dir=folder, weights=str(weights), epochs=1, device="cpu", **changes))


def test_a_run_starts_from_the_weights_of_another(folder: Path, trained: Path) -> None:
    settings = weighted(folder, trained)
    before = read_settings(Run(trained))
    assert (settings.encoder, settings.stem, settings.size) == (before.encoder, before.stem, before.size)
    assert settings.mean == before.mean
    state = build_image_encoder(settings).state_dict()
    for name, expected in load_file(Run(trained).encoder).items():
        assert torch.equal(state[name], expected)


def test_a_file_with_timms_names_is_loaded_without_its_classifier(folder: Path, tmp_path: Path) -> None:
    torch.manual_seed(7)
    model: Any = timm.create_model("resnet18")
    save_file(model.state_dict(), tmp_path / "weights.safetensors")
    settings = weighted(folder, tmp_path / "weights.safetensors", encoder="resnet18", size=64)
    encoder = build_image_encoder(settings)
    model.reset_classifier(0)
    images = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(encoder.eval()(images), model.eval()(images))
    with pytest.raises(ValueError, match="conv1"):
        build_image_encoder(settings.replace(stem="small"))
    with pytest.raises(ValueError, match=r"and \d+ more") as error:
        build_image_encoder(settings.replace(encoder="resnet34"))
    assert len(str(error.value)) < 500
    with pytest.raises(ValueError, match="--encoder"):
        weighted(folder, tmp_path / "weights.safetensors")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors"):
        weighted(folder, tmp_path / "nowhere.safetensors", encoder="resnet18")


def test_timms_weights_come_with_its_preprocessing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = timm.get_pretrained_cfg("vit_tiny_patch16_224")
    assert config is not None
    settings = weighted(folder, "timm", encoder="vit_tiny_patch16_224", depth=1)
    assert (settings.size, settings.mean, settings.std) == (224, config.mean, config.std)
    assert weighted(folder, "timm", encoder="vit_tiny_patch16_224", size=32, mean=(0, 0, 0)).mean == (0, 0, 0)
    assert preprocessing_of("timm", "resnet18")["size"] == 224
    with pytest.raises(ValueError, match="small_conv"):
        weighted(folder, "timm", encoder="small_conv")

    def offline(*_: Any, **__: Any) -> nn.Module:
        raise OSError("no network\nand more lines")

    monkeypatch.setattr(timm, "create_model", offline)
    with pytest.raises(ConnectionError, match="--weights FILE") as error:
        load_initial_weights(nn.Linear(1, 1), settings)
    assert "\n" not in str(error.value)


def test_frozen_blocks_keep_weights_and_statistics_and_the_page_shows_the_start(
    folder: Path, trained: Path, tmp_path: Path
) -> None:
    settings = recipe("images", data_dir=folder, weights=str(trained), freeze=3, epochs=1, device="cpu", workers=0)
    run = train(settings, out=tmp_path / "run")
    before, after = load_file(Run(trained).encoder), load_file(run.encoder)
    frozen = ("conv1", "bn1", "layer1", "layer2")
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in moved if name.startswith(frozen)} == set()
    assert {"layer3.0.conv1.weight", "layer4.0.bn1.running_mean"} <= moved
    results, first = (json.loads(Run(path).results.read_text()) for path in (run.path, trained))
    assert results["start"]["knn"] == first["knn"]
    assert "untrained" not in results
    assert "Start of training" in run.report.read_text()


@pytest.mark.parametrize("method", ["simclr", "moco", "mocov3"])
def test_frozen_batch_normalisation_is_never_in_training_mode(method: str, folder: Path, trained: Path) -> None:
    settings = weighted(folder, trained, freeze=2, method=method)
    built = build_image_method(settings, build_image_encoder(settings))
    for _ in range(2):
        for encoder in built.encoders():
            assert not encoder.bn1.training  # type: ignore[union-attr]
            assert encoder.layer4[0].bn1.training  # type: ignore[index, union-attr]
        built.eval()
        built.train()


def test_frozen_blocks_are_checked(folder: Path, trained: Path) -> None:
    assert "weights" in recipe("images", freeze=1).unused()["freeze"]
    with pytest.raises(ValueError, match="5 blocks"):
        build_image_encoder(weighted(folder, trained, freeze=5))
