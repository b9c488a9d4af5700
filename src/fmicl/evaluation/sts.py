"""Semantic textual similarity: the seven tasks that sentence embeddings are compared on, by SimCSE's protocol.

    STS12 ... STS16   all pairs of a year together ("all"), without weights for its parts
    STSB              STS-Benchmark, test split
    SICK-R            SICK relatedness, test split

Each is Spearman's correlation of cosine similarity and human score, in percent, with nothing trained on top. Files are
in SentEval's layout: FOLDER/STS/STS12-en-test/STS.input.MSRpar.txt, ..., FOLDER/STS/STSBenchmark/sts-test.csv,
FOLDER/SICK/SICK_test_annotated.txt. SentEval's own script lower-cases and tokenises all of them but SICK, so that an
encoder that knows capitals sees a text that its author may not have meant; an uncased one sees the same words.

Nothing here needs more than torch: an encoder is any function from sentences to vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from fmicl.evaluation.geometry import alignment, matrix, uniformity, unit_rows

__all__ = [
    "TASKS",
    "Encode",
    "Progress",
    "StsTask",
    "evaluate_sts",
    "evaluate_tasks",
    "load_sts",
    "load_stsb",
    "spearman",
]

Encode = Callable[[Sequence[str]], Tensor]
"""Maps B sentences to embeddings (B, d) on any device; directions count, lengths don't."""

Progress = Callable[[Iterable[Sequence[str]], int], Iterable[Sequence[str]]]
"""Wraps the batches, of which it is told the number, to draw a bar."""

