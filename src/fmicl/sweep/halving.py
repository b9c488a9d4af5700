"""Successive halving (Jamieson and Talwalkar, 2016): many candidates for few epochs, the best of them for more.

SELECTION/select.json  sweep.json  .lock  <run>/  <run>.log

Rung k trains the best 1/eta of rung k - 1 for eta times as many epochs. Each rung starts its runs anew: the learning
rate of a run falls to 0 at its last epoch (cosine or linear), so one that went on would be a warm restart, and its
score would be that of no `fmicl train` command. This costs at most 1/(eta - 1) more. An interrupted rung resumes.

Runs are scored on a validation split, which is held out of the training images, or without labels. Test images take no
part in the choice.
"""

from __future__ import annotations

import math
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from fmicl.config import Settings
from fmicl.evaluation.scores import ACCURACIES, SCORES, score
from fmicl.runs.folder import create_run
from fmicl.sweep.grid import Cell
from fmicl.sweep.launchers import Launcher
from fmicl.sweep.scheduler import Sweep, prepare_launcher
from fmicl.sweep.state import SweepRun, lock_folder
from fmicl.utils.files import read_json, write_json
from fmicl.utils.formatting import format_duration
from fmicl.utils.provenance import command_line
from fmicl.utils.registry import unknown_name

ROOT = Path("selections")
"""Default parent of the folders of selections."""
SELECT_FILE = "select.json"
FIRST_SHARE = 27
"""The first rung has at least one epoch in this many of the whole run, unless another is given."""
BY = (*ACCURACIES, *SCORES)
"""Scores that candidates can be chosen by."""


class Budget(NamedTuple):
    """What a selection may cost: as many runs of the whole length, or hours of the machine."""

    amount: float
    unit: str

    @classmethod
    def parse(cls, text: str) -> Budget:
        """``10`` is ten whole runs, ``2.5h`` and ``150m`` are hours and minutes.

        Raises:
            ValueError: it is neither.

        Example:
            >>> Budget.parse("10"), Budget.parse("90m")
            (Budget(amount=10.0, unit='runs'), Budget(amount=1.5, unit='hours'))
        """
        number, unit, factor = text, "runs", 1.0
        if text[-1:] in ("h", "m"):
            number, unit, factor = text[:-1], "hours", 1.0 if text[-1] == "h" else 1 / 60
        try:
            amount = float(number) * factor
        except ValueError:
            amount = math.nan
        if not 0 < amount < math.inf:
            raise ValueError(f"--budget is a number of whole runs (10) or a time (2.5h, 90m), but it is {text!r}")
        return cls(amount, unit)


class Rung(NamedTuple):
    """Candidates that are trained for as many epochs."""

    epochs: int
    runs: int


def plan_rungs(
    candidates: int, runs: float, epochs: int, *, eta: int = 3, first_epochs: int | None = None
) -> list[Rung]:
    r"""Rungs that cost at most as much as ``runs`` whole runs.

    With s + 1 rungs, rung k has :math:`\lceil n / \eta^k \rceil` runs of :math:`E / \eta^{s - k}` epochs. s is the
    smallest, so the first rung the longest, with which all candidates take part; if there is none, fewer do. Rungs of
    one run are left out, as they leave no choice.

    Args:
        candidates: how many there are.
        runs: the budget, in runs of ``epochs`` epochs.
        epochs: of a whole run, E.
        eta: share of candidates that is dropped, and factor of the epochs.
        first_epochs: epochs of the first rung at least; None: E/27.

    Raises:
        ValueError: a value is out of range, or the budget is too small for two candidates.

    Example:
        >>> plan_rungs(54, 10, 200)
        [Rung(epochs=7, runs=54), Rung(epochs=22, runs=18), Rung(epochs=67, runs=6), Rung(epochs=200, runs=2)]
        >>> plan_rungs(4, 10, 200)                     # the budget has room for all of them
        [Rung(epochs=200, runs=4)]
        >>> plan_rungs(54, 1, 200)                     # or not
        [Rung(epochs=7, runs=9), Rung(epochs=22, runs=3)]
    """
    if eta < 2:
        raise ValueError(f"--eta must be at least 2, but it is {eta}")
    least = _least_epochs(epochs) if first_epochs is None else first_epochs
    if not 1 <= least <= epochs:
        raise ValueError(f"--first-epochs must lie between 1 and {epochs}, the epochs of a whole run, not {least}")
    if candidates < 2:
        raise ValueError("there is one candidate, so nothing to choose: give options several values")
    deepest = 0
    while least <= round(epochs / eta ** (deepest + 1)) < round(epochs / eta**deepest):
        deepest += 1
    for halvings in range(deepest + 1):
        found = _rungs(candidates, epochs, eta, halvings)
        if _cost(found, epochs) <= runs:
            return found
    for number in range(candidates - 1, 1, -1):
        found = _rungs(number, epochs, eta, deepest)
        if _cost(found, epochs) <= runs:
            return found
    cheapest = _cost(_rungs(2, epochs, eta, deepest), epochs)
    raise ValueError(f"a budget of {runs:.3g} whole runs is too small: two candidates cost {cheapest:.3g}")


