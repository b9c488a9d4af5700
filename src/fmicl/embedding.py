"""A folder of images in, a table of vectors out."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from fmicl.data import find_images, plain_batches
from fmicl.evaluation import extract_features
from fmicl.runs import EncoderConfig, load_encoder, open_run, pick_device

FORMATS = (".parquet", ".npz", ".csv")
GREY = (0.299, 0.587, 0.114)
"""Luminance of red, green and blue (ITU-R 601), as in torchvision."""


def embed_folder(
    run: Path,
    folder: Path,
    output: Path,
    *,
    device: str = "auto",
    batch_size: int = 256,
    workers: int = 4,
) -> tuple[int, tuple[str, ...]]:
    """Write the features of all images under a folder, as the run's encoder sees them.

    ============  ==============================================================================
    ``.parquet``  columns ``path`` and ``embedding`` (a list of float32 of fixed length)
    ``.npz``      arrays ``paths`` (N,) and ``embeddings`` (N, d), readable without pickle
    ``.csv``      a header, then a row for each image: its path and d numbers
    ============  ==============================================================================

    Paths are relative to the folder. The output is written whole or not at all.

    Args:
        run: a run folder.
        folder: images, with or without subfolders.
        output: the file to write; its ending says the format.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        batch_size: images at a time.
        workers: processes that decode images.

    Returns:
        The number of images, and a line for each one that could not be read.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: no such run or folder.
        ValueError: the ending is none of the three.
    """
    if output.suffix not in FORMATS:
        raise ValueError(f"{output} ends in {output.suffix or 'nothing'}; the output is one of {', '.join(FORMATS)}")
    if output.exists():
        raise FileExistsError(f"{output} exists and is not overwritten: take another name")
    if not output.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {output.parent} to write {output.name} into")
    config = EncoderConfig.read(open_run(run))
    target = pick_device(device)
    encoder = load_encoder(run).to(target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*and are skipped")  # they are returned
        samples, skipped = find_images(folder)
    plain = plain_batches(
        samples,
        size=config.size,
        mean=(0.0,) * 3,
        std=(1.0,) * 3,
        batch_size=batch_size,
        device=target,
        workers=workers,
    )
    vectors = extract_features(encoder, ((normalise(images, config), None) for images, _ in plain), target)[0].cpu()
    paths = [path.relative_to(folder).as_posix() for path in samples.paths]
    write_table(output, paths, vectors)
    return len(paths), tuple(str(line) for line in skipped)


def normalise(images: Tensor, config: EncoderConfig) -> Tensor:
    """Colour images (N, 3, H, W) in [0, 1] as an encoder wants them: grey if it was trained on one channel.

    Example:
        >>> import torch
        >>> config = EncoderConfig("small_conv", 8, 1, 256, (0.5,), (0.5,), {})
        >>> normalise(torch.ones(1, 3, 1, 1), config).flatten()
        tensor([1.])
    """
    if config.channels == 1:
        images = images.mul(images.new_tensor(GREY).view(1, 3, 1, 1)).sum(1, keepdim=True)
    mean, std = (images.new_tensor(values).view(1, -1, 1, 1) for values in (config.mean, config.std))
    return (images - mean) / std


def write_table(output: Path, paths: list[str], vectors: Tensor) -> None:
    """Write paths and vectors (N, d) in the format that the ending says.

    Raises:
        FileExistsError: the output exists.

    Example:
        >>> import tempfile, torch
        >>> output = Path(tempfile.mkdtemp()) / "x.csv"
        >>> write_table(output, ["a.png"], torch.tensor([[1.0, 0.5]]))
        >>> print(output.read_text())
        path,0,1
        a.png,1.0,0.5
    """
    writers: dict[str, Callable[[Path, list[str], np.ndarray], None]]
    writers = {".parquet": _parquet, ".npz": _npz, ".csv": _csv}
    temporary = output.with_name(f".{output.stem}.{os.getpid()}{output.suffix}")
    try:
        writers[output.suffix](temporary, paths, vectors.float().numpy())
        os.link(temporary, output)  # unlike a rename, this refuses to overwrite
    except FileExistsError:
        raise FileExistsError(f"{output} exists and is not overwritten: take another name") from None
    finally:
        temporary.unlink(missing_ok=True)


def _parquet(path: Path, paths: list[str], vectors: np.ndarray) -> None:
    import pyarrow
    import pyarrow.parquet

    column = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])
    pyarrow.parquet.write_table(pyarrow.table({"path": paths, "embedding": column}), path)


def _npz(path: Path, paths: list[str], vectors: np.ndarray) -> None:
    np.savez(path, paths=np.array(paths, dtype=np.str_), embeddings=vectors)


def _csv(path: Path, paths: list[str], vectors: np.ndarray) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["path", *range(vectors.shape[1])])
        writer.writerows([name, *row] for name, row in zip(paths, vectors.tolist(), strict=True))
