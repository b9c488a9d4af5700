"""Splits from a listing of image files: checks, resizing into memory, labels.

Every image is checked before training starts: decoded, or, in folders of more than 10,000 that fit neither into memory
nor into the cache, only its header and its end (damage in between is then found in training, see
:class:`fmicl.data.ViewStream`). Images that can't be read are skipped with a warning; it is an error if there are no
others. They influence neither which of the others are held out nor the shape at which these are kept.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import ImageOps
from torch import Tensor

from fmicl.data.images.cache import ImageCache, MemoryStore, open_cache, warn_not_cached
from fmicl.data.images.decoding import check_images, map_in_processes, resize_centre, stored_side, try_decode
from fmicl.data.images.registry import Exclude, LoadRequest
from fmicl.data.images.samples import ArraySamples, FileSamples, MappedSamples, Samples, Skipped, summarise_skipped
from fmicl.data.images.search import image_paths, names_below, report_skipped
from fmicl.data.images.splits import Splits, too_few_to_evaluate

DECODED_LIMIT = 10_000
"""Up to so many images are decoded before training to check them, even if they stay files."""
_logger = logging.getLogger("fmicl")


@dataclass(frozen=True)
class Listing:
    """Image files of a dataset with their labels, before any of them is opened.

    Attributes:
        root: folder of the dataset.
        paths: training images, the labelled ones first.
        labels: their labels; -1 without one.
        classes: names of the classes; empty without labels.
        test_paths: test images, all labelled.
        test_labels: their labels.
        split: name of the test split.
        left_out: subfolders that are not searched.
    """

    root: Path
    paths: list[Path]
    labels: list[int]
    classes: tuple[str, ...] = ()
    test_paths: list[Path] = field(default_factory=list)
    test_labels: list[int] = field(default_factory=list)
    split: str = "none"
    left_out: list[Skipped] = field(default_factory=list)


def class_folders(train: Path, test: Path, exclude: Exclude | None) -> Listing:
    """The listing of two folders, below one root, with a subfolder per class in each.

    Raises:
        FileNotFoundError: one has no images.
        ValueError: an image is in no class folder, or a test class is no training class.
    """
    left_out: list[Skipped] = []
    found: list[tuple[list[Path], list[str]]] = []
    for folder in (train, test):
        paths = image_paths(folder, left_out, exclude)
        loose = next((p for p in paths if p.parent == folder), None)
        if loose is not None:
            raise ValueError(
                f"{loose} is in no class folder: {folder} needs a folder for each class, with its images inside"
                + (" (for ImageNet's val/ the script valprep.sh sorts them)" if folder == test else "")
            )
        found.append((paths, [p.relative_to(folder).parts[0] for p in paths]))
    (paths, names), (test_paths, test_names) = found
    classes = sorted(set(names))
    unknown = sorted(set(test_names) - set(classes))
    if unknown:
        raise ValueError(
            f"{test} has {len(unknown)} classes that {train} lacks, for example {unknown[0]}: both need the same names"
        )
    index = {name: i for i, name in enumerate(classes)}
    return Listing(
        train.parent, paths, [index[n] for n in names], tuple(classes), test_paths, [index[n] for n in test_names],
        test.name.lower(), left_out,
    )  # fmt: skip


def load_listing(listing: Listing, request: LoadRequest) -> Splits:
    """Check every image, load them into memory or the cache if they fit, and make the splits.

    Raises:
        FileNotFoundError: no image can be read.
        ValueError: there are classes, but too few readable images to evaluate on.
    """
    paths = listing.paths + listing.test_paths
    labels = torch.tensor(listing.labels + listing.test_labels, dtype=torch.int64)
    is_test = torch.arange(len(paths)) >= len(listing.paths)
    with open_cache(listing.root, paths, [stored_side(request.size)], request.cache_limit, request.cache) as cache:
        found = None if cache is None else cache.read(paths)
        if found is None:
            samples, skipped = _check_and_load(paths, listing, request, cache)
        else:
            samples, skipped = _in_memory(found[0], request), found[1]
    report_skipped(listing.root, skipped, len(paths), listing.left_out)
    bad = {x.path for x in skipped}
    good = [i for i, path in enumerate(paths) if path not in bad]
    names = names_below(listing.root, [paths[i] for i in good])
    return _split(samples, names, labels[good], is_test[good], listing, tuple(skipped))


def _check_and_load(
    paths: list[Path], listing: Listing, request: LoadRequest, cache: ImageCache | None
) -> tuple[Samples, list[Skipped]]:
    """Check every image, and decode them into memory or the cache if they fit."""
    _logger.info("checking %s images in %s", f"{len(paths):,}", listing.root)
    shapes, skipped = check_images(paths)
    samples, failed = _load(shapes, request, cache)
    skipped += failed
    if cache is not None and not isinstance(samples, FileSamples):
        index = {path: i for i, path in enumerate(paths)}
        cache.commit(samples.images.shape, [(index[x.path], x.reason) for x in skipped])
        written = cache.read(paths)
        if written is not None:  # a mapping through which the file can't be changed
            samples = _in_memory(written[0], request)
    return samples, skipped


def _in_memory(images: Tensor, request: LoadRequest) -> ArraySamples | MappedSamples:
    if images.nbytes <= request.memory_limit:
        return ArraySamples(images)
    return MappedSamples(images, torch.arange(len(images)))


def _load(
    shapes: dict[Path, tuple[int, int]], request: LoadRequest, cache: ImageCache | None
) -> tuple[Samples, list[Skipped]]:
    """The images in memory or the cache if they fit, else as files; and those that only decoding finds damaged."""
    plan = height, width, fits = _plan(shapes, request, cache)
    images: Tensor | None = None
    failed: list[Skipped] = []
    if fits:
        room = cache is not None and shapes and cache.has_room(3 * len(shapes) * height * width)
        store = cache if cache is not None and room else MemoryStore()
        try:
            pixels = store.allocate((len(shapes), 3, height, width))
        except OSError as error:
            warn_not_cached(error)
            return _load(shapes, request, None)
        images, failed = _decode_all(list(shapes), pixels, store, request.size)
    elif len(shapes) <= DECODED_LIMIT:
        failed = [x for x in map_in_processes(_damage, list(shapes)) if x is not None]
    bad = {x.path for x in failed}
    readable = {path: shape for path, shape in shapes.items() if path not in bad}
    if _plan(readable, request, cache) != plan:  # the damaged images influenced it
        images = None  # free the memory before the others are read again
        if cache is not None:
            cache.discard()
        samples, more = _load(readable, request, cache)
        return samples, failed + more
    return FileSamples(tuple(readable)) if images is None else _in_memory(images, request), failed


def _plan(shapes: dict[Path, tuple[int, int]], request: LoadRequest, cache: ImageCache | None) -> tuple[int, int, bool]:
    """Height and width at which the images would be kept, and whether they fit into memory or the cache.

    Small images of one shape are kept pixel for pixel; others become squares.
    """
    side = stored_side(request.size)
    first = next(iter(shapes.values()), (side, side))
    same = max(first) <= side and all(shape == first for shape in shapes.values())
    height, width = first if same else (side, side)
    size = len(shapes) * 3 * height * width
    return height, width, size <= request.memory_limit or (cache is not None and cache.has_room(size))


def _damage(path: Path) -> Skipped | None:
    found = try_decode(path)
    return found if isinstance(found, Skipped) else None


def _decode_all(
    paths: Sequence[Path], pixels: NDArray[np.uint8], store: MemoryStore, size: int
) -> tuple[Tensor, list[Skipped]]:
    """Decode into an array of the store; images that can't be decoded leave no gap."""
    height, width = pixels.shape[2:]

    def one(row: int) -> Skipped | None:
        image = try_decode(paths[row])
        if isinstance(image, Skipped):
            return image
        if image.size != (width, height):
            if height == width == stored_side(size):
                image = resize_centre(image, height, size, keep_margin=True)
            else:  # the header was wrong about the shape
                image = ImageOps.fit(image, (width, height))
        pixels[row] = np.asarray(image, dtype=np.uint8).transpose(2, 0, 1)
        return None

    failed: list[Skipped] = []
    count = 0
    for row, result in enumerate(map_in_processes(one, range(len(paths)))):
        if result is not None:
            failed.append(result)
        else:
            if count < row:
                pixels[count] = pixels[row]
            count += 1
    return store.finish(pixels, count), failed


