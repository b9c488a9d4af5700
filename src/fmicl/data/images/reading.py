"""Image files one by one, in worker processes or in this one, and what is said of those that can't be decoded."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from fmicl.data.images.decode import decode, try_decode
from fmicl.data.images.samples import FileSamples, Skipped
from fmicl.utils.machine import available_cpus

__all__ = ["Files", "load", "undecodable", "why"]


class Files(Dataset[Any]):
    """Files as bytes in one array: worker processes share it, where a list of paths would be copied by and by."""

    def __init__(self, samples: FileSamples) -> None:
        self.paths = np.array([os.fsencode(path) for path in samples.paths], dtype=np.bytes_)

    def __len__(self) -> int:
        return len(self.paths)

    def decode(self, index: int) -> Image.Image:
        """The picture in a file."""
        return decode(os.fsdecode(bytes(self.paths[index])))


def load(dataset: Dataset[Any], batches: list[list[int]], workers: int, device: torch.device) -> Iterator[Any]:
    """The batches of a data set, decoded by so many processes, or by this one where there are none."""
    loader = DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=min(workers, available_cpus()),  # more would only wait for each other
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else the loader takes a number from the global one
        worker_init_fn=_ignore_interrupts,
    )
    try:
        yield from loader
        return
    except OSError as error:  # from a worker it comes with the worker's whole traceback in front
        message = str(error).strip().splitlines()[-1].removeprefix("OSError: ")
    # Out here nothing holds on to the workers any more, and they are gone when the error is seen.
    raise OSError(message)


def _ignore_interrupts(_: int) -> None:
    """A terminal's Ctrl-C, or its end, reaches workers too, but the batch under way needs them; they end with us."""
    for name in ("SIGINT", "SIGHUP"):
        if hasattr(signal, name):  # Windows has no SIGHUP
            signal.signal(getattr(signal, name), signal.SIG_IGN)


def why(path: Path) -> Skipped:
    """Why a file can't be decoded."""
    found = try_decode(path)
    return found if isinstance(found, Skipped) else Skipped(path, "could not be read at first, but can be now")


def undecodable(path: Path) -> str:
    """The error that a file can't be decoded."""
    return f"{path} can't be decoded ({why(path).reason}). Repair or remove it."
