"""SwAV: Sinkhorn iterations, swapped prediction, prototypes and queue, against loops and lightly."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as effort
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from fmicl.config import recipe
from fmicl.methods import SwAV
from fmicl.methods.swav import SwappedPredictionLoss, sinkhorn, swapped_prediction_loss
from fmicl.models.vision import SmallConv
from two_processes import of_two_processes


def unit(*shape: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), dim=-1)


def views(n: int = 6) -> tuple[Tensor, Tensor]:
    first, second = torch.randn(2, n, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return first, second


def build(**options: Any) -> SwAV:
    torch.manual_seed(0)
    return SwAV(SmallConv(1, 4), SwappedPredictionLoss(8, 5), dim=8, hidden=16, **options)


def plain_sinkhorn(scores: Tensor, epsilon: float, iterations: int) -> Tensor:
    """Algorithm of the paper's appendix, entry by entry."""
    q = [[math.exp(s / epsilon) for s in row] for row in scores.double().tolist()]
    samples, prototypes = len(q), len(q[0])
    for _ in range(iterations):
        for k in range(prototypes):
            total = sum(row[k] for row in q)
            for row in q:
                row[k] /= total * prototypes
        for row in q:
            total = sum(row)
            row[:] = [value / (total * samples) for value in row]
    return torch.tensor(q) * samples


def test_sinkhorn_is_the_papers_algorithm() -> None:
    scores = unit(7, 4) @ unit(3, 4, seed=1).T
    torch.testing.assert_close(sinkhorn(scores), plain_sinkhorn(scores, 0.05, 3), rtol=1e-4, atol=1e-6)


@given(st.integers(2, 12), st.integers(2, 6), st.floats(0.2, 2.0), st.integers(0, 100))
@effort(max_examples=30, deadline=None)
def test_assignments_of_many_iterations_are_balanced(n: int, k: int, epsilon: float, seed: int) -> None:
    codes = sinkhorn(unit(n, 4, seed=seed) @ unit(k, 4, seed=seed + 1).T, epsilon=epsilon, iterations=300)
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(n))
    torch.testing.assert_close(codes.sum(dim=0), torch.full((k,), n / k), rtol=1e-3, atol=1e-4)


def test_sharp_assignments_do_not_overflow() -> None:
    codes = sinkhorn(unit(7, 4) @ unit(3, 4, seed=1).T, epsilon=1e-3)
    assert bool(codes.isfinite().all())
    torch.testing.assert_close(codes.sum(dim=1), torch.ones(7))


def test_past_samples_take_part_in_the_balance_if_they_count() -> None:
    scores, past = unit(4, 4) @ unit(3, 4, seed=1).T, unit(9, 4, seed=2) @ unit(3, 4, seed=1).T
    together = sinkhorn(torch.cat([scores, past]))[:4]
    torch.testing.assert_close(sinkhorn(scores, past=past), together)
    torch.testing.assert_close(sinkhorn(scores, past=past, past_weight=torch.tensor(0.0)), sinkhorn(scores))


def test_loss_is_swapped_cross_entropy() -> None:
    x, y, c = unit(4, 6), unit(8, 6, seed=1), unit(3, 6, seed=2)
    codes, total = sinkhorn(x @ c.T), 0.0
    for row in range(8):
        log_p = (y[row] @ c.T / 0.1).log_softmax(dim=0)
        total -= sum(float(codes[row % 4, k] * log_p[k]) for k in range(3)) / 8
    assert float(swapped_prediction_loss(3 * x, 5 * y, c)) == pytest.approx(total, rel=1e-5)


def test_loss_is_lightlys_with_crops_and_queue() -> None:
    lightly = pytest.importorskip("lightly.loss", reason="lightly is not installed")
    c = unit(5, 8, seed=9)
    one, other, crops = unit(6, 8), unit(6, 8, seed=1), [unit(6, 8, seed=s) for s in (2, 3)]
    queues = [unit(10, 8, seed=4), unit(10, 8, seed=5)]
    theirs = lightly.SwaVLoss()([x @ c.T for x in (one, other)], [x @ c.T for x in crops], [q @ c.T for q in queues])
    ours = [
        swapped_prediction_loss(x, torch.cat([y, *crops]), c, past=queue)
        for x, y, queue in ((one, other, queues[0]), (other, one, queues[1]))
    ]
    torch.testing.assert_close(torch.stack(ours).mean(), theirs.squeeze())


def test_sinkhorn_is_lightlys() -> None:
    lightly = pytest.importorskip("lightly.loss.swav_loss", reason="lightly is not installed")
    scores = unit(9, 8) @ unit(5, 8, seed=1).T
    torch.testing.assert_close(sinkhorn(scores), lightly.sinkhorn(scores), rtol=1e-4, atol=1e-6)


def test_method_is_the_mean_of_both_directions() -> None:
    method = build().eval()
    first, second = views()
    z1, z2 = method.embed(first), method.embed(second)
    expected = (method.objective(z1, z2) + method.objective(z2, z1)) / 2
    found = method.loss(first, second)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.first, torch.cat([z1, z2]).detach())
    torch.testing.assert_close(found.second, torch.cat([z2, z1]).detach())


