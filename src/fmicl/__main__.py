"""``fmicl`` and ``python -m fmicl``: the command line, or how to install what it needs."""

from __future__ import annotations

import signal
import sys

from fmicl.utils.extras import missing_package


def main() -> int:
    """Run :func:`fmicl.cli.main.main`; if a package of an extra is missing, name the extra, with exit code 2.

    Ctrl-C while Python still imports is one line, as later.
    """
    try:
        from fmicl.cli.main import main as run

        return run()
    except KeyboardInterrupt:
        print("fmicl: stopped", file=sys.stderr)
        return 128 + signal.SIGINT
    except ModuleNotFoundError as error:
        found = missing_package(error)
        if found is None:
            raise
        package, how = found
        print(f"fmicl: error: there is no package {package}; needs: {how}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
