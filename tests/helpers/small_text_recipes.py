"""The recipe for sentences, small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fmicl.config.text_recipes import TextRecipe


def small(place: Path, **changes: Any) -> TextRecipe:
    settings: dict[str, Any] = {
        "data": place / "text.txt", "model": str(place / "bert"), "cache_dir": place / "cache", "length": 16,
        "batch_size": 8, "queue": 16, "hidden": 16, "sts_every": 2, "device": "cpu",
    }  # fmt: skip
    return TextRecipe(**settings | changes)
