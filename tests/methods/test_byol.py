"""BYOL against its formula and lightly's parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fmicl
from fmicl.config import recipe
from fmicl.methods import BYOL
from fmicl.methods.byol import PredictionLoss
from fmicl.models.vision import SmallConv
from fmicl.training.pipeline import settings_warnings
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method


def views(n: int = 6) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return first, second


def build(**options: Any) -> BYOL:
    torch.manual_seed(0)
    return BYOL(SmallConv(1, 4), dim=8, hidden=16, **options)


def test_loss_is_the_mean_of_2_minus_2_cosines_in_both_directions() -> None:
    method = build().eval()
    first, second = views()
    total = torch.zeros(())
    for one, other in ((first, second), (second, first)):
        for q, k in zip(method.predict(one), method.target(other), strict=True):
            total = total + (2 - 2 * (q @ k) / (q.norm() * k.norm())) / 12
    found = method.loss(first, second)
    torch.testing.assert_close(found.loss, total)
    found.loss.backward()
    assert all(p.grad is None for p in method.target_encoder.parameters())
    assert all(p.grad is not None for p in method.parameters() if p.requires_grad)


def test_loss_is_lightlys() -> None:
    lightly = pytest.importorskip("lightly.loss", reason="lightly is not installed")
    x, y = torch.randn(2, 9, 5)
    torch.testing.assert_close(PredictionLoss()(x, y), 2 + 2 * lightly.NegativeCosineSimilarity()(x, y))


def test_momentum_schedule_is_lightlys() -> None:
    scheduler = pytest.importorskip("lightly.utils.scheduler", reason="lightly is not installed")
    method = build(momentum=0.996)
    theirs = [scheduler.cosine_schedule(step, 11, 0.996, 1.0) for step in range(11)]  # ends at its last step
    assert [method.momentum(step / 10) for step in range(11)] == pytest.approx(theirs)


def test_heads_have_two_layers_each_and_predictions_no_normalisation() -> None:
    method = build()
    for head in (method.projection, method.predictor):
        assert [type(layer).__name__ for layer in head.children()] == ["Linear", "BatchNorm1d", "ReLU", "Linear"]


def test_other_objectives_of_pairs_can_take_its_place() -> None:
    method = BYOL(SmallConv(1, 4), fmicl.FMICLLoss("js"), dim=8, hidden=16)
    assert method.loss(*views()).terms is not None


def test_options_of_objectives_are_said_to_have_no_effect() -> None:
    changes = {"objective": "infonce", "divergence": "tsallis", "order": 2.0, "alpha": 1.0, "negatives": "both"}
    settings = recipe("digits", method="byol", **changes)
    assert settings.unused() == dict.fromkeys(settings.unused(), "method byol has a loss of its own")
    assert set(settings.unused()) == set(changes)
    assert settings.hash == recipe("digits", method="byol").hash
    warned = [line for line in settings_warnings(settings, 64) if "has no effect: method byol" in line]
    assert len(warned) == len(changes)
    assert "alpha" not in settings.objective_options.collapse_advice(settings.objective_context())


def test_rotation_prediction_is_by_kl() -> None:
    settings = recipe("digits", method="byol", divergence="js", rotation_weight=0.4, hidden=16, dim=8)
    method = build_image_method(settings, build_image_encoder(settings))
    assert isinstance(method.objective, PredictionLoss)
    assert method.rotation is not None
    assert method.rotation.divergence.name == "kl"
    assert method.loss(*views()).rotation is not None
