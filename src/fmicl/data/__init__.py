"""Samples, and how they become batches of views.

:func:`load_images` reads a data set in its official form and says what is wrong with it before training starts;
:class:`ViewStream` makes two random views of each sample; :func:`plain_batches` is for evaluation.
"""

from fmicl.data.fingerprint import fingerprint, what_changed
from fmicl.data.folders import find_images
from fmicl.data.loading import DatasetInfo, dataset_info, list_datasets, load_images
from fmicl.data.samples import ArraySamples, FileSamples, Samples, Skipped, Splits, split_by_name, stratified_split
from fmicl.data.stream import Batch, ViewStream, pictures, plain_batches

__all__ = [
    "ArraySamples",
    "Batch",
    "DatasetInfo",
    "FileSamples",
    "Samples",
    "Skipped",
    "Splits",
    "ViewStream",
    "dataset_info",
    "find_images",
    "fingerprint",
    "list_datasets",
    "load_images",
    "pictures",
    "plain_batches",
    "split_by_name",
    "stratified_split",
    "what_changed",
]
