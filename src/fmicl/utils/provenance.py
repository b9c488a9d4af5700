"""Provenance of results: command line, package versions, device and commit."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from fmicl import __version__

_PACKAGE = Path(__file__).resolve().parents[1]


def command_line() -> list[str]:
    """The command that started this process, without the directory of the program."""
    first = Path(sys.argv[0])
    program = ["python", "-m", "fmicl"] if first == _PACKAGE / "__main__.py" else [first.name]
    return [*program, *sys.argv[1:]]


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of Python, fmicl and these packages; None for a package that is not installed.

    Example:
        >>> versions(["torch"])["fmicl"] == __version__
        True
    """
    found: dict[str, str | None] = {"python": platform.python_version(), "fmicl": __version__}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def commit() -> str | None:
    """The commit of this package's checkout, with ``-dirty`` if files differ from it; None outside a checkout."""
    checkout = _PACKAGE.parents[1]
    if not (checkout / ".git").exists():
        return None
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip() or None
    except (OSError, subprocess.SubprocessError):
        return None
