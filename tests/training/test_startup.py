"""Commands begin without what they don't need. Each in a process of its own, where nothing is imported yet."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import threading
from typing import Any

import pytest
from fmicl.training.startup import wake_gpu

from fmicl.config import recipe


def recipe(**settings: Any) -> Recipe:
    return dataclasses.replace(recipe("digits"), **settings)


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout


def test_lightning_comes_without_torchmetrics_and_works() -> None:
    said = run(
        "import sys\n"
        "from fmicl.training.startup import import_lightning\n"
        "import_lightning()\n"
        "from lightning.pytorch import LightningModule, Trainer\n"
        "print([name for name in ('torchmetrics', 'scipy', 'transformers') if name in sys.modules])\n"
        "Trainer(max_epochs=1, logger=False, enable_checkpointing=False, accelerator='cpu')\n"
        "import torchmetrics, torch\n"
        "print(float(torchmetrics.MeanMetric()(torch.tensor([1.0, 3.0]))))\n"
    )
    assert said.splitlines()[0] == "[]"
    assert said.splitlines()[-1] == "2.0"  # whoever wants it has the true one


def test_a_lightning_that_needs_more_gets_torchmetrics() -> None:
    said = run(
        "import sys, fmicl.training.startup as start\n"
        "stand_in = start._stand_in\n"
        "start._stand_in = lambda name, *classes: stand_in(name)\n"  # without the classes
        "start.import_lightning()\n"
        "print([name for name in sys.modules if name.startswith('lightning.')])\n"
        "from lightning.pytorch import Trainer\n"
        "from torchmetrics import Metric\n"
        "print(Metric.__mro__[-1].__name__)\n"
    )
    assert said.split() == ["[]", "object"]


def test_what_is_imported_already_is_left_alone() -> None:
    import torchmetrics
    from fmicl.training.startup import import_lightning

    import_lightning()
    assert sys.modules["torchmetrics"] is torchmetrics


@pytest.mark.parametrize(
    ("settings", "environment"), [({"device": "cpu"}, {}), ({"devices": 2}, {}), ({}, {"WORLD_SIZE": "2"})]
)
def test_a_gpu_is_only_woken_where_it_is_clear_which_one(
    settings: dict[str, Any], environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert wake_gpu(recipe(**settings)) is None


def test_waking_a_gpu_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    for name in ("WORLD_SIZE", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    asked = threading.Event()

    def broken() -> bool:
        asked.set()
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", broken)
    thread = wake_gpu(recipe())
    assert thread is not None
    thread.join(60)
    assert asked.is_set()
