"""``fmicl`` and ``python -m fmicl``: the command line, or one line on how to get what it needs."""

from __future__ import annotations

import sys

from fmicl import EXTRAS, __version__, how_to_install


def main() -> int:
    """Run :func:`fmicl.cli.main`; where a package of an extra is missing, say which extra, with exit code 2."""
    if sys.argv[1:] == ["--version"]:
        print(f"fmicl {__version__}")
        return 0
    try:
        from fmicl.cli import main as run

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


if __name__ == "__main__":
    sys.exit(main())
