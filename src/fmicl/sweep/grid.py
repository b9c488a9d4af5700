"""The grid of a sweep: every field of a recipe may have several values, and a cell is one of each.

All of it is derived from the fields of the recipe (:mod:`fmicl.config.fields`), so nothing is listed twice: neither the
options of ``fmicl sweep`` nor what a case may set. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import io
import itertools
import re
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fmicl.config.fields import leaves

__all__ = [
    "Cell",
    "SweepOptions",
    "cells",
    "grid_class",
    "grid_of",
    "name_of",
    "parse_case",
    "spell_out_flags",
    "values_of",
]

ONE_FOR_ALL = frozenset({"dataset", "device", "devices"})
"""What the runs of a sweep have in common: the recipe's data, and the devices that they are dealt out to."""
LONGEST_NAME = 120
"""Characters of a cell's name, which is a folder's, too."""
UNNAMED = "run"
"""Name of a run that nothing tells from others."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One run of a sweep: its name, all its settings, and those that differ from the recipe's own.

    ``case_sets`` are the fields that its case gave a value, which the case's name stands for.
    """

    name: str
    recipe: Any
    changes: dict[str, Any]
    case: str | None = None
    case_sets: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SweepOptions:
    """How a sweep is trained."""

    case: Annotated[
        tuple[tuple[str, ...], ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME FIELD=VALUE ...")
    ] = ()
    """Settings that belong together, under a name; each case is trained with each combination of the others."""
    parallel: int | None = None
    """Runs at once on each device; with submitit, jobs at once (None: one on each device, or all jobs)."""
    out: Path | None = None
    """Folder of the sweep, to start it or to go on with it (None: the one under sweeps/ that has the very same runs,
    else the next number)."""
    launcher: Literal["local", "submitit"] = "local"
    """local: this machine's devices. submitit: a job of SLURM for each run (needs the extra slurm)."""
    slurm: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE ...")] = ()
    """With submitit: partition, time, cpus_per_task, account, ... as sbatch has them."""

    def __post_init__(self) -> None:
        if self.parallel is not None and self.parallel < 1:
            raise ValueError(f"parallel must be positive, but it is {self.parallel}")
        if self.slurm and self.launcher != "submitit":
            raise ValueError("--slurm goes with --launcher submitit")


_GRIDS: dict[Any, Any] = {}


def grid_class(kind: type) -> Any:
    """A dataclass with the recipe's fields, in which each is a tuple of values, for the command line."""
    if kind not in _GRIDS:
        fields = []
        for leaf in leaves(kind):
            hint = types.GenericAlias(tuple, (leaf.type, ...)) if leaf.several else leaf.type
            option = leaf.name.replace("_", "-")
            words = f"{leaf.help} (--no-{option}: False)" if leaf.type is bool else leaf.help
            fields.append((leaf.name, Annotated[hint, tyro.conf.arg(help=words)]))
        _GRIDS[kind] = dataclasses.make_dataclass(f"{kind.__name__}Grid", fields, frozen=True, kw_only=True)
    return _GRIDS[kind]


def grid_of(recipe: Any) -> Any:
    """The grid whose only cell is the recipe itself.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> grid_of(RECIPES["cifar10"].recipe).divergence
        ('kl',)
    """
    kind = type(recipe)
    return grid_class(kind)(**{x.name: (x.of(recipe),) if x.several else x.of(recipe) for x in leaves(kind)})


def spell_out_flags(words: Sequence[str], *kinds: type) -> list[str]:
    """``--no-FIELD`` as ``--FIELD False``: a grid takes values of booleans, and `fmicl train` these flags.

    Args:
        words: of the command line.
        kinds: recipes' classes, whose booleans these are.

    Example:
        >>> from fmicl.config.recipes import Recipe
        >>> spell_out_flags(["sweep", "digits", "--no-baselines", "--seed", "0", "1"], Recipe)
        ['sweep', 'digits', '--baselines', 'False', '--seed', '0', '1']
    """
    booleans = {f"--no-{leaf.name}": leaf for kind in kinds for leaf in leaves(kind) if leaf.type is bool}
    found: list[str] = []
    for word in words:
        leaf = booleans.get(f"--no-{word[5:].replace('-', '_')}") if word.startswith(("--no-", "--no_")) else None
        found += [word] if leaf is None else [f"--{leaf.name.replace('_', '-')}", "False"]
    return found


def values_of(grid: Any, recipe: Any) -> dict[str, tuple[Any, ...]]:
    """The values of the fields that the grid says something else of than the recipe.

    Raises:
        ValueError: an option without a value, a value twice, or several values where the runs have one in common.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> recipe = RECIPES["cifar10"].recipe
        >>> values_of(dataclasses.replace(grid_of(recipe), divergence=("kl", "js"), epochs=(200,)), recipe)
        {'divergence': ('kl', 'js'), 'epochs': (200,)}
    """
    found: dict[str, tuple[Any, ...]] = {}
    for leaf in leaves(type(recipe)):
        given = getattr(grid, leaf.name)
        values = tuple(given) if leaf.several else (given,)
        if not values and leaf.type is bool:
            values = (True,)  # as `fmicl train` has it: the option alone says yes
        option = f"--{leaf.name.replace('_', '-')}"
        if not values:
            raise ValueError(f"{option} needs at least one value")
        twice = next((value for i, value in enumerate(values) if value in values[:i]), None)
        if twice is not None:
            raise ValueError(f"{option} has {_words(twice)} twice; each value is trained once")
        if len(values) > 1 and leaf.name in ONE_FOR_ALL:
            raise ValueError(f"{option} has {len(values)} values, but the runs of a sweep have it in common")
        if values != (leaf.of(recipe),):
            found[leaf.name] = values
    return found


def parse_case(words: Sequence[str], recipe: Any) -> tuple[str, dict[str, Any]]:
    """A case, ``NAME FIELD=VALUE ...``, as its name and its fields' values.

    A value of several numbers has commas between them (``crop_scale=0.2,1``).

    Raises:
        ValueError: no name, no field, an unknown field, or a value that the field doesn't take.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> parse_case(["MoCo", "method=moco", "objective=infonce"], RECIPES["cifar10"].recipe)
        ('MoCo', {'method': 'moco', 'objective': 'infonce'})
    """
    if len(words) < 2 or "=" in words[0]:
        raise ValueError(f"a case is NAME FIELD=VALUE ..., such as `--case SimCLR objective=infonce`; got: {words}")
    name, *settings = words
    kind = type(recipe)
    known = {leaf.name: leaf for leaf in leaves(kind)}
    changes: dict[str, Any] = {}
    for setting in settings:
        key, equals, text = setting.partition("=")
        field = key.replace("-", "_")
        if not equals or field not in known:
            near = difflib.get_close_matches(field, known, n=3)
            hint = f"; did you mean {' or '.join(near)}?" if equals and near else ""
            what = f"there is no field {key!r}" if equals else f"{setting!r} is not FIELD=VALUE"
            raise ValueError(f"case {name}: {what}{hint}")
        if field in changes:
            raise ValueError(f"case {name} says {field} twice")
        if field in ONE_FOR_ALL:
            raise ValueError(f"case {name}: the runs of a sweep have {field} in common")
        leaf = known[field]
        parts = text.split(",") if _is_tuple(leaf.type) else [text.capitalize() if leaf.type is bool else text]
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                parsed = tyro.cli(
                    grid_class(kind), default=grid_of(recipe), args=[f"--{field.replace('_', '-')}", *parts]
                )
        except SystemExit:
            takes = "it is True or False" if leaf.type is bool else "`fmicl train RECIPE --help` says what it takes"
            raise ValueError(f"case {name}: {field} can't be {text!r}; {takes}") from None
        value = getattr(parsed, field)
        changes[field] = value[0] if leaf.several else value
    return name, changes


def _is_tuple(hint: Any) -> bool:
    choices = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(choice) in (tuple, list) for choice in choices)


