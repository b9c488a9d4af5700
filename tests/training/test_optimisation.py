"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fmicl.methods import SimCLR
from fmicl.models.vision import SmallConv
from fmicl.training.optimisation import parameter_groups, warmup_cosine


def test_schedule_against_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(20):
        assert warmup_cosine(step + 5, 5, 25) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert [warmup_cosine(step, 5, 25) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


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
