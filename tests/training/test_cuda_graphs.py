"""Training with CUDA graphs and fused kernels against plain training, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fmicl.config import OptimisationOptions, Settings, recipe
from fmicl.data import ArraySamples, ViewStream
from fmicl.data.augmentations.views import LocalCropOptions, SecondViewOptions, Views, view_pair
from fmicl.methods import Method
from fmicl.models.fast import capture_graph
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")

STEPS = 4


def build(settings: Settings, device: torch.device, objective: nn.Module | None = None) -> TrainingModule:
    """The module of these settings, with an optimiser but without a trainer."""
    torch.manual_seed(0)
    method = build_image_method(settings, build_image_encoder(settings))
    method.objective = objective or method.objective
    module = TrainingModule(method, Optimisation.of(settings[OptimisationOptions], STEPS)).to(device)
    optimizer = module.configure_optimizers()
    module.optimizers = lambda *_, **__: optimizer  # type: ignore[assignment,method-assign]
    return module


def stream_of(settings: Settings, images: torch.Tensor, device: torch.device, *, compile: bool = False) -> ViewStream:
    families = view_pair(settings[Views], settings[SecondViewOptions])
    local = settings[LocalCropOptions].views(settings[Views]), settings.local_crops
    return ViewStream(
        ArraySamples(images), families, 64, seed=0, device=device, multiplicity=settings.multiplicity, local=local,
        compile=compile,
    )  # fmt: skip


def trained(changes: dict[str, Any], *, faster: bool, half: bool = False) -> tuple[list[float], Method]:
    """Losses of some steps, and the trained method."""
    settings = recipe("cifar10", batch_size=64, queue=256, learning_rate=0.02, **changes)
    device = torch.device("cuda")
    images = torch.randint(256, (64 * STEPS, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    module = build(settings, device)
    optimizer = module.optimizers()
    assert isinstance(optimizer, torch.optim.Optimizer)
    if faster:
        module.accelerate(device)
        assert module.capture
    losses = []
    for batch in stream_of(settings, images, device, compile=faster):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16, enabled=half):
            loss = module.training_step(batch, 0)["loss"]
        loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
        module.on_after_backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert not faster or (module.capture and module._captured is not None)
    return losses, module.method


every_kind = pytest.mark.parametrize(
    "changes",
    [
        {},
        {"divergence": "js", "negatives": "both"},
        {"shift": "optimal"},
        {"divergence": "js", "shift": "optimal"},
        {"method": "moco", "divergence": "pearson", "shift": "optimal"},
        {"divergence": "js", "alpha": "auto"},
        {"divergence": "pearson", "skew": 0.1},
        {"divergence": "learned", "alpha": "auto"},
        {"method": "moco", "divergence": "learned", "alpha": "auto", "skew": 0.1},
        {"multiplicity": 4},
        {"objective": "infonce"},
        {"objective": "align_uniform"},
        {"objective": "spectral"},
        {"method": "moco", "objective": "infonce"},
        {"method": "moco", "divergence": "vlc"},
        {"method": "moco", "symmetric": True},
        {"method": "moco", "key_statistics": "batch", "symmetric": True},
        {"method": "mocov3"},
        {"method": "byol"},
        {"method": "byol", "optimizer": "lars"},
        {"method": "swav", "prototypes": 50},
        {"method": "swav", "prototypes": 50, "sinkhorn_queue": 128, "sinkhorn_queue_start": 0.0, "local_crops": 2},
        {"method": "cpc", "objective": "infonce"},
        {"method": "dim", "divergence": "js"},
        {"local_crops": 2},
        {"method": "moco", "symmetric": True, "local_crops": 2},
        {"rotation_weight": 0.4},
        {"method": "moco", "symmetric": True, "rotation_weight": 0.4, "divergence": "pearson"},
    ],
    ids=lambda changes: " ".join(f"{key}={value}" for key, value in changes.items()) or "simclr",
)


@every_kind
def test_captured_steps_equal_plain_ones(changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    plain, before = trained(changes, faster=False)
    seen, after = trained(changes, faster=True)
    assert seen == pytest.approx(plain, rel=2e-3, abs=2e-4)
    for (name, mine), theirs in zip(after.state_dict().items(), before.state_dict().values(), strict=True):
        if mine.is_floating_point():
            assert float((mine - theirs).norm()) <= 2e-2 * float(theirs.norm()) + 1e-3, name
        else:
            assert torch.equal(mine, theirs), name


@every_kind
def test_captured_steps_in_half_precision(changes: dict[str, Any]) -> None:
    """The default in training, with another kernel of the loss."""
    plain, _ = trained(changes, faster=False, half=True)
    seen, _ = trained(changes, faster=True, half=True)
    assert seen == pytest.approx(plain, rel=2e-2, abs=2e-2)


def test_dropout_differs_in_every_captured_step() -> None:
    network = torch.nn.Dropout(0.5).cuda().train()
    x = torch.ones(64, 64, device="cuda")
    run = capture_graph(lambda x: (network(x), network(x)), [network], x)
    torch.manual_seed(1)
    one, other = (value.clone() for value in run(x))
    assert not torch.equal(one, other)
    torch.manual_seed(2)
    assert not torch.equal(run(x)[0], one)
    torch.manual_seed(1)
    assert torch.equal(run(x)[0], one)


def test_frozen_layers_stay_frozen_in_a_captured_step() -> None:
    network = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)).cuda().train()
    network[1].eval()
    x = torch.randn(8, 4, device="cuda")
    before = network(x).detach()
    captured = capture_graph(lambda images: (network(images),), [network], x)
    torch.testing.assert_close(captured(x)[0], before)
    assert [module.training for module in network] == [True, False]
    assert int(network[1].num_batches_tracked) == 0  # type: ignore[arg-type]


def test_parameters_of_the_objective_get_gradients_in_a_captured_step() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(()))

        def forward(self, x: torch.Tensor, y: torch.Tensor, **_: Any) -> torch.Tensor:
            return self.scale * (x - y).square().mean()

    scales = []
    settings, device = recipe("cifar10", batch_size=64), torch.device("cuda")
    images = torch.randint(256, (64, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for faster in (False, True):
        objective = Scaled()
        module = build(settings, device, objective)
        if faster:
            module.accelerate(device)
        (batch,) = stream_of(settings, images, device)
        module.training_step(batch, 0)["loss"].backward()  # type: ignore[no-untyped-call, unused-ignore]
        assert not faster or module._captured is not None
        assert objective.scale.grad is not None
        scales.append(float(objective.scale.grad))
    assert scales[1] == pytest.approx(scales[0], rel=2e-2)
