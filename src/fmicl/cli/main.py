"""The command line, derived from the recipe dataclasses: a field there is an option here.

Nothing heavy is imported before the command is known, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import tyro

from fmicl.cli.commands import Embed, Evaluate, Report
from fmicl.cli.tables import print_results, print_sts
from fmicl.config.fields import field_words
from fmicl.config.recipes import RECIPES, Entry, Recipe, no_recipe
from fmicl.config.settings import Settings
from fmicl.config.text_recipes import TEXT_RECIPES, TextRecipe
from fmicl.data.augmentations.views import Views
from fmicl.sweep.grid import SweepOptions, grid_class, grid_of, spell_out_flags
from fmicl.utils.output import ignore_closed_output, redirect_to_devnull

if TYPE_CHECKING:
    from fmicl.runs.folder import Run


@dataclass(frozen=True)
class Train:
    """Train an encoder by a recipe; each of its settings is an option."""

    recipe: tyro.conf.OmitArgPrefixes[Recipe]
    out: Path | None = None
    """Folder for the run; it must not exist (None: the next number under runs/)."""
    resume: bool = False
    """Go on with the run in --out, or with the newest of this recipe, by its own settings."""
    name: tyro.conf.Suppress[str] = "run"

    def __call__(self) -> None:
        """Train, then print what came out."""
        _begin(self.recipe)
        from fmicl.training.pipeline import train

        run = _run(self, train)
        if run is not None:
            print_results(run.path)
            print(f"page: {run.report}")


@dataclass(frozen=True)
class TrainText:
    """Train a sentence encoder by a recipe; each of its settings is an option."""

    recipe: tyro.conf.OmitArgPrefixes[TextRecipe]
    out: Path | None = None
    """Folder for the run; it must not exist (None: the next number under runs/)."""
    resume: bool = False
    """Go on with the run in --out, or with the newest of this recipe, by its own settings."""
    name: tyro.conf.Suppress[str] = "run"

    def __call__(self) -> None:
        """Train, then print what came out."""
        _begin(self.recipe)
        from fmicl.training.text import train_text
        from fmicl.utils.files import read_json

        run = _run(self, train_text)
        if run is not None:
            results = read_json(run.results)
            if "pairs" in results:
                print_sts(results)
            print(f"encoder: SentenceTransformer({str(run.path)!r})")
            print(f"page: {run.report}")


def _run(command: Train | TrainText, train: Callable[..., Run | None]) -> Run | None:
    """Train; if Ctrl-C comes before the run has a folder, say what is left: only a run to be resumed has anything."""
    from fmicl.runs.folder import ROOT, old_run
    from fmicl.sweep.launchers import OF_A_SWEEP
    from fmicl.training.signals import Stopped, what_is_left

    try:
        return train(command.recipe, name=command.name, out=command.out, resume=command.resume)
    except Stopped:
        raise
    except KeyboardInterrupt:
        raise Stopped(what_is_left(old_run(command.name, command.out) if command.resume else None)) from None
    except (ValueError, OSError) as error:
        asked = command.resume and not os.environ.get(OF_A_SWEEP)
        if not asked or old_run(command.name, command.out) is not None:
            raise
        where = f"in {command.out}" if command.out else f"of {command.name} in {ROOT.absolute()}"
        raise ValueError(f"there is no run {where} to go on with, and none can be begun: {error}") from error


def _flow(*kinds: Any) -> None:
    """Let the words on each field flow in ``--help``, where tyro keeps the line breaks of a docstring."""
    for kind in kinds:
        hints, words = get_type_hints(kind, include_extras=True), field_words(kind)
        for name in (option.name for option in fields(kind) if option.name in words):
            if not any(type(note) is type(tyro.conf.arg()) for note in getattr(hints[name], "__metadata__", ())):
                kind.__annotations__[name] = Annotated[hints[name], tyro.conf.arg(help=words[name])]


_flow(Recipe, TextRecipe, Views, Evaluate, Embed, SweepOptions)

_ENTRIES: list[tuple[Any, Entry[Settings]]] = [
    *((Train, entry) for entry in RECIPES.values()),
    *((TrainText, entry) for entry in TEXT_RECIPES.values()),
]


def _one_of(commands: Sequence[Any]) -> Any:
    """Recipes' commands, each a subcommand under the name of its recipe."""
    return reduce(
        or_,
        (
            Annotated[
                type(command),
                tyro.conf.subcommand(entry.name, default=command, description=entry.sentence, prefix_name=False),
            ]
            for command, (_, entry) in zip(commands, _ENTRIES, strict=True)
        ),
    )


