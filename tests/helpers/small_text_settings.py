"""Settings for sentences that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fmicl.config import Settings, recipe


def small(folder: Path, **changes: Any) -> Settings:
    settings: dict[str, Any] = {
        "data": folder / "text.txt", "model": str(folder / "bert"), "cache_dir": folder / "cache", "length": 16,
        "batch_size": 8, "queue": 16, "hidden": 16, "sts_every": 2, "device": "cpu",
    }  # fmt: skip
    return recipe("wikipedia", **settings | changes)
