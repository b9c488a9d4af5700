"""Decoding of image files: checks, resizing, worker processes, and errors of damaged files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fmicl.data.images.samples import FileSamples, Skipped
from fmicl.utils.machine import available_cpus

# Also those that Pillow reads only with a plugin: a warning is better than photos that are silently ignored.
EXTENSIONS = frozenset(
    {".jpg", ".jpeg", ".jpe", ".jp2", ".png", ".webp", ".bmp", ".gif", ".tif",
     ".tiff", ".ppm", ".pgm", ".pbm", ".avif", ".heic", ".heif", ".jxl"}
)  # fmt: skip
_END_MARKS = {"JPEG": b"\xff\xd9", "PNG": b"IEND\xaeB`\x82"}  # the last bytes of a complete file
_ORIENTATION = 0x0112  # EXIF tag
WORKER_SECONDS = 30
"""How long a worker process outlives SIGTERM; SLURM kills a job half a minute after it."""
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def decode(path: Path | str) -> Image.Image:
    """Read an image file as RGB, turned upright according to its EXIF orientation.

    Raises:
        OSError: the file can't be read or decoded; the message names it.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "red.png"
        >>> Image.new("P", (3, 2), 1).save(path)
        >>> decode(path).mode
        'RGB'
    """
    try:
        return _read_rgb(path)
    except Exception as error:  # decoders raise any type, from SyntaxError to struct.error
        raise OSError(f"{path} can't be decoded ({_reason(error)}). Repair or remove it.") from error


def try_decode(path: Path) -> Image.Image | Skipped:
    """As :func:`decode`, but returns the reason if a file can't be decoded.

    Example:
        >>> try_decode(Path("nowhere.png"))
        Skipped(path=...Path('nowhere.png'), reason='there is no such file')
    """
    try:
        return _read_rgb(path)
    except Exception as error:
        return Skipped(path, _reason(error))


def why_undecodable(path: Path) -> Skipped:
    """Why a file could not be decoded."""
    found = try_decode(path)
    return found if isinstance(found, Skipped) else Skipped(path, "could not be read at first, but can be now")


def check_image(path: Path) -> tuple[int, int] | Skipped:
    """Check the header and the end of an image file, which is far cheaper than decoding it.

    A JPEG or PNG with its end mark is taken as complete; everything else is decoded.

    Returns:
        (height, width) of the upright image, or why the file can't be read.
    """
    try:
        with Image.open(path) as image:
            width, height = image.size
            if min(width, height) < 1:
                return Skipped(path, f"has no pixels ({width} x {height})")
            end = _END_MARKS.get(image.format or "")
            if end is None or not _ends_with(path, end):
                image.load()
            # Only if the header has it: searching further would decode a PNG.
            if "exif" in image.info and image.getexif().get(_ORIENTATION, 1) >= 5:  # rotated by 90 degrees
                width, height = height, width
    except Exception as error:
        return Skipped(path, _reason(error))
    return height, width


def check_images(paths: Sequence[Path]) -> tuple[dict[Path, tuple[int, int]], list[Skipped]]:
    """(height, width) of the images that can be read, by :func:`check_image`, and those that can't."""
    found = dict(zip(paths, map_in_processes(check_image, paths), strict=True))
    shapes = {path: x for path, x in found.items() if not isinstance(x, Skipped)}
    return shapes, [x for x in found.values() if isinstance(x, Skipped)]


def stored_side(size: int) -> int:
    """Side at which images are stored for views of a size: 256 for 224, as is usual.

    Example:
        >>> stored_side(224), stored_side(64)
        (256, 73)
    """
    return round(size * 256 / 224)


