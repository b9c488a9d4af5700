"""Tables of our numbers beside the paper's: docs/reproduction.md from the archived runs in results/.

    python experiments/reproduction.py            # write the tables
    python experiments/reproduction.py --check    # exit code 1 if the page differs from the archived runs

Only the text between the page's markers (<!-- cifar10 --> ... <!-- /cifar10 -->) is written. Each number of ours is a
mean over seeds, with the standard deviation (n - 1). The runs are linked once a row, or once a column on CIFAR-10.
"""

from __future__ import annotations

import argparse
import itertools
import shlex
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

from fmicl.reproduce import paper
from fmicl.reproduce.archive import read_runs
from fmicl.reproduce.experiment import Entry, Measured, Outcome, Table, score
from fmicl.utils.files import read_json

ROOT = Path(__file__).resolve().parents[1]
NAMES = {"Tsallis-3": "Tsallis", "SimCSE": "SimCLR"}
"""Columns that `fmicl.reproduce.paper` calls otherwise."""
OTHERS = {"reverse KL": "reverse_kl", "Neyman": "neyman", "Jeffrey": "jeffrey"}
"""Divergences that the paper's large table doesn't have."""
COLUMNS = {
    name: {"method": "simclr", "objective": "fmicl", **paper.COLUMNS[NAMES.get(name, name)]}
    for name in ("SimCLR", "MoCo", "AU", "KL", "JS", "Pearson", "SH", "Tsallis-3", "VLC")
} | {name: {"method": "simclr", "objective": "fmicl", "divergence": each} for name, each in OTHERS.items()}
"""Columns of our table, and the options of each."""
DIVERGENCES = {options["divergence"]: name for name, options in COLUMNS.items() if "divergence" in options}
RELATIVES = {
    "MoCo": ("moco", "infonce"), "MoCo v3": ("mocov3", "infonce"), "BYOL": ("byol", None), "SwAV": ("swav", None),
    "Barlow Twins": ("simclr", "barlow_twins"), "VICReg": ("simclr", "vicreg"), "RenyiCL": ("mocov3", "renyi"),
    "RPC": ("simclr", "rpc"), "SigLIP": ("simclr", "siglip"), "DCL": ("simclr", "dcl"), "DHEL": ("simclr", "dhel"),
}  # fmt: skip
"""Systems beside f-MICL, each with settings of its own: method and objective."""
PAPER = {
    "linear, 800 epochs": paper.LINEAR["cifar10"],
    "k-NN, 800 epochs": paper.KNN["cifar10"],
    "k-NN, 200 epochs": {name: by_alpha[40.0] for name, by_alpha in paper.ALPHA_VISION.items()},
}
PAPER_TEXT = {name: paper.STS[NAMES.get(name, name)] for name in ("SimCSE", *list(COLUMNS)[1:9])}
"""Average over the seven tasks, BERT-base."""
TASKS = ("STS12", "STS13", "STS14", "STS15", "STS16", "STSB", "SICK-R", "avg")
ALPHAS = (1, 1e2, 1e4, 1e5, 409600, 1e6)
RUNS = "runs by seed"
GEOMETRY = ("alignment", "uniformity", "effective_rank")
LATE = 20
"""Epochs at the end of a run over which its metrics are averaged."""
ON_THE_WAY = (0.008, 0.04, 0.2, 1.0)
"""Shares of a run on sentences after which its development score is shown: the recipe's first look, and the last."""


@dataclass(frozen=True)
class WarmStart:
    """An archived warm start: an encoder that runs on sentences start from."""

    seed: int
    command: str
    results: Mapping[str, Any]
    source: Path


Scored = Outcome | WarmStart


def column(run: Outcome) -> str | None:
    """Which of the paper's columns it is; None for other combinations."""
    s = run.settings
    name = next((name for name, each in COLUMNS.items() if each.items() <= s.values.items()), None)
    return "SimCSE" if name == "SimCLR" and s.task.name == "text" else name


