"""Tables of our numbers beside the paper's: docs/reproduction.md from the archived runs in results/.

    python experiments/reproduction.py            # write the tables
    python experiments/reproduction.py --check    # exit code 1 if the page differs from the archived runs

Only the text between the page's markers (<!-- cifar10 --> ... <!-- /cifar10 -->) is written. Each number of ours is a
mean over seeds, with the standard deviation (n - 1). The runs are linked once a row, or once a column on CIFAR-10.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from record import differences

from fmicl.methods import METHODS
from fmicl.reproduce import paper
from fmicl.reproduce.experiment import score
from fmicl.sweep.summary import mean_and_std

ROOT = Path(__file__).resolve().parents[1]
COLUMNS = (
    "SimCLR", "MoCo", "AU", "KL", "JS", "Pearson", "SH", "Tsallis-3", "VLC", "reverse KL", "Neyman", "Jeffrey",
)  # fmt: skip
DIVERGENCES = {
    "kl": "KL", "js": "JS", "pearson": "Pearson", "squared_hellinger": "SH", "tsallis": "Tsallis-3", "vlc": "VLC",
    "reverse_kl": "reverse KL", "neyman": "Neyman", "jeffrey": "Jeffrey",
}  # fmt: skip
PAPER = {
    "linear, 800 epochs": paper.LINEAR["cifar10"],
    "k-NN, 800 epochs": paper.KNN["cifar10"],
    "k-NN, 200 epochs": {name: by_alpha[40.0] for name, by_alpha in paper.ALPHA_VISION.items()},
}
NAMES = {"Tsallis-3": "Tsallis", "SimCSE": "SimCLR"}
"""Columns that `fmicl.reproduce.paper` calls otherwise."""
PAPER_TEXT = {name: paper.STS[NAMES.get(name, name)] for name in ("SimCSE", *COLUMNS[1:9])}
"""Average over the seven tasks, BERT-base."""
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSB", "SICK-R", "avg")
ALPHAS = (1, 1e2, 1e4, 1e5, 409600, 1e6)
RUNS = "runs by seed"
GEOMETRY = ("alignment", "uniformity", "effective_rank")
LATE = 20
"""Epochs at the end of a run over which its metrics are averaged."""
ON_THE_WAY = (0.008, 0.04, 0.2, 1.0)
"""Shares of a run on sentences after which its development score is shown: the recipe's first look, and the last."""


class Record:
    """An archived run.

    Args:
        file: where it is, relative to results/.
        contents: its contents.
    """

    def __init__(self, file: Path, contents: Mapping[str, Any]) -> None:
        self.file, self.contents = file, contents
        self.recipe, self.settings = str(contents.get("recipe")), contents["settings"]
        self.results: Mapping[str, Any] = contents["results"]
        self.seed, self.epochs = int(contents["seed"]), self.settings.get("epochs")
        self.task = contents["task"]
        self.differences = {} if self.task == "warm_start" else differences(contents)

    @property
    def column(self) -> str | None:
        """Which of the paper's columns it is; None for other combinations."""
        s = self.settings
        method, objective = s.get("method", "simclr"), s.get("objective")
        if METHODS[method].value.own_loss:
            return None
        if objective == "infonce":
            names = {"simclr": "SimCSE" if self.task == "text" else "SimCLR", "moco": "MoCo"}
            return names.get(method)
        if method != "simclr":
            return None
        if objective == "align_uniform":
            return "AU"
        return DIVERGENCES.get(s.get("divergence", "")) if objective == "fmicl" else None


def label(record: Record) -> str:
    """Method and objective in a few words."""
    if record.column:
        return record.column
    method = str(record.settings.get("method"))
    if METHODS[method].value.own_loss:
        return {"byol": "BYOL", "swav": "SwAV"}.get(method, method)
    objective = record.settings.get("objective")
    names = {**DIVERGENCES, "learned": "learned f"}
    what = names.get(record.settings.get("divergence", ""), "f-MICL") if objective == "fmicl" else objective
    return f"{what} by {method}"