def cells(
    recipe: Any, values: Mapping[str, tuple[Any, ...]], cases: Sequence[tuple[str, Mapping[str, Any]]] = ()
) -> list[Cell]:
    """All cells: each case with each combination of values, a whole round of them for each seed.

    Raises:
        ValueError: a setting that the recipe refuses, in its words; a field that both a case and the grid set; or
            two cells that would train the very same thing.

    Example:
        >>> from fmicl.config.recipes import RECIPES
        >>> values = {"divergence": ("kl", "js"), "seed": (0, 1)}
        >>> [cell.name for cell in cells(RECIPES["digits"].recipe, values)]
        ['divergence=kl,seed=0', 'divergence=js,seed=0', 'divergence=kl,seed=1', 'divergence=js,seed=1']
        >>> cases = [("SimCLR", {"objective": "infonce"}), ("JS", {"divergence": "js"})]
        >>> [cell.name for cell in cells(RECIPES["digits"].recipe, {"seed": (0, 1)}, cases)]
        ['SimCLR,seed=0', 'JS,seed=0', 'SimCLR,seed=1', 'JS,seed=1']
    """
    names = [name for name, _ in cases]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"there are two cases {name}")
    for name, changes in cases:
        both = sorted(set(changes) & set(values))
        if both:
            raise ValueError(f"{both[0]} is set by case {name} and by --{both[0].replace('_', '-')}: leave one of them")
    axes = sorted(values, key=lambda field: field != "seed")  # the seed first, so that it changes last
    order = {leaf.name: i for i, leaf in enumerate(leaves(type(recipe)))}
    shown = sorted((field for field in values if len(values[field]) > 1), key=order.__getitem__)
    found = []
    named: list[tuple[str | None, Mapping[str, Any]]] = [*cases]
    if not cases:
        named.append((None, {}))
    for combination in itertools.product(*(values[axis] for axis in axes)):
        chosen = dict(zip(axes, combination, strict=True))
        for case, extra in named:
            changed = _replaced(recipe, {**chosen, **extra})
            found.append(
                Cell(
                    name=name_of(case, {field: chosen[field] for field in shown}, LONGEST_NAME),
                    recipe=changed,
                    changes={x.name: x.of(changed) for x in leaves(type(recipe)) if x.of(changed) != x.of(recipe)},
                    case=case,
                    case_sets=tuple(extra),
                )
            )
    _check_different(found, recipe)
    return found


