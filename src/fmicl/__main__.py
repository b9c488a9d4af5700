"""``fmicl`` and ``python -m fmicl``: the command line, or one line on how to get what it needs."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import NoReturn

from fmicl import EXTRAS, __version__, how_to_install


def main() -> int:
    """Run :func:`fmicl.cli.main.main`; where a package of an extra is missing, say which extra, with exit code 2."""
    if sys.argv[1:] == ["--version"]:
        print(f"fmicl {__version__}")
        return 0
    try:
        from fmicl.cli.main import main as run

        return run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        how = how_to_install(EXTRAS[package])
        if sys.argv[1:] in ([], ["-h"], ["--help"]):
            print(
                "fmicl: contrastive learning with any f-divergence. `import fmicl` and its losses need torch alone;\n"
                f"the commands train, sweep, evaluate, embed and report need more: {how}"
            )
            return 0
        print(f"fmicl: error: there is no package {package}; needs: {how}", file=sys.stderr)
        return 2


def command() -> NoReturn:
    """`main` as a process of its own, which `leave`s with its exit code."""
    leave(main())


def leave(code: int) -> NoReturn:
    """End the process. Where torch was imported, at once: to take its modules apart takes Python a second or more.

    Everything that asked to be called at the end is, and all output is written first. Where a thread still works,
    Python waits for it as ever.
    """
    working = any(not thread.daemon and thread is not threading.current_thread() for thread in threading.enumerate())
    if working or "torch" not in sys.modules:
        sys.exit(code)
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


if __name__ == "__main__":
    command()
