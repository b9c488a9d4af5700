"""The methods against plain derivations: pairs, queue, momentum, and every objective with each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from fmicl.methods import METHODS, Method, MoCo, MoCoV3, MomentumMethod
from fmicl.methods.simclr import anchored_pairs
from fmicl.models.vision import SmallConv
from two_processes import of_two_processes

OBJECTIVES: dict[str, Callable[[], nn.Module]] = {
    "fmicl": lambda: fmicl.FMICLLoss("js"),
    "infonce": lambda: fmicl.InfoNCELoss(0.2),
    "align_uniform": lambda: fmicl.AlignUniformLoss(),
    "spectral": lambda: fmicl.SpectralContrastiveLoss(),
}


def two_views(n: int = 6) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8)


def build(name: str, objective: nn.Module, **options: Any) -> Method:
    torch.manual_seed(0)
    if name == "moco":
        options.setdefault("queue", 16)
    return METHODS[name].value.method(SmallConv(1, 4), objective, dim=8, hidden=16, **options)


def test_simclr_is_the_objective_of_both_views() -> None:
    method = build("simclr", fmicl.FMICLLoss("kl")).eval()
    first, second = two_views()
    expected = fmicl.FMICLLoss("kl")(method.embed(first), method.embed(second))
    found = method.compare_views(first, second)
    torch.testing.assert_close(found.loss, expected)
    assert found.terms is not None
    torch.testing.assert_close(found.terms.sum(), expected.detach())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_simclr_of_more_views_is_the_mean_over_all_pairs(objective: str) -> None:
    method = build("simclr", OBJECTIVES[objective]()).eval()
    views = torch.randn(4, 6, 1, 8, 8)
    embedded = [method.embed(view) for view in views]
    pairs = [(0, 1), (2, 0), (0, 3), (1, 2), (3, 1), (2, 3)]
    expected = torch.stack([method.objective(embedded[i], embedded[j]) for i, j in pairs]).mean()
    found = method.loss(views[0], views[1:].flatten(0, 1))
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close((found.first, found.second), (embedded[0].detach(), embedded[1].detach()))
    if found.terms is not None:
        torch.testing.assert_close(found.terms.sum(), expected.detach())
    found.loss.backward()
    assert all(p.grad is not None for p in method.parameters())


@pytest.mark.parametrize("views", range(2, 10))
def test_every_two_views_are_one_pair_and_each_is_the_anchor_equally_often(views: int) -> None:
    pairs = anchored_pairs(views)
    assert sorted(sorted(pair) for pair in pairs) == [[i, j] for i in range(views) for j in range(i + 1, views)]
    anchors = [sum(anchor == view for anchor, _ in pairs) for view in range(views)]
    assert max(anchors) - min(anchors) == (views + 1) % 2
    assert pairs[0] == (0, 1)


@pytest.mark.parametrize(("name", "others"), [("simclr", 9), ("simclr", 0), ("moco", 12), ("mocov3", 12)])
def test_views_that_do_not_belong_together_are_refused(name: str, others: int) -> None:
    method = build(name, fmicl.FMICLLoss("kl"))
    with pytest.raises(ValueError, match=f"6 .*{others} others"):
        method.loss(torch.randn(6, 1, 8, 8), torch.randn(others, 1, 8, 8))


def test_moco_with_infonce_is_mocos_formula() -> None:
    method = build("moco", fmicl.InfoNCELoss(0.2)).eval()
    assert isinstance(method, MoCo)
    first, second = two_views()
    queue = method.queue.clone()
    q, k = F.normalize(method.embed(first), dim=1), F.normalize(method.target(second), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(6, dtype=torch.long))
    found = method.loss(first, second)
    torch.testing.assert_close(found.loss, expected)
    assert torch.equal(method.queue, queue)  # the backward pass needs it
    method.after_backward(found.second)
    torch.testing.assert_close(method.queue[:6], k)
    assert torch.equal(method.queue[6:], queue[6:])


@pytest.mark.parametrize("objective", ["infonce", "fmicl"])
def test_symmetric_moco_is_the_mean_of_both_directions(objective: str) -> None:
    method = build("moco", OBJECTIVES[objective](), symmetric=True)
    assert isinstance(method, MoCo)
    (first, second), queue = two_views(), method.queue.clone()
    # in training both views share the statistics of the batch, so they go through the networks together here too
    q1, q2 = method.embed(torch.cat([first, second])).chunk(2)
    k1, k2 = method.target(torch.cat([first, second])).chunk(2)
    expected = (method.objective(q1, k2, negatives=queue) + method.objective(q2, k1, negatives=queue)) / 2
    found = method.loss(first, second)
    torch.testing.assert_close(found.loss, expected)
    method.after_backward(found.second)
    torch.testing.assert_close(method.queue[:12], F.normalize(torch.cat([k2, k1]), dim=1))
    assert torch.equal(method.queue[12:], queue[12:])


def test_mocov3_with_infonce_is_symmetric_cross_entropy() -> None:
    method = build("mocov3", fmicl.InfoNCELoss(0.2, negatives="cross")).eval()
    assert isinstance(method, MoCoV3)
    views = two_views()
    total = torch.zeros(())
    for one, other in (views, views[::-1]):
        q, k = F.normalize(method.predict(one), dim=1), F.normalize(method.target(other), dim=1)
        total = total + F.cross_entropy(q @ k.T / 0.2, torch.arange(6)) / 2
    torch.testing.assert_close(method.loss(*views).loss, total)


@pytest.mark.parametrize("name", ["moco", "mocov3"])
def test_with_past_statistics_a_key_does_not_depend_on_its_batch(name: str) -> None:
    keys: dict[str, list[Tensor]] = {}
    for statistics in ("batch", "past"):
        method = build(name, fmicl.InfoNCELoss(), statistics=statistics)
        assert isinstance(method, MoCo | MoCoV3)
        method.target(torch.randn(6, 1, 8, 8))  # the first batch has none before it
        views = torch.randn(6, 1, 8, 8)
        others = torch.cat([views[:3], torch.randn(3, 1, 8, 8)])
        keys[statistics] = [copy.deepcopy(method).target(images)[:3] for images in (views, others)]
    torch.testing.assert_close(keys["past"][0], keys["past"][1])
    assert not torch.allclose(keys["batch"][0], keys["batch"][1], atol=1e-2)


def test_unknown_statistics_are_refused() -> None:
    with pytest.raises(ValueError, match=r"statistics .*'running'"):
        build("moco", fmicl.InfoNCELoss(), statistics="running")


def test_past_statistics_leave_names_and_shapes_of_the_state_alone() -> None:
    plain, past = (build("moco", fmicl.InfoNCELoss(), statistics=s) for s in ("batch", "past"))
    assert {k: v.shape for k, v in plain.state_dict().items()} == {k: v.shape for k, v in past.state_dict().items()}
    assert not any(p.requires_grad for n, p in past.named_parameters() if n.startswith("target"))


def test_queue_wraps_round_and_overwrites_the_oldest() -> None:
    method = build("moco", nn.Identity(), queue=5)
    assert isinstance(method, MoCo)
    for value in range(1, 4):
        keys = torch.zeros(2, 8)
        keys[:, value] = 3.0  # enqueued at unit length
        method.enqueue(keys)
    assert method.queue.argmax(1).tolist() == [3, 1, 2, 2, 3]
    assert int(method.queue_position) == 1
    torch.testing.assert_close(method.queue.norm(dim=1), torch.ones(5))
    with pytest.raises(ValueError, match="queue"):
        method.enqueue(torch.ones(6, 8))


@pytest.mark.parametrize("name", ["moco", "mocov3", "byol"])
def test_momentum_encoder_is_a_moving_average(name: str) -> None:
    method = build(name, nn.Identity())
    assert isinstance(method, MomentumMethod)
    online, target = ((m.encoder, m.projection) for m in (method, copy.deepcopy(method)))
    with torch.no_grad():
        for part in online:
            for parameter in part.parameters():
                parameter.add_(1.0)
    method.start_step(0.0)
    for old, trained, new in zip(target, online, (method.target_encoder, method.target_projection), strict=True):
        for a, b, c in zip(old.parameters(), trained.parameters(), new.parameters(), strict=True):
            torch.testing.assert_close(c, 0.99 * a + 0.01 * b)


@pytest.mark.parametrize(
    ("name", "options", "end"),
    [("mocov3", {}, 1.0), ("byol", {}, 1.0), ("moco", {}, 0.99), ("moco", {"final_momentum": 0.999}, 0.999)],
)
def test_momentum_rises_to_its_end_along_a_cosine(name: str, options: dict[str, float], end: float) -> None:
    method = build(name, nn.Identity(), **options)
    assert isinstance(method, MomentumMethod)
    values = [method.momentum(t / 4) for t in range(5)]
    assert values == pytest.approx([end - (end - 0.99) * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)])
    assert values[-1] == end


def test_queue_holds_the_keys_of_all_processes_in_rank_order(tmp_path: Path) -> None:
    script = """
        from fmicl.methods import MoCo
        from fmicl.models.vision import SmallConv
        torch.manual_seed(0)
        method = MoCo(SmallConv(1, 4), nn.Identity(), dim=4, hidden=8, queue=6)
        keys = torch.zeros(2, 4)
        keys[0, 2 * rank] = keys[1, 2 * rank + 1] = 1.0
        method.enqueue(keys)
        result = method.queue
    """
    queues = of_two_processes(script, tmp_path)
    assert torch.equal(queues[0], queues[1])
    assert torch.equal(queues[0][:4], torch.eye(4))
