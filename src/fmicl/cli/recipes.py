"""The recipe argument of train, sweep and select, and the list of recipes."""

from __future__ import annotations

from collections.abc import Sequence

from fmicl.cli.main import COMMANDS
from fmicl.config import RECIPES


def split_recipe(command: str, words: Sequence[str]) -> tuple[str, list[str]] | None:
    """The recipe and the rest of the words; None after the list of recipes was printed.

    Raises:
        ValueError: an unknown recipe, or none.
    """
    if not words or words[0] in ("-h", "--help"):
        width = max(len(entry.name) for entry in RECIPES) + 2
        print(f"usage: fmicl {command} RECIPE [OPTIONS]\n\n{COMMANDS[command][1]}\n")
        for entry in RECIPES:
            print(f"  {entry.name:<{width}}{entry.summary}")
        print(f"\n`fmicl {command} RECIPE --help` lists the options of a recipe.")
        if words:
            return None
        raise ValueError(f"fmicl {command} needs a recipe")
    _ = RECIPES[words[0]]  # an unknown one is an error that names the near ones
    return words[0], list(words[1:])