def _split(
    samples: Samples,
    names: list[str],
    labels: Tensor,
    is_test: Tensor,
    listing: Listing,
    skipped: tuple[Skipped, ...],
) -> Splits:
    root, left_out = listing.root, tuple(listing.left_out)
    if not listing.classes:
        return Splits(samples, None, None, (), skipped, listing.split, root, tuple(names), left_out)
    train = (~is_test & (labels >= 0)).nonzero()[:, 0]
    rest = (~is_test).nonzero()[:, 0]
    held = is_test.nonzero()[:, 0]
    missing = too_few_to_evaluate(labels[train], len(held))
    if missing:
        unread = f". These can't be read: {summarise_skipped(skipped)}" if skipped else ""
        raise ValueError(f"{root} has too few readable images in its class folders to evaluate on: {missing}{unread}")
    training = dataclasses.replace(samples.select(train), labels=labels[train])
    return Splits(
        pretrain=training if len(rest) == len(train) else samples.select(rest),
        train=training,
        test=dataclasses.replace(samples.select(held), labels=labels[held]),
        classes=listing.classes,
        skipped=skipped,
        split=listing.split,
        root=root,
        names=tuple(names[i] for i in rest.tolist()),
        left_out=left_out,
        test_names=tuple(names[i] for i in held.tolist()),
    )
