"""Datasets, augmentations, and streams of training batches, for images and text.

Names are loaded when they are first used, so that option classes below this package can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmicl.data.images.evaluation_batches import display_images as display_images
    from fmicl.data.images.evaluation_batches import evaluation_batches as evaluation_batches
    from fmicl.data.images.fingerprint import describe_change as describe_change
    from fmicl.data.images.fingerprint import fingerprint as fingerprint
    from fmicl.data.images.loading import DATASETS as DATASETS
    from fmicl.data.images.loading import dataset_info as dataset_info
    from fmicl.data.images.loading import list_datasets as list_datasets
    from fmicl.data.images.loading import load_images as load_images
    from fmicl.data.images.loading import require_data_dir as require_data_dir
    from fmicl.data.images.registry import DatasetInfo as DatasetInfo
    from fmicl.data.images.registry import LoadRequest as LoadRequest
    from fmicl.data.images.registry import register_dataset as register_dataset
    from fmicl.data.images.samples import ArraySamples as ArraySamples
    from fmicl.data.images.samples import FileSamples as FileSamples
    from fmicl.data.images.samples import Samples as Samples
    from fmicl.data.images.samples import Skipped as Skipped
    from fmicl.data.images.samples import printable as printable
    from fmicl.data.images.samples import summarise_skipped as summarise_skipped
    from fmicl.data.images.search import find_images as find_images
    from fmicl.data.images.splits import Splits as Splits
    from fmicl.data.images.splits import describe_splits as describe_splits
    from fmicl.data.images.splits import split_by_name as split_by_name
    from fmicl.data.images.splits import stratified_split as stratified_split
    from fmicl.data.images.view_stream import ViewStream as ViewStream
    from fmicl.data.stream import Batch as Batch
    from fmicl.data.stream import Stream as Stream
    from fmicl.data.text.lines import LineReader as LineReader
    from fmicl.data.text.sentence_stream import SentenceStream as SentenceStream
    from fmicl.data.text.sentence_stream import padded_width as padded_width
    from fmicl.data.text.tokens import Sentences as Sentences
    from fmicl.data.text.tokens import cache_root as cache_root
    from fmicl.data.text.tokens import describe_text_change as describe_text_change
    from fmicl.data.text.tokens import tokenise_file as tokenise_file

_HOMES = {
    name: module
    for module, names in {
        "images.evaluation_batches": "display_images evaluation_batches",
        "images.fingerprint": "describe_change fingerprint",
        "images.loading": "DATASETS dataset_info list_datasets load_images require_data_dir",
        "images.registry": "DatasetInfo LoadRequest register_dataset",
        "images.samples": "ArraySamples FileSamples Samples Skipped printable summarise_skipped",
        "images.search": "find_images",
        "images.splits": "Splits describe_splits split_by_name stratified_split",
        "images.view_stream": "ViewStream",
        "stream": "Batch Stream",
        "text.lines": "LineReader",
        "text.sentence_stream": "SentenceStream padded_width",
        "text.tokens": "Sentences cache_root describe_text_change tokenise_file",
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
