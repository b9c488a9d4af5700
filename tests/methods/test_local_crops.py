"""Multi-crop: local crops as further positives, in every method that compares views."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fmicl
from fmicl.config import recipe
from fmicl.methods import BYOL, DIM, METHODS, Method, MoCo, MoCoV3, SimCLR, SwAV
from fmicl.methods.swav import SwappedPredictionLoss
from fmicl.models.vision import SmallConv
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method

N, CROPS = 5, 3


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    first, second = torch.randn(2, N, 1, 8, 8, generator=generator)
    return first, second, torch.randn(CROPS * N, 1, 4, 4, generator=generator)


def build(kind: Any, objective: nn.Module | None = None, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(SmallConv(1, 4), objective, dim=8, hidden=16, **options).eval()


def parts(method: Method) -> tuple[Tensor, Tensor, list[Tensor]]:
    first, second, local = batch()
    return method.embed(first), method.embed(second), [method.embed(crop) for crop in local.split(N)]


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def test_simclr_pairs_each_crop_with_each_view() -> None:
    method = build(SimCLR, fmicl.FMICLLoss("js"))
    one, two, crops = parts(method)
    pairs = [(one, two), *((crop, one) for crop in crops), *((two, crop) for crop in crops)]
    torch.testing.assert_close(method.loss(*batch()).loss, mean([method.objective(x, y) for x, y in pairs]))


@pytest.mark.parametrize("symmetric", [True, False])
def test_moco_takes_crops_as_queries_alone(symmetric: bool) -> None:
    method = build(MoCo, fmicl.FMICLLoss("js"), queue=16, symmetric=symmetric)
    one, two, crops = parts(method)
    first, second, _ = batch()
    keys = [method.target(second), method.target(first)] if symmetric else [method.target(second)]
    pairs = [*zip((one, two), keys, strict=False), *((crop, key) for key in keys for crop in crops)]
    found = method.loss(*batch())
    expected = mean([method.objective(q, k, negatives=method.queue) for q, k in pairs])
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.second, torch.cat(keys))  # what is enqueued


@pytest.mark.parametrize("kind", [MoCoV3, BYOL])
def test_crops_predict_the_keys_of_both_views(kind: Any) -> None:
    method = build(kind, fmicl.InfoNCELoss(negatives="cross") if kind is MoCoV3 else None)
    one, two, crops = parts(method)
    k1, k2 = (method.target(view) for view in batch()[:2])
    pairs = [(one, k2), (two, k1), *((crop, key) for crop in crops for key in (k1, k2))]
    expected = mean([method.objective(method.predictor(x), key) for x, key in pairs])
    torch.testing.assert_close(method.loss(*batch()).loss, expected)


def test_crops_predict_swavs_assignments_and_have_none() -> None:
    method = build(SwAV, SwappedPredictionLoss(8, 6))
    one, two, crops = parts(method)
    pairs = [(x, y) for x, other in ((one, two), (two, one)) for y in (other, *crops)]
    torch.testing.assert_close(method.loss(*batch()).loss, mean([method.objective(x, y) for x, y in pairs]))


def test_vectors_of_crops_are_pairs_of_both_maps_in_dim() -> None:
    method = build(DIM, local_width=16, global_weight=0.0)
    one, two, crops = parts(method)
    maps = [method.encoder.forward_features(view).flatten(2).transpose(1, 2) for view in batch()[:2]]
    places = [method.local_head(m.flatten(0, 1)).unflatten(0, m.shape[:2]) for m in maps]
    pairs = [(places[0], two), (places[1], one), *((place, crop) for place in places for crop in crops)]
    expected = mean([method.objective(x, y.unsqueeze(1)) for x, y in pairs])
    torch.testing.assert_close(method.loss(*batch()).loss, expected)


@pytest.mark.parametrize("name", [name for name in METHODS.names() if METHODS[name].value.method.local_crops])
def test_crops_leave_running_statistics_alone(name: str) -> None:
    settings = recipe("digits", method=name, hidden=16, dim=8, queue=64, prototypes=8, local_crops=CROPS)
    states = []
    for crops in (False, True):
        torch.manual_seed(0)
        method = build_image_method(settings, build_image_encoder(settings))
        method.loss(*batch()[: 3 if crops else 2])
        states.append({k: v for k, v in method.state_dict().items() if "running" in k and "predictor" not in k})
    assert states[0]
    for key, value in states[0].items():
        torch.testing.assert_close(states[1][key], value, msg=key)


def test_methods_without_pairs_of_views_take_none() -> None:
    with pytest.raises(ValueError, match=r"cpc .*local_crops is 2"):
        recipe("digits", method="cpc", local_crops=2)
    method = build(METHODS["cpc"].value.method)
    with pytest.raises(ValueError, match="CPC takes no local crops"):
        method.loss(*batch())
    with pytest.raises(ValueError, match="14 of 5"):
        build(BYOL).loss(*batch()[:2], torch.randn(14, 1, 4, 4))


def test_an_encoder_that_cannot_take_crops_is_refused_before_training() -> None:
    settings = recipe("cifar10", encoder="vit_tiny_patch16_224", stem="auto", depth=1, local_crops=2)
    with pytest.raises(ValueError, match=r"14 x 14.*--local-size 32"):
        build_image_encoder(settings)
    build_image_encoder(settings.replace(local_size=32))
