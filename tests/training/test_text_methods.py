"""Each objective and method on sentences: against the papers' formulas under dropout, and in bfloat16."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

import fmicl
from fmicl.data import Batch
from fmicl.methods import Method
from fmicl.models.text import build_sentence_encoder
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.training.tasks.text import build_text_method
from small_text_settings import small
from tiny_bert import SENTENCES, tiny_bert

OBJECTIVES = ("fmicl", "infonce", "align_uniform", "spectral")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tiny_bert(folder / "bert")
    return folder


def method_and_batch(place: Path, **changes: Any) -> tuple[Method, Batch]:
    recipe = small(place, **changes)
    torch.manual_seed(0)
    encoder, tokenizer = build_sentence_encoder(recipe.model, recipe.pooling)
    ids = tokenizer.batch(SENTENCES[:12], recipe.length)
    return build_text_method(recipe, encoder), Batch(ids, ids, torch.arange(12))


# The papers' formulas, dense and in float64.
def unit(x: Tensor) -> Tensor:
    return F.normalize(x.double(), dim=1)


def others(x: Tensor, y: Tensor, *, own: bool = False) -> Tensor:
    """Squared distances of all x_i to all y_j, j != i unless `own`."""
    d = (x[:, None] - y[None]).square().sum(dim=2)
    return d.reshape(-1) if own else d[~torch.eye(len(x), dtype=torch.bool)]


def plain_loss(objective: str, x: Tensor, y: Tensor, queue: Tensor | None = None) -> Tensor:
    x, y = unit(x), unit(y)
    positive = (x - y).square().sum(dim=1)
    if objective == "infonce":  # SimCSE: row i of the cosines against the number i; MoCo: the positive, then the queue
        cosines = x @ y.T if queue is None else torch.cat([(x * y).sum(1, keepdim=True), x @ unit(queue).T], dim=1)
        target = torch.arange(len(x)) if queue is None else torch.zeros(len(x), dtype=torch.long)
        return F.cross_entropy(cosines / 0.05, target)
    other = y if objective == "spectral" else x
    negative = others(x, other) if queue is None else others(x, unit(queue), own=True)
    if objective == "fmicl":  # KL: f'(u) = 1 + log u, f*(f'(u)) = u
        return -(1 - 20 * positive).mean() + 409600 * torch.exp(-20 * negative).mean()
    if objective == "align_uniform":
        return positive.mean() + torch.exp(-2 * negative).mean().log()
    inner = 1 - negative / 2
    return -2 * (1 - positive / 2).mean() + inner.square().mean()


def plain_step(method: Method, batch: Batch, objective: str) -> Tensor:
    """The loss of a method from its encoders, with dropout drawn in the order of its paper."""
    ids = batch.first
    name = type(method).__name__
    if name == "SimCLR":
        x, y = method.projection(method.encoder(torch.cat([ids, ids]))).chunk(2)
        return plain_loss(objective, x, y)
    online = method.encoder, method.projection
    target: Any = method.target_encoder, method.target_projection
    if name == "MoCo":
        x = online[1](online[0](ids))
        y = target[1](target[0](ids))
        return plain_loss(objective, x, y, queue=method.queue)  # type: ignore[arg-type]
    predictor: Any = method.predictor
    q1, q2 = (predictor(online[1](online[0](ids))) for _ in range(2))
    k1, k2 = (target[1](target[0](ids)) for _ in range(2))
    return (plain_loss(objective, q1, k2) + plain_loss(objective, q2, k1)) / 2


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", ["simclr", "moco", "mocov3"])
def test_loss_of_two_dropout_passes_and_a_step_that_lowers_it(name: Any, objective: Any, place: Path) -> None:
    method, batch = method_and_batch(place, method=name, objective=objective)
    torch.manual_seed(7)
    compared = method.loss(batch.first, batch.second)
    torch.manual_seed(7)
    expected = plain_step(method, batch, objective)
    torch.testing.assert_close(compared.loss.double(), expected, rtol=2e-5, atol=1e-5)
    assert not torch.isclose(compared.first, compared.second).all(dim=1).any()  # two masks
    compared.loss.backward()
    gradients = [p.grad for p in method.parameters() if p.grad is not None]
    size = torch.stack([g.norm() for g in gradients]).norm()
    assert bool(size.isfinite())
    assert float(size) > 0
    with torch.no_grad():
        for parameter in method.parameters():
            if parameter.grad is not None:
                parameter.sub_(1e-4 / size * parameter.grad)
        torch.manual_seed(7)
        assert float(plain_step(method, batch, objective)) < float(expected)


@pytest.mark.parametrize("pooling", ["cls_mlp", "mean"])
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "byol"},
        {"method": "swav", "prototypes": 4, "sinkhorn_queue": 24},
        {"method": "cpc", "objective": "infonce"},
        {"method": "cpc", "divergence": "js"},
    ],
    ids=lambda changes: " ".join(map(str, changes.values())),
)
def test_steps_of_methods_with_a_loss_of_their_own_lower_it(changes: Any, pooling: Any, place: Path) -> None:
    method, batch = method_and_batch(place, pooling=pooling, **changes)
    optimizer = torch.optim.AdamW([p for p in method.parameters() if p.requires_grad], lr=3e-3)
    losses = []
    for step in range(12):
        method.start_step(step / 12)
        torch.manual_seed(7)  # the same dropout in each
        compared = method.loss(batch.first, batch.second)
        losses.append(float(compared.loss.detach()))
        optimizer.zero_grad()
        compared.loss.backward()
        assert all(p.grad is not None for p in method.parameters() if p.requires_grad)
        method.after_backward(compared.second)
        optimizer.step()
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("pooling", ["cls_mlp", "cls", "mean"])
def test_width_of_the_embeddings(pooling: Any, place: Path) -> None:
    method, batch = method_and_batch(place, pooling=pooling)
    assert method.embed(batch.first).shape == (12, 8)
    assert len(list(method.projection.parameters())) == (2 if pooling == "cls_mlp" else 0)


def test_dropout_differs_between_processes_and_steps(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    method, batch = method_and_batch(place)
    module = TrainingModule(method, Optimisation())
    monkeypatch.setattr(module, "start_step", lambda: None)
    seen = []
    for rank in (0, 1):
        monkeypatch.setattr(TrainingModule, "global_rank", rank)
        for step in (0, 1):
            module.batches = step
            seen.append(module.training_step(batch, 0)["first"])
    for i, one in enumerate(seen):
        assert not any(torch.allclose(one, other) for other in seen[:i])


@pytest.mark.parametrize("name", ["simclr", "moco"])
def test_bf16_loss_and_gradient_at_the_papers_alpha_and_gamma(
    name: Any, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half precision ends at the embeddings: the loss is float32, whatever autocast says."""
    method, batch = method_and_batch(place, method=name)
    if name == "moco":
        method.enqueue(method.target(batch.first))  # type: ignore[operator]  # near ones, as keys of past batches
    seen: list[Tensor] = []
    compare = method.compare

    def watched(x: Tensor, y: Tensor, **options: Any) -> Any:
        for rows in (x, y):
            if rows.requires_grad:
                rows.retain_grad()
        seen.extend([x, y])
        return compare(x, y, **options)

    monkeypatch.setattr(method, "compare", watched)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = method.loss(batch.first, batch.second).loss
    loss.backward()
    x, y = seen
    assert x.dtype == torch.bfloat16
    assert loss.dtype == torch.float32
    exact = [rows.detach().double().requires_grad_() for rows in (x, y)]
    queue: Any = method.queue if name == "moco" else None
    expected = plain_loss("fmicl", exact[0], exact[1], queue)
    expected.backward()
    loss, expected = loss.detach(), expected.detach()
    assert float(expected) > 1e4  # alpha counts: negatives are near at the start
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for rows, twin in zip((x, y), exact, strict=True):
        if rows.requires_grad:
            assert rows.grad is not None
            assert twin.grad is not None
            error = (rows.grad.double() - twin.grad).norm() / twin.grad.norm()
            assert float(error) < 2**-8  # the gradient of a bfloat16 tensor is one, with 8 bits


def test_bf16_rows_of_the_real_width_near_the_end_of_training() -> None:
    """768 dimensions, spread out: a negative costs next to nothing, and rounding must not change that."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 768, generator=generator)
    y = (x + 0.2 * torch.randn(64, 768, generator=generator)).bfloat16().requires_grad_()
    x = x.bfloat16().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = fmicl.FMICLLoss("kl", alpha=409600.0, gamma=20.0)(x, y)
    loss.backward()
    exact = [rows.detach().double().requires_grad_() for rows in (x, y)]
    expected = plain_loss("fmicl", exact[0], exact[1])
    expected.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-5)
    for rows, twin in zip((x, y), exact, strict=True):
        assert rows.grad is not None
        assert twin.grad is not None
        assert float((rows.grad.double() - twin.grad).norm() / twin.grad.norm()) < 2**-8