_TRAIN = [kind(entry.recipe, name=entry.name) for kind, entry in _ENTRIES]
_Recipe: Any = _one_of(_TRAIN)


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder on images or sentences by a recipe."""

    command: tyro.conf.OmitArgPrefixes[_Recipe]
    """What to train."""


@dataclass(frozen=True)
class Sweep:
    """Train a recipe on a grid: any of its fields may have several values."""

    sweep: tyro.conf.OmitArgPrefixes[SweepOptions] = field(default_factory=SweepOptions)
    name: tyro.conf.Suppress[str] = "run"

    def __call__(self) -> int:
        """Train the grid; the exit code."""
        from fmicl.sweep.scheduler import run_sweep

        of: Any = self  # the class is made below, with a grid for its kind of recipe
        return run_sweep(self.name, of.recipe, of.grid, self.sweep)


def _sweep_of(entry: Any) -> Any:
    """The sweep of one recipe: its own options, and the recipe's fields with several values each."""
    grid = [("grid", Annotated[grid_class(type(entry.recipe)), tyro.conf.OmitArgPrefixes])]
    recipe = {"recipe": entry.recipe}  # no field: not an option
    kind = make_dataclass("Sweep", grid, bases=(Sweep,), namespace=recipe, frozen=True, kw_only=True)
    return kind(grid=grid_of(entry.recipe), name=entry.name)


_SWEEP = [_sweep_of(entry) for _, entry in _ENTRIES]
_Grid: Any = _one_of(_SWEEP)


@dataclass(frozen=True)
class SweepCommand:
    """Train a recipe on a grid of settings, several runs at once; the same command goes on."""

    command: tyro.conf.OmitArgPrefixes[_Grid]
    """What to train."""


_OF_RECIPES = {
    (verb, entry.name): (command, entry.sentence)
    for verb, commands in (("train", _TRAIN), ("sweep", _SWEEP))
    for command, (_, entry) in zip(commands, _ENTRIES, strict=True)
}
_OF_RUNS = {"evaluate": Evaluate, "embed": Embed, "report": Report}
_COMMANDS: Any = reduce(
    or_,
    (
        Annotated[command, tyro.conf.subcommand(name, prefix_name=False)]
        for name, command in {"train": TrainCommand, "sweep": SweepCommand, **_OF_RUNS}.items()
    ),
)