def label(run: Outcome) -> str:
    """Method and objective in a few words."""
    s = run.settings
    if name := column(run):
        return name
    if s.method_options.own_loss:
        return str({"byol": "BYOL", "swav": "SwAV"}.get(s.method, s.method))
    names = {**DIVERGENCES, "learned": "learned f"}
    return f"{names.get(s.divergence, 'f-MICL') if s.objective == 'fmicl' else s.objective} by {s.method}"


def load(folder: Path, links: str = "../results") -> list[Outcome]:
    """All archived runs below a folder; the source of each is the link to it."""
    return [replace(run, source=Path(links, run.source.relative_to(folder))) for run in read_runs(folder)]


def warm_starts(folder: Path, links: str = "../results") -> list[WarmStart]:
    """The archived warm starts below a folder."""
    found = {Path(links, file.relative_to(folder)): read_json(file) for file in folder.rglob("warm-start-*.json")}
    return [WarmStart(each["seed"], each.get("command", ""), each["results"], file) for file, each in found.items()]


def cells(runs: Sequence[Scored], values: Iterable[str | Callable[[Any], float | None]]) -> list[str]:
    """Mean and spread over seeds of each score or other value, and last a link for each seed; "" without a number.

    A number that not all of these runs have is followed by links to its own.

    Raises:
        ValueError: a seed is there twice.
    """
    by_seed = sorted(runs, key=lambda r: r.seed)

    def known(value: str | Callable[[Any], float | None]) -> dict[Path, float]:
        found = {r.source: score(r.results, value) if isinstance(value, str) else value(r) for r in by_seed}
        return {source: x for source, x in found.items() if x is not None}

    found = [known(value) for value in values]
    shown = [r for r in by_seed if any(r.source in each for each in found)]
    for one, other in itertools.pairwise(shown):
        if one.seed == other.seed:
            raise ValueError(f"{one.source} and {other.source} are the same run: seed {one.seed} counts once")

    def linked(sources: Iterable[Path]) -> str:
        return " ".join(f"[{r.seed}]({r.source.as_posix()})" for r in shown if r.source in sources)

    return [
        str(Measured(tuple(each.values()), ())) + (f" ({linked(each)})" if 0 < len(each) < len(shown) else "")
        for each in found
    ] + [linked([r.source for r in shown])]


def table(head: Sequence[str], rows: Iterable[Sequence[Entry]]) -> str:
    """A table in Markdown, without a title."""
    return Table("", tuple(head), tuple(map(tuple, rows))).markdown()


def cifar10(runs: Sequence[Outcome]) -> str:
    """Runs with the recipe's own settings, beside the paper's."""
    rows: list[Sequence[Entry]] = [
        (f"paper, {name}", *(values.get(NAMES.get(column, column)) for column in COLUMNS))
        for name, values in PAPER.items()
    ]
    ours = [r for r in runs if is_main(r)]
    for epochs in sorted({r.settings.epochs for r in ours}, key=lambda epochs: (epochs != 200, -epochs)):
        these = [r for r in ours if r.settings.epochs == epochs]
        columns = [cells([r for r in these if column(r) == name], ("knn", "linear")) for name in COLUMNS]
        for name, row in zip(("k-NN", "linear", RUNS), zip(*columns, strict=True), strict=True):
            rows.append([f"**ours, {name}, {epochs} epochs**", *row])
    return table(["CIFAR-10, accuracy in percent", *COLUMNS], rows)


def is_main(run: Outcome) -> bool:
    """Whether it has the settings of the recipe cifar10, but for objective, method, epochs and seed."""
    return run.settings.recipe == "cifar10" and column(run) is not None and not run.differences


def is_relative(run: Outcome) -> bool:
    """Whether it is a system of its own settings, in 200 epochs on CIFAR-10, evaluated on the test images."""
    return relative(run) is not None and run.settings.epochs == 200 and run.results.get("split") == "test"


def relative(run: Outcome) -> str | None:
    """Which of the systems beside f-MICL it is; None for runs of one."""
    s = run.settings
    given = (s.method, None if s.method_options.own_loss else s.objective)
    found = next((name for name, each in RELATIVES.items() if each == given), None)
    return found if s.recipe == "cifar10" else None


