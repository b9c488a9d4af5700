"""Folders of images: TinyImageNet, ImageNet, and a user's own.

A file counts as an image by its extension; hidden files and folders are passed over, and so are the folders of runs
and sweeps, whose figures are no data (:mod:`fmicl.data.images.walk`). Every image is looked at
before training starts: decoded, or, in folders of more than 10,000 that don't fit into memory, only its header and
its end (damage in between is then found while training, see :class:`fmicl.data.ViewStream`). Those that can't be
read are skipped, counted, and reported with a warning; it is an error if there are no others. They have no say in
which of the others are held out, or at what shape these are kept.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from PIL import ImageOps
from torch import Tensor

from fmicl.data.images.decode import check_image, in_threads, resize_centre, stored_side, to_tensor, try_decode
from fmicl.data.images.samples import (
    ArraySamples,
    FileSamples,
    Samples,
    Skipped,
    Splits,
    lacking,
    listed,
    split_by_name,
)
from fmicl.data.images.walk import Exclude, images_in, subfolders

__all__ = ["find_images", "load_folder", "load_imagenet", "load_tinyimagenet"]

_DECODED = 10_000  # folders up to so many images are decoded whole before training, even where they stay files
_HELD_OUT = 0.1  # of the labelled images of a user's folder
_EVALUATION = ("test", "val", "valid", "validation")  # folders that are a split when train/ is beside them
_logger = logging.getLogger("fmicl")


@dataclass(frozen=True)
class _Listing:
    """What a folder says about its images, before any of them is opened; -1 is no label."""

    root: Path
    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...]
    test_paths: list[Path]
    test_labels: list[int]
    split: str
    left_out: list[Skipped]


def find_images(folder: Path | str, *, exclude: Exclude | None = None) -> tuple[FileSamples, tuple[Skipped, ...]]:
    """All readable images of a folder and the folders in it, sorted by path, without labels.

    Returns:
        The images, and what is left out: images that can't be read, and folders that can't be entered or hold runs
        of this package. Warnings count these.

    Raises:
        FileNotFoundError: If there is no such folder, or no readable image in it.
    """
    root = Path(folder)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}")
    left_out: list[Skipped] = []
    paths = images_in(root, left_out, exclude)
    shapes, skipped = _look(paths)
    _report(root, skipped, len(paths), left_out)
    return FileSamples(tuple(shapes)), (*skipped, *left_out)


def load_folder(data_dir: Path, *, size: int, memory_limit: int, exclude: Exclude | None = None) -> Splits:
    """Any folder of images, with or without labels.

    - At least two subfolders with images: each is a class (with whatever is further down in it), and about a tenth
      of each class is held out for evaluation. A file's path below the folder decides its side, so that it stays
      there when other files come or go (see :func:`fmicl.data.split_by_name`). Images beside the class folders are
      unlabelled: the encoder is trained on them as well, and evaluation leaves them out.
    - ``train/`` and ``test/`` (or ``val/``), in upper or lower case: these are the splits, with a folder for each
      class in both.
    - Otherwise all images are unlabelled, however deep they are, and there is nothing to evaluate on.

    Args:
        data_dir: The folder.
        size: Side of the views that it will be used for.
        memory_limit: Bytes up to which the images are kept in memory, resized.
        exclude: Which subfolders to leave out.

    Raises:
        FileNotFoundError: If there is no such folder, or no readable image in it.
        ValueError: If there are classes, but the readable images are too few to evaluate on.
    """
    root = data_dir
    folders = {f.name.lower(): f for f in subfolders(root)}
    evaluation = next((name for name in _EVALUATION if name in folders), None)
    if evaluation is not None and "train" in folders:
        return _assemble(_given_split(root, folders["train"], folders[evaluation], exclude), size, memory_limit)
    left_out: list[Skipped] = []
    paths = images_in(root, left_out, exclude)
    names = sorted({p.relative_to(root).parts[0] for p in paths if p.parent != root})
    if len(names) < 2:
        listing = _Listing(root, paths, [-1] * len(paths), (), [], [], "none", left_out)
        return _assemble(listing, size, memory_limit)
    label = {name: i for i, name in enumerate(names)}
    # The labelled images first: evaluation takes the front.
    paths.sort(key=lambda p: (p.parent == root, p))
    labels = [-1 if p.parent == root else label[p.relative_to(root).parts[0]] for p in paths]
    # Before any file is opened: whether one can be read has no say in where the others go.
    count = sum(x >= 0 for x in labels)
    below = [p.relative_to(root).as_posix() for p in paths[:count]]
    kept, held = split_by_name(below, labels[:count], _HELD_OUT, "held-out")
    kept += range(count, len(paths))
    listing = _Listing(
        root,
        [paths[i] for i in kept],
        [labels[i] for i in kept],
        tuple(names),
        [paths[i] for i in held],
        [labels[i] for i in held],
        "held-out",
        left_out,
    )
    return _assemble(listing, size, memory_limit)


def load_imagenet(data_dir: Path, *, size: int, memory_limit: int, exclude: Exclude | None = None) -> Splits:
    """ImageNet as class folders: ``train/n01440764/*.JPEG`` and ``val/n01440764/*.JPEG``.

    Raises:
        FileNotFoundError: If train/ or val/ is missing or empty.
        ValueError: If val/ is not sorted into classes, or has others than train/.
    """
    root = _root(data_dir, ("imagenet", "ILSVRC2012", "ImageNet"), "train")
    for name in ("train", "val"):
        if not (root / name).is_dir():
            raise FileNotFoundError(
                f"no ImageNet in {data_dir}: {root / name} is missing. Both train/ and val/ are needed, with a "
                f"folder for each class; ImageNet itself is to be had from https://image-net.org only."
            )
    return _assemble(_given_split(root, root / "train", root / "val", exclude), size, memory_limit)


def load_tinyimagenet(data_dir: Path, *, size: int, memory_limit: int, exclude: Exclude | None = None) -> Splits:
    """TinyImageNet as it comes: ``train/n01443537/images/*.JPEG``, ``val/images``, ``val/val_annotations.txt``.

    Classes are in the order of their WordNet names, and called by their first word in ``words.txt``.

    Raises:
        FileNotFoundError: If a folder, a file, or an image that the annotations name is missing.
        ValueError: If the annotations have a line that can't be understood, or leave images out.
    """
    root = _root(data_dir, ("tiny-imagenet-200",), "train")
    address = "get http://cs231n.stanford.edu/tiny-imagenet-200.zip and extract it there"
    for needed in ("train", "val/images", "val/val_annotations.txt"):
        if not (root / needed).exists():
            raise FileNotFoundError(f"no TinyImageNet in {data_dir}: {root / needed} is missing; {address}")
    listed = root / "wnids.txt"
    names = listed.read_text().split() if listed.is_file() else [f.name for f in subfolders(root / "train")]
    label = {name: i for i, name in enumerate(sorted(names))}
    paths, labels = [], []
    left_out: list[Skipped] = []
    for name in sorted(names):
        found = images_in(root / "train" / name, left_out, exclude)
        paths += found
        labels += [label[name]] * len(found)
    test_paths, test_labels = _tinyimagenet_annotations(root / "val", label, left_out)
    words = _words(root / "words.txt")
    classes = tuple(words.get(name, name) for name in sorted(names))
    listing = _Listing(root, paths, labels, classes, test_paths, test_labels, "val", left_out)
    return _assemble(listing, size, memory_limit)


def _tinyimagenet_annotations(
    val: Path, label: dict[str, int], left_out: list[Skipped]
) -> tuple[list[Path], list[int]]:
    annotations = val / "val_annotations.txt"
    entries: dict[str, int] = {}
    for number, line in enumerate(annotations.read_text().splitlines(), start=1):
        columns = line.split("\t")
        if len(columns) < 2 or columns[1] not in label:
            raise ValueError(
                f"line {number} of {annotations} should be an image, a tab and a class of train/; "
                f"it is {line!r}: extract the archive again"
            )
        entries[columns[0]] = label[columns[1]]
    there = {p.name for p in images_in(val / "images", left_out)}
    for missing in sorted(entries.keys() - there)[:1]:
        raise FileNotFoundError(f"{val / 'images' / missing} is missing, but {annotations} names it")
    for extra in sorted(there - entries.keys())[:1]:
        raise ValueError(f"{val / 'images' / extra} has no line in {annotations}: add one, or remove the image")
    return [val / "images" / name for name in sorted(entries)], [entries[name] for name in sorted(entries)]


def _words(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    rows = (line.split("\t") for line in path.read_text().splitlines())
    return {row[0]: row[1].split(",")[0].strip() for row in rows if len(row) > 1}


def _given_split(root: Path, train: Path, test: Path, exclude: Exclude | None) -> _Listing:
    """Class folders in two places; those of the second are among those of the first."""
    found: list[tuple[list[Path], list[str]]] = []
    left_out: list[Skipped] = []
    for folder in (train, test):
        paths = images_in(folder, left_out, exclude)
        loose = next((p for p in paths if p.parent == folder), None)
        if loose is not None:
            raise ValueError(
                f"{loose} is in no class folder: {folder} needs a folder for each class, with its images inside"
                + (" (for ImageNet's val/ there is a script, valprep.sh, that sorts them)" if folder == test else "")
            )
        found.append((paths, [p.relative_to(folder).parts[0] for p in paths]))
    (paths, names), (test_paths, test_names) = found
    classes = sorted(set(names))
    unknown = sorted(set(test_names) - set(classes))
    if unknown:
        raise ValueError(
            f"{test} has {len(unknown)} classes that {train} has not, for example {unknown[0]}: "
            f"both need the same names"
        )
    label = {name: i for i, name in enumerate(classes)}
    return _Listing(
        root,
        paths,
        [label[n] for n in names],
        tuple(classes),
        test_paths,
        [label[n] for n in test_names],
        test.name.lower(),
        left_out,
    )


def _assemble(listing: _Listing, size: int, memory_limit: int) -> Splits:
    """Look at every image, keep them in memory if they fit, and make the splits."""
    paths = listing.paths + listing.test_paths
    labels = torch.tensor(listing.labels + listing.test_labels, dtype=torch.int64)
    is_test = torch.arange(len(paths)) >= len(listing.paths)
    _logger.info("looking at %s images in %s", f"{len(paths):,}", listing.root)
    shapes, skipped = _look(paths)
    samples, failed = _read(shapes, size, memory_limit)
    skipped += failed
    _report(listing.root, skipped, len(paths), listing.left_out)
    bad = {x.path for x in skipped}
    good = [i for i, path in enumerate(paths) if path not in bad]
    names = [paths[i].relative_to(listing.root).as_posix() for i in good]
    return _split(samples, names, labels[good], is_test[good], listing, tuple(skipped))


def _look(paths: Sequence[Path]) -> tuple[dict[Path, tuple[int, int]], list[Skipped]]:
    """The shapes of the images, as their headers say, and those that can't be read."""
    looked = list(zip(paths, in_threads(check_image, paths), strict=True))
    shapes = {path: x for path, x in looked if not isinstance(x, Skipped)}
    return shapes, [x for _, x in looked if isinstance(x, Skipped)]


def _read(shapes: dict[Path, tuple[int, int]], size: int, memory_limit: int) -> tuple[Samples, list[Skipped]]:
    """The images in memory if they fit, as files if not; and those that only decoding finds broken."""
    plan = height, width, fits = _plan(shapes, size, memory_limit)
    images: Tensor | None = None
    failed: list[Skipped] = []
    if fits:
        images, failed = _decode_all(list(shapes), height, width, size)
    elif len(shapes) <= _DECODED:
        failed = [x for x in in_threads(_broken, list(shapes)) if x is not None]
    bad = {x.path for x in failed}
    whole = {path: shape for path, shape in shapes.items() if path not in bad}
    if _plan(whole, size, memory_limit) != plan:  # the broken ones had a say in it
        images = None  # makes room for those that are read again
        samples, more = _read(whole, size, memory_limit)
        return samples, failed + more
    return FileSamples(tuple(whole)) if images is None else ArraySamples(images), failed


def _plan(shapes: dict[Path, tuple[int, int]], size: int, memory_limit: int) -> tuple[int, int, bool]:
    """Height and width that the images would be kept at, and whether they fit into memory then."""
    height, width = _kept_shape(list(shapes.values()), size)
    return height, width, len(shapes) * 3 * height * width <= memory_limit


def _split(
    samples: Samples,
    names: list[str],
    labels: Tensor,
    is_test: Tensor,
    listing: _Listing,
    skipped: tuple[Skipped, ...],
) -> Splits:
    if not listing.classes:
        return Splits(
            samples, None, None, (), skipped, listing.split, listing.root, tuple(names), tuple(listing.left_out)
        )
    train = (~is_test & (labels >= 0)).nonzero()[:, 0]
    rest = (~is_test).nonzero()[:, 0]
    held = is_test.nonzero()[:, 0]
    missing = lacking(labels[train], len(held))
    if missing:
        unread = f". These can't be read: {listed(skipped)}" if skipped else ""
        raise ValueError(
            f"{listing.root} has too few readable images in its class folders to evaluate on: {missing}{unread}"
        )
    training = _labelled(samples.select(train), labels[train])
    return Splits(
        pretrain=training if len(rest) == len(train) else samples.select(rest),
        train=training,
        test=_labelled(samples.select(held), labels[held]),
        classes=listing.classes,
        skipped=skipped,
        split=listing.split,
        root=listing.root,
        names=tuple(names[i] for i in rest.tolist()),
        left_out=tuple(listing.left_out),
        test_names=tuple(names[i] for i in held.tolist()),
    )


def _labelled(samples: Samples, labels: Tensor) -> Samples:
    if isinstance(samples, ArraySamples):
        return ArraySamples(samples.images, labels)
    return FileSamples(samples.paths, labels)


def _kept_shape(shapes: Sequence[tuple[int, int]], size: int) -> tuple[int, int]:
    """Images that all have one shape, and none too large, are kept pixel for pixel; else they become squares."""
    side = stored_side(size)
    first = shapes[0] if shapes else (side, side)
    return first if max(first) <= side and all(shape == first for shape in shapes) else (side, side)


def _broken(path: Path) -> Skipped | None:
    found = try_decode(path)
    return found if isinstance(found, Skipped) else None


def _decode_all(paths: list[Path], height: int, width: int, size: int) -> tuple[Tensor, list[Skipped]]:
    def one(path: Path) -> Tensor | Skipped:
        image = try_decode(path)
        if isinstance(image, Skipped):
            return image
        if image.size != (width, height):
            if height == width == stored_side(size):
                image = resize_centre(image, height, size, whole=True)
            else:  # the header was wrong about the shape
                image = ImageOps.fit(image, (width, height))
        return to_tensor(image)

    images = torch.empty(len(paths), 3, height, width, dtype=torch.uint8)
    failed: list[Skipped] = []
    count = 0
    for result in in_threads(one, paths):
        if isinstance(result, Skipped):
            failed.append(result)
        else:
            images[count] = result
            count += 1
    return images[:count], failed


def _report(root: Path, skipped: Sequence[Skipped], total: int, left_out: Sequence[Skipped]) -> None:
    """Warn of images that can't be read, and of folders that are left out; raise if there are no other images."""
    if len(skipped) == total:
        raise FileNotFoundError(f"none of the {total} images in {root} can be read: {listed(skipped)}")
    if skipped:
        warnings.warn(
            f"{len(skipped)} of the {total} images in {root} can't be read and are skipped: {listed(skipped)}",
            stacklevel=4,
        )
    if left_out:
        warnings.warn(
            f"folders of {root} are not looked into and are skipped: {listed(left_out)}",
            stacklevel=4,
        )


def _root(data_dir: Path, names: Sequence[str], sign: str) -> Path:
    """The folder itself, or the one with the usual name in it."""
    if not (data_dir / sign).is_dir():
        for name in names:
            if (data_dir / name).is_dir():
                return data_dir / name
    return data_dir
