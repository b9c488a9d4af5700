"""Semantic textual similarity (STS): the seven standard tasks, evaluated by SimCSE's protocol.

    STS12 ... STS16   all pairs of a year concatenated ("all")
    STSB              STS-Benchmark, test split
    SICK-R            SICK relatedness, test split

The score is Spearman's correlation of cosine similarity and human score, in percent, without a trained regressor. Files
are in SentEval's layout: FOLDER/STS/STS12-en-test/STS.input.MSRpar.txt, ..., FOLDER/STS/STSBenchmark/sts-test.csv,
FOLDER/SICK/SICK_test_annotated.txt. SentEval's download script lower-cases and tokenises all of them except SICK, which
matters to a cased encoder.

An encoder is any function from sentences to vectors; nothing but torch is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fmicl.evaluation.geometry import alignment, check_matrix, uniformity, unit_rows
from fmicl.utils.validation import require_positive

Encode = Callable[[Sequence[str]], Tensor]
"""Maps B sentences to embeddings (B, d) on any device; only directions matter."""

Progress = Callable[[Iterable[Sequence[str]], int], Iterable[Sequence[str]]]
"""Wraps the batches, with their number, to show a progress bar."""

_PARTS: dict[str, tuple[str, ...]] = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
_PAIRS = {"STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186, "STSB": 1379, "SICK-R": 4927}

TASKS: tuple[str, ...] = tuple(_PAIRS)
"""The seven tasks, in the usual order."""

POSITIVE_ABOVE = 4.0
"""STS-B pairs with a score above this (of 5) are positive pairs for alignment, as in SimCSE."""


@dataclass(frozen=True)
class StsTask:
    """Sentence pairs with human scores.

    Attributes:
        name: such as "STS12".
        first: first sentences of N pairs, with single spaces between words.
        second: second sentences.
        scores: human similarity scores.

    Raises:
        ValueError: the lengths differ, there are fewer than two pairs, or a score is not finite.

    Example:
        >>> task = StsTask("mine", ("a cat", "a dog"), ("the cat", "two trees"), (4.5, 0.0))
        >>> len(task)
        2
    """

    name: str
    first: tuple[str, ...]
    second: tuple[str, ...]
    scores: tuple[float, ...]

    def __post_init__(self) -> None:
        if not len(self.first) == len(self.second) == len(self.scores):
            raise ValueError(
                f"{self.name}: {len(self.first)} first sentences, {len(self.second)} second sentences and "
                f"{len(self.scores)} scores don't match"
            )
        if len(self) < 2:
            raise ValueError(f"{self.name}: a correlation needs at least 2 scored pairs, got {len(self)}")
        if not all(math.isfinite(score) for score in self.scores):
            raise ValueError(f"{self.name}: some scores are not finite")

    def __len__(self) -> int:
        return len(self.scores)


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation; ties share their mean rank.

    Args:
        x: (N,) numbers.
        y: (N,) numbers.

    Returns:
        A number from -1 to 1; nan (undefined) if all values of x or all values of y are equal.

    Raises:
        ValueError: the shapes are not (N,) with the same N of at least 2, or a value is not finite.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 20.0, 0.3, 400.0]))
        0.8
    """
    if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
        raise ValueError(f"spearman needs two shapes (N,) with N at least 2, got {tuple(x.shape)} and {tuple(y.shape)}")
    a, b = (_centred_ranks(values.detach().cpu().double()) for values in (x, y))
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / scale) if float(scale) > 0 else math.nan


