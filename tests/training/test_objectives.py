"""Every objective trains on digits, with and without labels, and ends above the untrained encoder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmicl.config import OptimisationOptions, Settings, recipe
from fmicl.losses import OBJECTIVES
from fmicl.methods import Method
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.training.processes import find_processes
from fmicl.training.tasks.base import Context
from fmicl.training.tasks.images import ImageTask
from image_sets import make
from small_settings import digits, small
from train_run import train

CHANGES: dict[str, dict[str, Any]] = {
    # losses of a large scale; Barlow Twins needs a wider head than the recipe has
    "barlow_twins": {"barlow_scale": 0.1, "learning_rate": 0.05, "hidden": 512, "dim": 512},
    "vicreg": {"learning_rate": 0.05},
    "cross_entropy": {"labels": True},
    "renyi": {"temperature": 0.5},  # theirs
    "siglip": {"learning_rate": 0.05},  # its inner products are scaled by 10
}


def build(settings: Settings) -> tuple[ImageTask, TrainingModule]:
    """Task and module of these settings, with an optimiser but without a trainer."""
    torch.manual_seed(settings.seed)
    task = ImageTask(settings, Context(torch.device("cpu"), find_processes(1), lambda _: None))
    module = TrainingModule(task.build_method(), Optimisation.of(settings[OptimisationOptions], len(task.stream)))
    optimizer = module.configure_optimizers()
    module.optimizers = lambda *_, **__: optimizer  # type: ignore[assignment,method-assign]
    return task, module


def accuracies(**changes: Any) -> tuple[float, float]:
    """k-NN accuracy of the untrained and of the trained encoder, by a plain loop."""
    settings = recipe("digits", device="cpu", workers=0, **changes)
    task, module = build(settings)
    optimizer, monitor = module.optimizers(), task.monitor()
    assert isinstance(optimizer, torch.optim.Optimizer)
    before = monitor.measure(module.method, 0)
    for _ in range(settings.epochs):
        for batch in task.stream:
            optimizer.zero_grad()
            module.training_step(batch, 0)["loss"].backward()  # type: ignore[no-untyped-call, unused-ignore]
            module.on_after_backward()
            optimizer.step()
    after = monitor.measure(module.method, 0)
    assert before is not None
    assert after is not None
    return before, after


@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_each_objective_ends_above_the_untrained_encoder(objective: str) -> None:
    before, after = accuracies(objective=objective, **{"epochs": 5, **CHANGES.get(objective, {})})
    assert after > before


@pytest.mark.slow
@pytest.mark.parametrize("objective", OBJECTIVES.names())
def test_each_objective_ends_above_the_untrained_encoder_by_its_run(objective: str, tmp_path: Path) -> None:
    changes = {**CHANGES.get(objective, {}), "epochs": 30, "baselines": True, "monitor_every": 0}
    run = train(recipe("digits", objective=objective, device="cpu", **changes), out=tmp_path / "run")
    results = json.loads(run.results.read_text())
    assert results["knn"] > results["untrained"]["knn"]
    assert results["linear"] > results["untrained"]["linear"]


@pytest.mark.parametrize("objective", ["fmicl", "infonce"])
def test_labels_help(objective: str) -> None:
    """After as many steps, training with labels is above training without, and above training with wrong ones."""
    changes = {"objective": objective, "divergence": "js", "epochs": 6}  # at 3, seeds differ as much

    def mean(**extra: object) -> float:
        return sum(accuracies(**changes, **extra, seed=seed)[1] for seed in (0, 1)) / 2

    true = mean(labels=True)
    assert true > mean()
    assert true > mean(labels=True, label_noise=1.0)


class Spy(nn.Module):
    """An objective that keeps the labels of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor | None] = []

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        del negatives
        self.seen.append(labels)
        return (x - y).square().mean()


@pytest.mark.parametrize(
    ("changes", "calls", "views"),
    [
        ({}, 1, 1),
        ({"multiplicity": 3}, 3, 1),
        ({"method": "mocov3"}, 2, 1),
        ({"method": "moco", "queue": 600}, 1, 1),
        ({"method": "moco", "queue": 600, "symmetric": True}, 1, 2),
    ],
    ids=str,
)
def test_the_objective_gets_the_labels_of_the_batch(changes: dict[str, Any], calls: int, views: int) -> None:
    task, module = build(digits(labels=True, **changes))
    module.method.objective = spy = Spy()
    batch = next(iter(task.stream))
    assert task.splits.train is not None
    assert task.splits.train.labels is not None
    module.training_step(batch, 0)
    expected = task.splits.train.labels[batch.index].repeat(views)
    assert len(spy.seen) == calls
    assert all(labels is not None and torch.equal(labels, expected) for labels in spy.seen)


def test_without_labels_the_objective_gets_none() -> None:
    task, module = build(digits())
    module.method.objective = spy = Spy()
    module.training_step(next(iter(task.stream)), 0)
    assert spy.seen == [None]


def test_noise_is_that_of_the_seed() -> None:
    def labels(**changes: Any) -> Tensor:
        stream = build(digits(labels=True, **changes))[0].stream
        assert stream.labels is not None  # type: ignore[attr-defined]
        return stream.labels  # type: ignore[attr-defined, no-any-return]

    noisy = labels(label_noise=0.2)
    assert float((noisy != labels()).float().mean()) == pytest.approx(0.2, abs=1e-3)
    assert torch.equal(noisy, labels(label_noise=0.2))
    assert not torch.equal(noisy, labels(label_noise=0.2, seed=1))


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize("objective", ["fmicl", "infonce", "cross_entropy"])
def test_a_folder_of_classes_trains_with_labels(objective: str, tmp_path: Path) -> None:
    folder = make("images", tmp_path, n=12)
    settings = small("images", folder, labels=True, objective=objective, label_noise=0.2, epochs=1, monitor_every=0)
    run = train(settings, out=tmp_path / "run")
    assert run.checkpoint.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"objective": "spectral", "labels": True}, "spectral.*infonce"),
        ({"objective": "cross_entropy"}, "cross_entropy.*--labels"),
        ({"method": "moco", "labels": True, "label_negatives": "other_classes"}, "moco.*--label-negatives"),
        ({"labels": True, "label_noise": 1.5}, "label_noise.*1.5"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        digits(**changes)


def test_text_has_no_labels() -> None:
    with pytest.raises(ValueError, match="cross_entropy"):
        recipe("wikipedia", objective="cross_entropy")
    assert "label_negatives" in recipe("wikipedia", label_negatives="other_classes").unused()


def test_options_of_labels_have_no_effect_without_them() -> None:
    changes = {"label_noise": 0.2, "label_negatives": "other_classes"}
    assert set(digits(**changes).unused()) == set(changes)
    assert digits(**changes).hash == digits().hash
    assert digits(labels=True, **changes).unused() == {}


def test_a_method_forgets_labels() -> None:
    """A call without labels after one with them has none."""
    task, module = build(digits(labels=True))
    method: Method = module.method
    method.objective = spy = Spy()
    batch = next(iter(task.stream))
    method.loss(batch.first, batch.second, labels=batch.labels)
    method.loss(batch.first, batch.second)
    assert spy.seen[1] is None