def load(folder: Path) -> list[Record]:
    """All archived runs below a folder; other JSON files, such as benchmarks, are left out.

    Raises:
        ValueError: a file is damaged.
    """
    found = []
    for file in sorted(folder.rglob("*.json")):
        try:
            contents = json.loads(file.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{file} is damaged: {error}") from error
        if isinstance(contents, dict) and {"task", "settings", "results"} <= contents.keys():
            found.append(Record(file.relative_to(folder), contents))
    return found


def cells(records: Sequence[Record], values: Iterable[Callable[[Record], Any]], links: str) -> list[str]:
    """Mean and spread over seeds of each value, and last a link for each seed; "" without a number.

    A number that not all of these runs have is followed by links to its own.

    Raises:
        ValueError: a seed is there twice.
    """
    values = list(values)
    by_seed = sorted(records, key=lambda r: r.seed)
    having = [[r for r in by_seed if isinstance(value(r), int | float)] for value in values]
    runs = [r for r in by_seed if any(r in known for known in having)]
    for one, other in itertools.pairwise(runs):
        if one.seed == other.seed:
            raise ValueError(f"{one.file} and {other.file} are the same run: seed {one.seed} counts once")

    def linked(known: Iterable[Record]) -> str:
        return " ".join(f"[{r.seed}]({links}/{r.file.as_posix()})" for r in known)

    made = []
    for value, known in zip(values, having, strict=True):
        number = mean_and_std([float(value(r)) for r in known]) if known else ""
        made.append(number + (f" ({linked(known)})" if known and known != runs else ""))
    return [*made, linked(runs)]


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown, the first column to the left."""
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(re.sub(r"  +", " ", line) for line in lines)


def _result(name: str) -> Callable[[Record], Any]:
    return lambda record: score(record.results, name)


def cifar10(records: Sequence[Record], links: str) -> str:
    """Runs with the recipe's own settings, beside the paper's."""
    rows = []
    for name, values in PAPER.items():
        theirs = (values.get(NAMES.get(column, column)) for column in COLUMNS)
        rows.append([f"paper, {name}", *("" if x is None else f"{x:.2f}" for x in theirs)])
    ours = [r for r in records if is_main(r)]
    for epochs in sorted({r.epochs for r in ours}, key=lambda epochs: (epochs != 200, -epochs)):
        columns = [
            cells([r for r in ours if r.epochs == epochs and r.column == c], _accuracies(), links) for c in COLUMNS
        ]
        for name, row in zip(("k-NN", "linear", RUNS), zip(*columns, strict=True), strict=True):
            rows.append([f"**ours, {name}, {epochs} epochs**", *row])
    return table(["CIFAR-10, accuracy in percent", *COLUMNS], rows)


def _accuracies() -> list[Callable[[Record], Any]]:
    return [_result("knn"), _result("linear")]


def is_main(record: Record) -> bool:
    """Whether it has the settings of the recipe cifar10, but for objective, method, epochs and seed."""
    return record.recipe == "cifar10" and record.column is not None and not record.differences


def geometry(records: Sequence[Record], links: str) -> str:
    """Where the embeddings of those runs end: how far pairs are apart, and how much of the sphere is used."""
    ours = [r for r in records if is_main(r) and _result("alignment")(r) is not None]
    rows = [
        [name, str(epochs), *cells(runs, [_late("alignment"), *map(_result, GEOMETRY)], links)]
        for epochs in sorted({r.epochs for r in ours})
        for name in COLUMNS
        if (runs := [r for r in ours if r.epochs == epochs and r.column == name])
    ]
    if not rows:
        return "No run is archived yet."
    head = ["objective", "epochs", "alignment in training", "alignment", "uniformity", "effective rank", RUNS]
    return table(head, rows)


def _late(name: str) -> Callable[[Record], Any]:
    """The mean of a column of its metrics over the last epochs: a row there is of one batch."""

    def value(record: Record) -> Any:
        rows = record.contents.get("metrics", ())
        late = [row[name] for row in rows[-LATE:] if isinstance(row.get(name), int | float)]
        return statistics.fmean(late) if len(late) == LATE else None

    return value


def others(records: Sequence[Record], links: str) -> str:
    """Runs on images with other settings, or on other data."""
    groups: dict[tuple[str, ...], list[Record]] = {}
    for r in records:
        if r.task == "images" and not is_main(r):
            differs = _listed(r.differences)
            groups.setdefault((r.recipe, label(r), differs, str(r.epochs)), []).append(r)
    if not groups:
        return "No run is archived yet."
    rows = [[*key, *cells(g, _accuracies(), links)] for key, g in sorted(groups.items())]
    return table(["recipe", "objective", "differs from the recipe", "epochs", "k-NN", "linear", RUNS], rows)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} {_text(value)}`" for key, value in settings.items())


def text(records: Sequence[Record], links: str) -> str:
    """Runs on sentences: those of the settings that most runs have, the alphas of KL, and the rest."""
    # A run without a score has nothing to show.
    found = [r for r in records if r.task == "text" and any(_result(task)(r) is not None for task in TASKS)]
    starts = [r for r in records if r.task == "warm_start"]
    common = _common(found)
    usual = [r for r in found if _key(r) == common]
    main = [r for r in usual if r.column and "alpha" not in r.differences]
    shown = {"warm start": starts} if starts else {}
    shown |= {name: [r for r in main if r.column == name] for name in PAPER_TEXT}
    rows = []
    for name, runs in shown.items():
        *scores, linked = _sts(runs, links)
        rows.append([name, *scores, f"{PAPER_TEXT[name]:.2f}" if name in PAPER_TEXT else "", linked])
    head = ["Spearman's correlation x 100", *(f"ours, {task}" for task in TASKS), "paper, BERT-base, avg", RUNS]
    parts = [table(head, rows)]
    if not found:
        parts.append("No run of ours is archived yet.")
    else:
        epochs, *more = _words(usual[0], starts, without=("alpha",))
        parts.append(", ".join([f"Each run of ours above is {epochs} of the recipe `{usual[0].recipe}`", *more]) + ".")
    if any(_evaluations(r) for r in main):
        shares = [f"after {share:.1%} of it".replace(".0%", "%") for share in ON_THE_WAY]
        rows = [[name, *_development(runs, links)] for name, runs in shown.items() if runs and runs is not starts]
        parts.append(table(["STS-B dev in training", "chosen step", "its score", *shares, RUNS], rows))
    alphas = [r for r in usual if r.column == "KL"]
    swept = {alpha: runs for alpha in ALPHAS if (runs := [r for r in alphas if r.settings.get("alpha") == alpha])}
    if len(swept) > 1:
        rows = [[f"{alpha:,.0f}", *_sts(runs, links)] for alpha, runs in swept.items()]
        parts.append(table(["KL, alpha", *TASKS, RUNS], rows))
        main += itertools.chain(*swept.values())
    done = {id(r) for r in main}
    groups: dict[str, list[Record]] = {}
    for r in found:
        if id(r) not in done:
            groups.setdefault(", ".join([label(r), *_words(r, starts)]), []).append(r)
    if groups:
        rows = [[name, *_sts(runs, links)] for name, runs in groups.items()]
        parts.append(table(["other settings", *TASKS, RUNS], rows))
    return "\n\n".join(parts)


def _sts(runs: Sequence[Record], links: str) -> list[str]:
    return cells(runs, [_result(task) for task in TASKS], links)


def _words(record: Record, starts: Sequence[Record], without: Sequence[str] = ()) -> list[str]:
    """Epochs, the start if it is one of these, and what else differs from the recipe."""
    differing = {key: value for key, value in record.differences.items() if key not in without}
    words = ["one epoch" if record.epochs == 1 else f"{record.epochs} epochs"]
    # A warm start's command is "python experiments/warm_start.py train TEXT MODEL ...". Where MODEL lay says nothing.
    if any(shlex.split(start.contents.get("command", ""))[4:5] == [differing.get("model")] for start in starts):
        del differing["model"]
        words.append("from the warm start")
    return [*words, f"with {_listed(differing)}"] if differing else words


def _evaluations(record: Record) -> list[tuple[float, float]]:
    """The share of the run, and the development score then."""
    rows = [row for row in record.contents.get("metrics", ()) if isinstance(row.get("stsb_dev"), int | float)]
    return [(row["step"] / rows[-1]["step"], row["stsb_dev"]) for row in rows]


def _development(runs: Sequence[Record], links: str) -> list[str]:
    def at(share: float) -> Callable[[Record], Any]:
        return lambda record: next((score for done, score in _evaluations(record) if abs(done - share) < 1e-6), None)

    steps = ", ".join(str(r.results["step"]) for r in sorted(runs, key=lambda r: r.seed) if _evaluations(r))
    return [steps, *cells(runs, [_result("stsb_dev"), *map(at, ON_THE_WAY)], links)]


def _key(record: Record) -> tuple[tuple[str, str], ...]:
    """What differs from the recipe, but for alpha; with the epochs, which a recipe of sentences leaves as they are."""
    differing = {key: _text(value) for key, value in record.differences.items() if key != "alpha"}
    return tuple(sorted({**differing, "epochs": str(record.epochs)}.items()))


def _common(records: Sequence[Record]) -> tuple[tuple[str, str], ...]:
    keys = [_key(r) for r in records]
    return max(keys, key=lambda key: (keys.count(key), key), default=())


def tables(results: Path, links: str = "../results") -> dict[str, str]:
    """All tables, by the name of their markers."""
    records = load(results)
    return {make.__name__: make(records, links) for make in (cifar10, geometry, others, text)}


def page(written: str, made: Mapping[str, str]) -> str:
    """A page with the tables between its markers.

    Raises:
        ValueError: a table's markers are missing, or there twice.
    """
    for name, content in made.items():
        start, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
        if written.count(start) != 1 or written.count(end) != 1 or written.index(start) > written.index(end):
            raise ValueError(f"the page needs {start.strip()} and {end} once, in this order, each on its own line")
        before, rest = written.split(start)
        written = f"{before}{start}{content}\n{end}{rest.split(end)[1]}"
    return written


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the archived runs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "reproduction.md", help="the page")
    options = parser.parse_args(arguments)
    try:
        before = options.page.read_text(encoding="utf-8")
        after = page(before, tables(options.results))
    except (OSError, ValueError) as error:
        print(f"reproduction.py: error: {error}", file=sys.stderr)
        return 2
    if options.check:
        if before != after:
            print(f"{options.page} is out of date: run python experiments/reproduction.py", file=sys.stderr)
        else:
            print(f"{options.page} agrees with the archived runs")
        return int(before != after)
    if before != after:
        options.page.write_text(after, encoding="utf-8")
    print(f"{options.page}: {'written' if before != after else 'was up to date'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