_LONG = (["train"], ["sweep"])
"""What goes on also when nobody reads its output any more."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: run a command.

    Wrong input ends in one message and exit code 2, a loss that is not finite or a failed run of a sweep in exit
    code 1. With the environment variable ``FMICL_TRACEBACK`` set, errors come with their traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    with ignore_closed_output() if words[:1] in _LONG else contextlib.nullcontext():
        return _main(words)


def _main(words: Sequence[str]) -> int:
    try:
        return int(_parse(words)() or 0)
    except BrokenPipeError as error:
        if words[:1] in _LONG:  # then it is not the output's
            return _complain(error, 2)
        redirect_to_devnull(sys.stdout)  # whoever read the output, `head` say, has seen enough
        return 0
    except (ValueError, OSError) as error:
        return _complain(error, 2)
    except KeyboardInterrupt as stop:
        if stop.args == ("",):  # another process says it, and would be killed if this one failed
            return 0
        print(f"fmicl: {str(stop) or 'stopped'}", file=sys.stderr)
        return 128 + int(getattr(stop, "number", signal.SIGINT))  # as a shell would say it
    except RuntimeError as error:
        if type(error).__name__ != "NonFiniteError":  # a bug, or a machine out of memory: its traceback is of use
            raise
        return _complain(error, 1)


def _parse(words: Sequence[str]) -> Any:
    """The command with its options; a value that a recipe refuses is a ValueError in the recipe's own words."""
    words = [_expanded(word) for word in words]
    if words[:1] == ["sweep"]:
        words = spell_out_flags(words, Recipe, TextRecipe)
    recipes = [entry.name for _, entry in _ENTRIES]
    if words[:1] in _LONG and len(words) > 1 and words[1] not in recipes and words[1][:1] != "-":
        raise no_recipe(words[1], recipes)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            return _command(words)
    except SystemExit as exit_:
        # tyro names the field of a dataclass that refused its values by its own inner path, which helps nobody.
        wrapper = exit_.__context__
        refused = getattr(wrapper, "__context__", None)
        if isinstance(refused, ValueError) and isinstance(getattr(wrapper, "arg", None), str):
            raise ValueError(str(refused)) from None
        sys.stderr.write(said.getvalue())
        raise


def _command(words: Sequence[str]) -> Any:
    """The command that these words say.

    Of the recipe, or the command, that they begin with alone: what is said of a misspelt option is about no other.
    """
    verb, name = [*words, "", ""][:2]
    if (verb, name) in _OF_RECIPES:
        command, sentence = _OF_RECIPES[verb, name]
        command = _resumed(words) or command
        prog = f"fmicl {verb} {name}"
        return tyro.cli(type(command), default=command, description=sentence, prog=prog, args=words[2:])
    if verb in _OF_RUNS:
        return tyro.cli(_OF_RUNS[verb], prog=f"fmicl {verb}", args=words[1:])
    return tyro.cli(
        _COMMANDS,
        prog="fmicl",
        description="Contrastive learning with any f-divergence. (--version says which one this is.)",
        args=words,
    )


def _expanded(word: str) -> str:
    """A word with the home folder in the place of ``~``, which a shell leaves alone within quotes or after ``=``.

    Here, once, for all commands and options, so that a path is the same one in all of them.
    """
    option, equals, path = word.partition("=")
    if equals and re.fullmatch(r"[\w-]+", option):
        return f"{option}={os.path.expanduser(path)}"
    return os.path.expanduser(word)


def _resumed(words: Sequence[str]) -> Train | TrainText | None:
    """Of ``train RECIPE --resume``, the command by which its run was started: what is not given now is as it was then.

    Raises:
        ValueError: the run in --out is one of another recipe.
    """
    kinds = {entry.name: kind for kind, entry in _ENTRIES}
    if len(words) < 2 or words[0] != "train" or words[1] not in kinds:
        return None
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, nargs="?")
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args(words[2:])
    if not given.resume:
        return None
    from fmicl.runs.folder import old_run, read_recipe, read_text_recipe
    from fmicl.utils.files import read_json

    name = words[1]
    old = old_run(name, given.out)
    if old is None or not old.settings.exists():
        return None
    before = read_json(old.settings).get("recipe")
    if before != name:
        if before in kinds:
            raise ValueError(
                f"{old.path} is a run of the recipe {before}, not of {name}: "
                f"fmicl train {before} --resume --out {old.path}"
            )
        return None  # it was started from Python
    if kinds[name] is Train:
        return Train(read_recipe(old)[1], name=name)
    return TrainText(read_text_recipe(old)[1], name=name)


def _begin(recipe: Settings) -> None:
    """What a command to train has to wait for, at once and side by side."""
    from fmicl.training.startup import import_lightning, wake_gpu

    wake_gpu(recipe)
    import_lightning()


def _complain(error: Exception, code: int) -> int:
    if os.environ.get("FMICL_TRACEBACK"):
        raise error
    print(f"fmicl: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
