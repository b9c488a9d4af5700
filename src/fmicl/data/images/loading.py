"""The data sets by name."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import fnmatch
from dataclasses import dataclass
from pathlib import Path

import torch

from fmicl.data.images.binaries import load_cifar10, load_digits, load_stl10
from fmicl.data.images.folders import load_folder, load_imagenet, load_tinyimagenet
from fmicl.data.images.samples import Splits, lacking, split_by_name, stratified_split
from fmicl.data.images.walk import Exclude
from fmicl.utils.locks import one_at_a_time

__all__ = ["DatasetInfo", "dataset_info", "list_datasets", "load_images", "named_folder"]


@dataclass(frozen=True)
class DatasetInfo:
    """What is known of a data set before it is loaded."""

    name: str
    summary: str
    needs_folder: bool = True
    downloads: bool = False
    folder: bool = False


_DATASETS = {
    info.name: info
    for info in (
        DatasetInfo("cifar10", "CIFAR-10, binary or Python version: 60,000 images of 32 x 32", downloads=True),
        DatasetInfo("digits", "scikit-learn's digits: 1,797 grey images of 8 x 8, no files needed", needs_folder=False),
        DatasetInfo("imagenet", "ImageNet as class folders in train/ and val/", folder=True),
        DatasetInfo("images", "any folder of images, with or without class subfolders", folder=True),
        DatasetInfo("stl10", "STL-10 with its unlabelled split: 113,000 images of 96 x 96", downloads=True),
        DatasetInfo("tinyimagenet", "TinyImageNet as it comes: 110,000 images of 64 x 64", folder=True),
    )
}


def list_datasets(pattern: str = "*") -> list[str]:
    """Names of the data sets, as ``load_images`` takes them.

    Example:
        >>> list_datasets("*imag*")
        ['imagenet', 'images', 'tinyimagenet']
    """
    return sorted(fnmatch.filter(_DATASETS, pattern))


def dataset_info(name: str) -> DatasetInfo:
    """What is known of a data set before it is loaded.

    Raises:
        ValueError: If there is none of that name; the message says what the near ones are.

    Example:
        >>> dataset_info("stl10").downloads
        True
        >>> dataset_info("cifar")
        Traceback (most recent call last):
        ...
        ValueError: there is no data set 'cifar'; did you mean cifar10? All: cifar10, digits, ...
    """
    if name not in _DATASETS:
        near = difflib.get_close_matches(name, _DATASETS, n=2)
        hint = f"; did you mean {' or '.join(near)}?" if near else "."
        raise ValueError(f"there is no data set {name!r}{hint} All: {', '.join(list_datasets())}")
    return _DATASETS[name]


def named_folder(name: str, data_dir: Path | str | None) -> Path | str:
    """The folder of a data set that is read from one.

    Raises:
        ValueError: it is not said which one, or there is no such data set.
    """
    if data_dir is None:
        raise ValueError(f"{name} ({dataset_info(name).summary}) is read from a folder: say which one with --data-dir")
    return data_dir


def load_images(
    name: str,
    data_dir: Path | str | None = None,
    *,
    size: int = 32,
    download: bool = False,
    validation: float = 0.0,
    seed: int = 0,
    memory_limit: int = 4 * 2**30,
    checksum: bool = True,
    exclude: Exclude | None = None,
) -> Splits:
    """Load a data set, after checking that all of it is there.

    CIFAR-10, STL-10 and the digits come as arrays. Folders do so too if they fit into ``memory_limit`` once their
    shorter side is resized to about ``size * 256 / 224`` and the centre cut out as a square; otherwise they stay
    files, which are decoded when they are needed. (Images that all have one shape, none of its sides larger
    than that, are kept pixel for pixel.) Images of a folder that can't be read are left out, with a warning that
    counts them and names the first; ``skipped`` of the result has them all.

    Args:
        name: One of :func:`list_datasets`.
        data_dir: Folder of the data set, or the one that it is in; digits need none.
        size: Side of the views that the images will be used for.
        download: Let torchvision get the data if they are not there, where it offers that.
        validation: Share of the labelled training set to hold out, stratified by class. ``test`` is then that
            part, named "validation", and the real test split is left alone: this is for choosing settings.
            In folders it is about that share: a file's path and the seed decide (:func:`fmicl.data.split_by_name`).
        seed: Which samples are held out for validation. The test splits don't depend on it.
        memory_limit: Bytes up to which a folder of images is held in memory.
        checksum: Check the official MD5 sums. Switch it off to use a part of CIFAR-10 or STL-10 in their own form.
        exclude: Subfolders that hold no images to train on: given a folder, returns what it is, or None.

    Raises:
        FileNotFoundError: If a file or folder is missing; the message says which one and what to do.
        ValueError: If one is damaged, an option doesn't fit the data set, too few images are left to evaluate on, or
            the name is unknown.

    Example:
        >>> splits = load_images("digits", validation=0.1)
        >>> splits.split, len(splits.train), len(splits.test)
        ('validation', 1211, 136)
    """
    info = dataset_info(name)
    if download and not info.downloads:
        offered = ", ".join(n for n in list_datasets() if _DATASETS[n].downloads)
        raise ValueError(f"torchvision offers no download of {name}, only of {offered}: leave --download out")
    if not 0 <= validation < 1:
        raise ValueError(f"validation is the share of the training set to hold out, in [0, 1); got {validation}")
    if not info.needs_folder:
        return _hold_out(load_digits(), validation, seed)
    root = Path(named_folder(name, data_dir)).expanduser()
    if not root.is_dir() and not download:
        raise FileNotFoundError(f"there is no folder {root}: say where the data is with --data-dir")
    if info.folder:
        load = {"imagenet": load_imagenet, "images": load_folder, "tinyimagenet": load_tinyimagenet}[name]
        splits = load(root, size=size, memory_limit=memory_limit, exclude=exclude)
    else:
        read = {"cifar10": load_cifar10, "stl10": load_stl10}[name]
        with contextlib.ExitStack() as stack:
            if download:  # of several processes one does, and the others wait and find the files
                with contextlib.suppress(OSError):  # a folder that can't be written to: what is there, is there
                    root.mkdir(parents=True, exist_ok=True)
                    stack.enter_context(one_at_a_time(root / ".download.lock"))
            splits = read(root, download=download, checksum=checksum)
    return _hold_out(splits, validation, seed)


def _hold_out(splits: Splits, share: float, seed: int) -> Splits:
    """Replace the test split with a part of the training split, which nothing is trained on any more."""
    if share == 0:
        return splits
    if splits.train is None or splits.train.labels is None:
        raise ValueError("validation holds out labelled images, but these have no labels (no class subfolders)")
    count = len(splits.train)
    if splits.names:
        labels = splits.train.labels.tolist()
        sides = split_by_name(splits.names[:count], labels, share, f"validation {seed}")
        kept, held = (torch.tensor(side) for side in sides)
    else:
        kept, held = stratified_split(splits.train.labels, share, seed)
    train = splits.train.select(kept)
    if splits.pretrain is splits.train:
        pretrain = train
    else:  # it starts with the samples of train
        pretrain = splits.pretrain.select(torch.cat([kept, torch.arange(count, len(splits.pretrain))]))
    missing = lacking(splits.train.labels[kept], len(held))
    if missing:
        raise ValueError(f"--validation {share} leaves too few images to evaluate on, so take another share: {missing}")
    names = (*(splits.names[i] for i in kept.tolist()), *splits.names[count:]) if splits.names else ()
    return dataclasses.replace(
        splits,
        pretrain=pretrain,
        train=train,
        test=splits.train.select(held),
        split="validation",
        names=names,
        test_names=tuple(splits.names[i] for i in held.tolist()) if splits.names else (),
    )
