"""Fingerprints of image data."""

from __future__ import annotations

import dataclasses
import re
import shutil
from pathlib import Path

import torch

from fmicl.data import ArraySamples, Splits, describe_change, fingerprint, load_images
from image_sets import make_classes, write_image


def test_the_fingerprint_of_files_changes_with_the_data_only(tmp_path: Path) -> None:
    make_classes(tmp_path / "here", {"a": 20, "b": 20})

    def load(folder: str, memory_limit: int = 0) -> Splits:
        return load_images("images", tmp_path / folder, size=32, memory_limit=memory_limit)

    before = fingerprint(load("here"))
    assert fingerprint(load("here", 2**30)) == before  # in memory or on disk
    shutil.move(tmp_path / "here", tmp_path / "there")
    assert fingerprint(load("there")) == before
    assert describe_change(before, load("there")) == ""
    assert describe_change(None, load("there")) == ""
    trained = tmp_path / "there" / load("there").names[0]
    image = trained.read_bytes()
    write_image(trained, 5, (200, 100))
    same = r"the {} set has \d+ images as before, but not the same ones"
    assert re.fullmatch(same.format("training"), describe_change(before, load("there")))
    trained.unlink()
    n = before["samples"]
    assert describe_change(before, load("there")) == f"the training set had {n} images, and has {n - 1} now"
    trained.write_bytes(image)
    assert fingerprint(load("there")) == before
    held_out = tmp_path / "there" / load("there").test_names[0]
    write_image(held_out, 5, (200, 100))
    assert re.fullmatch(same.format("evaluation"), describe_change(before, load("there")))
    splits = load("there")
    assert splits.test is not None
    n = len(splits.test)
    fewer = dataclasses.replace(splits, test=splits.test.select(torch.arange(1, n)), test_names=splits.test_names[1:])
    assert describe_change(before, fewer) == f"the evaluation set had {n} images, and has {n - 1} now"
    none = dataclasses.replace(splits, test=None, test_names=())
    assert describe_change(before, none) == f"the evaluation set had {n} images, and has 0 now"


def test_the_fingerprint_of_arrays_depends_on_pixels_and_labels() -> None:
    images, labels = torch.zeros(4, 1, 2, 2, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    other = images.clone()
    other[3, 0, 1, 1] = 1
    found = [
        fingerprint(Splits(ArraySamples(x, y), None, None))["digest"]
        for x, y in ((images, labels), (other, labels), (images, 1 - labels), (images, None), (images[:3], None))
    ]
    assert len(set(found)) == 5
    assert fingerprint(Splits(ArraySamples(images.clone(), labels), None, None))["digest"] == found[0]
