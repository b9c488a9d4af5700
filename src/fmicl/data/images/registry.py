"""The registry of image datasets: what `--dataset` can name, and how each is loaded.

A dataset is a function from a :class:`LoadRequest` to :class:`fmicl.data.Splits`, registered in its own file:

    @register_dataset("squares", summary="Coloured squares.", needs_folder=False)
    def load_squares(request: LoadRequest) -> Splits: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fmicl.utils.registry import Registry

if TYPE_CHECKING:
    from fmicl.data.images.splits import Splits

Exclude = Callable[[Path], str | None]
"""Which subfolders hold no data: what such a folder is, in the singular ("fmicl run"), or None to search it."""


@dataclass(frozen=True)
class LoadRequest:
    """What a dataset's loader is asked for; each reads what concerns it.

    Attributes:
        root: folder of the dataset, or one above it. It exists unless ``download`` is set or no folder is needed.
        size: side of the views that the images will be used for, in pixels.
        memory_limit: bytes up to which a folder of image files is kept in memory.
        cache_limit: bytes up to which such a folder is decoded into the cache on disk; 0 for no cache.
        cache: folder of the cache; None is the user's.
        download: download the data if it is missing.
        checksum: verify that files are the official ones.
        exclude: which subfolders of a folder of image files hold no data.
        options: the dataset's own options, an instance of the class that it was registered with; None if it has none.
    """

    root: Path
    size: int = 32
    memory_limit: int = 4 * 2**30
    cache_limit: int = 0
    cache: Path | None = None
    download: bool = False
    checksum: bool = True
    exclude: Exclude | None = None
    options: Any = None


@dataclass(frozen=True)
class DatasetInfo:
    """How a dataset is loaded, and what is known of it before.

    Attributes:
        load: the loader.
        needs_folder: whether it is read from a folder that the user names.
        downloads: whether it can be downloaded.
        is_folder: whether it consists of image files, which are kept in memory up to ``memory_limit``.
        options: frozen dataclass of options that belong to this dataset alone; None if it has none.
    """

    load: Callable[[LoadRequest], Splits]
    needs_folder: bool = True
    downloads: bool = False
    is_folder: bool = False
    options: Any = None


DATASETS: Registry[DatasetInfo] = Registry("dataset")


def register_dataset(
    name: str,
    *,
    summary: str,
    needs_folder: bool = True,
    downloads: bool = False,
    is_folder: bool = False,
    options: Any = None,
) -> Callable[[Callable[[LoadRequest], Splits]], Callable[[LoadRequest], Splits]]:
    """Function decorator that registers a dataset's loader under the name that `--dataset` takes.

    Args:
        name: what users type.
        summary: one line for `--help`.
        needs_folder: see :class:`DatasetInfo`, as the others.
        downloads: whether it can be downloaded.
        is_folder: whether it consists of image files.
        options: dataclass of its own options.

    Raises:
        ValueError: the name is taken.
    """

    def register(load: Callable[[LoadRequest], Splits]) -> Callable[[LoadRequest], Splits]:
        DATASETS.register(name, summary=summary)(DatasetInfo(load, needs_folder, downloads, is_folder, options))
        return load

    return register
