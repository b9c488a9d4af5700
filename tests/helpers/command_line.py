"""`python -m fmicl` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping


def fmicl(*arguments: str, env: Mapping[str, str] | None = None, **options: object) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    return python("-m", "fmicl", *arguments, env={"COLUMNS": "200", **(env or {})}, **options)


def python(
    *arguments: str, env: Mapping[str, str] | None = None, **options: object
) -> subprocess.CompletedProcess[str]:
    """Run Python to its end."""
    defaults: dict[str, object] = {"capture_output": True, "text": True, "timeout": 300}
    environment = {**os.environ, **(env or {})}
    return subprocess.run([sys.executable, *arguments], env=environment, **{**defaults, **options})  # type: ignore[call-overload,no-any-return]
