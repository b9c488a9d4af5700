"""Grid of a sweep: every combination of option values, and named cases."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fmicl.config import Settings

ONE_VALUE = frozenset({"dataset", "device", "devices"})
"""Options with one value for the whole sweep: the recipe's data, and the devices that the scheduler assigns."""
LONGEST_LABEL = 90
"""Characters of a label; the hash in a folder name distinguishes labels that are cut to the same."""


@dataclass(frozen=True)
class Cell:
    """One run of a grid.

    Attributes:
        settings: all its options.
        label: its case, the options that vary in the grid, and the seed, as a file name: ``js-epochs200-seed0``.
        case: the name of its case.
    """

    settings: Settings
    label: str
    case: str | None = None

    @property
    def folder(self) -> str:
        """The name of a new run folder; the hash makes it unique."""
        return f"{self.label}-{self.settings.hash}"


def make_cells(
    base: Settings,
    values: Mapping[str, Sequence[Any]],
    cases: Sequence[tuple[str, Mapping[str, Any]]] = (),
) -> list[Cell]:
    """Combine each case with each combination of values, one seed after the other.

    Args:
        base: the settings that the cells change.
        values: options with one or several values each.
        cases: names of cases with the options that they set.

    Raises:
        ValueError: settings that contradict each other, a value or case given twice, an option that both a case and
            the grid set, several values of an option of :data:`ONE_VALUE`, or two cells that would train the same
            thing.

    Example:
        >>> from fmicl.config import recipe
        >>> values = {"divergence": ("kl", "js"), "seed": (0, 1), "epochs": (2,)}
        >>> [cell.label for cell in make_cells(recipe("digits"), values)]
        ['kl-seed0', 'js-seed0', 'kl-seed1', 'js-seed1']
        >>> cases = [("SimCLR", {"objective": "infonce"}), ("JS", {"divergence": "js"})]
        >>> [cell.label for cell in make_cells(recipe("digits"), {"epochs": (2, 4)}, cases)]
        ['SimCLR-epochs2-seed0', 'JS-epochs2-seed0', 'SimCLR-epochs4-seed0', 'JS-epochs4-seed0']
    """
    _check_values(values, cases)
    axes = sorted(values, key=lambda name: name != "seed")  # itertools.product varies the first axis last
    shown = [name for name in base.schema.options if len(values.get(name, ())) > 1 and name != "seed"]
    named: list[tuple[str | None, Mapping[str, Any]]] = list(cases) or [(None, {})]
    cells: dict[str, Cell] = {}
    for combination in itertools.product(*(values[axis] for axis in axes)):
        chosen = dict(zip(axes, combination, strict=True))
        for case, changes in named:
            settings = base.replace(**chosen, **changes)
            cell = Cell(settings, _label(case, {name: chosen[name] for name in shown}, settings.seed), case)
            other = cells.setdefault(settings.hash, cell)
            if other is not cell:
                raise _same_thing(other, cell)
    return list(cells.values())


def _check_values(values: Mapping[str, Sequence[Any]], cases: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    for name, given in values.items():
        flag = f"--{name.replace('_', '-')}"
        if not given:
            raise ValueError(f"{flag} needs at least one value")
        if repeated := [value for i, value in enumerate(given) if value in given[:i]]:
            raise ValueError(f"{flag} has the value {repeated[0]} twice")
        if name in ONE_VALUE and len(given) > 1:
            raise ValueError(f"{flag} has {len(given)} values, but all runs of a sweep share one")
    names = [name for name, _ in cases]
    for case, changes in cases:
        if names.count(case) > 1:
            raise ValueError(f"there are two cases {case}")
        if both := sorted(changes.keys() & values.keys()):
            raise ValueError(f"{both[0]} is set by case {case} and for all runs: remove one of them")
        if shared := sorted(changes.keys() & ONE_VALUE):
            raise ValueError(f"case {case} sets {shared[0]}, but all runs of a sweep share one value of it")


def _same_thing(one: Cell, other: Cell) -> ValueError:
    names = [name for name, value in other.settings.values.items() if value != one.settings.values[name]]
    reason = f" (no effect on the results: {', '.join(names)})" if names else ""
    return ValueError(
        f"{one.label} and {other.label} would train the same thing{reason}. To combine some values only, use cases, "
        "such as `--case SimCLR objective=infonce --case JS divergence=js`"
    )


def _label(case: str | None, shown: Mapping[str, Any], seed: int) -> str:
    words = [case or "", *(_word(name, value) for name, value in shown.items())]
    safe = [re.sub(r"[^A-Za-z0-9._+-]+", "_", word).strip("._-") for word in words]
    last = f"seed{seed}"
    return "-".join(filter(None, ["-".join(filter(None, safe))[: LONGEST_LABEL - len(last) - 1], last]))


def _word(name: str, value: Any) -> str:
    """An option's value in a label; values that are words go without the option's name."""
    if isinstance(value, bool):
        return name if value else f"no_{name}"
    if isinstance(value, Path):
        return value.name
    if isinstance(value, str) and value[:1].isalpha():
        return value
    values = value if isinstance(value, list | tuple) else [value]
    return name + "_".join(f"{x:g}" if isinstance(x, float) else str(x) for x in values)


def check_cells(cells: Sequence[Cell], *, local: bool = True) -> None:
    """Refuse settings that would fail in training, before the first run starts.

    Args:
        cells: the runs.
        local: whether they are trained on this machine, so that their files must exist here.

    Raises:
        ValueError, FileNotFoundError: as `fmicl train` would.
    """
    from fmicl.training.processes import check_batch
    from fmicl.training.tasks import task_class

    different = {cell.settings.replace(seed=0).hash: cell.settings for cell in cells}
    for settings in different.values():
        check_batch(settings, settings.devices)
        task_class(settings.task.name).check(settings, local=local)