def relatives(runs: Sequence[Outcome]) -> str:
    """Systems with settings of their own beside the recipe's f-MICL and SimCLR, 200 epochs."""
    rows: list[Sequence[Entry]] = []
    for name in ("KL", "Pearson", "VLC", "SimCLR"):
        these = [r for r in runs if is_main(r) and column(r) == name and r.settings.epochs == 200]
        rows.append([name, "", *cells(these, ("knn", "linear", "effective_rank"))])
    for name in RELATIVES:
        groups: dict[str, list[Outcome]] = {}
        for r in runs:
            if is_relative(r) and relative(r) == name:
                groups.setdefault(_listed(r.differences), []).append(r)
        rows += [[name, key, *cells(each, ("knn", "linear", "effective_rank"))] for key, each in sorted(groups.items())]
        if not groups:
            rows.append([name, "", "", "", "", ""])
    return table(["system", "differs from the recipe", "k-NN", "linear", "effective rank", RUNS], rows)


def geometry(runs: Sequence[Outcome]) -> str:
    """Where the embeddings of those runs end: how far pairs are apart, and how much of the sphere is used."""
    ours = [r for r in runs if is_main(r) and r.score("alignment") is not None]
    rows = [
        [name, str(epochs), *cells(these, [_late("alignment"), *GEOMETRY])]
        for epochs in sorted({r.settings.epochs for r in ours})
        for name in COLUMNS
        if (these := [r for r in ours if r.settings.epochs == epochs and column(r) == name])
    ]
    if not rows:
        return "No run is archived yet."
    head = ["objective", "epochs", "alignment in training", "alignment", "uniformity", "effective rank", RUNS]
    return table(head, rows)


def _late(name: str) -> Callable[[Outcome], float | None]:
    """The mean of a column of its metrics over the last epochs: a row there is of one batch."""

    def value(run: Outcome) -> float | None:
        late = [x for row in run.metrics[-LATE:] if (x := row.get(name)) is not None]
        return statistics.fmean(late) if len(late) == LATE else None

    return value


def others(runs: Sequence[Outcome]) -> str:
    """Runs on images with other settings, or on other data."""
    groups: dict[tuple[str, ...], list[Outcome]] = {}
    for r in runs:
        s = r.settings
        if s.task.name == "images" and not is_main(r) and not is_relative(r):
            groups.setdefault((s.recipe, label(r), _listed(r.differences), str(s.epochs)), []).append(r)
    if not groups:
        return "No run is archived yet."
    rows = [[*key, *cells(group, ("knn", "linear"))] for key, group in sorted(groups.items())]
    return table(["recipe", "objective", "differs from the recipe", "epochs", "k-NN", "linear", RUNS], rows)


