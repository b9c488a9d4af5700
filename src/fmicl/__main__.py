"""``fmicl`` and ``python -m fmicl``: the command line, or one line on how to get what it needs."""

from __future__ import annotations

import sys

from fmicl import EXTRAS


def main() -> int:
    """Run :func:`fmicl.cli.main`; where a package of an extra is missing, say which extra, with exit code 2."""
    try:
        from fmicl.cli import main as run

        return run()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        print(f"fmicl: error: there is no package {package}; needs: pip install '{EXTRAS[package]}'", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
