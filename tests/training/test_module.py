"""The LightningModule around a method: batch normalisation over processes, memory format, state."""

from __future__ import annotations

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from fmicl.data import Batch
from fmicl.methods import SimCLR
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from small_settings import digits


def some_module(**changes: object) -> TrainingModule:
    settings = digits(encoder="resnet18", mean=(0.5,) * 3, std=(0.5,) * 3, **changes)
    torch.manual_seed(0)
    module = TrainingModule(
        build_image_method(settings, build_image_encoder(settings)),
        Optimisation(warmup_steps=2, total_batches=7, accumulate=2),
    )
    optimizer = module.configure_optimizers()
    module.optimizers = lambda *_, **__: optimizer  # type: ignore[assignment,method-assign]
    return module


def some_batch() -> Batch:
    first, second = torch.randn(2, 6, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return Batch(first, second, torch.arange(6))


def test_channels_last_changes_the_layout_and_not_the_numbers() -> None:
    module = some_module()
    layouts: list[bool] = []
    module.method.encoder.register_forward_pre_hook(
        lambda _, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    plain = module.training_step(some_batch(), 0)["loss"]
    module.channels_last = True
    module.to(memory_format=torch.channels_last)
    converted = module.training_step(some_batch(), 0)["loss"]
    assert layouts == [False, True]
    torch.testing.assert_close(plain, converted, rtol=1e-4, atol=1e-4)


def test_step_and_learning_rate_follow_from_the_number_of_batches() -> None:
    """Two batches a step; the last step has one batch only."""
    module = some_module()
    seen = []
    for module.batches in range(8):
        seen.append((module.step, module.progress, module.learning_rate))
    steps = [0, 0, 1, 1, 2, 2, 3, 4]
    assert [step for step, _, _ in seen] == steps
    assert [progress for _, progress, _ in seen] == [step / 4 for step in steps]
    assert [rate for _, _, rate in seen] == pytest.approx([0.1 * {0: 0.5, 1: 1, 2: 1, 3: 0.5, 4: 0}[s] for s in steps])


def test_momentum_encoder_and_learning_rate_change_once_per_step() -> None:
    module = some_module(method="moco", queue=16)
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    started: list[float] = []
    module.method.start_step = started.append  # type: ignore[assignment]
    rates = []
    for index in range(4):
        module.training_step(some_batch(), index)["loss"].backward()
        module.on_after_backward()
        rates.append(optimizer.param_groups[0]["lr"])
    assert started == [0, 0.25]
    assert rates == pytest.approx([0.05, 0.05, 0.1, 0.1])
    assert int(module.method.queue_position) == 4 * 6 % 16  # type: ignore[arg-type]
    assert module.batches == 4


def test_synchronised_batchnorm_keeps_the_activation_and_the_names() -> None:
    class Encoder(nn.Sequential):
        num_features = 8

    encoder = Encoder(nn.Conv2d(1, 8, 3), BatchNormAct2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(1))
    method = SimCLR(encoder, nn.Identity(), projection=nn.Identity()).eval()
    views = torch.randn(3, 1, 8, 8)
    before, names = method.embed(views), list(method.state_dict())
    TrainingModule(method, Optimisation()).synchronise_batchnorm()
    assert [type(m).__name__ for m in encoder] == [
        "Conv2d", "SyncBatchNormAct", "Conv2d", "SyncBatchNorm", "Flatten"
    ]  # fmt: skip
    assert torch.equal(method.embed(views), before)
    assert list(method.state_dict()) == names
