"""Training in the one process that gets the run."""

from __future__ import annotations

from pathlib import Path

from fmicl.config import Settings
from fmicl.runs.folder import Run
from fmicl.training import pipeline


def train(settings: Settings, *, out: Path | None = None, resume: bool = False) -> Run:
    """`fmicl.train`, whose run is None only in the other processes of a run."""
    run = pipeline.train(settings, out=out, resume=resume)
    assert run is not None
    return run
