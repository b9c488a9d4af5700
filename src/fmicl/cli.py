"""The command line, derived from the recipe dataclasses: a field there is an option here.

Nothing heavy is imported before the command is known, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, make_dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from fmicl.checks import TokenPooling
from fmicl.grid import SweepOptions, grid_class, grid_of, spell_out_flags
from fmicl.recipes import RECIPES, Entry, Recipe, no_recipe
from fmicl.settings import Settings
from fmicl.tables import print_results, print_sts
from fmicl.text_recipes import TEXT_RECIPES, TextRecipe

if TYPE_CHECKING:
    from fmicl.runs import Run


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
        from fmicl.training import train

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
        from fmicl.runs import read_json
        from fmicl.text_training import train_text

        run = _run(self, train_text)
        if run is not None:
            results = read_json(run.results)
            if "pairs" in results:
                print_sts(results)
            print(f"encoder: SentenceTransformer({str(run.path)!r})")
            print(f"page: {run.report}")


def _run(command: Train | TrainText, train: Callable[..., Run | None]) -> Run | None:
    """Train; if Ctrl-C comes before or after the training itself, say what is left."""
    from fmicl.runs import old_run
    from fmicl.stopping import Stopped, what_is_left

    try:
        return train(command.recipe, name=command.name, out=command.out, resume=command.resume)
    except Stopped:
        raise
    except KeyboardInterrupt:
        raise Stopped(what_is_left(old_run(command.name, command.out))) from None


_ENTRIES: list[tuple[Any, Entry[Settings]]] = [
    *((Train, entry) for entry in RECIPES.values()),
    *((TrainText, entry) for entry in TEXT_RECIPES.values()),
]
_Recipe: Any = reduce(
    or_,
    (
        Annotated[
            kind,
            tyro.conf.subcommand(
                entry.name, default=kind(entry.recipe, name=entry.name), description=entry.sentence, prefix_name=False
            ),
        ]
        for kind, entry in _ENTRIES
    ),
)


@dataclass(frozen=True)
class TrainCommand:
    """Train an encoder on images or sentences by a recipe."""

    command: tyro.conf.OmitArgPrefixes[_Recipe]
    """What to train."""

    def __call__(self) -> None:
        """Run the chosen recipe."""
        self.command()


@dataclass(frozen=True)
class Sweep:
    """Train a recipe on a grid: any of its fields may have several values."""

    sweep: tyro.conf.OmitArgPrefixes[SweepOptions] = field(default_factory=SweepOptions)
    name: tyro.conf.Suppress[str] = "run"

    def __call__(self) -> int:
        """Train the grid; the exit code."""
        from fmicl.sweep import run_sweep

        of: Any = self  # the class is made below, with a grid for its kind of recipe
        return run_sweep(self.name, of.recipe, of.grid, self.sweep)


def _sweep_of(entry: Any) -> Any:
    """The sweep of one recipe, as a subcommand: its own options, and the recipe's fields with several values each."""
    fields = [("grid", Annotated[grid_class(type(entry.recipe)), tyro.conf.OmitArgPrefixes])]
    recipe = {"recipe": entry.recipe}  # no field: not an option
    kind = make_dataclass("Sweep", fields, bases=(Sweep,), namespace=recipe, frozen=True, kw_only=True)
    default = kind(grid=grid_of(entry.recipe), name=entry.name)
    return Annotated[
        kind, tyro.conf.subcommand(entry.name, default=default, description=entry.sentence, prefix_name=False)
    ]


_Grid: Any = reduce(or_, (_sweep_of(entry) for _, entry in _ENTRIES))


@dataclass(frozen=True)
class SweepCommand:
    """Train a recipe on a grid of settings, several runs at once; the same command goes on."""

    command: tyro.conf.OmitArgPrefixes[_Grid]
    """What to train."""

    def __call__(self) -> int:
        """Run the sweep of the chosen recipe."""
        code: int = self.command()
        return code


