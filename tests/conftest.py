"""What all tests share, and what leaves the end of a run out."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Triton decides at import whether its programs run on a GPU or in its interpreter, on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave evaluation and page out where a test is not about them."""
    monkeypatch.setattr("fmicl.training.pipeline.evaluate_run", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.runs.report.write_report", lambda _: None)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: what a shell runs in its background ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
