"""What a sentence encoder is worth: the STS scores of a sentence-transformers folder or a run, and where they go."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from fmicl.evaluation.sts import StsTask, evaluate_tasks, load_sts
from fmicl.models.norms import evaluation_mode
from fmicl.models.text import Tokenizer
from fmicl.runs.folder import Run
from fmicl.runs.sentence_encoder import load_sentence_encoder
from fmicl.utils.files import back_up_json, check_new_file, read_json, write_atomically, write_json
from fmicl.utils.validation import TokenPooling

if TYPE_CHECKING:
    pass

__all__ = [
    "evaluate_text",
    "note_scores",
    "stsb_scorer",
    "write_new_json",
]

BATCH = 64
DEV_BATCH = 256
ABOUT = ("step", "stsb_dev", "chosen_by")
"""Of results.json, which encoder was exported, and why."""


def evaluate_text(
    path: Path,
    sts: Path,
    *,
    pooling: TokenPooling | None = None,
    output: Path | None = None,
    device: str = "auto",
    bar: bool = False,
) -> dict[str, Any]:
    """Score a sentence encoder on the STS tasks, and write the scores to a new file if one is named.

    Args:
        path: a run folder of sentences, a folder that `SentenceTransformer.save` left, or a plain transformers one.
        sts: the tasks, in SentEval's layout.
        pooling: of a plain transformers folder, and of no other: how its tokens make one vector.
        output: a JSON file that must not exist yet; it is written whole or not at all.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        bar: draw a progress bar on a terminal.

    Returns:
        What `fmicl.sts.evaluate_tasks` gives, with the path under "model" and, where one was named, the pooling:
        what the file holds.

    Raises:
        FileExistsError: the output exists. It is looked for before the work, and again when writing.
        FileNotFoundError: the encoder, the tasks or the output's folder aren't there.
        ValueError: the path is something else than a sentence encoder, a pooling is missing or too many, or a file
            is damaged.
    """
    if output is not None:
        check_new_file(output, "take another --json")
    tasks = load_sts(sts)  # cheap: what is wrong with them is said before a model is loaded
    encode = load_sentence_encoder(path, device, pooling)
    about = {"model": str(path)} if pooling is None else {"model": str(path), "pooling": pooling}
    results = {**about, **evaluate_tasks(encode, tasks, batch_size=BATCH, progress=_bar if bar else None)}
    if output is not None:
        write_new_json(output, results)
    return results


def note_scores(run: Run, scores: dict[str, Any] | None, about: dict[str, Any] | None = None) -> dict[str, Any]:
    """Write results.json of a run on sentences: which encoder was exported, and its scores.

    Results that say something else are not thrown away: they get a number.

    Args:
        run: the run.
        scores: what `evaluate_text` gives; None for none.
        about: which step was exported, why, and its score on STS-B dev; None keeps what results.json says.

    Returns:
        What results.json holds.
    """
    if about is None:
        before = read_json(run.results) if run.results.exists() else {}
        about = {key: before.get(key) for key in ABOUT}
    results = {**about, **{key: value for key, value in (scores or {}).items() if key != "model"}}
    back_up_json(run.results, results)
    write_json(run.results, results)
    return results


def stsb_scorer(
    task: StsTask, tokenizer: Tokenizer, length: int, device: torch.device
) -> Callable[[nn.Module], float | None]:
    """A function that gives a sentence encoder's score on a task, in percent; None where it isn't defined.

    Sentences are tokenised once. The encoder is asked in eval mode and as it was written: what is compiled is
    compiled for the batches of training.
    """
    batches: dict[tuple[str, ...], Tensor] = {}

    def score(encoder: nn.Module) -> float | None:
        def encode(sentences: Sequence[str]) -> Tensor:
            key = tuple(sentences)
            if key not in batches:
                batches[key] = tokenizer.batch(sentences, length).to(device)
            vectors: Tensor = encoder.forward(batches[key])
            return vectors

        with evaluation_mode(encoder):
            value: float | None = evaluate_tasks(encode, {task.name: task}, batch_size=DEV_BATCH)[task.name]
        return value

    return score


def write_new_json(path: Path, value: object) -> None:
    """Write JSON to a file that isn't there yet, whole or not at all.

    Raises:
        FileExistsError: it is there, also if it came while the value was made.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x.json"
        >>> write_new_json(path, {"avg": 78.02})
        >>> json.loads(path.read_text())
        {'avg': 78.02}
    """
    text = json.dumps(value, indent=2, allow_nan=False) + "\n"
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), overwrite=False)


def _bar(batches: Iterable[Sequence[str]], total: int) -> Iterable[Sequence[str]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(batches, "encoding", total=total, console=console, transient=True, disable=not console.is_terminal)