def _least_epochs(epochs: int) -> int:
    return max(1, epochs // FIRST_SHARE)


def _rungs(candidates: int, epochs: int, eta: int, halvings: int) -> list[Rung]:
    rungs = [
        Rung(max(1, round(epochs / eta ** (halvings - k))), math.ceil(candidates / eta**k)) for k in range(halvings + 1)
    ]
    return [rung for rung in rungs if rung.runs > 1]


def _cost(rungs: Sequence[Rung], epochs: int) -> float:
    return sum(rung.runs * rung.epochs for rung in rungs) / epochs


@dataclass(frozen=True)
class _Scored:
    """A candidate after a rung."""

    cell: Cell
    run: SweepRun
    score: float | None

    def to_json(self, kept: bool) -> dict[str, Any]:
        shown = ("knn", "linear", *SCORES)
        return {
            "candidate": _name(self.cell),
            "hash": self.run.settings.hash,
            "folder": self.run.run.path.name,
            "score": self.score,
            "kept": kept,
            "state": self.run.state,
            "error": self.run.error,
            "seconds": self.run.seconds,
            "results": {key: self.run.results[key] for key in shown if key in self.run.results},
        }


class Selection:
    """Successive halving over candidates.

    Args:
        cells: the candidates, with the settings of a whole run.
        budget: what it may cost.
        by: the score, of :data:`BY`.
        eta: each rung keeps one in this many candidates, for this many times the epochs.
        first_epochs: epochs of the first rung at least (None: E/27).
        program: the command of fmicl; tests use another.

    Attributes:
        identity: what makes two selections the same, as JSON.

    Raises:
        ValueError: candidates that can't be compared, that would be scored on test images, or that cost too much.
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        budget: Budget,
        *,
        by: str = "knn",
        eta: int = 3,
        first_epochs: int | None = None,
        program: Sequence[str] = (sys.executable, "-m", "fmicl"),
    ) -> None:
        check_candidates(cells, by)
        self.program, self.cells, self.budget = program, list(cells), budget
        self.by, self.eta, self.first_epochs = by, eta, first_epochs
        self.epochs = cells[0].settings.epochs
        self.identity = {
            "recipe": cells[0].settings.recipe, "candidates": [cell.settings.hash for cell in cells], "by": by,
            "budget": list(budget), "eta": eta, "first_epochs": first_epochs,
        }  # fmt: skip
        if budget.unit == "runs":  # what is wrong with the plan is said before anything starts
            self._plan(budget.amount)
        self.folder = Path()
        self.rungs: list[dict[str, Any]] = []
        self.seconds = self._rung_seconds = 0.0

    def _plan(self, runs: float) -> list[Rung]:
        return plan_rungs(len(self.cells), runs, self.epochs, eta=self.eta, first_epochs=self.first_epochs)

    def run(self, folder: Path, launcher: Launcher, say: Callable[[str], None] = print) -> int:
        """Train all rungs, or continue with them.

        Args:
            folder: where the runs go.
            launcher: where they are trained.
            say: prints a line.

        Returns:
            The exit code: 0, 1 if all runs of a rung failed, or that of a signal.

        Raises:
            ValueError: the folder holds another selection, or results on test images.
        """
        self.folder = folder
        file = folder / SELECT_FILE
        if file.exists() and read_json(file)["identity"] != self.identity:
            raise ValueError(f"{folder} is another selection: take another --out")
        runs = self.budget.amount
        if self.budget.unit == "hours":
            code, measured = self._measure(launcher, say)
            if code or measured is None:
                return code or 1
            runs = self.budget.amount * 3600 / measured
        rungs = self._plan(runs)
        candidates = self._sample(rungs[0].runs)
        if len(candidates) < len(self.cells):
            say(f"the budget has room for {len(candidates)} of {len(self.cells)} candidates, chosen at random")
        words = ", ".join(f"{rung.runs} for {rung.epochs} epochs" for rung in rungs)
        say(f"successive halving by {(ACCURACIES | SCORES)[self.by].words}: {words}")
        ranked: list[_Scored] = []
        for number, rung in enumerate(rungs):
            count = min(rung.runs, len(candidates), self._affordable(rung))
            if count < 2 and ranked:
                say(f"{format_duration(self.seconds)} are spent: no rung of {rung.epochs} epochs")
                break
            say(f"rung {number + 1} of {len(rungs)}: {count} candidates, {rung.epochs} epochs")
            code, found = self._train(candidates[:count], rung.epochs, launcher)
            if code >= 128:
                self._write(None)
                return code
            ranked = sorted(found, key=lambda each: -math.inf if each.score is None else each.score, reverse=True)
            working = [each for each in ranked if each.score is not None]
            if not working:
                say(f"no run has a {self.by}: see the logs in {self.folder}")
                self._write(None)
                return 1
            coming = rungs[number + 1].runs if number + 1 < len(rungs) else 1
            candidates = [each.cell for each in working[:coming]]
            self._note(rung.epochs, ranked, candidates)
            self._write(None)
            _print_rung(self.rungs[-1], self.by)
            if len(candidates) < 2:
                break
        winner = ranked[0]
        self._write(winner)
        say(f"best by {self.by}: {_name(winner.cell)} ({winner.score:.4g} after {winner.run.settings.epochs} epochs)")
        say(f"train it on all training images:\n  {train_command(winner.cell.settings)}")
        say(f"all rungs: {self.folder / SELECT_FILE}")
        return 0

    def _measure(self, launcher: Launcher, say: Callable[[str], None]) -> tuple[int, float | None]:
        """Seconds of a whole run, from one candidate's shortest run; its start counts as well, so this is too much."""
        least = self.first_epochs or _least_epochs(self.epochs)
        say(f"one run of {least} epochs, to see how long it takes")
        code, found = self._train(self.cells[:1], least, launcher)
        if code >= 128 or found[0].run.state != "finished":
            return code, None
        seconds = found[0].run.seconds / (launcher.capacity or 1)
        self.seconds = 0.0  # it is a run of the first rung, most often
        return 0, seconds * self.epochs / least

    def _sample(self, number: int) -> list[Cell]:
        if number >= len(self.cells):
            return list(self.cells)
        chosen = random.Random(self.cells[0].settings.seed).sample(range(len(self.cells)), number)
        return [self.cells[i] for i in sorted(chosen)]

    def _affordable(self, rung: Rung) -> int:
        """Runs that the rest of the hours has room for, by the time that the last rung took."""
        if self.budget.unit != "hours" or not self.rungs:
            return len(self.cells)
        last = self.rungs[-1]
        per_epoch = last["seconds"] / (len(last["runs"]) * last["epochs"])
        return int((self.budget.amount * 3600 - self.seconds) / max(1e-9, per_epoch * rung.epochs))

    def _train(self, cells: Sequence[Cell], epochs: int, launcher: Launcher) -> tuple[int, list[_Scored]]:
        shorter = [shortened(cell, epochs) for cell in cells]
        sweep = Sweep(shorter, self.folder, program=self.program)
        code = sweep.train(launcher, summary=False)
        found = []
        for cell, run in zip(cells, sweep.runs, strict=True):
            split = run.results.get("split")
            if split not in (None, "validation"):
                raise ValueError(f"{run.run.path} was evaluated on the {split} split: give --validation 0.1")
            found.append(_Scored(cell, run, score(run.results, self.by) if run.state == "finished" else None))
        self._rung_seconds = sum(run.seconds for run in sweep.runs) / (launcher.capacity or 1)
        self.seconds += self._rung_seconds
        return code, found

    def _note(self, epochs: int, ranked: Sequence[_Scored], kept: Sequence[Cell]) -> None:
        rows = [each.to_json(each.cell in kept) for each in ranked]
        self.rungs.append({"epochs": epochs, "seconds": self._rung_seconds, "runs": rows})

    def _write(self, winner: _Scored | None) -> None:
        record: dict[str, Any] = {
            "identity": self.identity,
            "command": command_line(),
            "updated": datetime.now(UTC).isoformat(timespec="seconds"),
            "rungs": self.rungs,
            "winner": None,
        }
        if winner is not None:
            record["winner"] = {
                "candidate": _name(winner.cell), "score": winner.score, "epochs": winner.run.settings.epochs,
                "settings": whole_run(winner.cell.settings).to_json(),
                "command": train_command(winner.cell.settings),
            }  # fmt: skip
        write_json(self.folder / SELECT_FILE, record)


def check_candidates(cells: Sequence[Cell], by: str) -> None:
    """Refuse candidates that can't be compared, or that would be scored on test images.

    Raises:
        ValueError: which.
    """
    if by not in BY:
        raise unknown_name("score", by, BY)
    first = cells[0].settings
    if first.task.name != "images":
        raise ValueError(f"fmicl select is for images, but {first.recipe} is a recipe for {first.task.name}")
    for name in ("epochs", "seed", "validation"):
        if len({getattr(cell.settings, name) for cell in cells}) > 1:
            raise ValueError(f"--{name} has several values, but all candidates need the same to be compared")
    if "epochs" in first.unresolved:
        raise ValueError("the epochs of a whole run follow from the data here, but rungs need a number: give --epochs")
    if not first.validation and (by in ACCURACIES or first.dataset != "images"):
        raise ValueError("--validation 0 would choose by the test images: leave it out, or give a share such as 0.1")


def shortened(cell: Cell, epochs: int) -> Cell:
    """A candidate in a rung: fewer epochs, and nothing measured that the choice does not need."""
    settings = cell.settings.replace(epochs=epochs, baselines=False, monitor_every=0, probe_views=0)
    return Cell(settings, f"{_name(cell)}-epochs{epochs}", cell.case)


def whole_run(settings: Settings) -> Settings:
    """A candidate as it is trained in the end: on all training images."""
    return settings.replace(validation=0.0)


def train_command(settings: Settings) -> str:
    """The command that trains a candidate on all training images.

    Example:
        >>> from fmicl.config import recipe
        >>> train_command(recipe("digits", divergence="js", alpha=2.0, validation=0.1))
        'fmicl train digits --divergence js --alpha 2.0'
    """
    settings = whole_run(settings)
    return shlex.join(["fmicl", "train", settings.recipe, *settings.arguments()])


def _name(cell: Cell) -> str:
    return cell.label.removesuffix(f"seed{cell.settings.seed}").rstrip("-") or "recipe"


def _print_rung(rung: Mapping[str, Any], by: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"after {rung['epochs']} epochs")
    table.add_column("candidate")
    others = [name for name in ("knn", "linear") if name != by and any(name in row["results"] for row in rung["runs"])]
    for heading in (by, *others, "minutes"):
        table.add_column(heading, justify="right")
    table.add_column("")
    for row in rung["runs"]:
        values = [row["score"], *(row["results"].get(name) for name in others)]
        shown = ["" if value is None else f"{value:.4g}" for value in values]
        what = "kept" if row["kept"] else "" if row["score"] is not None else str(row["error"] or row["state"])
        table.add_row(row["candidate"], *shown, f"{row['seconds'] / 60:.1f}", what)
    Console().print(table)


def find_selection(identity: Mapping[str, Any], out: Path | None, root: Path = ROOT) -> Path:
    """The folder of a selection: ``out``, the one under ``root`` that is the same, or the next number there."""
    if out is not None:
        return out
    for file in sorted(root.glob(f"{identity['recipe']}-*/{SELECT_FILE}"), reverse=True):
        if read_json(file).get("identity") == identity:
            return file.parent
    return create_run(identity["recipe"], root=root).path


def run_selection(
    selection: Selection,
    *,
    out: Path | None = None,
    parallel: int | None = None,
    launcher: str = "local",
    slurm: Sequence[str] = (),
) -> int:
    """Run a selection in its folder; the options are those of ``fmicl select``.

    Returns:
        The exit code, as of :meth:`Selection.run`.

    Raises:
        ValueError, OSError: wrong settings, launcher or folder.
    """
    if selection.budget.unit == "hours" and launcher != "local":
        raise ValueError("a budget in hours is for this machine; with SLURM, give whole runs (--budget 10)")
    make_launcher = prepare_launcher(selection.cells, parallel=parallel, launcher=launcher, slurm=slurm)
    folder = find_selection(selection.identity, out)
    with lock_folder(folder) as lock:
        return selection.run(folder, make_launcher(lock))
