"""The command line: `fmicl train | sweep | select | evaluate | embed | reproduce | report | mi | check-assumption`.

Nothing heavy is imported before the command is known, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import signal
import sys
from collections.abc import Sequence

from fmicl import __version__
from fmicl.utils.errors import NonFiniteError
from fmicl.utils.output import ignore_closed_output, open_missing_output, redirect_to_devnull

COMMANDS = {
    "train": ("fmicl.cli.train", "Train an encoder on images or text by a recipe."),
    "sweep": ("fmicl.cli.sweep", "Train a recipe on a grid of settings, several runs at once; resumes by itself."),
    "select": ("fmicl.cli.select", "Choose divergence, alpha and gamma by successive halving, without test images."),
    "evaluate": ("fmicl.cli.evaluate", "Evaluate a run: k-NN and linear probe for images, STS tasks for text."),
    "embed": ("fmicl.cli.embed", "Write the embeddings of a folder of images or a text file."),
    "reproduce": ("fmicl.cli.reproduce", "Run the paper's tables and figures, and show our numbers beside its own."),
    "report": ("fmicl.cli.report", "Draw a run's figures and write its HTML page."),
    "mi": ("fmicl.cli.mi", "Estimate the f-mutual information of two arrays, with intervals."),
    "check-assumption": ("fmicl.cli.check_assumption", "Test whether a run's positive pairs follow a Gaussian kernel."),
}
"""Module and summary of each command; a module has ``run(words) -> int``."""

LONG_RUNNING = ("train", "sweep", "select", "reproduce")
"""Commands that continue when their output is closed, as by `| head`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code.

    Wrong input ends in one message and exit code 2, a loss that is not finite or a failed run of a sweep in exit
    code 1. With the environment variable ``FMICL_TRACEBACK`` set, errors come with their traceback.
    """
    open_missing_output()
    words = [_expand_home(word) for word in (sys.argv[1:] if arguments is None else arguments)]
    command, rest = (words[0], words[1:]) if words else ("--help", [])
    if command == "--version":
        print(f"fmicl {__version__}")
        return 0
    if command in ("-h", "--help"):
        print(_help())
        return 0
    with ignore_closed_output() if command in LONG_RUNNING else contextlib.nullcontext():
        return _run(command, rest)


def _help() -> str:
    lines = [f"  {name:<18}{summary}" for name, (_, summary) in COMMANDS.items()]
    return "\n".join(
        [
            "usage: fmicl COMMAND ...",
            "",
            "Contrastive learning with any f-divergence.",
            "",
            *lines,
            "",
            "`fmicl COMMAND --help` lists a command's options, `fmicl --version` prints the version.",
        ]
    )


def _run(command: str, words: Sequence[str]) -> int:
    try:
        if command not in COMMANDS:
            from fmicl.utils.registry import unknown_name

            raise unknown_name("command", command, COMMANDS)
        _refuse_empty_values(words)
        return int(importlib.import_module(COMMANDS[command][0]).run(words) or 0)
    except BrokenPipeError as error:
        if command in LONG_RUNNING:  # then it is not the output's
            return _fail(error, 2)
        redirect_to_devnull(sys.stdout)  # the reader of the output, `head` say, has seen enough
        return 0
    except (ValueError, OSError) as error:
        return _fail(error, 2)
    except NonFiniteError as error:
        return _fail(error, 1)
    except KeyboardInterrupt as stop:
        if stop.args == ("",):  # another process prints the message, and would be killed if this one failed
            return 0
        print(f"fmicl: {str(stop) or 'stopped'}", file=sys.stderr)
        return 128 + int(getattr(stop, "number", signal.SIGINT))  # as a shell reports it


def _expand_home(word: str) -> str:
    """A word with the home folder for ``~``, which a shell leaves alone within quotes or after ``=``."""
    option, equals, path = word.partition("=")
    if equals and re.fullmatch(r"[\w-]+", option):
        return f"{option}={os.path.expanduser(path)}"
    return os.path.expanduser(word)


def _refuse_empty_values(words: Sequence[str]) -> None:
    """Refuse ``--out ''``, which an unset variable of the shell gives, and which a path would take for this folder."""
    for before, word in zip(("the command", *words), words, strict=False):
        if not word or re.fullmatch(r"--[\w-]+=", word):
            raise ValueError(f"{word[:-1] or before} has an empty value: name one, or leave the option out")


def _fail(error: Exception, code: int) -> int:
    if os.environ.get("FMICL_TRACEBACK"):
        raise error
    print(f"fmicl: error: {error}", file=sys.stderr)
    return code
