"""Evaluation of image encoders: the second linear probe, on random views, and the batches of the evaluation."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmicl.cli import main as cli
from fmicl.data import ArraySamples, FileSamples, ViewStream
from fmicl.evaluation.features import evaluation_batch_size
from fmicl.runs import tables
from fmicl.runs.report import write_report
from fmicl.sweep.summary import scores
from fmicl.training.tasks import image_evaluation
from fmicl.training.tasks.image_evaluation import evaluate_run
from image_sets import make
from small_settings import digits, small
from train_run import train


class Shape(nn.Module):
    """Features that tell which image a view is of, and whether its colours were left alone."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


@pytest.mark.parametrize(
    ("number", "count", "at_once"), [(1, 10, 512), (2, 10, 512), (3, 10, 512), (1, 11, 8), (3, 11, 8)]
)
def test_views_keep_their_colours_and_their_owners(
    number: int, count: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of images that don't fill a batch."""
    monkeypatch.setattr("fmicl.evaluation.features.EVALUATION_BATCH", at_once)
    settings = digits(probe_views=number, batch_size=4)
    plain = torch.arange(count, dtype=torch.uint8).mul(20).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)  # any crop is the same
    features, owners = image_evaluation._features_of_views(Shape(), ArraySamples(plain), settings, torch.device("cpu"))
    mean, std = settings.mean[0], settings.std[0]
    torch.testing.assert_close(features[:, 0], (owners * 20 / 255 - mean) / std, atol=1e-5, rtol=1e-5)
    assert sorted(owners.tolist()) == sorted([*range(count)] * number)


def test_views_of_a_structured_image_differ() -> None:
    images = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features, owners = image_evaluation._features_of_views(
        nn.Flatten(), ArraySamples(images), digits(probe_views=2, batch_size=4), torch.device("cpu")
    )
    for sample in range(6):
        one, other = features[owners == sample]
        assert not torch.equal(one, other)


class Watched(nn.Module):
    """Says how many images it sees at once."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, images: Tensor) -> Tensor:
        self.seen.append(len(images))
        return images.flatten(1)[:, :4]


@pytest.mark.parametrize(("size", "most"), [(8, 512), (128, 32), (224, 10), (512, 2)])
def test_large_images_come_in_small_batches(size: int, most: int) -> None:
    assert image_evaluation._batch_size(small("images", None, size=32), torch.device("cpu")) == 512
    count = 2 * most + 1
    images = torch.randint(256, (count, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    settings = small("images", None, size=size, probe_views=4)
    cpu = torch.device("cpu")
    assert image_evaluation._batch_size(settings, cpu) == most
    encoder = Watched()
    samples = ArraySamples(images, torch.zeros(count, dtype=torch.int64))
    image_evaluation._features(encoder, samples, settings, cpu)
    assert sum(encoder.seen) == count
    image_evaluation._features_of_views(encoder, samples, settings, cpu)
    image_evaluation._geometry(encoder, samples, settings, cpu)
    assert max(encoder.seen) == max(most, 4)  # the views of one image are not taken apart


@pytest.mark.parametrize(
    ("size", "batch", "at_once"),
    [(32, 512, 1024), (32, 4096, 2048), (224, 256, 512), (224, 16, 167), (448, 16, 41), (1024, 4, 8), (4096, 2, 4)],
)
def test_on_a_gpu_large_images_come_in_smaller_batches_or_as_in_training(size: int, batch: int, at_once: int) -> None:
    assert evaluation_batch_size(size, torch.device("cuda"), 2 * batch) == at_once


def test_geometry_embeds_views_before_the_next_ones_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []

    class Stream(ViewStream):
        def __iter__(self) -> Any:
            for batch in super().__iter__():
                events.append("made")
                yield batch

    monkeypatch.setattr(image_evaluation, "ViewStream", Stream)
    monkeypatch.setattr("fmicl.evaluation.features.EVALUATION_BATCH", 4)
    encoder = Watched()
    encoder.register_forward_pre_hook(lambda *_: events.append("embedded"))
    images = torch.randint(256, (12, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    image_evaluation._geometry(encoder, ArraySamples(images), digits(), torch.device("cpu"))
    assert events == ["made", "embedded", "embedded"] * 3


def test_ranks_are_of_ten_views_of_each_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """An encoder that only sees which image it is: views differ in nothing, so LiDAR and RankMe have a closed form."""
    monkeypatch.setattr("fmicl.evaluation.features.EVALUATION_BATCH", 30)
    plain = torch.tensor([10, 10, 200, 200], dtype=torch.uint8).view(4, 1, 1, 1).expand(4, 1, 8, 8)
    seen: list[int] = []

    class Corners(nn.Module):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(len(images))
            bright = (images.mean(dim=(1, 2, 3)) > 0).float()
            return torch.stack([bright, 1 - bright, torch.ones_like(bright)], dim=1)

    settings = digits(batch_size=4, jitter=0.0)
    found = image_evaluation._ranks(Corners(), nn.Flatten(), ArraySamples(plain), settings, torch.device("cpu"))
    assert found["lidar"] == found["lidar_features"] == pytest.approx(1.0, abs=1e-4)  # one direction tells them apart
    assert found["rankme"] == found["rankme_features"] == pytest.approx(1.9, abs=0.1)  # two dimensions, uncentred
    assert seen == [30]  # three samples fill a batch of 30 views


def test_probe_views_add_a_second_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(digits(epochs=1, probe_views=2, validation=0.75), out=tmp_path / "run")
    found = json.loads(run.results.read_text())
    assert (found["split"], found["train_samples"], found["test_samples"]) == ("validation", 337, 1010)
    # two views of each of the 337 training images, also of those that don't fill a batch
    assert all(1 < found[name] < 512 for name in ("rankme_features", "lidar_features", "lidar"))
    assert found["rankme"] > 1
    assert "with those of 674 random views of the training samples" in found["linear_views_protocol"]
    assert "no augmentation" in found["linear_protocol"]
    assert 10 < found["linear_views"] <= 100
    assert scores(found)["linear on views"] == found["linear_views"]
    assert "Linear probe, on views too" in write_report(run.path).read_text()
    tables.print_results(run.path)
    assert "on views too" in capsys.readouterr().out
    again = evaluate_run(run, device="cpu")
    assert again["linear_views"] == found["linear_views"]
    without = evaluate_run(run, device="cpu", probe_views=0)
    assert "linear_views" not in without
    assert without["linear"] == found["linear"]
    given: dict[str, Any] = {}
    monkeypatch.setattr(image_evaluation, "evaluate_run", lambda _, **options: given.update(options))
    assert cli.main(["evaluate", str(run.path), "--probe-views", "3", "--device", "cpu"]) == 0
    assert given["probe_views"] == 3


def test_probe_views_of_files(tmp_path: Path) -> None:
    folder = make("images", tmp_path)
    settings = small("images", folder, memory_gib=0.0, epochs=1, probe_views=2, monitor_every=0)
    run = train(settings, out=tmp_path / "run")
    assert json.loads(run.results.read_text())["linear_views"] is not None


def test_views_of_broken_files_belong_to_their_replacements(tmp_path: Path) -> None:
    folder = make("images", tmp_path)
    paths = sorted(folder.rglob("*.png"))
    paths[0].write_bytes(paths[0].read_bytes()[:60])
    settings = small("images", folder, probe_views=2, batch_size=4)
    samples = FileSamples(tuple(paths), torch.zeros(len(paths), dtype=torch.long))
    _, owners = image_evaluation._features_of_views(nn.Flatten(), samples, settings, torch.device("cpu"))
    assert 0 not in owners.tolist()
