"""The run folder: layout, creation, lookup, settings.

RUN/settings.json  metrics.csv  tensorboard/  checkpoints/last.ckpt  encoder.safetensors  encoder.json
    projection.safetensors  results.json  arrays.safetensors  figures/  report.html

A text run has sentence_transformer/ and modules.json instead of the encoder's two files; modules.json makes the run
folder itself a sentence-transformers model.
"""

from __future__ import annotations

import csv
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmicl.utils.files import check_writable

ROOT = Path("runs")
"""Default parent of run folders, relative to the current folder."""
SWEEP_FILE = "sweep.json"
"""The file that makes a folder that of a sweep."""
READ_ONLY_HINT = "copy the run folder to a place that you may write to, and use the copy"
"""What to do about a run folder without write permission."""


class _RunPath:
    """A path relative to the run folder."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: Run, owner: type[Run]) -> Path:
        return run.path / self.name


@dataclass(frozen=True)
class Run:
    """The paths in a run folder.

    Example:
        >>> Run(Path("runs/digits-001")).checkpoint.as_posix()
        'runs/digits-001/checkpoints/last.ckpt'
    """

    path: Path

    settings = _RunPath("settings.json")  # recipe, settings, data fingerprint, command, versions: enough to repeat it
    metrics = _RunPath("metrics.csv")  # one row per epoch (text: per validation)
    tensorboard = _RunPath("tensorboard")  # folder of event files
    checkpoint = _RunPath("checkpoints/last.ckpt")  # training state, to resume from
    encoder = _RunPath("encoder.safetensors")  # weights of the encoder
    encoder_config = _RunPath("encoder.json")  # how to build the encoder and to normalise its images
    projection = _RunPath("projection.safetensors")  # weights of the projection head
    sentence_transformer = _RunPath("sentence_transformer")  # text: folder of encoder and tokenizer
    modules = _RunPath("modules.json")  # text: makes the run folder a sentence-transformers model
    results = _RunPath("results.json")  # results of the evaluation
    arrays = _RunPath("arrays.safetensors")  # pair distances and nearest neighbours, for the figures
    assumption = _RunPath("assumption.json")  # tests of the Gaussian kernel, by `fmicl check-assumption`
    figures = _RunPath("figures")  # folder of PNGs
    report = _RunPath("report.html")  # the HTML report

    @staticmethod
    def is_run(path: Path) -> bool:
        """Whether a folder is a run, finished or not: whether it has settings."""
        return Run(path).settings.is_file()

    @property
    def finished(self) -> bool:
        """Whether the run has ended: the report is the last file written."""
        return self.report.exists() and self.results.exists()


def read_rows(metrics: Path) -> list[dict[str, float | None]]:
    """The rows of a metrics.csv as numbers; None for a cell that is blank, cut off or no number.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is damaged.
    """
    try:
        with metrics.open(newline="", encoding="utf-8") as file:
            return [{name: _number(cell) for name, cell in row.items()} for row in csv.DictReader(file)]
    except (csv.Error, UnicodeDecodeError) as error:
        raise ValueError(f"{metrics} is damaged: {error}") from error


def _number(cell: Any) -> float | None:
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None


def create_run(name: str, out: Path | None = None, root: Path = ROOT) -> Run:
    """Create a run folder: ``out``, or the next free number under ``root``.

    Raises:
        FileExistsError: ``out`` exists.
        NotADirectoryError: ``out`` is a file or lies below one.
        PermissionError: the folder can't be created.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> [create_run("digits", root=folder).path.name for _ in range(2)]
        ['digits-001', 'digits-002']
    """
    check_new_run(out, root)
    if out is not None:
        try:
            out.mkdir(parents=True)
        except FileExistsError:  # another process has just created it
            raise _exists(out) from None
        return Run(out)
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max(_numbered(name, root), default=0)
    while True:  # another process may have just taken the number
        try:
            (root / f"{name}-{number:03d}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return Run(root / f"{name}-{number:03d}")


def check_new_run(out: Path | None, root: Path = ROOT) -> None:
    """Raise the errors of :func:`create_run` without creating anything, to fail before data is loaded."""
    if out is not None and out.is_dir():
        raise _exists(out)
    check_writable(out or root, "take another --out")


def _exists(out: Path) -> FileExistsError:
    return FileExistsError(f"{out} exists, and a run never overwrites another: take another --out, or add --resume")


def latest_run(name: str, root: Path = ROOT) -> Run | None:
    """The run of this name with the highest number, if there is one."""
    runs = _numbered(name, root)
    return Run(runs[max(runs)]) if runs else None


def find_run(name: str, out: Path | None) -> Run | None:
    """The run to resume: the one in ``out``, or the latest of that name; None if there is none.

    Raises:
        ValueError: ``out`` is a file.
    """
    if out is None:
        return latest_run(name)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not a run folder to resume")
    return Run(out) if out.exists() else None


def _numbered(name: str, root: Path) -> dict[int, Path]:
    paths = {path.name.removeprefix(f"{name}-"): path for path in root.glob(f"{name}-*") if path.is_dir()}
    return {int(number): path for number, path in paths.items() if number.isdigit()}


def open_run(path: Path | str) -> Run:
    """An existing run folder.

    Raises:
        FileNotFoundError: there is no such folder, or it is not a run of ``fmicl train``.
    """
    run = Run(Path(path))
    if not run.path.is_dir():
        file = f"{run.path} is a file, not a run folder"
        raise FileNotFoundError(file if run.path.exists() else f"there is no run folder {run.path}")
    if not run.settings.exists():
        raise FileNotFoundError(f"{run.path} is not a run folder of `fmicl train`: it has no {run.settings.name}")
    return run


def is_run_or_sweep(path: Path) -> bool:
    """Whether a folder is that of a run or a sweep.

    settings.json alone is not enough: other programs write files of that name.
    """
    run = Run(path)
    trained = run.metrics.is_file() or run.encoder_config.is_file() or run.checkpoint.parent.is_dir()
    return (path / SWEEP_FILE).is_file() or (trained and run.settings.is_file())


def exclude_runs(path: Path) -> str | None:
    """Filter for image search: leave out run and sweep folders below a data folder, whose figures are no data."""
    return "fmicl run" if is_run_or_sweep(path) else None


def keep_results(run: Run, epochs: int) -> list[Path]:
    """Rename results and page of a run that goes on, such as results-200-epochs.json: then it is not finished any more.

    Returns:
        The new paths.
    """
    found = [path for path in (run.report, run.results) if path.exists()]
    return [path.rename(path.with_name(f"{path.stem}-{epochs}-epochs{path.suffix}")) for path in found]


def remove_temporary_files(run: Run) -> None:
    """Remove the partial files that a killed process has left."""
    for path in list(run.path.rglob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
