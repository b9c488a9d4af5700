"""Whether data is what it was: a short digest of what an encoder is trained on."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import numpy as np

from fmicl.data.samples import ArraySamples, Splits

__all__ = ["fingerprint", "what_changed"]

_HASHED = 256 * 2**20  # bytes of pixels; of larger sets, evenly spaced images


def fingerprint(splits: Splits) -> dict[str, Any]:
    """Number and digest of the samples that the encoder is trained on.

    Of image files these are the paths below the data folder and the sizes in bytes, so a folder may move and an
    unreadable file may go. Of arrays it is the shape, the labels and the pixels (of sets above 256 MiB, those of
    evenly spaced images).

    Example:
        >>> from fmicl.data import load_images
        >>> fingerprint(load_images("digits"))["samples"]
        1347
    """
    samples = splits.pretrain
    digest = hashlib.blake2b(digest_size=16)
    if splits.root is not None and splits.names:
        for name in splits.names:
            size = os.stat(splits.root / name).st_size
            digest.update(os.fsencode(name) + b"\0" + str(size).encode() + b"\n")
    elif isinstance(samples, ArraySamples):
        images = samples.images.cpu().numpy()
        digest.update(repr(images.shape).encode())
        if samples.labels is not None:
            digest.update(samples.labels.cpu().numpy().tobytes())
        step = -(-images.nbytes // _HASHED)
        for image in images[:: max(1, step)]:
            digest.update(np.ascontiguousarray(image).data)
    else:
        for path in samples.paths:
            digest.update(os.fsencode(path) + b"\0" + str(path.stat().st_size).encode() + b"\n")
    return {"samples": len(samples), "digest": digest.hexdigest()}


def what_changed(then: dict[str, Any] | None, splits: Splits) -> str:
    """In words, how the data differs from a fingerprint taken before; "" where it doesn't, or none was taken.

    Example:
        >>> from fmicl.data import load_images
        >>> what_changed(fingerprint(load_images("digits")), load_images("digits", validation=0.5))
        'it was trained on 1347 images then, and there are 674 now'
    """
    now = fingerprint(splits)
    if then is None or then == now:
        return ""
    if then.get("samples") != now["samples"]:
        return f"it was trained on {then.get('samples')} images then, and there are {now['samples']} now"
    return f"there are {now['samples']} images as before, but not the same ones"
