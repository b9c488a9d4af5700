"""Datasets, augmentations, and streams of training batches, for images and text.

Names are loaded when they are first used, so that option classes below this package can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmicl.data.images.fingerprint import fingerprint as fingerprint
    from fmicl.data.images.fingerprint import what_changed as what_changed
    from fmicl.data.images.folders import find_images as find_images
    from fmicl.data.images.loading import DatasetInfo as DatasetInfo
    from fmicl.data.images.loading import dataset_info as dataset_info
    from fmicl.data.images.loading import list_datasets as list_datasets
    from fmicl.data.images.loading import load_images as load_images
    from fmicl.data.images.loading import named_folder as named_folder
    from fmicl.data.images.plain import pictures as pictures
    from fmicl.data.images.plain import plain_batches as plain_batches
    from fmicl.data.images.samples import ArraySamples as ArraySamples
    from fmicl.data.images.samples import FileSamples as FileSamples
    from fmicl.data.images.samples import Samples as Samples
    from fmicl.data.images.samples import Skipped as Skipped
    from fmicl.data.images.samples import Splits as Splits
    from fmicl.data.images.samples import described as described
    from fmicl.data.images.samples import listed as listed
    from fmicl.data.images.samples import printable as printable
    from fmicl.data.images.samples import split_by_name as split_by_name
    from fmicl.data.images.samples import stratified_split as stratified_split
    from fmicl.data.images.stream import Batch as Batch
    from fmicl.data.images.stream import Stream as Stream
    from fmicl.data.images.stream import ViewStream as ViewStream
    from fmicl.data.text.lines import LineReader as LineReader
    from fmicl.data.text.sentences import SentenceStream as SentenceStream
    from fmicl.data.text.sentences import padded_width as padded_width
    from fmicl.data.text.tokens import Sentences as Sentences
    from fmicl.data.text.tokens import cache_root as cache_root
    from fmicl.data.text.tokens import text_changed as text_changed
    from fmicl.data.text.tokens import tokenise_file as tokenise_file

_HOMES = {
    name: module
    for module, names in {
        "images.fingerprint": "fingerprint what_changed",
        "images.folders": "find_images",
        "images.loading": "DatasetInfo dataset_info list_datasets load_images named_folder",
        "images.plain": "pictures plain_batches",
        "images.samples": (
            "ArraySamples FileSamples Samples Skipped Splits described listed printable split_by_name stratified_split"
        ),
        "images.stream": "Batch Stream ViewStream",
        "text.lines": "LineReader",
        "text.sentences": "SentenceStream padded_width",
        "text.tokens": "Sentences cache_root text_changed tokenise_file",
    }.items()
    for name in names.split()
}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
