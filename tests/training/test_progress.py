"""Progress lines of a run without a terminal."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fmicl.training.progress import ProgressDisplay


def lines_of(seconds: list[float], monkeypatch: pytest.MonkeyPatch, total: int = 100) -> list[str]:
    """What is said while batches of 10 samples take so long, ten of them an epoch."""
    optimisation = SimpleNamespace(total_batches=total, batches_per_epoch=min(10, total), accumulate=1)
    module: Any = SimpleNamespace(batches=0, optimisation=optimisation)
    said: list[str] = []
    clock = [0.0]
    monkeypatch.setattr("fmicl.training.progress.time.monotonic", lambda: clock[0])
    display = ProgressDisplay(module, 10, say=said.append, live=False)
    display.on_train_start(None, None)  # type: ignore[arg-type]
    for each in seconds:
        clock[0] += each
        module.batches += 1
        display.on_train_batch_end(None, None, {"loss": torch.tensor(2.0)})  # type: ignore[arg-type]
    return said


def test_the_first_batch_takes_no_part_in_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    said = lines_of([40.0, *[1.0] * 20], monkeypatch)
    assert said == [
        "the first batch took 0:00:40, which the rate below leaves out",
        "epoch 2/10  loss 2.0000  10 images/s  time left 0:01:29",
        "epoch 3/10  loss 2.0000  10 images/s  time left 0:01:19",
    ]


def test_a_quick_first_batch_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of([1.0, *[2.0] * 5], monkeypatch) == ["epoch 1/10  loss 2.0000  5 images/s  time left 0:03:08"]


def test_a_single_batch_has_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    assert lines_of([2.0], monkeypatch, total=1) == ["epoch 1/1  loss 2.0000  5 images/s  time left 0:00:00"]
