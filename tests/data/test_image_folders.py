"""Datasets of image files: TinyImageNet, ImageNet, any folder; complete, damaged, and changing."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fmicl.data import (
    ArraySamples,
    FileSamples,
    Splits,
    display_images,
    fingerprint,
    load_images,
)
from fmicl.data.images.decoding import check_image, decode, to_tensor
from image_sets import arrays, damage_header, damage_inside, labels_of, make_classes, truncate, write_image


def make_tinyimagenet(root: Path) -> Path:
    root = root / "tiny-imagenet-200"
    names = ["n02", "n01", "n03"]
    for k, name in enumerate(names):
        for i in range(4):
            write_image(root / "train" / name / "images" / f"{name}_{i}.JPEG", 10 * k + i, (64, 64))
    lines = []
    for i in range(6):
        write_image(root / "val" / "images" / f"val_{i}.JPEG", 100 + i, (64, 64))
        lines.append(f"val_{i}.JPEG\t{names[i % 3]}\t0\t0\t62\t62")
    (root / "val" / "val_annotations.txt").write_text("\n".join(lines) + "\n")
    (root / "wnids.txt").write_text("\n".join(names) + "\n")
    (root / "words.txt").write_text("n01\ttench, Tinca\nn02\tgoldfish\nn99\tother\n")
    return root


@pytest.mark.parametrize("below", ["", "tiny-imagenet-200"])
def test_tinyimagenet(tmp_path: Path, below: str) -> None:
    root = make_tinyimagenet(tmp_path)
    splits = load_images("tinyimagenet", tmp_path / below, size=64)
    pretrain, train, test = arrays(splits)
    assert pretrain is train
    assert splits.split == "val"
    assert splits.classes == ("tench", "goldfish", "n03")
    assert labels_of(train) == [0] * 4 + [1] * 4 + [2] * 4
    assert labels_of(test) == [1, 0, 2, 1, 0, 2]
    first = to_tensor(decode(root / "train" / "n01" / "images" / "n01_0.JPEG"))
    assert torch.equal(train.images[0], first)  # 64 x 64 already: pixel for pixel


def test_tinyimagenet_damage_is_refused_by_name(tmp_path: Path) -> None:
    root = make_tinyimagenet(tmp_path)
    annotations = root / "val" / "val_annotations.txt"
    whole = annotations.read_text()
    annotations.write_text(whole.replace("n03", "n77"))
    with pytest.raises(ValueError, match=r"line 3 of .*val_annotations\.txt"):
        load_images("tinyimagenet", tmp_path, size=64)
    annotations.write_text("\n".join(whole.splitlines()[1:]))
    with pytest.raises(ValueError, match=r"val_0\.JPEG"):
        load_images("tinyimagenet", tmp_path, size=64)
    annotations.write_text(whole)
    (root / "val" / "images" / "val_2.JPEG").unlink()
    with pytest.raises(FileNotFoundError, match=r"val_2\.JPEG"):
        load_images("tinyimagenet", tmp_path, size=64)
    annotations.unlink()
    with pytest.raises(FileNotFoundError, match=r"val_annotations\.txt"):
        load_images("tinyimagenet", tmp_path, size=64)
    shutil.rmtree(root / "train" / "n03")
    annotations.write_text(whole)
    with pytest.raises(FileNotFoundError, match="n03"):
        load_images("tinyimagenet", tmp_path, size=64)


def test_imagenet(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", {"n01": 5, "n02": 3}, ".JPEG")
    make_classes(tmp_path / "val", {"n01": 2, "n02": 2}, ".JPEG")
    splits = load_images("imagenet", tmp_path, size=28)
    pretrain, train, test = arrays(splits)
    assert pretrain is train
    assert (splits.split, splits.classes) == ("val", ("n01", "n02"))
    assert labels_of(train) == [0] * 5 + [1] * 3
    assert labels_of(test) == [0, 0, 1, 1]
    assert train.images.shape == (8, 3, 32, 32)
    on_disk = load_images("imagenet", tmp_path, size=28, memory_limit=1000)
    assert isinstance(on_disk.train, FileSamples)
    assert isinstance(on_disk.test, FileSamples)
    assert labels_of(on_disk.train) == labels_of(train)
    assert on_disk.test.paths[0] == tmp_path / "val" / "n01" / "000.JPEG"
    write_image(tmp_path / "val" / "ILSVRC2012_val_1.JPEG")
    with pytest.raises(ValueError, match=r"val_1\.JPEG"):
        load_images("imagenet", tmp_path, size=28)
    (tmp_path / "val" / "ILSVRC2012_val_1.JPEG").unlink()
    make_classes(tmp_path / "val", {"n09": 1}, ".JPEG")
    with pytest.raises(ValueError, match=r"n09"):
        load_images("imagenet", tmp_path, size=28)
    shutil.rmtree(tmp_path / "val")
    with pytest.raises(FileNotFoundError, match="val"):
        load_images("imagenet", tmp_path, size=28)


def test_images_without_labels(tmp_path: Path) -> None:
    for i in range(6):
        write_image(tmp_path / f"{i}.png", i, (50 + i, 40))
    write_image(tmp_path / "holiday" / "a.jpg")
    (tmp_path / "notes.txt").write_text("not an image")
    write_image(tmp_path / ".thumbnails" / "t.png")
    splits = load_images("images", tmp_path, size=28)
    assert isinstance(splits.pretrain, ArraySamples)
    assert splits.pretrain.images.shape == (7, 3, 32, 32)
    assert splits.pretrain.labels is None
    assert splits.train is None
    assert splits.test is None
    with pytest.raises(ValueError, match="no labels"):
        load_images("images", tmp_path, size=28, validation=0.1)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_images_with_classes_and_unlabelled_ones(tmp_path: Path, memory_limit: int) -> None:
    make_classes(tmp_path, {"cats": 20, "dogs": 11})
    write_image(tmp_path / "dogs" / "old" / "x.png", 50)
    for i in range(3):
        write_image(tmp_path / f"{i}.png", 70 + i)
    splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
    assert splits.train is not None
    assert splits.test is not None
    assert type(splits.pretrain) is (ArraySamples if memory_limit else FileSamples)
    assert (splits.classes, splits.split) == (("cats", "dogs"), "held-out")
    count = len(splits.train)
    assert len(splits.pretrain) == count + 3
    assert count + len(splits.test) == 32
    assert set(labels_of(splits.test)) == {0, 1}
    assert labels_of(splits.train) == sorted(labels_of(splits.train))
    assert splits.pretrain.labels is None
    assert list(splits.names[count:]) == ["0.png", "1.png", "2.png"]
    if isinstance(splits.pretrain, FileSamples) and isinstance(splits.train, FileSamples):
        assert splits.pretrain.paths[:count] == splits.train.paths
        assert [p.relative_to(tmp_path).as_posix() for p in splits.pretrain.paths] == list(splits.names)
    again = load_images("images", tmp_path, size=32, memory_limit=memory_limit, seed=9)
    assert again.test is not None
    assert labels_of(again.test) == labels_of(splits.test)
    validated = load_images("images", tmp_path, size=32, memory_limit=memory_limit, validation=0.5)
    assert validated.train is not None
    assert validated.test is not None
    assert len(validated.pretrain) == len(validated.names) == len(validated.train) + 3
    assert len(validated.train) + len(validated.test) == count
    assert set(validated.names) < set(splits.names)
    other = load_images("images", tmp_path, size=32, memory_limit=memory_limit, validation=0.5, seed=1)
    assert other.names != validated.names


def test_images_with_given_splits(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", {"a": 3, "b": 2})
    make_classes(tmp_path / "test", {"a": 1, "b": 1})
    splits = load_images("images", tmp_path, size=32)
    _, train, test = arrays(splits)
    assert (splits.split, splits.classes) == ("test", ("a", "b"))
    assert (labels_of(train), labels_of(test)) == ([0, 0, 0, 1, 1], [0, 1])


def test_images_of_one_small_shape_are_kept_pixel_for_pixel(tmp_path: Path) -> None:
    for i in range(3):
        write_image(tmp_path / f"{i}.png", i, (20, 30))
    splits = load_images("images", tmp_path, size=32)
    assert isinstance(splits.pretrain, ArraySamples)
    assert torch.equal(splits.pretrain.images[1], to_tensor(decode(tmp_path / "1.png")))


@pytest.mark.parametrize("memory_limit", [2**30, 0])
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [
        (".png", truncate),
        (".jpg", truncate),
        (".webp", truncate),
        (".jpg", damage_header),
        (".bmp", truncate),
        (".gif", truncate),
    ],
)
def test_a_damaged_image_is_skipped_as_if_missing(
    tmp_path: Path, suffix: str, damage: Callable[[Path], None], memory_limit: int
) -> None:
    for i in range(4):
        write_image(tmp_path / f"{i}{suffix}", i)
    damage(tmp_path / f"2{suffix}")

    def load() -> tuple[Splits, torch.Tensor]:
        splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
        return splits, display_images(splits.pretrain, range(len(splits.pretrain)), 32)

    with pytest.warns(UserWarning, match=rf"1 of the 4 images.* are skipped: \S*2\{suffix}: \w"):
        splits, images = load()
    assert [x.path.name for x in splits.skipped] == [f"2{suffix}"]
    (tmp_path / f"2{suffix}").unlink()
    without, expected = load()
    assert without.skipped == ()
    assert fingerprint(splits) == fingerprint(without)
    assert torch.equal(images, expected)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_labels_of_damaged_images_are_removed(tmp_path: Path, memory_limit: int) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    truncate(tmp_path / "a" / "007.png")
    damage_header(tmp_path / "b" / "000.png")
    with pytest.warns(UserWarning, match=r"2 of the 120 images"):
        splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
    assert [x.path.relative_to(tmp_path).as_posix() for x in splits.skipped] == ["a/007.png", "b/000.png"]
    assert all(x.reason for x in splits.skipped)
    assert splits.train is not None
    assert splits.test is not None
    assert len(splits.train) + len(splits.test) == 118
    assert (torch.tensor(labels_of(splits.train) + labels_of(splits.test)).bincount() == 59).all()


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_damage_inside_a_file_is_found_before_training(tmp_path: Path, memory_limit: int) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    damage_inside(tmp_path / "b" / "001.png")
    assert check_image(tmp_path / "b" / "001.png") == (30, 40)  # header and end are fine
    with pytest.warns(UserWarning, match="1 of the 120 images"):
        splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
    assert [x.path.name for x in splits.skipped] == ["001.png"]
    assert len(splits.pretrain) + len(splits.test or ()) == 119


@pytest.mark.parametrize("memory_limit", [2**30, 3 * 3 * 20 * 30])
def test_a_damaged_image_does_not_influence_how_others_are_stored(tmp_path: Path, memory_limit: int) -> None:
    """With it they would differ in shape, and at the lower limit stay files."""
    for i in range(3):
        write_image(tmp_path / f"{i}.png", i, (20, 30))
    write_image(tmp_path / "x.png", 9, (90, 80))
    damage_inside(tmp_path / "x.png")
    with pytest.warns(UserWarning, match="1 of the 4 images"):
        kept = load_images("images", tmp_path, size=32, memory_limit=memory_limit).pretrain
    assert isinstance(kept, ArraySamples)
    assert torch.equal(kept.images[1], to_tensor(decode(tmp_path / "1.png")))


def test_large_folders_are_checked_by_header_and_end_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    damage_inside(tmp_path / "b" / "001.png")
    monkeypatch.setattr("fmicl.data.images.listing.DECODED_LIMIT", 119)
    assert load_images("images", tmp_path, size=32, memory_limit=0).skipped == ()


def test_unsupported_formats_are_reported(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    (tmp_path / "b.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    with pytest.warns(UserWarning, match=r"1 of the 2 images.*b\.HEIC"):
        load_images("images", tmp_path, size=32)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
@pytest.mark.parametrize("damage", [damage_header, damage_inside])
def test_images_that_are_all_damaged_are_an_error(
    tmp_path: Path, damage: Callable[[Path], None], memory_limit: int
) -> None:
    make_classes(tmp_path, {"a": 3, "b": 2})
    for path in tmp_path.glob("*/*.png"):
        damage(path)
    with pytest.raises(FileNotFoundError, match=r"none of the 5 images.*000\.png: .*; and 2 more$"):
        load_images("images", tmp_path, size=32, memory_limit=memory_limit)


@pytest.mark.parametrize("lost", ["test/*/*", "train/*/*", "train/b/*", "train/a/00[12].png"])
@pytest.mark.filterwarnings("ignore:.*and are skipped")
def test_too_few_readable_images_to_evaluate_are_an_error(tmp_path: Path, lost: str) -> None:
    make_classes(tmp_path / "train", {"a": 3, "b": 1})
    make_classes(tmp_path / "test", {"a": 1, "b": 1})
    load_images("images", tmp_path, size=32)
    for path in tmp_path.glob(lost):
        damage_header(path)
    with pytest.raises(ValueError, match=r"too few readable images.*00\d\.png"):
        load_images("images", tmp_path, size=32)


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images in"):
        load_images("images", tmp_path, size=32)
    for name in ("images", "imagenet", "tinyimagenet", "cifar10", "stl10"):
        with pytest.raises(FileNotFoundError, match=r"nowhere"):
            load_images(name, tmp_path / "nowhere", size=32)
        with pytest.raises(ValueError, match="--data-dir"):
            load_images(name, None, size=32)
