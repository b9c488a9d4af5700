"""The folder that a run leaves: made once, written whole, read without pickle.

RUN/settings.json  metrics.csv  tensorboard/  checkpoints/last.ckpt  encoder.safetensors  encoder.json
    projection.safetensors  results.json  arrays.safetensors  figures/  report.html

A run on sentences has, in the place of the encoder's two files, sentence_transformer/ and a modules.json that makes the
run folder itself one of sentence-transformers.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from fmicl.utils.device import describe_device
from fmicl.utils.files import check_writable, read_json, write_json, write_atomically
from fmicl.utils.provenance import command_line, commit, versions
from fmicl.config.recipes import Recipe
from fmicl.config.settings import Settings
from fmicl.config.text_recipes import TextRecipe

S = TypeVar("S", bound=Settings)

ROOT = Path("runs")
"""Where runs go by default, under the current folder."""
COPY_IT = "what a run leaves is in its folder; copy it to where that is allowed, and name the copy"
"""What to do with a run that can't be written to."""


@dataclass(frozen=True)
class Run:
    """The places in a run folder.

    Example:
        >>> Run(Path("runs/digits-001")).checkpoint.as_posix()
        'runs/digits-001/checkpoints/last.ckpt'
    """

    path: Path

    @property
    def settings(self) -> Path:
        """What was trained, with what: enough to run it again."""
        return self.path / "settings.json"

    @property
    def metrics(self) -> Path:
        """One row for each epoch."""
        return self.path / "metrics.csv"

    @property
    def tensorboard(self) -> Path:
        """The folder of event files."""
        return self.path / "tensorboard"

    @property
    def checkpoint(self) -> Path:
        """Where to go on from."""
        return self.path / "checkpoints" / "last.ckpt"

    @property
    def encoder(self) -> Path:
        """The encoder's weights."""
        return self.path / "encoder.safetensors"

    @property
    def encoder_config(self) -> Path:
        """How to build the encoder that the weights fit."""
        return self.path / "encoder.json"

    @property
    def projection(self) -> Path:
        """The weights of the projection head."""
        return self.path / "projection.safetensors"

    @property
    def sentence_transformer(self) -> Path:
        """Of a run on sentences: the encoder with its tokenizer, as sentence-transformers keeps it."""
        return self.path / "sentence_transformer"

    @property
    def modules(self) -> Path:
        """Of a run on sentences: what makes the run folder itself a sentence encoder."""
        return self.path / "modules.json"

    @property
    def results(self) -> Path:
        """Accuracies and geometry at the last epoch."""
        return self.path / "results.json"

    @property
    def arrays(self) -> Path:
        """What the figures are drawn from."""
        return self.path / "arrays.safetensors"

    @property
    def report(self) -> Path:
        """The page."""
        return self.path / "report.html"

    @property
    def finished(self) -> bool:
        """Whether the run came to its end, the page being the last thing written."""
        return self.report.exists() and self.results.exists()


def new_run(name: str, out: Path | None = None, root: Path = ROOT) -> Run:
    """Make a new run folder: ``out``, or the next free number under ``root``.

    Raises:
        FileExistsError: ``out`` exists; nothing is ever overwritten.
        NotADirectoryError: ``out`` is a file, or would be in one.
        PermissionError: no folder can be made there.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> [new_run("digits", root=folder).path.name for _ in range(2)]
        ['digits-001', 'digits-002']
    """
    check_place(out, root)
    if out is not None:
        try:
            out.mkdir(parents=True)
        except FileExistsError:  # since then
            raise _exists(out) from None
        return Run(out)
    root.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name[len(name) + 1 :]) for path in _numbered(name, root)), default=0)
    while True:  # another process may have just taken the number
        try:
            (root / f"{name}-{number:03d}").mkdir()
        except FileExistsError:
            number += 1
        else:
            return Run(root / f"{name}-{number:03d}")


def check_place(out: Path | None, root: Path = ROOT) -> None:
    """Refuse a place that no new run can have, before the work for it is done. See :func:`new_run`."""
    if out is not None and out.is_dir():
        raise _exists(out)
    check_writable(out or root, "take another --out")


def _exists(out: Path) -> FileExistsError:
    return FileExistsError(
        f"{out} exists, and a run never overwrites one: take another --out, or go on with it by --resume"
    )


def latest_run(name: str, root: Path = ROOT) -> Run | None:
    """The numbered run of this recipe with the highest number, if there is one."""
    runs = sorted(_numbered(name, root), key=lambda path: int(path.name[len(name) + 1 :]))
    return Run(runs[-1]) if runs else None


