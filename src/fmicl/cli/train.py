"""`fmicl train RECIPE`: train an encoder; every option of the recipe is a flag."""

from __future__ import annotations

import argparse
import contextlib
import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

from fmicl.cli.options import flat_values, options_class
from fmicl.cli.recipes import split_recipe
from fmicl.config import RECIPES, Settings, recipe
from fmicl.runs.folder import ROOT, Run, find_run
from fmicl.runs.settings import read_settings
from fmicl.utils.environment import STARTED_BY_SWEEP
from fmicl.utils.errors import Stopped
from fmicl.utils.files import read_json


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Where the run goes."""

    out: Annotated[
        Path | None, tyro.conf.arg(help="Folder for the run; it must not exist (None: the next number under runs/).")
    ] = None
    resume: Annotated[
        bool, tyro.conf.arg(help="Continue the run in --out, or the newest of this recipe, with its own settings.")
    ] = False


def run(words: Sequence[str]) -> int:
    """Train, then print the results."""
    chosen = split_recipe("train", words)
    if chosen is None:
        return 0
    name, rest = chosen
    settings, out, resume = parse(name, rest)
    _initialise_gpu(settings)
    from fmicl.training.pipeline import train
    from fmicl.training.tasks import task_class

    with _add_context_to_errors(settings, out, resume):
        finished = train(settings, out=out, resume=resume)
    if finished is not None:
        task_class(settings.task.name).print_results(finished)
        print(f"page: {finished.report}")
    return 0


def parse(name: str, words: Sequence[str]) -> tuple[Settings, Path | None, bool]:
    """Settings, folder and whether to resume, from the words after the recipe.

    Raises:
        ValueError: as :func:`fmicl.config.recipe`, or the run in --out is one of another recipe.
    """
    base = _settings_to_resume(name, words) or recipe(name)
    command = options_class(TrainOptions, base.schema, base.values)
    parsed = tyro.cli(command, prog=f"fmicl train {name}", description=RECIPES[name].summary, args=list(words))
    return Settings(name, **flat_values(parsed)), parsed.out, parsed.resume


def _settings_to_resume(name: str, words: Sequence[str]) -> Settings | None:
    """Of ``train RECIPE --resume``, the settings of its run: options that are not given stay as they were."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--out", type=Path, nargs="?")
    parser.add_argument("--resume", action="store_true")
    given, _ = parser.parse_known_args(list(words))
    old = find_run(name, given.out) if given.resume else None
    if old is None or not old.settings.exists():
        return None
    before = read_json(old.settings).get("recipe")
    if before != name:
        raise ValueError(
            f"{old.path} is a run of the recipe {before}, not of {name}: fmicl train {before} --resume --out {old.path}"
        )
    return read_settings(old)


@contextlib.contextmanager
def _add_context_to_errors(settings: Settings, out: Path | None, resume: bool) -> Any:
    """Add to an interruption what is left of the run, and to an error of --resume that there was no run."""

    def old() -> Run | None:
        return find_run(settings.recipe, out) if resume else None

    from fmicl.training.signals import how_to_continue

    try:
        yield
    except Stopped:
        raise
    except KeyboardInterrupt:  # before the run had a folder
        raise Stopped(how_to_continue(old())) from None
    except (ValueError, OSError) as error:
        if not resume or os.environ.get(STARTED_BY_SWEEP) or old() is not None:
            raise
        where = f"in {out}" if out else f"of {settings.recipe} in {ROOT.absolute()}"
        raise ValueError(f"there is no run {where} to continue, and none can be started: {error}") from error


def _initialise_gpu(settings: Settings) -> None:
    """Initialise the GPU in a thread, which takes seconds, while Python imports Lightning."""
    several = settings.devices != 1 or any(name in os.environ for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    if settings.device in ("auto", "cuda") and not several:
        threading.Thread(target=_touch_gpu).start()  # no daemon: torch aborts a process that exits during this


def _touch_gpu() -> None:
    with contextlib.suppress(Exception):  # the training itself reports what is wrong
        import torch

        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
