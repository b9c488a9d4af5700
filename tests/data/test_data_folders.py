"""Folders of image files: whole, damaged in every way that happens, and as they change."""

import math
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from fmicl.data import (
    ArraySamples,
    FileSamples,
    Splits,
    display_images,
    find_images,
    fingerprint,
    list_datasets,
    load_images,
    split_by_name,
)
from fmicl.data.images.decoding import check_image, decode, resize_centre, to_tensor
from image_sets import arrays, labels_of, make_classes, write_image


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


def test_tinyimagenet_damage_is_named(tmp_path: Path) -> None:
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
def test_images_with_classes_and_loose_ones(tmp_path: Path, memory_limit: int) -> None:
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


@pytest.mark.parametrize("validation", [0.0, 0.3])
def test_a_file_stays_on_its_side_when_others_come_or_go(tmp_path: Path, validation: float) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})

    def trained() -> set[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return set(load_images("images", tmp_path, size=32, memory_limit=0, validation=validation).names)

    before = trained()
    everything = {p.relative_to(tmp_path).as_posix() for p in tmp_path.glob("*/*.png")}
    replace_with_text(tmp_path / "a" / "007.png")
    replace_with_text(tmp_path / "b" / "031.png")
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


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def replace_with_text(path: Path) -> None:
    path.write_text("<html>404</html>")


def damage_inside(path: Path) -> None:
    """The end is there, the middle is not."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 3] + data[-12:])


@pytest.mark.parametrize("memory_limit", [2**30, 0])
@pytest.mark.parametrize(
    ("suffix", "damage"),
    [(".png", cut), (".jpg", cut), (".webp", cut), (".jpg", replace_with_text), (".bmp", cut), (".gif", cut)],
)
def test_a_damaged_image_is_as_if_it_were_not_there(
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
def test_damaged_images_take_their_labels_with_them(tmp_path: Path, memory_limit: int) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    cut(tmp_path / "a" / "007.png")
    replace_with_text(tmp_path / "b" / "000.png")
    with pytest.warns(UserWarning, match=r"2 of the 120 images"):
        splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
    assert [x.path.relative_to(tmp_path).as_posix() for x in splits.skipped] == ["a/007.png", "b/000.png"]
    assert all(x.reason for x in splits.skipped)
    assert splits.train is not None
    assert splits.test is not None
    assert len(splits.train) + len(splits.test) == 118
    assert (torch.tensor(labels_of(splits.train) + labels_of(splits.test)).bincount() == 59).all()


@pytest.mark.parametrize("memory_limit", [2**30, 0])
def test_damage_that_only_decoding_finds_is_found_before_training(tmp_path: Path, memory_limit: int) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    damage_inside(tmp_path / "b" / "001.png")
    assert check_image(tmp_path / "b" / "001.png") == (30, 40)  # header and end are fine
    with pytest.warns(UserWarning, match="1 of the 120 images"):
        splits = load_images("images", tmp_path, size=32, memory_limit=memory_limit)
    assert [x.path.name for x in splits.skipped] == ["001.png"]
    assert len(splits.pretrain) + len(splits.test or ()) == 119


@pytest.mark.parametrize("memory_limit", [2**30, 3 * 3 * 20 * 30])
def test_a_broken_image_has_no_say_in_how_the_others_are_kept(tmp_path: Path, memory_limit: int) -> None:
    """With it they would not be of one shape, and, at the lower limit, would stay files."""
    for i in range(3):
        write_image(tmp_path / f"{i}.png", i, (20, 30))
    write_image(tmp_path / "x.png", 9, (90, 80))
    damage_inside(tmp_path / "x.png")
    with pytest.warns(UserWarning, match="1 of the 4 images"):
        kept = load_images("images", tmp_path, size=32, memory_limit=memory_limit).pretrain
    assert isinstance(kept, ArraySamples)
    assert torch.equal(kept.images[1], to_tensor(decode(tmp_path / "1.png")))


def test_folders_too_large_to_decode_twice_are_looked_at_from_outside(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_classes(tmp_path, {"a": 60, "b": 60})
    damage_inside(tmp_path / "b" / "001.png")
    monkeypatch.setattr("fmicl.data.images.listing.DECODED_LIMIT", 119)
    assert load_images("images", tmp_path, size=32, memory_limit=0).skipped == ()


def test_photos_in_a_format_that_cannot_be_read_are_not_passed_over(tmp_path: Path) -> None:
    write_image(tmp_path / "a.jpg")
    (tmp_path / "b.HEIC").write_bytes(b"\0\0\0\x18ftypheic" + bytes(100))
    with pytest.warns(UserWarning, match=r"1 of the 2 images.*b\.HEIC"):
        load_images("images", tmp_path, size=32)


@pytest.mark.parametrize("memory_limit", [2**30, 0])
@pytest.mark.parametrize("damage", [replace_with_text, damage_inside])
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
def test_classes_that_damage_leaves_too_little_of_are_an_error_before_training(tmp_path: Path, lost: str) -> None:
    make_classes(tmp_path / "train", {"a": 3, "b": 1})
    make_classes(tmp_path / "test", {"a": 1, "b": 1})
    load_images("images", tmp_path, size=32)
    for path in tmp_path.glob(lost):
        replace_with_text(path)
    with pytest.raises(ValueError, match=r"too few readable images.*00\d\.png"):
        load_images("images", tmp_path, size=32)


def test_find_images(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    replace_with_text(tmp_path / "a" / "000.png")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match="1 of the 4"):
        samples, skipped = find_images(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in samples.paths] == ["a/001.png", "b/000.png", "b/001.png"]
    assert "not an image" in skipped[0].reason


def test_empty_and_missing_folders(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no images in"):
        load_images("images", tmp_path, size=32)
    for name in ("images", "imagenet", "tinyimagenet", "cifar10", "stl10"):
        with pytest.raises(FileNotFoundError, match=r"nowhere"):
            load_images(name, tmp_path / "nowhere", size=32)
        with pytest.raises(ValueError, match="--data-dir"):
            load_images(name, None, size=32)


def test_unknown_names_and_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar100.*cifar10"):
        load_images("cifar100", tmp_path)
    with pytest.raises(ValueError, match=r"imagenet.*cifar10, stl10"):
        load_images("imagenet", tmp_path, download=True)
    with pytest.raises(ValueError, match=r"validation.*1.5"):
        load_images("digits", validation=1.5)
    assert list_datasets() == ["cifar10", "digits", "imagenet", "images", "stl10", "tinyimagenet"]


# --- decoding -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I"])
def test_every_kind_of_image_becomes_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("x.tif" if mode in ("CMYK", "I;16", "I") else "x.png")
    if mode.startswith("I"):
        values = np.linspace(0, 65535, 64).reshape(8, 8)
        Image.fromarray(values.astype(np.uint16 if mode == "I;16" else np.int32)).save(path)
        assert np.array_equal(np.asarray(decode(path))[..., 0], (values.astype(np.int64) >> 8).astype(np.uint8))
    else:
        Image.new("RGB", (8, 8), (200, 100, 50)).convert(mode).save(path)
    assert decode(path).mode == "RGB"
    assert check_image(path) == (8, 8)


def test_photos_are_turned_upright(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to the right
    image.save(tmp_path / "x.jpg", exif=exif)
    upright = decode(tmp_path / "x.jpg")
    assert upright.size == (20, 40)
    assert check_image(tmp_path / "x.jpg") == (40, 20)
    assert np.asarray(upright)[5].mean() > 250


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (300, 64), (64, 64), (20, 21)])
def test_resize_centre_is_torchvisions(size: tuple[int, int]) -> None:
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    resized = tv.resize(image, [32], antialias=True)
    ours, theirs = (np.asarray(x).astype(int) for x in (resize_centre(image, 32, 28), tv.center_crop(resized, [28])))
    assert np.abs(ours - theirs).max() <= 1
