"""Loading of image datasets by name."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from fmicl.data.images import cifar10, digits, folder, imagenet, stl10, tinyimagenet  # noqa: F401 (they register)
from fmicl.data.images.registry import DATASETS, DatasetInfo, Exclude, LoadRequest
from fmicl.data.images.splits import Splits, hold_out
from fmicl.utils.locks import wait_for_lock


def list_datasets(pattern: str = "*") -> list[str]:
    """Names of the datasets that match a shell-style pattern.

    Example:
        >>> list_datasets("*imag*")
        ['imagenet', 'images', 'tinyimagenet']
    """
    return sorted(DATASETS.names(pattern))


def dataset_info(name: str) -> DatasetInfo:
    """What is known of a dataset before it is loaded.

    Raises:
        ValueError: there is none of that name; the message has the near ones.

    Example:
        >>> dataset_info("stl10").downloads
        True
    """
    return DATASETS[name].value


def require_data_dir(name: str, data_dir: Path | str | None, *, exists: bool = True) -> Path:
    """The folder of a dataset that is read from one.

    Raises:
        ValueError: none is given.
        FileNotFoundError: it must exist, and doesn't.
    """
    if data_dir is None:
        raise ValueError(f"{name} is read from a folder, but none is given: set --data-dir")
    root = Path(data_dir).expanduser()
    if exists and not root.is_dir():
        raise FileNotFoundError(f"there is no folder {root}: set --data-dir to where the data is")
    return root


def load_images(
    name: str,
    data_dir: Path | str | None = None,
    *,
    size: int = 32,
    download: bool = False,
    validation: float = 0.0,
    seed: int = 0,
    memory_limit: int = 4 * 2**30,
    cache_limit: int = 0,
    cache: Path | None = None,
    checksum: bool = True,
    exclude: Exclude | None = None,
    options: Any = None,
) -> Splits:
    """Load a dataset, after checking that it is complete.

    CIFAR-10, STL-10 and the digits are loaded as arrays. So are folders that fit into ``memory_limit`` once the shorter
    side of each image is resized to about ``size * 256 / 224`` and the centre square cropped. Larger folders are mapped
    into memory from the cache (:mod:`fmicl.data.images.cache`) up to ``cache_limit``, and stay files beyond that, which
    are decoded on demand. (Images that all have one shape, neither side larger than that, are kept pixel
    for pixel.) Images of a folder that can't be read are skipped, with a warning; ``skipped`` of the result has them.

    Args:
        name: one of :func:`list_datasets`.
        data_dir: folder of the dataset, or the one above it; digits need none.
        size: side of the views that the images will be used for.
        download: download the data if it is missing, where torchvision offers it.
        validation: share of the labelled training set to hold out, stratified by class. ``test`` is then that part, and
            the real test split is not touched: for tuning hyperparameters.
        seed: of the validation split. The test splits don't depend on it.
        memory_limit: bytes up to which a folder of images is kept in memory.
        cache_limit: bytes up to which a folder of many images is decoded once, into a file that is mapped into memory;
            0 for no such file.
        cache: folder of these files, see :func:`fmicl.data.cache_root`.
        checksum: verify the official MD5 sums. Switch it off to load a part of CIFAR-10 or STL-10 in their own format.
        exclude: which subfolders of a folder of images hold no data.
        options: of the dataset itself; None is its defaults.

    Raises:
        FileNotFoundError: a file or folder is missing; the message says which one and what to do.
        ValueError: a file is damaged, an option doesn't fit the dataset, too few images are left to evaluate on, or
            the name is unknown.

    Example:
        >>> splits = load_images("digits", validation=0.1)
        >>> splits.split, len(splits.train), len(splits.test)
        ('validation', 1211, 136)
    """
    info = dataset_info(name)
    if download and not info.downloads:
        offered = ", ".join(sorted(entry.name for entry in DATASETS if entry.value.downloads))
        raise ValueError(f"there is no download of {name}, only of {offered}: leave out --download")
    if not 0 <= validation < 1:
        raise ValueError(f"validation must lie in [0, 1), but it is {validation}")
    root = require_data_dir(name, data_dir, exists=not download) if info.needs_folder else Path()
    if options is None and info.options is not None:
        options = info.options()
    request = LoadRequest(
        root, size, memory_limit, cache_limit, cache, download=download, checksum=checksum, exclude=exclude,
        options=options,
    )  # fmt: skip
    with contextlib.ExitStack() as stack:
        if download:  # one of several processes downloads, and the others wait
            with contextlib.suppress(OSError):  # a read-only folder: the data may be there
                root.mkdir(parents=True, exist_ok=True)
                stack.enter_context(wait_for_lock(root / ".download.lock"))
        splits = info.load(request)
    return hold_out(splits, validation, seed) if validation else splits
