"""`fmicl reproduce NAME`: train and draw the paper's tables and figures; without a name, list them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from fmicl.cli.command import command
from fmicl.cli.sweep import LauncherOptions
from fmicl.utils.registry import unknown_name


@dataclass(frozen=True)
class Reproduce(LauncherOptions):
    """Reproduce tables and figures of the paper; without a name, list them with what they need."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="NAME ...")] = ()
    """Names of tables and figures; all is every one."""
    scale: Literal["full", "small"] = "full"
    """full: the paper's data and lengths. small: digits, or a tiny BERT on generated sentences, in minutes on a CPU."""
    data: Annotated[tuple[str, ...], tyro.conf.arg(metavar="RECIPE=PATH ...")] = ()
    """Where the data of a recipe is: cifar10=DIR tinyimagenet=DIR wikipedia=FILE. Runs without data are left out."""
    model: str | None = None
    """Sentence encoder to start from (None: the recipe's)."""
    sts: Path | None = None
    """STS tasks in SentEval's layout."""
    seed: tuple[int, ...] = (0,)
    """Seeds: a run of each setting for each."""
    epochs: tuple[int, ...] = ()
    """Epochs of image runs (none: the paper's)."""
    archive: Path | None = None
    """Folder of archived runs, such as results/, which are not trained again."""
    train: bool = True
    """Train runs that are missing; --no-train shows those that are there."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to train."""
    parallel: int | None = field(default=None, kw_only=True)
    """Runs at once on each device; with slurm, jobs at once (None: one, at the small scale one for each CPU)."""
    out: Path = Path("reproduction")
    """Folder of runs and results; the same folder continues."""

    def __call__(self) -> int:
        """List, or run and write."""
        from fmicl.reproduce import EXPERIMENTS, Scale
        from fmicl.reproduce.pipeline import Reproduction, listing

        common = {} if self.device == "auto" else {"device": self.device}
        small = self.scale == "small"
        scale = Scale(small, self.seed, self.epochs, self.places(), common)
        if not self.names:
            _print_listing(listing(scale))
            return 0
        self.check_launcher()
        if small and self.data:
            raise ValueError("--data is for --scale full: the small scale makes its own data")
        names = EXPERIMENTS.names() if self.names == ("all",) else self.names
        sweep = {"parallel": self.parallel, "launcher": self.launcher, "slurm": self.slurm}
        return Reproduction(scale, self.out, self.archive, self.train, sweep).run(names)

    def places(self) -> dict[str, dict[str, Any]]:
        """The options of each recipe that say where its data is.

        Raises:
            ValueError: not RECIPE=PATH, or an unknown recipe.
        """
        from fmicl.config import RECIPES, recipe

        found: dict[str, dict[str, Any]] = {}
        for word in self.data:
            name, equals, path = word.partition("=")
            if not equals or not path:
                raise ValueError(f"--data takes RECIPE=PATH, such as cifar10=DIR, but got {word!r}")
            if name not in RECIPES:
                raise unknown_name("recipe", name, RECIPES.names())
            found[name] = {recipe(name).task.data_option: Path(path)}
        text = {"model": self.model, "sts": self.sts}
        given = {name: value for name, value in text.items() if value is not None}
        return {**found, "wikipedia": {**found.get("wikipedia", {}), **given}} if given else found


def _print_listing(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table()
    for heading in ("name", "in the paper", "recipes", "runs", "hours (H200)"):
        table.add_column(heading, justify="right" if heading in ("runs", "hours (H200)") else "left")
    for row in rows:
        table.add_row(*row)
    Console().print(table)
    print("`fmicl reproduce NAME --scale small` runs one in minutes on a CPU; `--help` lists the options.")


run = command("reproduce", Reproduce)
