"""Wall-clock time of a loss and its gradient, called from Python, from batches of 16 up.

Inputs are raw embeddings, as an encoder gives them. What a user would write is `dense`: normalisation, one matrix of
inner products, and elementwise functions or a cross entropy, run eagerly or by torch.compile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import fmicl

__all__ = ["LOSSES", "Loss", "measure_wall", "raw_inputs"]

Loss = Callable[[Tensor, Tensor], Tensor]

ALPHA, TEMPERATURE = 40.0, 0.5


def raw_inputs(n: int, d: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two leaves of random rows that aren't normalised; the second is a view of the first's samples."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, d, generator=generator, device=device)
    y = x + 0.5 * torch.randn(n, d, generator=generator, device=device)
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def _log_ratios(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-|x_i - y_i|^2 of the positives, -|x_i - x_j|^2 of all pairs, and which of these are negatives."""
    x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    positive = 2 * (x * y).sum(dim=1).float() - 2
    negative = 2 * (x @ x.T).float() - 2
    return positive, negative, ~torch.eye(len(x), dtype=torch.bool, device=x.device)


def dense_kl(x: Tensor, y: Tensor) -> Tensor:
    positive, negative, others = _log_ratios(x, y)
    n = len(x)
    return ALPHA * (negative.exp() * others).sum() / (n * (n - 1)) - (positive + 1).mean()


def dense_js(x: Tensor, y: Tensor) -> Tensor:
    positive, negative, others = _log_ratios(x, y)
    n, log2 = len(x), 0.6931471805599453
    cost = ((F.softplus(negative) - log2) * others).sum() / (n * (n - 1))
    return ALPHA * cost - (log2 + F.logsigmoid(positive)).mean()


def dense_ntxent(x: Tensor, y: Tensor) -> Tensor:
    n = len(x)
    views = F.normalize(torch.cat((x, y)), dim=1)
    logits = (views @ views.T).float() / TEMPERATURE
    logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), float("-inf"))
    targets = torch.arange(2 * n, device=x.device).roll(n)
    return F.cross_entropy(logits, targets)


LOSSES: dict[str, tuple[Callable[[], Loss], Loss]] = {
    "kl": (lambda: fmicl.FMICLLoss("kl", alpha=ALPHA), dense_kl),
    "js": (lambda: fmicl.FMICLLoss("js", alpha=ALPHA), dense_js),
    "ntxent": (lambda: fmicl.InfoNCELoss(TEMPERATURE), dense_ntxent),
}
"""By setting: this library's loss and the dense one."""


def measure_wall(loss: Loss, leaves: tuple[Tensor, Tensor], seconds: float) -> dict[str, Any]:
    """Median wall-clock time of a loss and its gradient.

    Steps are called one after the other and in groups, each followed by a synchronisation: as in a training loop, the
    GPU may compute while Python goes on.
    """
    cuda = leaves[0].is_cuda

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        loss(*leaves).backward()

    def run(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            step()
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / number

    run(3)
    once = run(1)
    group = max(1, min(20, int(seconds / 10 / once)))
    times = [run(group) for _ in range(max(3, min(50, int(seconds / once / group))))]
    return {"seconds": statistics.median(times), "seconds_best": min(times), "repeats": len(times) * group}