def resize_centre(image: Image.Image, side: int, size: int, *, keep_margin: bool = False) -> Image.Image:
    """Resize the shorter side to ``side`` and crop the centre square of ``size``, rounding as torchvision does.

    Args:
        image: any image.
        side: new length of the shorter side.
        size: side of the square, at most ``side``.
        keep_margin: return the square of ``side``, from which the one of ``size`` can be cropped later.

    Example:
        >>> resize_centre(Image.new("RGB", (300, 200)), 64, 56).size
        (56, 56)
    """
    short = min(image.size)
    width, height = (side * x // short for x in image.size)
    left, top = round((width - size) / 2), round((height - size) / 2)
    if keep_margin:
        left, top, size = left - round((side - size) / 2), top - round((side - size) / 2), side
    # Resizing only the part that the square covers gives the same, with less work.
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


def map_in_threads(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """``map`` with one thread per processor, in order; decoding releases Python's lock.

    Example:
        >>> list(map_in_threads(abs, [-1, 2, -3]))
        [1, 2, 3]
    """
    threads = available_cpus()
    source = iter(items)
    with ThreadPoolExecutor(threads) as pool:
        # A bounded number in flight, since results can be large.
        waiting = deque(pool.submit(function, item) for item in islice(source, 8 * threads))
        while waiting:
            result = waiting.popleft().result()
            waiting.extend(pool.submit(function, item) for item in islice(source, 1))
            yield result


def map_in_processes(function: Callable[[_Item], _Result], items: Sequence[_Item]) -> Iterator[_Result]:
    """``map`` with one process per processor, in order, for small results of many items.

    Small images keep threads waiting for each other: much of decoding one is Python. Few items, and systems other than
    Linux, are left to threads. A process starts as a copy of this one, so ``function`` may be a closure, and what it
    writes into shared memory is seen here.

    Raises:
        OSError: a process was killed.

    Example:
        >>> list(map_in_processes(abs, [-1, 2, -3]))
        [1, 2, 3]
    """
    processes = min(available_cpus(), len(items) // _PORTION)
    if processes < 2 or sys.platform != "linux" or multiprocessing.current_process().daemon:
        yield from map_in_threads(function, items)
        return
    context = multiprocessing.get_context("fork")
    with warnings.catch_warnings():  # forks with threads: these processes take no lock of theirs, they only decode
        warnings.filterwarnings("ignore", ".*fork.*", DeprecationWarning)
        with ProcessPoolExecutor(processes, context, _set_job, (function, items)) as pool:
            try:
                for results in pool.map(_run_job, range(0, len(items), _PORTION)):
                    yield from results
            except BrokenProcessPool as error:
                raise OSError("a process that decodes images was killed: is there enough memory?") from error


_PORTION = 128  # items that a process takes at once
_job: tuple[Callable[[Any], Any], Sequence[Any]] | None = None


def _set_job(function: Callable[[Any], Any], items: Sequence[Any]) -> None:
    global _job
    _job = function, items
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends them


def _run_job(start: int) -> list[Any]:
    assert _job is not None
    function, items = _job
    return [function(item) for item in items[start : start + _PORTION]]


class ImageFiles(Dataset[Any]):
    """Image files for a DataLoader; the paths are bytes in one array, which worker processes share without copying."""

    def __init__(self, samples: FileSamples) -> None:
        self.paths = np.array([os.fsencode(path) for path in samples.paths], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self.paths)

    def decode(self, index: int) -> Image.Image:
        """The image of a sample."""
        return decode(os.fsdecode(bytes(self.paths[index])))


def load_batches(dataset: Dataset[Any], batches: list[list[int]], workers: int, device: torch.device) -> Iterator[Any]:
    """Batches of a dataset, loaded by worker processes, or by this process if there are 0.

    Raises:
        OSError: a file can't be decoded.
    """
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, available_cpus()),
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else the loader draws from the global one
        worker_init_fn=_outlive_signals,
    )
    try:
        yield from loader
        return
    except OSError as error:  # from a worker it comes with the worker's traceback in front
        message = str(error).strip().splitlines()[-1].removeprefix("OSError: ")
    # Raised out here, where nothing refers to the workers any more, so that they have ended when the error is seen.
    raise OSError(message)


def _outlive_signals(_: int) -> None:
    """Ignore Ctrl-C and hang-ups in a worker, and outlive SIGTERM, which a scheduler sends to all processes of a job.

    The current batch needs the worker until its parent has written a checkpoint; it ends with its parent.
    """
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)
    if hasattr(signal, "alarm"):
        signal.signal(signal.SIGTERM, lambda *_: signal.alarm(WORKER_SECONDS))  # SIGALRM then ends it


def _read_rgb(path: Path | str) -> Image.Image:
    with Image.open(path) as image:
        image.load()
        upright = ImageOps.exif_transpose(image)
        if upright.mode.startswith("I"):  # 16 bits a pixel, which a plain conversion would clip at 255
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
    if isinstance(error, UnidentifiedImageError):
        return "not an image, or of a format that Pillow can't read; convert it to JPEG or PNG"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
