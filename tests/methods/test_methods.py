"""The methods against plain derivations: pairs, queue, momentum, schedules, and every objective with each."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from timm.layers.norm_act import BatchNormAct2d
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from fmicl.data import Batch
from fmicl.methods import METHODS, Method, MoCo, MoCoV3, Optimisation, SimCLR, method_class, parameter_groups
from fmicl.methods.base import _seed, warmup_cosine
from fmicl.methods.simclr import anchored_pairs
from fmicl.models.vision import SmallConv
from two_processes import of_two_processes

OBJECTIVES: dict[str, Callable[[], nn.Module]] = {
    "fmicl": lambda: fmicl.FMICLLoss("js"),
    "infonce": lambda: fmicl.InfoNCELoss(0.2),
    "align_uniform": lambda: fmicl.AlignUniformLoss(),
    "spectral": lambda: fmicl.SpectralContrastiveLoss(),
}


def batch(n: int = 6) -> Batch:
    return Batch(torch.randn(n, 1, 8, 8), torch.randn(n, 1, 8, 8), torch.arange(n))


def build(name: str, objective: nn.Module, **options: Any) -> Method:
    torch.manual_seed(0)
    if name == "moco":
        options.setdefault("queue", 16)
    return method_class(name)(SmallConv(1, 4), objective, Optimisation(total_steps=4), dim=8, hidden=16, **options)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_every_objective(name: str, objective: str) -> None:
    method = build(name, OBJECTIVES[objective]())
    pairs = method.pairs(*batch()[:2])
    pairs.loss.backward()
    assert torch.isfinite(pairs.loss)
    trained = [p for p in method.parameters() if p.requires_grad]
    assert all(p.grad is not None for p in trained)
    assert any(p.grad.abs().sum() > 0 for p in trained if p.grad is not None)
    if isinstance(method, MoCo | MoCoV3):
        assert all(p.grad is None for p in method.target_encoder.parameters())


def test_simclr_is_the_objective_of_both_views() -> None:
    method = build("simclr", fmicl.FMICLLoss("kl")).eval()
    views = batch()
    expected = fmicl.FMICLLoss("kl")(method.embed(views.first), method.embed(views.second))
    pairs = method.pairs(views.first, views.second)
    torch.testing.assert_close(pairs.loss, expected)
    assert pairs.terms is not None
    torch.testing.assert_close(pairs.terms.sum(), expected.detach())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_simclr_of_more_views_is_the_mean_over_all_pairs(objective: str) -> None:
    method = build("simclr", OBJECTIVES[objective]()).eval()
    views = torch.randn(4, 6, 1, 8, 8)
    embedded = [method.embed(view) for view in views]
    pairs = [(0, 1), (2, 0), (0, 3), (1, 2), (3, 1), (2, 3)]
    expected = torch.stack([method.objective(embedded[i], embedded[j]) for i, j in pairs]).mean()
    found = method.pairs(views[0], views[1:].flatten(0, 1))
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close((found.first, found.second), (embedded[0].detach(), embedded[1].detach()))
    if found.terms is not None:
        torch.testing.assert_close(found.terms.sum(), expected.detach())
    found.loss.backward()
    assert all(p.grad is not None for p in method.parameters())


@pytest.mark.parametrize("views", range(2, 10))
def test_every_two_views_are_a_pair_once_and_each_is_the_anchor_as_often(views: int) -> None:
    pairs = anchored_pairs(views)
    assert sorted(sorted(pair) for pair in pairs) == [[i, j] for i in range(views) for j in range(i + 1, views)]
    anchors = [sum(anchor == view for anchor, _ in pairs) for view in range(views)]
    assert max(anchors) - min(anchors) == (views + 1) % 2
    assert pairs[0] == (0, 1)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_a_step_draws_what_torchs_own_seed_gives(device: str) -> None:
    def drawn() -> list[Tensor]:
        return [torch.rand(5), torch.rand(5, device=device).cpu(), F.dropout(torch.ones(64, device=device)).cpu()]

    torch.manual_seed(2**62 + 7)
    expected = drawn()
    _seed(2**62 + 7, torch.device(device))
    assert all(torch.equal(a, b) for a, b in zip(drawn(), expected, strict=True))


@pytest.mark.parametrize(("name", "others"), [("simclr", 9), ("simclr", 0), ("moco", 12), ("mocov3", 12)])
def test_views_that_do_not_belong_together_are_refused(name: str, others: int) -> None:
    method = build(name, fmicl.FMICLLoss("kl"))
    views = batch()._replace(second=torch.randn(others, 1, 8, 8))
    with pytest.raises(ValueError, match=f"of 6 first views there are {others} others"):
        method.training_step(views, 0)


def test_moco_with_infonce_is_mocos_formula(monkeypatch: pytest.MonkeyPatch) -> None:
    method = build("moco", fmicl.InfoNCELoss(0.2)).eval()
    assert isinstance(method, MoCo)
    views = batch()
    queue = method.queue.clone()
    q, k = F.normalize(method.embed(views.first), dim=1), F.normalize(method.target(views.second), dim=1)
    logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], dim=1) / 0.2
    expected = F.cross_entropy(logits, torch.zeros(6, dtype=torch.long))
    monkeypatch.setattr(method, "on_step_start", lambda: None)  # there is no optimiser here
    torch.testing.assert_close(method.training_step(views, 0)["loss"], expected)
    method.on_after_backward()
    torch.testing.assert_close(method.queue[:6], k)
    torch.testing.assert_close(method.queue[6:], queue[6:])


@pytest.mark.parametrize("objective", ["infonce", "fmicl"])
def test_symmetric_moco_is_the_mean_of_both_directions(objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = build("moco", OBJECTIVES[objective](), symmetric=True)
    assert isinstance(method, MoCo)
    views, queue = batch(), method.queue.clone()
    # in training both views share the statistics of the batch, so they go through the networks together here too
    q1, q2 = method.embed(torch.cat([views.first, views.second])).chunk(2)
    k1, k2 = method.target(torch.cat([views.first, views.second])).chunk(2)
    expected = (method.objective(q1, k2, negatives=queue) + method.objective(q2, k1, negatives=queue)) / 2
    monkeypatch.setattr(method, "on_step_start", lambda: None)  # there is no optimiser here
    torch.testing.assert_close(method.training_step(views, 0)["loss"], expected)
    method.on_after_backward()
    torch.testing.assert_close(method.queue[:12], F.normalize(torch.cat([k2, k1]), dim=1))
    torch.testing.assert_close(method.queue[12:], queue[12:])


def test_mocov3_with_infonce_is_symmetric_cross_entropy() -> None:
    method = build("mocov3", fmicl.InfoNCELoss(0.2, negatives="cross")).eval()
    assert isinstance(method, MoCoV3)
    views = batch()
    total = torch.zeros(())
    for one, other in ((views.first, views.second), (views.second, views.first)):
        q, k = F.normalize(method.predict(one), dim=1), F.normalize(method.target(other), dim=1)
        total = total + F.cross_entropy(q @ k.T / 0.2, torch.arange(6)) / 2
    torch.testing.assert_close(method.pairs(views.first, views.second).loss, total)


@pytest.mark.parametrize("name", ["moco", "mocov3"])
def test_by_the_batches_before_a_key_does_not_depend_on_its_batch(name: str) -> None:
    keys: dict[str, list[Tensor]] = {}
    for statistics in ("batch", "past"):
        method = build(name, fmicl.InfoNCELoss(), statistics=statistics)
        assert isinstance(method, MoCo | MoCoV3)
        method.target(batch().first)  # the first batch has none before it
        views = batch().first
        others = torch.cat([views[:3], torch.randn(3, 1, 8, 8)])
        keys[statistics] = [copy.deepcopy(method).target(images)[:3] for images in (views, others)]
    torch.testing.assert_close(keys["past"][0], keys["past"][1])
    assert not torch.allclose(keys["batch"][0], keys["batch"][1], atol=1e-2)


def test_statistics_of_another_kind_are_refused() -> None:
    with pytest.raises(ValueError, match='"batch" or of the "past" ones, got \'running\''):
        build("moco", fmicl.InfoNCELoss(), statistics="running")


def test_normalisations_by_the_past_have_the_names_of_the_others() -> None:
    plain, past = (build("moco", fmicl.InfoNCELoss(), statistics=s) for s in ("batch", "past"))
    assert {k: v.shape for k, v in plain.state_dict().items()} == {k: v.shape for k, v in past.state_dict().items()}
    assert not any(p.requires_grad for n, p in past.named_parameters() if n.startswith("target"))


def test_shared_statistics_keep_the_activation_of_a_normalisation() -> None:
    class Encoder(nn.Sequential):
        num_features = 8

    encoder = Encoder(nn.Conv2d(1, 8, 3), BatchNormAct2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.Flatten(1))
    method = SimCLR(encoder, nn.Identity(), Optimisation(), projection=nn.Identity()).eval()
    views = torch.randn(3, 1, 8, 8)
    before, names = method.embed(views), list(method.state_dict())
    method.share_statistics()
    assert [type(m).__name__ for m in encoder] == [
        "Conv2d", "SyncBatchNormAct", "Conv2d", "SyncBatchNorm", "Flatten"
    ]  # fmt: skip
    assert torch.equal(method.embed(views), before)
    assert list(method.state_dict()) == names


def test_queue_wraps_round_and_overwrites_the_oldest() -> None:
    method = build("moco", nn.Identity(), queue=5)
    assert isinstance(method, MoCo)
    for value in range(1, 4):
        keys = torch.zeros(2, 8)
        keys[:, value] = 3.0  # enqueued at unit length
        method.enqueue(keys)
    directions = method.queue.argmax(1).tolist()
    assert directions == [3, 1, 2, 2, 3]
    assert int(method.queue_position) == 1
    torch.testing.assert_close(method.queue.norm(dim=1), torch.ones(5))
    with pytest.raises(ValueError, match="make queue larger"):
        method.enqueue(torch.ones(6, 8))


def test_the_queue_is_in_the_state() -> None:
    assert {"queue", "queue_position"} <= set(build("moco", nn.Identity()).state_dict())


@pytest.mark.parametrize("name", ["moco", "mocov3"])
def test_momentum_encoder_is_a_moving_average(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method = build(name, nn.Identity())
    assert isinstance(method, MoCo | MoCoV3)
    monkeypatch.setattr(Method, "on_step_start", lambda _: None)  # no optimiser here
    before = copy.deepcopy(method.target_encoder)
    with torch.no_grad():
        for parameter in method.encoder.parameters():
            parameter.add_(1.0)
    m = method.momentum()
    assert m == 0.99
    method.on_step_start()
    for old, online, new in zip(
        before.parameters(), method.encoder.parameters(), method.target_encoder.parameters(), strict=True
    ):
        torch.testing.assert_close(new, m * old + (1 - m) * online)


@pytest.mark.parametrize(
    ("name", "options", "end"),
    [("mocov3", {}, 1.0), ("moco", {}, 0.99), ("moco", {"final_momentum": 0.999}, 0.999)],
)
def test_momentum_rises_to_its_end_along_a_cosine(name: str, options: dict[str, float], end: float) -> None:
    method = build(name, nn.Identity(), **options)
    assert isinstance(method, MoCo | MoCoV3)
    values = []
    for method.batches in range(5):
        values.append(method.momentum())
    assert values == pytest.approx([end - (end - 0.99) * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(5)])
    assert values[-1] == end


def test_schedule_against_torchs_cosine() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=1.0)
    oracle = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    for step in range(20):
        assert warmup_cosine(step + 5, 5, 25) == pytest.approx(optimizer.param_groups[0]["lr"])
        optimizer.step()
        oracle.step()
    assert [warmup_cosine(step, 5, 25) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_only_weights_decay() -> None:
    method = build("simclr", nn.Identity())
    decayed, free = parameter_groups(method, 0.1)
    assert decayed["weight_decay"] == 0.1
    assert free["weight_decay"] == 0.0
    names = {id(p): name for name, p in method.named_parameters()}
    assert all(names[id(p)].endswith("weight") and p.ndim > 1 for p in decayed["params"])
    norms = {id(p) for m in method.modules() if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d) for p in m.parameters()}
    biases = {id(p) for name, p in method.named_parameters() if name.endswith("bias")}
    assert {id(p) for p in free["params"]} == norms | biases


def test_unknown_method_names_the_near_ones() -> None:
    with pytest.raises(ValueError, match="did you mean moco"):
        method_class("mocoo")


def test_simclr_class_is_exported() -> None:
    assert method_class("simclr") is SimCLR


def test_queue_holds_the_keys_of_all_processes_in_rank_order(tmp_path: Path) -> None:
    script = """
        from fmicl.methods import MoCo, Optimisation
        from fmicl.models.vision import SmallConv
        torch.manual_seed(0)
        method = MoCo(SmallConv(1, 4), nn.Identity(), Optimisation(), dim=4, hidden=8, queue=6)
        keys = torch.zeros(2, 4)
        keys[0, 2 * rank] = keys[1, 2 * rank + 1] = 1.0
        method.enqueue(keys)
        result = method.queue
    """
    queues = of_two_processes(script, tmp_path)
    assert torch.equal(queues[0], queues[1])
    assert torch.equal(queues[0][:4], torch.eye(4))
