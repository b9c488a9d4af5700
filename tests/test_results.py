"""The second linear probe of a run, which learns from random views of the training images as well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmicl import cli, results, tables
from fmicl.data import ArraySamples, FileSamples
from fmicl.report import write_report
from fmicl.results import evaluate_run
from fmicl.sweep_table import scores
from fmicl.training import train
from image_sets import make
from small_recipes import digits, small


class Shape(nn.Module):
    """Features that tell which image a view is of, and whether its colours were left alone."""

    def forward(self, images: Tensor) -> Tensor:
        return images.mean(dim=(2, 3))


@pytest.mark.parametrize("number", [1, 2, 3])
def test_views_keep_their_colours_and_their_owners(number: int) -> None:
    recipe = digits(probe_views=number, batch_size=4)
    plain = torch.arange(10, dtype=torch.uint8).mul(20).view(10, 1, 1, 1).expand(10, 1, 8, 8)  # any crop is the same
    features, owners = results._features_of_views(Shape(), ArraySamples(plain), recipe, torch.device("cpu"))
    mean, std = recipe.views.mean[0], recipe.views.std[0]
    torch.testing.assert_close(features[:, 0], (owners * 20 / 255 - mean) / std, atol=1e-5, rtol=1e-5)
    assert sorted(owners.tolist()) == sorted([*range(10)] * number)


def test_views_of_a_structured_image_differ() -> None:
    images = torch.randint(256, (6, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    features, owners = results._features_of_views(
        nn.Flatten(), ArraySamples(images), digits(probe_views=2, batch_size=4), torch.device("cpu")
    )
    for sample in range(6):
        one, other = features[owners == sample]
        assert not torch.equal(one, other)


def test_a_run_has_a_second_probe_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(digits(epochs=1, probe_views=2), out=tmp_path / "run")
    assert run is not None
    found = json.loads(run.results.read_text())
    # 1347 training images in two batches of 512, and two views of each
    assert "with those of 2048 random views of the training samples" in found["linear_views_protocol"]
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
    monkeypatch.setattr("fmicl.results.evaluate_run", lambda _, **options: given.update(options))
    assert cli.main(["evaluate", str(run.path), "--probe-views", "3"]) == 0
    assert given["probe_views"] == 3


def test_files_and_no_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("images", tmp_path)
    assert folder is not None
    recipe = small("images", folder, memory_gib=0.0, epochs=1, probe_views=2, monitor_every=0)
    run = train(recipe, out=tmp_path / "run")
    assert run is not None
    assert json.loads(run.results.read_text())["linear_views"] is not None
    flat = tmp_path / "flat"
    flat.mkdir()
    for number, path in enumerate(sorted(folder.rglob("*.png"))):
        path.rename(flat / f"{number}.png")
    capsys.readouterr()
    train(small("images", flat, epochs=1, probe_views=2, monitor_every=0), out=tmp_path / "other")
    assert "without labels there is no linear probe, and probe_views has no part" in capsys.readouterr().out


def test_broken_files_count_as_what_came_in_their_place(tmp_path: Path) -> None:
    folder = make("images", tmp_path)
    assert folder is not None
    paths = sorted(folder.rglob("*.png"))
    paths[0].write_bytes(paths[0].read_bytes()[:60])
    recipe = small("images", folder, probe_views=2, batch_size=4)
    samples = FileSamples(tuple(paths), torch.zeros(len(paths), dtype=torch.long))
    _, owners = results._features_of_views(nn.Flatten(), samples, recipe, torch.device("cpu"))
    assert 0 not in owners.tolist()
