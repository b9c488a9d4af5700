"""Samples, and how they become batches of views.

:func:`load_images` reads a data set in its official form and says what is wrong with it before training starts;
:class:`ViewStream` makes random views of each sample; :func:`plain_batches` is for evaluation.
:func:`tokenise_file` turns a text file into tokens, and :class:`SentenceStream` these into batches.
"""

from fmicl.data.images.fingerprint import fingerprint, what_changed
from fmicl.data.images.folders import find_images
from fmicl.data.images.loading import DatasetInfo, dataset_info, list_datasets, load_images, named_folder
from fmicl.data.images.plain import pictures, plain_batches
from fmicl.data.images.samples import (
    ArraySamples,
    FileSamples,
    Samples,
    Skipped,
    Splits,
    described,
    listed,
    printable,
    split_by_name,
    stratified_split,
)
from fmicl.data.images.stream import Batch, Stream, ViewStream
from fmicl.data.text.lines import LineReader
from fmicl.data.text.sentences import SentenceStream, padded_width
from fmicl.data.text.tokens import Sentences, cache_root, text_changed, tokenise_file

__all__ = [
    "ArraySamples",
    "Batch",
    "DatasetInfo",
    "FileSamples",
    "LineReader",
    "Samples",
    "SentenceStream",
    "Sentences",
    "Skipped",
    "Splits",
    "Stream",
    "ViewStream",
    "cache_root",
    "dataset_info",
    "described",
    "find_images",
    "fingerprint",
    "list_datasets",
    "listed",
    "load_images",
    "named_folder",
    "padded_width",
    "pictures",
    "plain_batches",
    "printable",
    "split_by_name",
    "stratified_split",
    "text_changed",
    "tokenise_file",
    "what_changed",
]