_PARTS: dict[str, tuple[str, ...]] = {
    "STS12": ("MSRpar", "MSRvid", "SMTeuroparl", "surprise.OnWN", "surprise.SMTnews"),
    "STS13": ("FNWN", "headlines", "OnWN"),
    "STS14": ("deft-forum", "deft-news", "headlines", "images", "OnWN", "tweet-news"),
    "STS15": ("answers-forums", "answers-students", "belief", "headlines", "images"),
    "STS16": ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
_PAIRS = {"STS12": 3108, "STS13": 1500, "STS14": 3750, "STS15": 3000, "STS16": 1186, "STSB": 1379, "SICK-R": 4927}

TASKS: tuple[str, ...] = tuple(_PAIRS)
"""The seven tasks, in the order of the usual tables."""

POSITIVE_ABOVE = 4.0
"""Pairs of STS-B with a score above this (of 5) are positive pairs for alignment, as in SimCSE."""


@dataclass(frozen=True)
class StsTask:
    """Pairs of sentences that people have scored.

    Attributes:
        name: of the task, such as "STS12".
        first: N sentences, with single blanks between words.
        second: the N other ones.
        scores: how alike the two are, N numbers.

    Raises:
        ValueError: the three differ in length, there are fewer than two pairs, or a score is not a finite number.

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
                f"{self.name}: {len(self.first)} first sentences, {len(self.second)} second ones and "
                f"{len(self.scores)} scores do not make pairs"
            )
        if len(self) < 2:
            raise ValueError(f"{self.name}: a correlation needs at least two scored pairs; there are {len(self)}")
        if not all(math.isfinite(score) for score in self.scores):
            raise ValueError(f"{self.name}: some scores are not finite")

    def __len__(self) -> int:
        return len(self.scores)


def spearman(x: Tensor, y: Tensor) -> float:
    """Spearman's rank correlation: Pearson's of the ranks, where equal values share the mean of their ranks.

    Args:
        x: (N,) numbers.
        y: (N,) numbers.

    Returns:
        A number from -1 to 1; nan where all values of x, or all of y, are equal (it is not defined then).

    Raises:
        ValueError: the shapes are not (N,) with the same N of at least 2, or a value is not finite.

    Example:
        >>> spearman(torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([0.1, 20.0, 0.3, 400.0]))
        0.8
    """
    if x.ndim != 1 or x.shape != y.shape or len(x) < 2:
        raise ValueError(
            f"a rank correlation is of two lists (N,) with N of at least 2; got shapes {tuple(x.shape)} "
            f"and {tuple(y.shape)}"
        )
    a, b = (_centred_ranks(values.detach().cpu().double()) for values in (x, y))
    scale = (a.square().sum() * b.square().sum()).sqrt()
    return float((a * b).sum() / scale) if float(scale) > 0 else math.nan


def _centred_ranks(values: Tensor) -> Tensor:
    if not bool(values.isfinite().all()):
        raise ValueError("a rank correlation needs finite values")
    _, place, counts = values.unique(return_inverse=True, return_counts=True)
    ranks: Tensor = counts.cumsum(0).double() - (counts - 1) / 2
    return ranks[place] - (len(values) + 1) / 2


def load_sts(folder: Path | str) -> dict[str, StsTask]:
    """Those of the seven tasks that a folder in SentEval's layout holds, test splits.

    A pair without a score (a blank line in a gs file of STS15 and STS16) is left out. A task whose folder isn't there
    is left out too; one of which only a part is there is an error.

    Args:
        folder: has STS/ and SICK/ in it (SentEval's data/downstream).

    Returns:
        Tasks by name, in the order of `TASKS`.

    Raises:
        FileNotFoundError: there is no such folder, it holds none of the tasks, or a file of a task is missing.
        ValueError: a file is damaged; the message has its name and the line.
    """
    folder = _existing(folder)
    tasks = {year: _year(folder, year) for year in _PARTS if _place(folder, year).exists()}
    if _place(folder, "STSB").exists():
        tasks["STSB"] = load_stsb(folder)
    if _place(folder, "SICK-R").exists():
        tasks["SICK-R"] = _sick(_place(folder, "SICK-R") / "SICK_test_annotated.txt")
    if not tasks:
        inner = next((f for f in (folder / "downstream", folder / "data" / "downstream") if f.is_dir()), None)
        hint = (
            f"; did you mean {inner}?" if inner else ": it should have STS/ and SICK/ in it, as SentEval lays them out"
        )
        raise FileNotFoundError(f"{folder} holds none of the STS tasks{hint}")
    return tasks


def load_stsb(folder: Path | str, split: Literal["train", "dev", "test"] = "test") -> StsTask:
    """STS-Benchmark; its dev split is the one to choose checkpoints by.

    Raises:
        FileNotFoundError: the folder or the file isn't there.
        ValueError: the file is damaged; the message has its name and the line.
    """
    path = _place(_existing(folder), "STSB") / f"sts-{split}.csv"
    rows = [(line, _columns(path, line, text, 7)) for line, text in enumerate(_lines(path), start=1)]
    pairs = [(row[5], row[6], _score(path, line, row[4])) for line, row in rows]
    return _task("STSB" if split == "test" else f"STSB-{split}", path, pairs)


def evaluate_sts(
    encode: Encode,
    folder: Path | str,
    *,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score an encoder on the STS tasks of a folder: `load_sts`, then `evaluate_tasks`; see both.

    Args:
        encode: maps B sentences to embeddings (B, d).
        folder: in SentEval's layout.
        batch_size: sentences given to `encode` at a time.
        progress: wraps the batches, to draw a bar.

    Returns:
        What `evaluate_tasks` gives.

    Raises:
        FileNotFoundError: as `load_sts`.
        ValueError: as `load_sts` and `evaluate_tasks`.
    """
    return evaluate_tasks(encode, load_sts(folder), batch_size=batch_size, progress=progress)


@torch.no_grad()
def evaluate_tasks(
    encode: Encode,
    tasks: Mapping[str, StsTask],
    *,
    batch_size: int = 64,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Spearman's correlation of cosine similarity and human score on each task, in percent.

    Each distinct sentence of all tasks is encoded once, long ones first, so that a batch has little padding.

    Args:
        encode: maps B sentences to embeddings (B, d).
        tasks: by name.
        batch_size: sentences given to `encode` at a time.
        progress: wraps the batches, to draw a bar.

    Returns:
        A dictionary that is ready for JSON:

        - the name of each task: its score in percent, or None where every pair is equally similar, as for an encoder
          that has collapsed;
        - ``avg``: the mean of the seven, None unless all seven are there (and defined);
        - ``missing``: those of the seven that are not there;
        - ``alignment``, ``uniformity``: on STS-B test, as SimCSE has them: mean squared distance of the pairs with a
          score above 4, and log mean of exp(-2 |x - y|^2) over all pairs of its sentences, as often as they occur;
          None without STS-B (alignment: or without such pairs);
        - ``pairs``: how many scored pairs each task has;
        - ``incomplete``: tasks of the seven whose number of pairs is not the official one, as after a cut-off download.

    Raises:
        ValueError: `encode` gives something else than a finite (B, d), or a setting is out of range.

    Example:
        >>> task = StsTask("mine", ("a", "b", "c"), ("a", "a", "aaaa"), (5.0, 3.0, 1.0))
        >>> def encode(sentences):
        ...     return torch.tensor([[len(s), float(ord(s[0]) - 96)] for s in sentences])
        >>> evaluate_tasks(encode, {"mine": task})["mine"]
        100.0
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be positive, got batch_size={batch_size}")
    sentences = {sentence for task in tasks.values() for sentence in (*task.first, *task.second)}
    index, rows = _embed(encode, sentences, batch_size, progress)
    results: dict[str, Any] = {}
    for name, task in tasks.items():
        first, second = (rows[[index[s] for s in side]] for side in (task.first, task.second))
        # By the distance, so that two pairs of equal sentences tie exactly: products of unit rows would differ in
        # their last digit.
        similarity = 1 - (first - second).square().sum(dim=1) / 2
        value = 100 * spearman(similarity, torch.tensor(task.scores, dtype=torch.float64))
        results[name] = None if math.isnan(value) else value
    scores = [results.get(name) for name in TASKS]
    known = [score for score in scores if score is not None]
    results["avg"] = math.fsum(known) / len(TASKS) if len(known) == len(TASKS) else None
    results["missing"] = [name for name in TASKS if name not in tasks]
    results |= {"alignment": None, "uniformity": None}
    if "STSB" in tasks:
        results |= _geometry(tasks["STSB"], index, rows)
    results["pairs"] = {name: len(task) for name, task in tasks.items()}
    results["incomplete"] = [name for name in TASKS if name in tasks and len(tasks[name]) != _PAIRS[name]]
    return results


def _embed(
    encode: Encode,
    sentences: set[str],
    batch_size: int,
    progress: Progress | None,
) -> tuple[dict[str, int], Tensor]:
    """Where each sentence's row is, and unit rows in float64 on the CPU."""
    ordered = sorted(sentences, key=lambda sentence: (-len(sentence), sentence))
    batches: list[Sequence[str]] = [ordered[i : i + batch_size] for i in range(0, len(ordered), batch_size)]
    parts = []
    for batch in batches if progress is None else progress(batches, len(batches)):
        rows = encode(batch)
        if not isinstance(rows, Tensor) or rows.ndim != 2 or len(rows) != len(batch):
            seen = tuple(rows.shape) if isinstance(rows, Tensor) else type(rows).__name__
            raise ValueError(
                f"encode should give a tensor ({len(batch)}, d) for {len(batch)} sentences; it gave {seen}"
            )
        parts.append(matrix(rows, "embeddings").cpu())
    return {sentence: i for i, sentence in enumerate(ordered)}, unit_rows(torch.cat(parts).double(), "embeddings")


def _geometry(task: StsTask, index: Mapping[str, int], rows: Tensor) -> dict[str, float | None]:
    first, second = (rows[[index[s] for s in side]] for side in (task.first, task.second))
    close = torch.tensor(task.scores) > POSITIVE_ABOVE
    return {
        "alignment": alignment(first[close], second[close]) if bool(close.any()) else None,
        "uniformity": uniformity(torch.cat([first, second])),
    }


def _existing(folder: Path | str) -> Path:
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder} with the STS tasks")
    return folder


def _place(folder: Path, name: str) -> Path:
    if name == "SICK-R":
        return folder / "SICK"
    return folder / "STS" / ("STSBenchmark" if name == "STSB" else f"{name}-en-test")


def _year(folder: Path, year: str) -> StsTask:
    place = _place(folder, year)
    pairs: list[tuple[str, str, float]] = []
    for part in _PARTS[year]:
        inputs, gold = place / f"STS.input.{part}.txt", place / f"STS.gs.{part}.txt"
        texts, scores = _lines(inputs), _lines(gold)
        if len(texts) != len(scores):
            raise ValueError(
                f"{inputs} has {len(texts)} lines but {gold.name} beside it has {len(scores)}: one of them was cut off"
            )
        for line, (text, score) in enumerate(zip(texts, scores, strict=True), start=1):
            if score.strip():
                row = _columns(inputs, line, text, 2)
                pairs.append((row[0], row[1], _score(gold, line, score)))
    return _task(year, place, pairs)


def _sick(path: Path) -> StsTask:
    header, *lines = _lines(path)
    expected = ["pair_ID", "sentence_A", "sentence_B", "relatedness_score"]
    if header.split("\t")[:4] != expected:
        raise ValueError(f"{path}, line 1: the columns should be {', '.join(expected)}, ...; got {header!r}")
    rows = [(line, _columns(path, line, text, 5)) for line, text in enumerate(lines, start=2)]
    return _task("SICK-R", path, [(row[1], row[2], _score(path, line, row[3])) for line, row in rows])


def _task(name: str, source: Path, pairs: list[tuple[str, str, float]]) -> StsTask:
    try:
        first, second, scores = zip(*pairs, strict=True) if pairs else ((), (), ())
        return StsTask(name, first, second, scores)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def _lines(path: Path) -> list[str]:
    """Lines as SentEval's files have them: by newline alone, as sentences may hold Unicode's other separators."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, and with it a part of its task")
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
    """At least so many columns between tabs, with single blanks between words, as SentEval joins them."""
    columns = [" ".join(column.split()) for column in text.split("\t")]
    if len(columns) < number:
        raise ValueError(
            f"{path}, line {line}: {number} columns between tabs are needed, there are {len(columns)}; was it cut off?"
        )
    return columns


def _score(path: Path, line: int, text: str) -> float:
    try:
        score = float(text)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise ValueError(f"{path}, line {line}: {text.strip()!r} is not a score")
    return score
