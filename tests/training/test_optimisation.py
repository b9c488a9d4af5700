"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fmicl
from fmicl.config import OptimisationOptions
from fmicl.methods import SimCLR
from fmicl.models.vision import SmallConv
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import LARS, Optimisation, build_optimizer, parameter_groups, rate_factor
from small_settings import digits


def test_schedule_against_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(20):
        assert rate_factor("cosine", step + 5, 5, 25) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert [rate_factor("cosine", step, 5, 25) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_lars_is_its_formula() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = build_optimizer(module, Optimisation(optimizer="lars", learning_rate=0.3, weight_decay=0.1))
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    velocities = {name: torch.zeros_like(p) for name, p in weights.items()}
    torch.manual_seed(0)
    for scale in (10.0, 1e-3, 0.0):  # a step that is scaled down, one that is not, and no gradient
        for p in module.parameters():
            p.grad = scale * torch.randn_like(p)
        for name, p in module.named_parameters():
            assert p.grad is not None
            update, w = p.grad, weights[name]
            if p.ndim > 1:
                trust = 0.02 * float(w.norm()) / (0.3 * (float(update.norm()) + 0.1 * float(w.norm())))
                update = (min(trust, 1.0) if scale else 1.0) * (update + 0.1 * w)
            velocities[name] = 0.9 * velocities[name] + update
            weights[name] = w - 0.3 * velocities[name]
        optimizer.step()
        for name, p in module.named_parameters():
            torch.testing.assert_close(p.detach(), weights[name], msg=name)


def test_lars_without_its_bound_is_lightlys() -> None:
    lars = pytest.importorskip("lightly.utils.lars", reason="lightly is not installed")
    torch.manual_seed(0)
    ours, theirs = (nn.Parameter(torch.ones(3, 2)) for _ in range(2))
    # while the scale is below 1, lr times it is theirs at a learning rate of 1
    mine = LARS([ours], 0.5, weight_decay=0.1, eta=0.02)
    other = lars.LARS([theirs], 1.0, momentum=0.9, weight_decay=0.1, trust_coefficient=0.02)
    for _ in range(3):
        ours.grad = torch.randn(3, 2)
        theirs.grad = ours.grad.clone()
        mine.step()
        other.step()
        torch.testing.assert_close(ours, theirs)


def test_only_weights_decay() -> None:
    method = SimCLR(SmallConv(1, 4), nn.Identity(), dim=8, hidden=16)
    decayed, free = parameter_groups(method, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    names = {id(p): name for name, p in method.named_parameters()}
    assert all(names[id(p)].endswith("weight") and p.ndim > 1 for p in decayed["params"])
    norms = {id(p) for m in method.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for p in m.parameters()}
    biases = {id(p) for name, p in method.named_parameters() if name.endswith("bias")}
    assert {id(p) for p in free["params"]} == norms | biases


def test_parameters_of_the_objective_are_trained() -> None:
    order, gamma = (nn.Parameter(torch.tensor(value, dtype=torch.float64)) for value in (1.5, 1.0))
    mine = fmicl.Divergence.from_generator(lambda u: (u**order - 1) / (order - 1))
    torch.manual_seed(0)
    method = SimCLR(SmallConv(1), fmicl.FMICLLoss(mine, gamma=gamma), dim=8, hidden=16)
    optimizer = build_optimizer(method, Optimisation(learning_rate=1e-3))
    (group,) = (group for group in optimizer.param_groups if any(each is order for each in group["params"]))
    assert group["weight_decay"] == 0
    for _ in range(2):
        optimizer.zero_grad()
        method.loss(*torch.randn(2, 6, 1, 8, 8)).loss.backward()
        optimizer.step()
    assert float(order.detach()) != 1.5
    assert float(gamma.detach()) != 1.0
    assert {"objective.gamma", "objective.learned.0"} <= set(method.state_dict())


@pytest.mark.parametrize(("optimizer", "factor"), [("sgd", 1 / 8), ("lars", 1 / 8), ("adamw", 1.0)])
def test_learned_scalars_have_a_learning_rate_of_their_own(optimizer: str, factor: float) -> None:
    """SigLIP's scale and bias, to whose gradient all pairs of a batch add."""
    settings = digits(objective="siglip", optimizer=optimizer, batch_size=8, warmup_epochs=0.0)
    optimisation = Optimisation.of(settings[OptimisationOptions], batches_per_epoch=1)
    module = TrainingModule(SimCLR(SmallConv(1), fmicl.SigLIPLoss(), dim=8, hidden=16), optimisation)
    groups = build_optimizer(module, optimisation)
    module.optimizers = lambda *_, **__: groups  # type: ignore[assignment,method-assign]
    module.start_step()
    scalars = {id(p): group["lr"] for group in groups.param_groups for p in group["params"] if p.ndim == 0}
    assert scalars == {
        id(p): pytest.approx(factor * module.learning_rate) for p in module.method.objective.parameters()
    }
    assert all(group["lr"] == module.learning_rate for group in groups.param_groups if group["params"][0].ndim > 0)
