"""`fmicl sweep RECIPE`: train a grid of settings; every option of the recipe takes several values."""

from __future__ import annotations

import contextlib
import io
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import tyro

from fmicl.cli.options import expand_negated_flags, flat_values, options_class, takes_any_number
from fmicl.cli.recipes import split_recipe
from fmicl.config import RECIPES, Settings, recipe
from fmicl.sweep.grid import Cell, make_cells
from fmicl.utils.registry import unknown_name


@dataclass(frozen=True, kw_only=True)
class LauncherOptions:
    """Where the runs of a sweep are trained."""

    parallel: Annotated[
        int | None,
        tyro.conf.arg(help="Runs at once on each device; with SLURM, jobs at once (None: one run, or all jobs)."),
    ] = None
    launcher: Annotated[
        Literal["local", "slurm"],
        tyro.conf.arg(help="local: this machine's devices. slurm: a SLURM job for each run."),
    ] = "local"
    slurm: Annotated[
        tuple[str, ...],
        tyro.conf.arg(
            metavar="KEY=VALUE ...",
            help="Options of sbatch for --launcher slurm: partition, time, cpus_per_task, mem.",
        ),
    ] = ()

    def check_launcher(self) -> None:
        """Refuse options that contradict each other.

        Raises:
            ValueError: which.
        """
        if self.parallel is not None and self.parallel < 1:
            raise ValueError(f"parallel must be positive, but it is {self.parallel}")
        if self.slurm and self.launcher != "slurm":
            raise ValueError("--slurm needs --launcher slurm")


@dataclass(frozen=True, kw_only=True)
class SweepOptions(LauncherOptions):
    """How a sweep is trained."""

    case: Annotated[
        tuple[tuple[str, ...], ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(
            metavar="NAME OPTION=VALUE ...",
            help="Options that belong together, under a name; each case is combined with all values of other options.",
        ),
    ] = ()
    out: Annotated[
        Path | None,
        tyro.conf.arg(
            help="Folder of the sweep, new or to continue (None: the one under sweeps/ that has the same runs, else "
            "the next number)."
        ),
    ] = None


def run(words: Sequence[str]) -> int:
    """Train a grid; returns the exit code."""
    chosen = split_recipe("sweep", words)
    if chosen is None:
        return 0
    cells, options = parse(*chosen)
    from fmicl.sweep.scheduler import run_sweep

    return run_sweep(cells, out=options.out, parallel=options.parallel, launcher=options.launcher, slurm=options.slurm)


def parse(name: str, words: Sequence[str]) -> tuple[list[Cell], SweepOptions]:
    """The grid, and how to train it, from the words after the recipe.

    Raises:
        ValueError: as :func:`fmicl.sweep.grid.make_cells` and :func:`parse_case`, or options of the sweep that
            contradict each other.
    """
    base = recipe(name)
    options, values, cases = parse_grid("sweep", SweepOptions, base, words, RECIPES[name].summary)
    return make_cells(base, values, cases), options


Options = TypeVar("Options", bound=SweepOptions)


def parse_grid(
    command: str, kind: type[Options], base: Settings, words: Sequence[str], description: str
) -> tuple[Options, dict[str, tuple[Any, ...]], list[tuple[str, dict[str, Any]]]]:
    """The command's own options, values of the recipe's options that aren't just the recipe's, and cases."""
    parsed: Any = tyro.cli(
        options_class(kind, base.schema, base.values, several=True),
        prog=f"fmicl {command} {base.recipe}",
        description=description,
        args=expand_negated_flags(words, base.schema),
    )
    parsed.check_launcher()
    cases = [parse_case(case, base) for case in parsed.case]
    return parsed, _grid_values(flat_values(parsed), base), cases


def _grid_values(parsed: Mapping[str, Any], base: Settings) -> dict[str, tuple[Any, ...]]:
    """The values of all options that don't just have the recipe's."""
    found = {}
    for name, given in parsed.items():
        kind = base.schema.options[name].type
        values = (given,) if takes_any_number(kind) else tuple(given)
        if kind is bool and not values:
            values = (True,)  # the flag alone, as in `fmicl train`
        if values != (getattr(base, name),):
            found[name] = values
    return found


def parse_case(words: Sequence[str], base: Settings) -> tuple[str, dict[str, Any]]:
    """Parse a case, ``NAME OPTION=VALUE ...``, where commas separate the items of a value (``crop_scale=0.2,1``).

    Raises:
        ValueError: no name, no option, an unknown option, or a value that the option doesn't take.

    Example:
        >>> parse_case(["MoCo", "method=moco", "crop_scale=0.2,1"], recipe("cifar10"))
        ('MoCo', {'method': 'moco', 'crop_scale': (0.2, 1.0)})
    """
    if len(words) < 2 or "=" in words[0]:
        raise ValueError(
            f"a case is NAME OPTION=VALUE ..., such as `--case SimCLR objective=infonce`, but it is: {' '.join(words)}"
        )
    case, *assignments = words
    changes: dict[str, Any] = {}
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        name = key.replace("-", "_")
        if not equals:
            raise ValueError(f"case {case}: {assignment!r} is not OPTION=VALUE")
        if name not in base.schema.options:
            raise ValueError(f"case {case}: {unknown_name('option', key, base.schema.options)}")
        if name in changes:
            raise ValueError(f"case {case} sets {name} twice")
        changes[name] = _parse_value(case, name, text, base.schema.options[name].type)
    return case, changes


def _parse_value(case: str, name: str, text: str, kind: Any) -> Any:
    words = text.split(",") if _is_sequence(kind) else [text.capitalize() if kind is bool else text]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            return tyro.cli(Annotated[kind, tyro.conf.Positional], args=words)
    except SystemExit:
        hint = "it is True or False" if kind is bool else "`fmicl train RECIPE --help` shows its values"
        raise ValueError(f"case {case}: {name} can't be {text!r}; {hint}") from None


def _is_sequence(kind: Any) -> bool:
    choices = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
    return any(typing.get_origin(choice) in (tuple, list) for choice in choices)
