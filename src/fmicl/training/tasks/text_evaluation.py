"""Evaluation of sentence encoders on the STS tasks, and results.json of runs on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.evaluation.sts import StsTask, evaluate_tasks, load_sts
from fmicl.models.norms import evaluation_mode
from fmicl.models.text import Tokenizer
from fmicl.runs.folder import Run
from fmicl.runs.sentence_encoder import load_sentence_encoder
from fmicl.utils.files import back_up_json, check_new_file, read_json, write_json
from fmicl.utils.validation import TokenPooling

BATCH = 64
DEV_BATCH = 256
ABOUT = ("step", "stsb_dev", "chosen_by")
"""Keys of results.json that say which encoder was exported, and why."""


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
        path: a run on text, a sentence-transformers folder, or a plain transformers folder.
        sts: the tasks, in SentEval's layout.
        pooling: how tokens make one vector; for plain transformers folders only.
        output: a JSON file that must not exist.
        device: where to compute: auto (a GPU if there is one), cpu, cuda or mps.
        bar: draw a progress bar on a terminal.

    Returns:
        What `fmicl.sts.evaluate_tasks` gives, with the path under "model", and the pooling if there is one.

    Raises:
        FileExistsError: the output exists.
        FileNotFoundError: the encoder, the tasks or the output's folder don't exist.
        ValueError: the path is not a sentence encoder, the pooling is missing or superfluous, or a file is damaged.
    """
    if output is not None:
        check_new_file(output, "take another --json")
    tasks = load_sts(sts)  # before a model is loaded, which takes longer
    encode = load_sentence_encoder(path, device, pooling)
    about = {"model": str(path)} if pooling is None else {"model": str(path), "pooling": pooling}
    results = {**about, **evaluate_tasks(encode, tasks, batch_size=BATCH, progress=_bar if bar else None)}
    if output is not None:
        write_json(output, results, overwrite=False)
    return results


def write_text_results(
    run: Run,
    scores: dict[str, Any] | None,
    about: dict[str, Any] | None = None,
    *,
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Write results.json of a run on text: which encoder was exported, and its scores.

    Earlier results that differ are kept under another name.

    Args:
        run: the run.
        scores: what `evaluate_text` gives; None for none.
        about: which step was exported, why, and its score on STS-B dev; None keeps those of results.json.
        say: prints that earlier results are replaced.

    Returns:
        The content of results.json.
    """
    if about is None:
        before = read_json(run.results) if run.results.exists() else {}
        about = {key: before.get(key) for key in ABOUT}
    results = {**about, **{key: value for key, value in (scores or {}).items() if key != "model"}}
    backup = back_up_json(run.results, results)
    if backup is not None:
        say(f"{run.results} is replaced; the results before, which differ, are kept in {backup.name}")
    write_json(run.results, results)
    return results


def stsb_scorer(
    task: StsTask, tokenizer: Tokenizer, length: int, device: torch.device
) -> Callable[[nn.Module], float | None]:
    """A function that gives a sentence encoder's score on a task in percent, or None if it is undefined.

    Sentences are tokenised once. The encoder runs in eval mode and uncompiled: the compiled one is specialised for the
    batches of training.
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


def _bar(batches: Iterable[Sequence[str]], total: int) -> Iterable[Sequence[str]]:
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    return track(batches, "encoding", total=total, console=console, transient=True, disable=not console.is_terminal)
