"""Methods in a plain training loop, without Lightning or fmicl's own training."""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from fmicl.methods import Comparison, Method, MoCo, MoCoV3, MomentumMethod, SimCLR
from fmicl.models.vision import SmallConv

STEPS, BATCH = 4, 6


def loop(method: Method) -> Iterator[tuple[int, Method, Comparison]]:
    """Train on random views; before each optimiser step, yield its number, the method of before and the comparison."""
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD([p for p in method.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        before = copy.deepcopy(method)
        method.start_step(step / STEPS)
        first, second = torch.randn(2, BATCH, 1, 8, 8, generator=generator)
        optimizer.zero_grad()
        comparison = method.loss(first, second)
        comparison.loss.backward()
        method.after_backward(comparison.second)
        yield step, before, comparison
        optimizer.step()


def moved(method: nn.Module, before: nn.Module) -> bool:
    pairs = zip(method.parameters(), before.parameters(), strict=True)
    return all(not torch.equal(one, other) for one, other in pairs)


def assert_average(method: MomentumMethod, before: Method, momentum: float) -> None:
    """target = m target + (1 - m) online, with the weights of before the step."""
    assert isinstance(before, MomentumMethod)
    online: list[Tensor] = [*before.encoder.parameters(), *before.projection.parameters()]
    old: list[Tensor] = [*before.target_encoder.parameters(), *before.target_projection.parameters()]
    new: list[Tensor] = [*method.target_encoder.parameters(), *method.target_projection.parameters()]
    for theirs, mine, now in zip(old, online, new, strict=True):
        torch.testing.assert_close(now, momentum * theirs + (1 - momentum) * mine)


def test_simclr() -> None:
    torch.manual_seed(0)
    method = SimCLR(SmallConv(1, 4), fmicl.FMICLLoss("js"), dim=8, hidden=16)
    start = copy.deepcopy(method)
    for _, _, comparison in loop(method):
        assert comparison.first.shape == comparison.second.shape == (BATCH, 8)
        assert comparison.terms is not None
        torch.testing.assert_close(comparison.terms.sum(), comparison.loss.detach())
    assert moved(method.encoder, start.encoder)


@pytest.mark.parametrize("statistics", ["batch", "past"])
def test_moco(statistics: str) -> None:
    torch.manual_seed(0)
    method = MoCo(SmallConv(1, 4), fmicl.InfoNCELoss(), dim=8, hidden=16, queue=16, momentum=0.9, statistics=statistics)
    start = copy.deepcopy(method)
    for step, before, comparison in loop(method):
        assert isinstance(before, MoCo)
        assert_average(method, before, 0.9)
        assert int(method.queue_position) == (step + 1) * BATCH % 16
        places = torch.arange(step * BATCH, (step + 1) * BATCH) % 16
        torch.testing.assert_close(method.queue[places], F.normalize(comparison.second, dim=1))
        others = [place for place in range(16) if place not in places]
        assert torch.equal(method.queue[others], before.queue[others])
    assert moved(method.encoder, start.encoder)


def test_mocov3() -> None:
    torch.manual_seed(0)
    method = MoCoV3(SmallConv(1, 4), fmicl.InfoNCELoss(negatives="cross"), dim=8, hidden=16, momentum=0.9)
    start = copy.deepcopy(method)
    for step, before, _ in loop(method):
        assert_average(method, before, 1 - 0.1 * (1 + math.cos(math.pi * step / STEPS)) / 2)
    assert moved(method.encoder, start.encoder)
    assert moved(method.predictor, start.predictor)


def test_methods_need_no_lightning() -> None:
    program = (
        "import sys, fmicl.methods; print([name for name in ('lightning', 'fmicl.training') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