def _centred_ranks(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ValueError("spearman needs finite values")
    _, inverse, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return ranks[inverse] - (len(values) + 1) / 2


def load_sts(folder: Path | str) -> dict[str, StsTask]:
    """Load the test splits of those of the seven tasks that a folder in SentEval's layout contains.

    Pairs without a score (blank lines in the gs files of STS15 and STS16) are skipped, and so are tasks without a
    folder. A task with only a part of its files is an error.

    Args:
        folder: contains STS/ and SICK/ (SentEval's data/downstream).

    Returns:
        Tasks by name, in the order of `TASKS`.

    Raises:
        FileNotFoundError: there is no such folder, it contains none of the tasks, or a file of a task is missing.
        ValueError: a file is damaged; the message has its name and line.
    """
    folder = _existing(folder)
    tasks = {year: _load_year(folder, year) for year in _PARTS if _task_folder(folder, year).exists()}
    if _task_folder(folder, "STSB").exists():
        tasks["STSB"] = load_stsb(folder)
    if _task_folder(folder, "SICK-R").exists():
        tasks["SICK-R"] = _load_sick(_task_folder(folder, "SICK-R") / "SICK_test_annotated.txt")
    if not tasks:
        inner = next((f for f in (folder / "downstream", folder / "data" / "downstream") if f.is_dir()), None)
        hint = f"did you mean {inner}?" if inner else "it should contain STS/ and SICK/, in SentEval's layout"
        raise FileNotFoundError(f"{folder} contains none of the STS tasks; {hint}")
    return tasks


def load_stsb(folder: Path | str, split: Literal["train", "dev", "test"] = "test") -> StsTask:
    """Load a split of STS-Benchmark; checkpoints are selected on dev.

    Raises:
        FileNotFoundError: there is no such folder or file.
        ValueError: the file is damaged; the message has its name and line.
    """
    path = _task_folder(_existing(folder), "STSB") / f"sts-{split}.csv"
    rows = [(line, _columns(path, line, text, 7)) for line, text in enumerate(_lines(path), start=1)]
    pairs = [(row[5], row[6], _score(path, line, row[4])) for line, row in rows]
    return _task("STSB" if split == "test" else f"STSB-{split}", path, pairs)


def evaluate_sts(
    encode: Encode, folder: Path | str, *, batch_size: int = 64, progress: Progress | None = None
) -> dict[str, Any]:
    """Evaluate an encoder on the STS tasks of a folder: `load_sts`, then `evaluate_tasks`."""
    return evaluate_tasks(encode, load_sts(folder), batch_size=batch_size, progress=progress)


@torch.no_grad()
def evaluate_tasks(
    encode: Encode, tasks: Mapping[str, StsTask], *, batch_size: int = 64, progress: Progress | None = None
) -> dict[str, Any]:
    """Spearman's correlation of cosine similarity and human score on each task, in percent.

    Each distinct sentence is encoded once, longest first, to minimise padding.

    Args:
        encode: maps B sentences to embeddings (B, d).
        tasks: by name.
        batch_size: sentences per call of `encode`.
        progress: wraps the batches, to show a progress bar.

    Returns:
        A dictionary for JSON:

        - name of each task: its score in percent; None if all its pairs are equally similar (a collapsed encoder);
        - ``avg``: mean of the seven; None unless all seven are present and defined;
        - ``missing``: those of the seven that are missing;
        - ``alignment``, ``uniformity``: on STS-B test, as in SimCSE: mean squared distance of the pairs with a score
          above 4, and log mean of exp(-2 |x - y|^2) over all pairs of its sentences, with repetitions; None without
          STS-B (alignment: or without such pairs);
        - ``pairs``: number of scored pairs of each task;
        - ``incomplete``: those of the seven whose number of pairs is not the official one.

    Raises:
        ValueError: `encode` returns something other than a finite (B, d), or batch_size is not positive.

    Example:
        >>> task = StsTask("mine", ("a", "b", "c"), ("a", "a", "aaaa"), (5.0, 3.0, 1.0))
        >>> def encode(sentences):
        ...     return torch.tensor([[len(s), float(ord(s[0]) - 96)] for s in sentences])
        >>> evaluate_tasks(encode, {"mine": task})["mine"]
        100.0
    """
    require_positive("batch_size", batch_size)
    sentences = {sentence for task in tasks.values() for sentence in (*task.first, *task.second)}
    index, rows = _embed(encode, sentences, batch_size, progress)
    embedded = {name: _embedded_pairs(task, index, rows) for name, task in tasks.items()}
    results: dict[str, Any] = {}
    for name, (first, second) in embedded.items():
        # From distances, so that pairs of equal sentences tie exactly: inner products of unit rows differ in the last
        # digit.
        similarity = 1 - (first - second).square().sum(dim=1) / 2
        value = 100 * spearman(similarity, torch.tensor(tasks[name].scores, dtype=torch.float64))
        results[name] = None if math.isnan(value) else value
    known = [results[name] for name in TASKS if results.get(name) is not None]
    results["avg"] = math.fsum(known) / len(TASKS) if len(known) == len(TASKS) else None
    results["missing"] = [name for name in TASKS if name not in tasks]
    results |= {"alignment": None, "uniformity": None}
    if "STSB" in tasks:
        first, second = embedded["STSB"]
        close = torch.tensor(tasks["STSB"].scores) > POSITIVE_ABOVE
        results["alignment"] = alignment(first[close], second[close]) if bool(close.any()) else None
        results["uniformity"] = uniformity(torch.cat([first, second]))
    results["pairs"] = {name: len(task) for name, task in tasks.items()}
    results["incomplete"] = [name for name in TASKS if name in tasks and len(tasks[name]) != _PAIRS[name]]
    return results


def _embed(
    encode: Encode, sentences: set[str], batch_size: int, progress: Progress | None
) -> tuple[dict[str, int], Tensor]:
    """Row index of each sentence, and unit rows in float64 on the CPU."""
    ordered = sorted(sentences, key=lambda sentence: (-len(sentence), sentence))
    batches: list[Sequence[str]] = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    parts = []
    for batch in batches if progress is None else progress(batches, len(batches)):
        rows = encode(batch)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(batch):
            seen = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(f"encode must return a tensor ({len(batch)}, d) for {len(batch)} sentences, got {seen}")
        parts.append(check_matrix(rows, "embeddings").cpu())
    return {sentence: i for i, sentence in enumerate(ordered)}, unit_rows(torch.cat(parts).double(), "embeddings")


def _embedded_pairs(task: StsTask, index: Mapping[str, int], rows: Tensor) -> tuple[Tensor, Tensor]:
    return rows[[index[s] for s in task.first]], rows[[index[s] for s in task.second]]


def _existing(folder: Path | str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with the STS tasks")
    return folder


def _task_folder(folder: Path, name: str) -> Path:
    if name == "SICK-R":
        return folder / "SICK"
    return folder / "STS" / ("STSBenchmark" if name == "STSB" else f"{name}-en-test")


def _load_year(folder: Path, year: str) -> StsTask:
    inner = _task_folder(folder, year)
    pairs: list[tuple[str, str, float]] = []
    for part in _PARTS[year]:
        inputs, gold = inner / f"STS.input.{part}.txt", inner / f"STS.gs.{part}.txt"
        texts, scores = _lines(inputs), _lines(gold)
        if len(texts) != len(scores):
            raise ValueError(f"{inputs} has {len(texts)} lines, {gold.name} has {len(scores)}: one is truncated")
        for line, (text, score) in enumerate(zip(texts, scores, strict=True), start=1):
            if score.strip():
                row = _columns(inputs, line, text, 2)
                pairs.append((row[0], row[1], _score(gold, line, score)))
    return _task(year, inner, pairs)


def _load_sick(path: Path) -> StsTask:
    header, *lines = _lines(path)
    expected = ["pair_ID", "sentence_A", "sentence_B", "relatedness_score"]
    if header.split("\t")[:4] != expected:
        raise ValueError(f"{path}, line 1: the columns must be {', '.join(expected)}, ..., got {header!r}")
    rows = [(line, _columns(path, line, text, 5)) for line, text in enumerate(lines, start=2)]
    return _task("SICK-R", path, [(row[1], row[2], _score(path, line, row[3])) for line, row in rows])


def _task(name: str, source: Path, pairs: list[tuple[str, str, float]]) -> StsTask:
    try:
        first, second, scores = zip(*pairs, strict=True) if pairs else ((), (), ())
        return StsTask(name, first, second, scores)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _lines(path: Path) -> list[str]:
    r"""Lines of a file, split at \n only: sentences may contain other Unicode line separators."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing")
    data = path.read_bytes()
    try:
        lines = data.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ValueError(f"{path}, line {line}: not UTF-8 ({error.reason})") from None
    if lines[-1] == "":
        lines.pop()
    if not lines:
        raise ValueError(f"{path} is empty")
    return [line.removesuffix("\r") for line in lines]


def _columns(path: Path, line: int, text: str, number: int) -> list[str]:
    """Tab-separated columns, at least that many, with single spaces between words, as SentEval joins them."""
    columns = [" ".join(column.split()) for column in text.split("\t")]
    if len(columns) < number:
        raise ValueError(f"{path}, line {line}: {number} tab-separated columns are needed, got {len(columns)}")
    return columns


def _score(path: Path, line: int, text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{path}, line {line}: {text.strip()!r} is not a score")
    return score
