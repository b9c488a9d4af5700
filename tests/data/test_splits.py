"""Held-out and validation splits."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

from fmicl.data import load_images, split_by_name, stratified_split
from image_sets import arrays, damage_header, make_classes, write_image


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_a_file_stays_in_its_split_when_others_are_added_or_removed(tmp_path: Path, validation: float) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})

    def trained() -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return set(load_images("images", tmp_path, size=32, memory_limit=0, validation=validation).names)

    before = trained()
    everything = {p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("*/*.png")}
    damage_header(tmp_path / "a" / "007.png")
    damage_header(tmp_path / "b" / "031.png")
    lost = {"a/007.png", "b/031.png"}
    assert trained() == before - lost
    for name in lost:
        (tmp_path / name).unlink()
    assert trained() == before - lost
    for i in range(60, 70):
        write_image(tmp_path / "a" / f"{i:03d}.png", i)
    assert trained() & everything == before - lost


def test_split_by_name_holds_out_the_share_and_one_at_least() -> None:
    names = [f"{i % 2}/{i}.png" for i in range(4000)]
    labels = [i % 2 for i in range(4000)]
    kept, held = split_by_name(names, labels, 0.1, "x")
    assert sorted(kept + held) == list(range(4000))
    assert abs(len(held) - 400) < 4 * math.sqrt(4000 * 0.1 * 0.9)
    for n in range(2, 12):
        few, one = split_by_name([f"{i}" for i in range(n)], [0] * n, 0.001, "x")
        assert (len(few), len(one)) == (n - 1, 1)
        one, few = split_by_name([f"{i}" for i in range(n)], [0] * n, 0.999, "x")
        assert (len(one), len(few)) == (1, n - 1)
    assert split_by_name(["a", "b", "c"], [0, 1, 1], 0.5, "x")[0][0] == 0
    with pytest.raises(ValueError, match="none can be held out"):
        split_by_name(["a", "b"], [0, 1], 0.5, "x")
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_by_name(["a", "b"], [0, 0], 0.0, "x")


def test_validation_is_a_part_of_train_and_depends_on_the_seed() -> None:
    _, whole, _ = arrays(load_images("digits"))
    pretrain, train, held = arrays(load_images("digits", validation=0.2, seed=1))
    assert pretrain is train
    both = torch.cat([train.images, held.images])
    assert sorted(x.numpy().tobytes() for x in both) == sorted(x.numpy().tobytes() for x in whole.images)
    again = arrays(load_images("digits", validation=0.2, seed=1))[2]
    assert torch.equal(held.images, again.images)
    assert not torch.equal(held.images, arrays(load_images("digits", validation=0.2, seed=2))[2].images)


def test_stratified_split_keeps_the_shares_of_the_classes() -> None:
    labels = torch.cat([torch.full((n,), c) for c, n in enumerate([100, 50, 3, 2, 1])])
    kept, held = stratified_split(labels, 0.1, seed=3)
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(len(labels)))
    assert labels[held].bincount(minlength=5).tolist() == [10, 5, 1, 1, 0]
    with pytest.raises(ValueError, match="none can be held out"):
        stratified_split(torch.arange(4), 0.5, seed=0)
    with pytest.raises(ValueError, match="between 0 and 1"):
        stratified_split(labels, 1.0, seed=0)


def test_one_held_out_image_is_too_few(tmp_path: Path) -> None:
    make_classes(tmp_path, {"cat": 4, "dog": 1})
    with pytest.raises(ValueError, match=r"at most 3 of one, and 1 held out"):
        load_images("images", tmp_path, size=32)


def test_a_validation_share_that_leaves_too_few_training_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--validation 0.999.* 10 classes, at most 1 of one"):
        load_images("digits", validation=0.999)


def test_a_validation_share_that_holds_out_one_image_is_refused(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", {"cat": 9, "dog": 1})
    make_classes(tmp_path / "test", {"cat": 2, "dog": 2})
    with pytest.raises(ValueError, match=r"--validation 0.1.* 1 held out"):
        load_images("images", tmp_path, size=32, validation=0.1)