@dataclass(frozen=True)
class Evaluate:
    """Evaluate an encoder: images by k-NN, linear probe and geometry; sentences by the STS tasks (--sts)."""

    run: tyro.conf.Positional[Path]
    """The run folder; with --sts, one of sentences, or any folder of sentence-transformers or transformers."""
    data_dir: Path | None = None
    """Where a run's images are now, if they have moved."""
    sts: Path | None = None
    """STS12-16, STS-B and SICK-R in SentEval's layout (a folder with STS/ and SICK/)."""
    pooling: TokenPooling | None = None
    """Of a plain transformers folder, how tokens make one vector: the first one's (cls), or their mean."""
    json: Path | None = None
    """File to write the STS scores to, which must not exist."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    workers: int | None = None
    """Processes that decode images (None: as in training)."""
    probe_views: int | None = None
    """Fit a second linear probe, to so many random crops and flips of each training image too (None: as the run
    says)."""

    def __call__(self) -> None:
        """Evaluate, then print what came out."""
        if self.sts is not None:
            self._sentences(self.sts)
            return
        if self.json is not None:
            raise ValueError("--json goes with --sts; the results of a run on images are in its results.json")
        if self.pooling is not None:
            raise ValueError("--pooling is for sentences: name the STS tasks with --sts DIR")
        if (self.run / "modules.json").is_file():
            raise ValueError(f"{self.run} holds a sentence encoder: name the STS tasks with --sts DIR")
        from fmicl.report import write_report
        from fmicl.results import evaluate_run
        from fmicl.start import import_lightning

        import_lightning()
        evaluate_run(
            self.run, data_dir=self.data_dir, device=self.device, workers=self.workers, probe_views=self.probe_views
        )
        page = write_report(self.run)  # it would tell the results from before
        print_results(self.run)
        print(f"page: {page}")

    def _sentences(self, sts: Path) -> None:
        of_images = {"--data-dir": self.data_dir, "--workers": self.workers, "--probe-views": self.probe_views}
        for option, value in of_images.items():
            if value is not None:
                raise ValueError(f"{option} is for runs on images, and does not go with --sts")
        from fmicl.text_results import evaluate_text, note_scores

        scores = evaluate_text(self.run, sts, pooling=self.pooling, output=self.json, device=self.device, bar=True)
        print_sts(scores)
        if self.json is not None:
            print(f"scores -> {self.json}")
        if (self.run / "settings.json").is_file():
            from fmicl.report import write_report
            from fmicl.runs import Run

            note_scores(Run(self.run), scores)
            print(f"page: {write_report(self.run)}")


@dataclass(frozen=True)
class Embed:
    """Write the vectors of a folder of images, or of a file of sentences, as a run's encoder sees them."""

    run: tyro.conf.Positional[Path]
    """The run folder; for sentences, any folder of sentence-transformers or transformers too."""
    source: tyro.conf.Positional[Path]
    """A folder of images, with or without subfolders; or a text file with a sentence a line."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write, which must not exist: .parquet, .npz or .csv."""
    pooling: TokenPooling | None = None
    """Of a plain transformers folder, how tokens make one vector: the first one's (cls), or their mean."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    batch_size: int = 256
    """Images or sentences at a time."""
    workers: int | None = None
    """Processes that decode images (None: 4)."""

    def __call__(self) -> None:
        """Embed, then say how many."""
        from fmicl.embedding import embed_folder, embed_text

        if (self.run / "modules.json").is_file() or self.source.is_file():
            if self.workers is not None:
                raise ValueError("--workers is for folders of images, and does not go with sentences")
            lines = embed_text(
                self.run,
                self.source,
                self.output,
                pooling=self.pooling,
                device=self.device,
                batch_size=self.batch_size,
            )
            print(f"{lines} sentences -> {self.output}")
            return
        if self.pooling is not None:
            raise ValueError("--pooling is for sentences, and does not go with a folder of images")
        workers = 4 if self.workers is None else self.workers
        count, skipped = embed_folder(
            self.run, self.source, self.output, device=self.device, batch_size=self.batch_size, workers=workers
        )
        for line in skipped:
            print(f"left out: {line}", file=sys.stderr)
        print(f"{count} images -> {self.output}")


@dataclass(frozen=True)
class Report:
    """Draw a run's figures and write its page."""

    run: tyro.conf.Positional[Path]
    """The run folder."""

    def __call__(self) -> None:
        """Write the page, then say where it is."""
        from fmicl.report import write_report
        from fmicl.runs import open_run

        print(f"page: {write_report(open_run(self.run).path)}")


_COMMANDS: Any = reduce(
    or_,
    (
        Annotated[command, tyro.conf.subcommand(name, prefix_name=False)]
        for name, command in (
            ("train", TrainCommand),
            ("sweep", SweepCommand),
            ("evaluate", Evaluate),
            ("embed", Embed),
            ("report", Report),
        )
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point: run a command.

    Wrong input ends in one message and exit code 2, a loss that is not finite or a failed run of a sweep in exit
    code 1. With the environment variable ``FMICL_TRACEBACK`` set, errors come with their traceback.
    """
    try:
        return int(_parse(arguments)() or 0)
    except BrokenPipeError:  # whoever read the output, `head` say, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
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


def _parse(arguments: Sequence[str] | None) -> Any:
    """The command with its options; a value that a recipe refuses is a ValueError in the recipe's own words."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["sweep"]:
        words = spell_out_flags(words, Recipe, TextRecipe)
    recipes = [entry.name for _, entry in _ENTRIES]
    if words[:1] in (["train"], ["sweep"]) and len(words) > 1 and words[1] not in recipes and words[1][:1] != "-":
        raise no_recipe(words[1], recipes)
    resumed = _resumed(words)
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if resumed is not None:
                return tyro.cli(type(resumed), default=resumed, args=words[2:], prog=f"fmicl train {words[1]}")
            return tyro.cli(
                _COMMANDS,
                prog="fmicl",
                description="Contrastive learning with any f-divergence. (--version says which one this is.)",
                args=words,
            )
    except SystemExit as exit_:
        # tyro names the field of a dataclass that refused its values by its own inner path, which helps nobody.
        wrapper = exit_.__context__
        refused = getattr(wrapper, "__context__", None)
        if isinstance(refused, ValueError) and isinstance(getattr(wrapper, "arg", None), str):
            raise ValueError(str(refused)) from None
        sys.stderr.write(said.getvalue())
        raise


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
    from fmicl.runs import old_run, read_json, read_recipe, read_text_recipe

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
    from fmicl.start import import_lightning, wake_gpu

    wake_gpu(recipe)
    import_lightning()


def _complain(error: Exception, code: int) -> int:
    if os.environ.get("FMICL_TRACEBACK"):
        raise error
    print(f"fmicl: error: {error}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main())
