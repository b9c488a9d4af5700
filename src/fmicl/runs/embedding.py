"""A folder of images or a file of sentences in, a table of vectors out."""

from __future__ import annotations

import csv
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
from torch import Tensor

from fmicl.utils.validation import TokenPooling
from fmicl.data import LineReader, Skipped, evaluation_batches, find_images, printable
from fmicl.evaluation.probes import extract_features
from fmicl.runs.export import EncoderConfig, load_encoder
from fmicl.utils.files import check_new_file, write_atomically
from fmicl.training.image_evaluation import images_at_once
from fmicl.runs.folder import exclude_runs, open_run
from fmicl.utils.device import pick_device

FORMATS = (".parquet", ".npz", ".csv")
LARGEST_NAMES = 2**30
"""Bytes of the paths or sentences in a .npz."""


def embed_folder(
    run: Path,
    folder: Path,
    output: Path,
    *,
    device: str = "auto",
    batch_size: int | None = None,
    workers: int = 4,
) -> tuple[int, tuple[str, ...]]:
    r"""Write the features of all images under a folder, as the run's encoder sees them.

    ============  ==============================================================================
    ``.parquet``  columns ``path`` and ``embedding`` (a list of float32 of fixed length)
    ``.npz``      arrays ``paths`` (N,) and ``embeddings`` (N, d), readable without pickle
    ``.csv``      a header, then a row for each image: its path and d numbers
    ============  ==============================================================================

    Paths are relative to the folder; bytes in a name that are no UTF-8 are written as ``\xff``. Images that can't be
    decoded are left out and returned by name, and so are folders that can't be entered or hold runs. For an encoder
    that was trained on grey images, colours become grey. The output is written whole or not at all.

    Args:
        run: a run folder.
        folder: images, with or without subfolders.
        output: the file to write; its ending says the format, in lower or upper case.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        batch_size: images at a time; None: 512, and fewer large ones.
        workers: processes that decode images.

    Returns:
        The number of images, and a line for each image or folder that was left out.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: no such run or folder.
        ValueError: the ending is none of the three, the batch is empty, no image can be decoded, or a .npz would have
            more than a GiB of names.
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
        batch_size=images_at_once(config.size, target) if batch_size is None else batch_size,
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
    gone = {line.path for line in broken}
    paths = [printable(path.relative_to(folder).as_posix()) for path in samples.paths if path not in gone]
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
    """Write the vectors of all lines of a text file, as a sentence encoder sees them: row i is line i.

    ============  ==============================================================================
    ``.parquet``  columns ``sentence`` and ``embedding`` (a list of float32 of fixed length)
    ``.npz``      arrays ``sentences`` (N,) and ``embeddings`` (N, d), readable without pickle
    ``.csv``      a header, then a row for each line: the sentence and d numbers
    ============  ==============================================================================

    A blank line has a row like every other, that of a sentence without words. The vectors are those that
    ``SentenceTransformer(run).encode`` gives. The output is written whole or not at all.

    Args:
        run: a run folder of sentences, any sentence-transformers folder, or a plain transformers one.
        file: UTF-8, a sentence a line.
        output: the file to write; its ending says the format, in lower or upper case.
        pooling: of a plain transformers folder, and of no other: how its tokens make one vector.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        batch_size: sentences at a time; None: 256.

    Returns:
        The number of sentences.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: no such run or file.
        ValueError: the ending is none of the three, a line is not UTF-8, the file is empty, the run is none of
            sentences, a pooling is missing or too many, or a .npz would have more than a GiB of sentences.
    """
    from fmicl.training.text_evaluation import check_sentence_encoder, load_sentence_transformer

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
        raise ValueError(f"{output} ends in {output.suffix or 'nothing'}; the output is one of {', '.join(FORMATS)}")
    check_new_file(output, "take another -o")


def _check_padding(output: Path, names: list[str]) -> None:
    """Refuse a .npz whose names, each as long as the longest and four bytes a character, would be too large."""
    size = 4 * len(names) * max(map(len, names), default=0)
    if output.suffix.lower() == ".npz" and size > LARGEST_NAMES:
        raise ValueError(
            f"a .npz pads each of {len(names):,} names to the longest, of {max(map(len, names)):,} characters: "
            f"{size / 2**30:.1f} GiB without the vectors; write .parquet or .csv, which don't"
        )


def write_table(output: Path, names: list[str], vectors: Tensor, *, column: str = "path") -> None:
    """Write what was embedded, and vectors (N, d), in the format that the ending says.

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
    with path.open("wb") as file:  # given a name, it would add an ending
        np.savez(file, **arrays)  # type: ignore[arg-type]


def _csv(path: Path, column: str, names: list[str], vectors: np.ndarray) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([column, *range(vectors.shape[1])])
        writer.writerows([name, *row] for name, row in zip(names, vectors.tolist(), strict=True))
