"""`fmicl train` initialises the GPU in a thread while Python imports Lightning; tested without a GPU."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from fmicl.cli import train
from fmicl.config import recipe


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[threading.Thread]:
    """The threads that are started."""
    threads: list[threading.Thread] = []
    start = threading.Thread.start

    def watched(self: threading.Thread) -> None:
        threads.append(self)
        start(self)

    monkeypatch.setattr(threading.Thread, "start", watched)
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return threads


@pytest.mark.parametrize(
    ("changes", "environment"),
    [({"device": "cpu"}, {}), ({"devices": 2}, {}), ({}, {"WORLD_SIZE": "2"}), ({}, {"SLURM_NTASKS": "2"})],
)
def test_no_gpu_is_initialised_unless_it_is_clear_which_one(
    changes: dict[str, Any],
    environment: dict[str, str],
    started: list[threading.Thread],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    train._initialise_gpu(recipe("digits", **changes))
    assert not started


def test_a_broken_driver_does_not_stop_the_command(
    started: list[threading.Thread], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def broken() -> bool:
        asked.set()
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    train._initialise_gpu(recipe("digits"))
    (thread,) = started
    assert not thread.daemon  # torch aborts a process that exits during the initialisation
    thread.join(60)
    assert asked.is_set()