def test_prototypes_are_normalised_and_frozen_at_first() -> None:
    method = build(freeze=0.1)
    prototypes = method.get_parameter("objective.prototypes")
    with torch.no_grad():
        prototypes.mul_(3.0)
    for progress, moves in ((0.0, False), (0.09, False), (0.1, True), (0.5, True)):
        method.zero_grad()
        method.start_step(progress)
        torch.testing.assert_close(prototypes.norm(dim=1), torch.ones(5))
        found = method.loss(*views())
        found.loss.backward()
        method.after_backward(found.second)
        assert (prototypes.grad is not None) == moves
        assert all(p.grad is not None for p in method.encoder.parameters())


def test_queue_counts_once_it_is_full_and_due() -> None:
    method, plain = build(queue=12, queue_start=0.5), build()
    plain.load_state_dict(method.state_dict(), strict=False)
    seen = []
    for progress in (0.0, 0.6, 0.7, 0.8):  # 6, 12 and 18 samples after the first three
        for each in (method, plain):
            each.start_step(progress)
        first, second = torch.randn(2, 6, 1, 8, 8)
        found = method.loss(first, second)
        seen.append(torch.equal(found.loss, plain.loss(first, second).loss))
        method.after_backward(found.second)
    assert seen == [True, True, False, False]
    z2, z1 = F.normalize(found.second, dim=1).chunk(2)
    torch.testing.assert_close(method.queue[6:], torch.stack([z1, z2], dim=1))
    assert {"queue", "queue_position", "queue_filled", "queue_started"} <= set(method.state_dict())


def test_options_reach_method_and_loss() -> None:
    options = {"prototypes": 7, "prototype_temperature": 0.2, "sinkhorn_epsilon": 0.1, "sinkhorn_iterations": 4}
    settings = recipe("digits", method="swav", sinkhorn_queue=512, **options)
    loss = settings.objective_options.build(settings.objective_context(16))
    assert loss.extra_repr() == "prototypes=7, temperature=0.2, epsilon=0.1, iterations=4"
    assert settings.unused() == {}
    with pytest.raises(ValueError, match=r"sinkhorn_queue \(512\).*1024"):
        settings.method_options.check_batch(1024)
    assert "sinkhorn_queue is 0" in recipe("digits", method="swav", sinkhorn_queue_start=0.1).unused().values()


@pytest.mark.parametrize(("name", "value"), [("prototypes", 0), ("freeze_prototypes", 1.5), ("sinkhorn_queue", -1)])
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        recipe("digits", method="swav", **{name: value})


SCRIPT = """
    import fmicl
    from fmicl.methods.byol import PredictionLoss
    from fmicl.methods.critics import CriticLoss
    from fmicl.methods.swav import SwappedPredictionLoss

    def gradients(rows):
        torch.manual_seed(1)
        data, past = torch.randn(2, 6, 5), torch.nn.functional.normalize(torch.randn(4, 3), dim=1)
        present = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 1], [1, 1], [1, 1]], dtype=torch.bool)
        js = fmicl.divergence("js")
        cases = {
            "swav": lambda x, y: swav(x, y, past=past),
            "byol": PredictionLoss(),
            "infonce": lambda x, y: CriticLoss(None)(*places(x, y)),
            "js": lambda x, y: CriticLoss(js)(*places(x, y)),
            "infonce, some missing": lambda x, y: CriticLoss(None)(*places(x, y), present[rows]),
            "js, some missing": lambda x, y: CriticLoss(js)(*places(x, y), present[rows]),
        }
        found = []
        for name, loss in cases.items():
            torch.manual_seed(2)
            linear, swav = nn.Linear(5, 3), SwappedPredictionLoss(3, 4)
            value = loss(linear(data[0][rows]), linear(data[1][rows]))
            value.backward()
            trained = [*linear.parameters(), *(swav.parameters() if name == "swav" else ())]
            found.append([value.detach(), *(p.grad for p in trained)])
        return found

    def places(x, y):
        return torch.stack([x, -x], dim=1), torch.stack([y, 2 * y], dim=1)
"""


def test_gradient_over_two_processes_is_that_of_the_joined_batch(tmp_path: Path) -> None:
    """Of SwAV's loss, with a queue, BYOL's and the critics'."""
    script = """
    found = gradients(slice(4) if rank == 0 else slice(4, 6))
    for values in found:
        for value in values:
            distributed.all_reduce(value)
            value /= 2
    result = [value for values in found for value in values]
    """
    together = of_two_processes(SCRIPT + script, tmp_path)
    space: dict[str, Any] = {"torch": torch, "nn": torch.nn}
    exec(textwrap.dedent(SCRIPT), space)
    alone = [value for values in space["gradients"](slice(None)) for value in values]
    for result in together:
        for ours, theirs in zip(result, alone, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
