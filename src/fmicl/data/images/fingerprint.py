"""Whether data is what it was: short digests of what an encoder is trained on, and of what it is evaluated on."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from fmicl.data.images.samples import ArraySamples, Samples, Splits

__all__ = ["fingerprint", "what_changed"]

_HASHED = 256 * 2**20  # bytes of pixels; of larger sets, evenly spaced images


def fingerprint(splits: Splits) -> dict[str, Any]:
    """Number and digest of the samples that the encoder is trained on, and of those that it is evaluated on, if any.

    Of image files these are the paths below the data folder and the sizes in bytes, so a folder may move and an
    unreadable file may go. Of arrays it is the shape, the labels and the pixels (of sets above 256 MiB, those of
    evenly spaced images).

    Example:
        >>> from fmicl.data import load_images
        >>> found = fingerprint(load_images("digits"))
        >>> found["samples"], found["evaluated"]["samples"]
        (1347, 450)
    """
    found = _of(splits.pretrain, splits.root, splits.names)
    return found if splits.test is None else {**found, "evaluated": _of(splits.test, splits.root, splits.test_names)}


def _of(samples: Samples, root: Path | None, names: tuple[str, ...]) -> dict[str, Any]:
    digest = hashlib.blake2b(digest_size=16)
    if root is not None and names:
        for name in names:
            size = os.stat(root / name).st_size
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
    if then is None:
        return ""
    now, none = fingerprint(splits), {"samples": 0, "digest": ""}
    tested = then.get("evaluated"), now.get("evaluated", none)
    for what, (was, found) in {"trained": (then, now), "evaluated": tested}.items():
        if was is None or was["digest"] == found["digest"]:  # earlier versions took none of what is evaluated on
            continue
        if was["samples"] != found["samples"]:
            return f"it was {what} on {was['samples']} images then, and there are {found['samples']} now"
        return f"there are {found['samples']} images that it is {what} on, as before, but not the same ones"
    return ""