def old_run(name: str, out: Path | None) -> Run | None:
    """The run to go on with: in that folder, or the newest of that name; None where there is none.

    Raises:
        ValueError: ``out`` is a file.
    """
    if out is None:
        return latest_run(name)
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file, not the folder of a run to resume")
    return Run(out) if out.exists() else None


def _numbered(name: str, root: Path) -> list[Path]:
    return [path for path in root.glob(f"{name}-*") if path.name[len(name) + 1 :].isdigit() and path.is_dir()]


def open_run(path: Path | str) -> Run:
    """An existing run folder.

    Raises:
        FileNotFoundError: there is no such folder, or it is not one that ``fmicl train`` left.
    """
    run = Run(Path(path))
    if not run.path.is_dir():
        file = f"{run.path} is a file, not the folder of a run"
        raise FileNotFoundError(file if run.path.exists() else f"there is no run folder {run.path}")
    if not run.settings.exists():
        raise FileNotFoundError(f"{run.path} is not a run folder of `fmicl train`: it has no settings.json")
    return run


def is_run_folder(path: Path) -> bool:
    """Whether a folder is that of a run or of a sweep, by the files in it."""
    if os.path.isfile(path / "sweep.json"):
        return True
    run = Run(path)
    beside = os.path.isfile(run.metrics) or os.path.isfile(run.encoder_config) or os.path.isdir(run.checkpoint.parent)
    return beside and os.path.isfile(run.settings)


def exclude_runs(path: Path) -> str | None:
    """For the search of image files: the figures of runs, which may lie below a data folder, are no data."""
    return "fmicl run" if is_run_folder(path) else None


def remove_halves(run: Run) -> None:
    """Remove what a killed process left of files that it was just writing."""
    for path in list(run.path.rglob(".*.tmp")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)





def write_settings(run: Run, name: str, recipe: Settings, device: str, data: dict[str, Any] | None = None) -> None:
    """Write settings.json: all that is needed to run it again, and the fingerprint of the data that it saw."""
    packages = ["torch", "lightning"]
    packages += (
        ["timm", "torchvision", "scikit-learn"]
        if recipe.kind == "images"
        else ["transformers", "tokenizers", "sentence-transformers"]
    )
    write_json(
        run.settings,
        {
            "recipe": name,
            "kind": recipe.kind,
            "settings": recipe.to_json(),
            "data": data,
            "command": command_line(),
            "versions": versions(packages),
            "device": describe_device(device),
            "commit": commit(),
            "seed": recipe.seed,
            "started": datetime.now(UTC).isoformat(timespec="seconds"),
        },
    )



def read_kind(run: Run) -> str:
    """What a run is trained on: "images" (older runs don't say it) or "text"."""
    return str(read_json(run.settings).get("kind", Recipe.kind))


def read_recipe(run: Run) -> tuple[str, Recipe]:
    """Name and settings of a run on images.

    Raises:
        ValueError: it is one on sentences.
    """
    settings = _settings_of(run, Recipe.kind)
    return str(settings["recipe"]), Recipe.from_json(settings["settings"])


def read_text_recipe(run: Run) -> tuple[str, TextRecipe]:
    """Name and settings of a run on sentences.

    Raises:
        ValueError: it is one on images.
    """
    settings = _settings_of(run, TextRecipe.kind)
    return str(settings["recipe"]), TextRecipe.from_json(settings["settings"])


def read_settings(run: Run, kind: type[S]) -> S:
    """Settings of a run of this kind.

    Raises:
        ValueError: it is one of another.
    """
    return kind.from_json(_settings_of(run, kind.kind)["settings"])


def _settings_of(run: Run, kind: str) -> dict[str, Any]:
    found = read_kind(run)
    if found != kind:
        raise ValueError(f"{run.path} is a run on {found}, not on {kind}")
    return read_json(run.settings)


def read_fingerprint(run: Run) -> dict[str, Any] | None:
    """The fingerprint of the data that a run was started with; None if it has none."""
    data = read_json(run.settings).get("data")
    return data if isinstance(data, dict) else None






def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""
    write_atomically(path, lambda temporary: torch.save(state, temporary))


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a handful of unrelated types for damaged files
        raise ValueError(f"the checkpoint {path} can't be read ({error}); remove it to start this run again") from error
    if not isinstance(state, dict):
        raise ValueError(f"the checkpoint {path} holds a {type(state).__name__}, not a run's state")
    return state