def name_of(case: str | None, settings: Mapping[str, Any], longest: int | None = None) -> str:
    """What a run, or all runs with these settings, are called: safe as a folder's name, with the seed last.

    With ``longest``, no more characters than that, but for the seed.

    Example:
        >>> name_of("SimCLR", {"seed": 1, "epochs": 200}), name_of(None, {})
        ('SimCLR,epochs=200,seed=1', 'run')
    """
    parts = [] if case is None else [_slug(case)]
    parts += [f"{field}={_slug(value)}" for field, value in settings.items() if field != "seed"]
    seed = [f"seed={settings['seed']}"] if "seed" in settings else []
    return ",".join(part for part in (_short(",".join(parts), longest), *seed) if part) or UNNAMED


def _replaced(recipe: Any, changes: Mapping[str, Any]) -> Any:
    """The recipe with all changes made at once, so that it judges them together."""
    nested: dict[str, Any] = {}
    for leaf in leaves(type(recipe)):
        if leaf.name in changes:
            place = nested
            for part in leaf.path[:-1]:
                place = place.setdefault(part, {})
            place[leaf.path[-1]] = changes[leaf.name]

    def replace(value: Any, new: dict[str, Any]) -> Any:
        made = {key: replace(getattr(value, key), x) if isinstance(x, dict) else x for key, x in new.items()}
        return dataclasses.replace(value, **made)

    return replace(recipe, nested)


def _check_different(found: list[Cell], recipe: Any) -> None:
    seen: dict[Any, Cell] = {}
    names: dict[str, Cell] = {}
    for cell in found:
        unused = cell.recipe.without_part(recipe) if hasattr(cell.recipe, "without_part") else []
        key = tuple(str(leaf.of(recipe if leaf.name in unused else cell.recipe)) for leaf in leaves(type(recipe)))
        if key in seen:
            why = f": {', '.join(unused)} has no part in it" if unused else ""
            raise ValueError(
                f"{seen[key].name} and {cell.name} would train the same thing{why}. Settings that belong together are "
                "a case each, such as `--case SimCLR objective=infonce --case JS divergence=js`"
            )
        seen[key] = cell
        if cell.name in names:
            raise ValueError(f"two cells would have the folder {cell.name}: name them by --case")
        names[cell.name] = cell


def _words(value: Any) -> str:
    return " ".join(str(x) for x in value) if isinstance(value, list | tuple) else str(value)


def _slug(value: Any) -> str:
    """A value as a part of a folder's name, safe on every file system and in a shell."""
    if isinstance(value, list | tuple):
        return "-".join(_slug(x) for x in value)
    text = f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
    if isinstance(value, Path):
        text = value.name or text
    safe = re.sub(r"[^A-Za-z0-9._+-]+", "_", text).lstrip(".-") or "_"
    if safe == text or (isinstance(value, Path) and safe == value.name):
        return safe
    return f"{safe}-{hashlib.sha256(str(value).encode()).hexdigest()[:6]}"


def _short(name: str, longest: int | None) -> str:
    if longest is None or len(name) <= longest:
        return name
    return f"{name[: longest - 9]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
