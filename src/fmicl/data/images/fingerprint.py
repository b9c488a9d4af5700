"""Fingerprints of image data, to detect that it has changed since a run was trained."""

from __future__ import annotations

import hashlib
import math
import os
from pathlib import Path
from typing import Any

import numpy as np

from fmicl.data.images.samples import FileSamples, Samples
from fmicl.data.images.splits import Splits

_HASHED_BYTES = 256 * 2**20  # of larger arrays, evenly spaced images are hashed


def fingerprint(splits: Splits) -> dict[str, Any]:
    """Number and digest of the samples that the encoder is trained on and, with labels, of those it is evaluated on.

    Image files are hashed by their paths below the data folder and their sizes in bytes, so the folder may move and an
    unreadable file may be removed. Arrays are hashed by shape, labels and pixels (above 256 MiB, those of evenly spaced
    images).

    Example:
        >>> from fmicl.data import load_images
        >>> found = fingerprint(load_images("digits"))
        >>> found["samples"], found["evaluated"]["samples"]
        (1347, 450)
    """
    found = _digest(splits.pretrain, splits.root, splits.names)
    if splits.test is not None:
        found["evaluated"] = _digest(splits.test, splits.root, splits.test_names)
    return found


def _digest(samples: Samples, root: Path | None, names: tuple[str, ...]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    if root is not None and names:
        for name in names:
            size = os.stat(root / name).st_size
            digest.update(os.fsencode(name) + b"\0" + str(size).encode() + b"\n")
    elif isinstance(samples, FileSamples):
        for path in samples.paths:
            digest.update(os.fsencode(path) + b"\0" + str(path.stat().st_size).encode() + b"\n")
    else:
        shape = (len(samples), *samples.images.shape[1:])
        digest.update(repr(shape).encode())
        if samples.labels is not None:
            digest.update(samples.labels.cpu().numpy().tobytes())
        spaced = range(0, len(samples), max(1, -(-math.prod(shape) // _HASHED_BYTES)))
        for i in spaced:
            image = samples.read([i])[0]
            digest.update(np.ascontiguousarray(image.cpu().numpy()).data)
    return {"samples": len(samples), "digest": digest.hexdigest()}


def describe_change(before: dict[str, Any] | None, splits: Splits) -> str:
    """How the data differs from an earlier fingerprint, in words; "" if it doesn't, or if there is none.

    Example:
        >>> from fmicl.data import load_images
        >>> describe_change(fingerprint(load_images("digits")), load_images("digits", validation=0.5))
        'the training set had 1347 images, and has 674 now'
    """
    if before is None:
        return ""
    now, none = fingerprint(splits), {"samples": 0, "digest": ""}
    pairs = {"training": (before, now), "evaluation": (before.get("evaluated", none), now.get("evaluated", none))}
    for name, (old, new) in pairs.items():
        if old["digest"] == new["digest"]:
            continue
        if old["samples"] != new["samples"]:
            return f"the {name} set had {old['samples']} images, and has {new['samples']} now"
        return f"the {name} set has {new['samples']} images as before, but not the same ones"
    return ""
