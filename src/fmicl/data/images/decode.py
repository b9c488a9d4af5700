"""From an image file to pixels, and whether a file can be read at all."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from fmicl.data.images.samples import Skipped
from fmicl.utils.machine import available_cpus

__all__ = [
    "EXTENSIONS",
    "check_image",
    "decode",
    "in_threads",
    "resize_centre",
    "resize_square",
    "stored_side",
    "to_tensor",
    "try_decode",
]

# Also those that Pillow reads only with a plugin: better an error or a warning than photos that are passed over.
EXTENSIONS = frozenset(
    [
        ".jpg",
        ".jpeg",
        ".jpe",
        ".jp2",
        ".png",
        ".webp",
        ".bmp",
        ".gif",
        ".tif",
        ".tiff",
        ".ppm",
        ".pgm",
        ".pbm",
        ".avif",
        ".heic",
        ".heif",
        ".jxl",
    ]
)
_ENDS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # the last bytes of a file that is all there
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def decode(path: Path | str) -> Image.Image:
    """Read an image file as RGB, turned upright as its camera says.

    Raises:
        OSError: If the file can't be read or decoded; the message names it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "red.png"
        >>> Image.new("P", (3, 2), 1).save(path)
        >>> decode(path).mode
        'RGB'
    """
    try:
        return _pixels(path)
    except Exception as error:  # decoders raise whatever they like, from SyntaxError to struct.error
        raise OSError(f"{path} can't be decoded ({_reason(error)}). Repair or remove it.") from error


def try_decode(path: Path) -> Image.Image | Skipped:
    """As :func:`decode`, but for a file that can't be decoded it says why.

    Example:
        >>> try_decode(Path("nowhere.png"))
        Skipped(path=...Path('nowhere.png'), reason='there is no such file')
    """
    try:
        return _pixels(path)
    except Exception as error:
        return Skipped(path, _reason(error))


def check_image(path: Path) -> tuple[int, int] | Skipped:
    """Look at the header and the end of an image file, which is far cheaper than to decode it.

    A JPEG or PNG that has its end mark is taken as whole; everything else is decoded after all.

    Returns:
        (height, width) as stored, or why the file can't be read.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            if min(width, height) < 1:
                return Skipped(path, f"has no pixels ({width} x {height})")
            end = _ENDS.get(image.format or "")
            if end is None or not _ends_with(path, end):
                image.load()
            # Only where the header has it: looking for it further on would decode a PNG.
            if "exif" in image.info and image.getexif().get(0x0112, 1) >= 5:  # the camera lay on its side
                width, height = height, width
    except Exception as error:
        return Skipped(path, _reason(error))
    return height, width


def stored_side(size: int) -> int:
    """Side that images are kept at for views of a size: 256 for 224, as usual, so that a crop has some room.

    Example:
        >>> stored_side(224), stored_side(64)
        (256, 73)
    """
    return round(size * 256 / 224)


def resize_centre(image: Image.Image, side: int, size: int, *, whole: bool = False) -> Image.Image:
    """Resize the shorter side to ``side`` and cut out the centre square of ``size``, rounding as torchvision does.

    Args:
        image: Any image.
        side: What the shorter side becomes.
        size: Side of the square, at most ``side``.
        whole: Keep a square of the whole ``side`` from which the one of ``size`` can be cut out later.

    Example:
        >>> resize_centre(Image.new("RGB", (300, 200)), 64, 56).size
        (56, 56)
    """
    short = min(image.size)
    width, height = (side * x // short for x in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    if whole:
        left, top, size = left - round((side - size) / 2), top - round((side - size) / 2), side
    # Resizing only the part that the square covers is the same, and less work.
    x, y = image.width / width, image.height / height
    right, bottom = min(image.width, (left + size) * x), min(image.height, (top + size) * y)
    return image.resize((size, size), Image.Resampling.BILINEAR, box=(left * x, top * y, right, bottom))


def resize_square(image: Image.Image, size: int) -> Image.Image:
    """Resize the largest centre square to ``size``.

    Example:
        >>> resize_square(Image.new("RGB", (30, 20)), 24).size
        (24, 24)
    """
    short = min(image.size)
    left, top = (image.width - short) // 2, (image.height - short) // 2
    square = image.crop((left, top, left + short, top + short))
    return square if short == size else square.resize((size, size), Image.Resampling.BILINEAR)


def to_tensor(image: Image.Image) -> Tensor:
    """(3, H, W) uint8 of an RGB image.

    Example:
        >>> to_tensor(Image.new("RGB", (3, 2), (9, 8, 7)))[:, 1, 2]
        tensor([9, 8, 7], dtype=torch.uint8)
    """
    return torch.from_numpy(np.array(image, dtype=np.uint8)).permute(2, 0, 1).contiguous()


def in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """``map`` with a thread for each processor of this process, in order; decoding runs outside of Python's lock.

    Example:
        >>> list(in_threads(abs, [-1, 2, -3]))
        [1, 2, 3]
    """
    threads = available_cpus()
    source = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        # A bounded number in flight, since what comes out can be large.
        waiting = deque(pool.submit(function, item) for item in islice(source, 8 * threads))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(source, 1))
            yield result


def _pixels(path: Path | str) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits a pixel, which a plain conversion would cut off at 255
            values = np.asarray(upright).astype(np.int64)
            upright = Image.fromarray((values.clip(0, 65535) >> 8).astype(np.uint8))
        return upright.convert("RGB")


def _ends_with(path: Path, end: bytes) -> bool:
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(-min(len(end), file.tell()), os.SEEK_END)
        return file.read() == end


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    if type(error).__name__ == "UnidentifiedImageError":
        return "not an image, or of a format that Pillow can't read; convert it to JPEG or PNG"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
