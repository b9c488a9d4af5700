"""The training pipeline: from settings to a run folder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fmicl.training.pipeline import train as train

__all__ = ["train"]


def __getattr__(name: str) -> Any:
    """Import the pipeline, and Lightning with it, when it is first used."""
    if name == "train":
        from fmicl.training.pipeline import train

        return train
    raise AttributeError(f"module 'fmicl.training' has no attribute {name!r}")
