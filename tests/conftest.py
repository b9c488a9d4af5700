"""Fixtures that several packages' tests use."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

# Triton decides at import whether its kernels run on a GPU or in its interpreter, on the CPU.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip evaluation and report of runs on images; the encoder is still exported."""
    monkeypatch.setattr("fmicl.training.tasks.images.evaluate_run", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)


@pytest.fixture
def only_text_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip STS tasks and report of runs on text; the encoder is still exported."""
    monkeypatch.setattr("fmicl.training.tasks.text.evaluate_text", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as in a terminal: processes that a shell starts in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
