"""The digits dataset of scikit-learn, which needs no files."""

from __future__ import annotations

import numpy as np
import torch

from fmicl.data.images.registry import LoadRequest, register_dataset
from fmicl.data.images.samples import ArraySamples
from fmicl.data.images.splits import Splits


@register_dataset(
    "digits", summary="scikit-learn's digits: 1,797 grey images of 8 x 8, no files needed.", needs_folder=False
)
def load_digits(_: LoadRequest) -> Splits:
    """The 1,797 handwritten digits of scikit-learn, 8 x 8 pixels; a fixed quarter is the test split."""
    from sklearn.datasets import load_digits as digits
    from sklearn.model_selection import train_test_split

    data = digits()
    images = torch.from_numpy(np.rint(data.images * (255 / 16)).astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    kept, held = train_test_split(np.arange(len(images)), test_size=0.25, random_state=0, stratify=data.target)
    train, test = (ArraySamples(images, labels).select(torch.from_numpy(np.sort(i))) for i in (kept, held))
    return Splits(train, train, test, tuple(str(d) for d in range(10)))
