"""Embeddings of image folders and text files, as Parquet, NumPy or CSV tables."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from fmicl.data import LineReader, Skipped, evaluation_batches, find_images, printable
from fmicl.evaluation.features import evaluation_batch_size, extract_features
from fmicl.runs.export import EncoderConfig, load_encoder
from fmicl.runs.folder import exclude_runs, open_run
from fmicl.utils.device import pick_device
from fmicl.utils.files import check_new_file, write_atomically
from fmicl.utils.validation import TokenPooling

FORMATS = (".parquet", ".npz", ".csv")
LARGEST_NAMES = 2**30
"""Maximum number of bytes of the paths or sentences in a .npz."""


def embed_folder(
    run: Path,
    folder: Path,
    output: Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    workers: int = 4,
) -> tuple[int, tuple[str, ...]]:
    r"""Write the features of all images in a folder, computed by the encoder of a run.

    ============  ==============================================================================
    ``.parquet``  columns ``path`` and ``embedding`` (fixed-size lists of float32)
    ``.npz``      arrays ``paths`` (N,) and ``embeddings`` (N, d), without pickle
    ``.csv``      a header, then one row per image: its path and d numbers
    ============  ==============================================================================

    Paths are relative to the folder; bytes that are not UTF-8 are written as ``\xff``. Images that can't be decoded,
    and subfolders that can't be entered or contain runs, are skipped and returned. An encoder for grey images gets
    colour images converted to grey. The output is written atomically.

    Args:
        run: a run folder.
        folder: images, with or without subfolders.
        output: the file to write; its extension (in any case) selects the format.
        device: auto (a GPU if there is one), cpu, cuda or mps.
        batch_size: images per batch; None chooses by image size and device.
        workers: number of processes that decode images.

    Returns:
        The number of images, and a line for each skipped image or folder.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: there is no such run or folder.
        ValueError: an option is out of range, the extension is unknown, no image can be decoded, or the paths are too
            long for a .npz.
    """
    if workers < 0:
        raise ValueError(f"--workers must not be negative, but it is {workers}")
    _check_batch(batch_size)
    _check_output(output)
    config = EncoderConfig.read(open_run(run))
    target = pick_device(device)
    encoder = load_encoder(run).to(target)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*and are skipped")  # they are returned
        samples, skipped = find_images(folder, exclude=exclude_runs)
    _check_padding(output, [str(path.relative_to(folder)) for path in samples.paths])
    broken: list[Skipped] = []
    batches = evaluation_batches(
        samples,
        size=config.size,
        mean=config.mean,
        std=config.std,
        batch_size=evaluation_batch_size(config.size, target) if batch_size is None else batch_size,
        device=target,
        workers=workers,
        skipped=broken,
    )
    try:
        vectors, _ = extract_features(encoder, batches, target, into="cpu")
    except ValueError as error:
        if len(broken) < len(samples):
            raise
        raise ValueError(f"none of the images in {folder} can be decoded, for example {broken[0]}") from error
    undecodable = {line.path for line in broken}
    paths = [printable(path.relative_to(folder).as_posix()) for path in samples.paths if path not in undecodable]
    write_table(output, paths, vectors)
    return len(paths), tuple(str(line) for line in (*skipped, *broken))


def embed_text(
    run: Path,
    file: Path,
    output: Path,
    *,
    pooling: TokenPooling | None = None,
    device: str = "auto",
    batch_size: int | None = None,
) -> int:
    """Write the embeddings of all lines of a text file, computed by a sentence encoder: row i is line i.

    The formats are those of :func:`embed_folder`, with ``sentence`` for ``path``. Blank lines have rows, too. The
    embeddings are those of ``SentenceTransformer(run).encode``.

    Args:
        run: the folder of a text run, a sentence-transformers model or a transformers model.
        file: UTF-8 text, one sentence per line.
        output: the file to write; its extension (in any case) selects the format.
        pooling: how the tokens of a transformers model are pooled; None for other folders, which specify it.
        device: auto (a GPU if there is one), cpu, cuda or mps.
        batch_size: sentences per batch; None means 256.

    Returns:
        The number of sentences.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: there is no such run or file.
        ValueError: an option is out of range, the extension is unknown, the file is empty or not UTF-8, the folder has
            no sentence encoder, pooling is missing or superfluous, or the sentences are too long for a .npz.
    """
    from fmicl.runs.sentence_encoder import check_sentence_encoder, load_sentence_transformer

    _check_batch(batch_size)
    _check_output(output)
    check_sentence_encoder(run, pooling)
    reader = LineReader(file)
    sentences = [line for lines in reader for line in lines]
    reader.check()
    if not sentences:
        raise ValueError(f"{file} is empty")
    _check_padding(output, sentences)
    model = load_sentence_transformer(run, device, pooling)
    vectors = model.encode(sentences, batch_size=batch_size or 256, convert_to_tensor=True, show_progress_bar=False)
    write_table(output, sentences, vectors.cpu(), column="sentence")
    return len(sentences)


def _check_batch(size: int | None) -> None:
    if size is not None and size < 1:
        raise ValueError(f"--batch-size must be positive, but it is {size}")


def _check_output(output: Path) -> None:
    if output.suffix.lower() not in FORMATS:
        raise ValueError(f"{output} must end in one of {', '.join(FORMATS)}")
    check_new_file(output, "take another -o")


def _check_padding(output: Path, names: list[str]) -> None:
    """Refuse a .npz whose names are too large: NumPy pads each to the longest, at 4 bytes per character."""
    size = 4 * len(names) * max(map(len, names), default=0)
    if output.suffix.lower() == ".npz" and size > LARGEST_NAMES:
        raise ValueError(
            f"a .npz pads each of {len(names):,} names to the longest, of {max(map(len, names)):,} characters: "
            f"{size / 2**30:.1f} GiB without the embeddings; write .parquet or .csv instead"
        )


def write_table(output: Path, names: list[str], vectors: Tensor, *, column: str = "path") -> None:
    """Write names and vectors (N, d) in the format of the file's extension.

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
    writers: dict[str, Callable[[Path, str, list[str], np.ndarray], None]]
    writers = {".parquet": _parquet, ".npz": _npz, ".csv": _csv}
    write = writers[output.suffix.lower()]
    write_atomically(output, lambda path: write(path, column, names, vectors.float().numpy()), overwrite=False)


def _parquet(path: Path, column: str, names: list[str], vectors: np.ndarray) -> None:
    import pyarrow
    import pyarrow.parquet

    rows = pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(vectors.reshape(-1)), vectors.shape[1])
    pyarrow.parquet.write_table(pyarrow.table({column: names, "embedding": rows}), path)


def _npz(path: Path, column: str, names: list[str], vectors: np.ndarray) -> None:
    arrays = {f"{column}s": np.array(names, dtype=np.str_), "embeddings": vectors}
    with path.open("wb") as file:  # np.savez adds an extension to names, not to files
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _csv(path: Path, column: str, names: list[str], vectors: np.ndarray) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column, *range(vectors.shape[1])])
        writer.writerows([name, *row] for name, row in zip(names, vectors.tolist(), strict=True))