def _text(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _listed(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key} {_text(value)}`" for key, value in settings.items())


def text(runs: Sequence[Outcome], starts: Sequence[WarmStart]) -> str:
    """Runs on sentences: those of the settings that most runs have, the alphas of KL, and the rest."""
    # A run without a score has nothing to show.
    found = [r for r in runs if r.settings.task.name == "text" and any(r.score(task) is not None for task in TASKS)]
    keys = [_key(r) for r in found]
    common = max(keys, key=lambda key: (keys.count(key), key), default=())
    usual = [r for r, key in zip(found, keys, strict=True) if key == common]
    main = [r for r in usual if column(r) and "alpha" not in r.differences]
    columns = {name: [r for r in main if column(r) == name] for name in PAPER_TEXT}
    shown: dict[str, Sequence[Scored]] = {**({"warm start": starts} if starts else {}), **columns}
    rows: list[Sequence[Entry]] = []
    for name, runs_shown in shown.items():
        *scores, linked = cells(runs_shown, TASKS)
        rows.append([name, *scores, PAPER_TEXT.get(name), linked])
    head = ["Spearman's correlation x 100", *(f"ours, {task}" for task in TASKS), "paper, BERT-base, avg", RUNS]
    parts = [table(head, rows)]
    if not found:
        parts.append("No run of ours is archived yet.")
    else:
        epochs, *more = _words(usual[0], starts, without=("alpha",))
        words = [f"Each run of ours above is {epochs} of the recipe `{usual[0].settings.recipe}`", *more]
        parts.append(", ".join(words) + ".")
    if any(_evaluations(r) for r in main):
        shares = [f"after {share:.1%} of it".replace(".0%", "%") for share in ON_THE_WAY]
        rows = [[name, *_development(each)] for name, each in columns.items() if each]
        parts.append(table(["STS-B dev in training", "chosen step", "its score", *shares, RUNS], rows))
    alphas = [r for r in usual if column(r) == "KL"]
    swept = {alpha: each for alpha in ALPHAS if (each := [r for r in alphas if r.settings.alpha == alpha])}
    if len(swept) > 1:
        rows = [[f"{alpha:,.0f}", *cells(each, TASKS)] for alpha, each in swept.items()]
        parts.append(table(["KL, alpha", *TASKS, RUNS], rows))
        main += itertools.chain(*swept.values())
    done = {id(r) for r in main}
    groups: dict[str, list[Outcome]] = {}
    for r in found:
        if id(r) not in done:
            groups.setdefault(", ".join([label(r), *_words(r, starts)]), []).append(r)
    if groups:
        rows = [[name, *cells(each, TASKS)] for name, each in groups.items()]
        parts.append(table(["other settings", *TASKS, RUNS], rows))
    return "\n\n".join(parts)


def _words(run: Outcome, starts: Sequence[WarmStart], without: Sequence[str] = ()) -> list[str]:
    """Epochs, the start if it is one of these, and what else differs from the recipe."""
    differing = {key: value for key, value in run.differences.items() if key not in without}
    words = ["one epoch" if run.settings.epochs == 1 else f"{run.settings.epochs} epochs"]
    # A warm start's command is "python experiments/warm_start.py train TEXT MODEL ...". Where MODEL lay says nothing.
    if any(shlex.split(start.command)[4:5] == [differing.get("model")] for start in starts):
        del differing["model"]
        words.append("from the warm start")
    return [*words, f"with {_listed(differing)}"] if differing else words


def _evaluations(run: Outcome) -> list[tuple[float, float]]:
    """The share of the run, and the development score then."""
    rows = [(row["step"] or 0.0, x) for row in run.metrics if (x := row.get("stsb_dev")) is not None]
    return [(step / rows[-1][0], x) for step, x in rows]


def _development(runs: Sequence[Outcome]) -> list[str]:
    def at(share: float) -> Callable[[Outcome], float | None]:
        return lambda run: next((score for done, score in _evaluations(run) if abs(done - share) < 1e-6), None)

    steps = ", ".join(str(r.results["step"]) for r in sorted(runs, key=lambda r: r.seed) if _evaluations(r))
    return [steps, *cells(runs, ["stsb_dev", *map(at, ON_THE_WAY)])]


def _key(run: Outcome) -> tuple[tuple[str, str], ...]:
    """What differs from the recipe, but for alpha; with the epochs, which a recipe of sentences leaves as they are."""
    differing = {key: _text(value) for key, value in run.differences.items() if key != "alpha"}
    return tuple(sorted({**differing, "epochs": str(run.settings.epochs)}.items()))


def tables(results: Path) -> dict[str, str]:
    """All tables, by the name of their markers."""
    runs = load(results)
    made = {make.__name__: make(runs) for make in (cifar10, relatives, geometry, others)}
    return {**made, "text": text(runs, warm_starts(results))}


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


def page_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """The options of a script that writes the tables of a page in docs/."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 if the page is out of date")
    parser.add_argument("--results", type=Path, default=ROOT / "results", help="folder of the archived runs")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / name, help="the page")
    return parser


def update(options: argparse.Namespace, made: Mapping[str, str], script: str) -> int:
    """Write the tables of a page, or check them."""
    before = options.page.read_text(encoding="utf-8")
    after = page(before, made)
    if options.check and before != after:
        print(f"{options.page} is out of date: run python experiments/{script}", file=sys.stderr)
        return 1
    if before != after:
        options.page.write_text(after, encoding="utf-8")
    print(f"{options.page}: {'written' if before != after else 'up to date'}")
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Write the page, or check it."""
    options = page_parser(__doc__, "reproduction.md").parse_args(arguments)
    try:
        return update(options, tables(options.results), "reproduction.py")
    except (OSError, ValueError) as error:
        print(f"reproduction.py: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
