"""Datasets, augmentations, and streams of training batches, for images and text."""

from fmicl.data.cache import cache_root
from fmicl.data.images.evaluation_batches import display_images, evaluation_batches
from fmicl.data.images.fingerprint import describe_change, fingerprint
from fmicl.data.images.folder import survey_folder
from fmicl.data.images.labels import training_labels
from fmicl.data.images.loading import dataset_info, list_datasets, load_images, require_data_dir
from fmicl.data.images.registry import DATASETS, DatasetInfo, LoadRequest, register_dataset
from fmicl.data.images.samples import (
    ArraySamples,
    FileSamples,
    MappedSamples,
    Samples,
    Skipped,
    printable,
    summarise_skipped,
)
from fmicl.data.images.search import find_images
from fmicl.data.images.splits import Splits, describe_splits, split_by_name, stratified_split
from fmicl.data.images.view_stream import ViewStream
from fmicl.data.stream import Batch, Stream
from fmicl.data.text.lines import LONG_LINE, LineReader
from fmicl.data.text.sentence_stream import SentenceStream
from fmicl.data.text.tokens import Sentences, describe_text_change, tokenise_file

__all__ = [
    "DATASETS",
    "LONG_LINE",
    "ArraySamples",
    "Batch",
    "DatasetInfo",
    "FileSamples",
    "LineReader",
    "LoadRequest",
    "MappedSamples",
    "Samples",
    "SentenceStream",
    "Sentences",
    "Skipped",
    "Splits",
    "Stream",
    "ViewStream",
    "cache_root",
    "dataset_info",
    "describe_change",
    "describe_splits",
    "describe_text_change",
    "display_images",
    "evaluation_batches",
    "find_images",
    "fingerprint",
    "list_datasets",
    "load_images",
    "printable",
    "register_dataset",
    "require_data_dir",
    "split_by_name",
    "stratified_split",
    "summarise_skipped",
    "survey_folder",
    "tokenise_file",
    "training_labels",
]
