"""Implementations that are compared: our kernels and losses, and those of others for the same objective.

A setting is one objective on the same inputs; its rows give the same value and gradient:

    kl         sum_{i != j} exp(-|x_i - x_j|^2) and its gradient in x: f-MICL's negative term for KL, no positive pairs
    divergence the same sum for each of the nine divergences
    loss       whole losses of two views, gradient in both
    infonce    one direction: mean_i -log(e^(x_i.y_i / t) / sum_j e^(x_i.y_j / t)), gradient in x and y
    ntxent     SimCLR's: every one of the 2 N views against all others

`OPERATIONS` says what each needs at the least if no matrix of N x N is kept, in multiples of N^2 d.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from measure import Step
from torch import Tensor

import fmicl
from fmicl.kernels import pair_sum

TEMPERATURE = 0.1
CRITIC = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("kl"), d=2)

Make = Callable[[Tensor, Tensor], Step]

# A product of tiles is 2 N^2 d. A penalty: one for the inner products, one for each side's gradient. A softmax: the
# inner products twice, since no gradient can start before the row's normaliser is known. NT-Xent's square has side 2 N.
OPERATIONS = {"kl": 4, "divergence": 4, "infonce": 8, "ntxent": 24}
OPERATIONS_OF = {"FMICLLoss KL": 4, "AlignUniformLoss": 4, "SpectralContrastiveLoss": 6}


@dataclass(frozen=True)
class Row:
    """One implementation of a setting.

    Attributes:
        setting: which objective.
        name: as the tables show it.
        make: gives the step for two leaves; imports what it needs.
        ours: whether it is this library's.
        via: through which of its functions it is called.
        dense: how many N x N float32 arrays it holds at once, at the least; 0 if none.
        cubic: how many of N x N x N.
        device: where it runs; None is everywhere.
    """

    setting: str
    name: str
    make: Make
    ours: bool = False
    via: str = ""
    dense: float = 0
    cubic: float = 0
    device: str | None = None


def operations(setting: str, name: str, n: int, d: int) -> float:
    """Floating-point operations of the setting: what its floor is made of."""
    factor = OPERATIONS_OF.get(name.split(",")[0], OPERATIONS.get(setting, 4))
    return float(factor) * n * n * d


def _backward(loss: Tensor) -> Tensor:
    loss.backward()
    return loss


# --- ours ------------------------------------------------------------------------------------------------------------


def _pair_sum(kernel: str, fast: bool, divergence: str = "kl") -> Make:
    critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence(divergence), d=2)

    # the dense and the tiled sum compute in the type that they get, and a loss hands them float32
    widen = kernel in ("reference", "tiled")

    def make(x: Tensor, y: Tensor) -> Step:  # noqa: ARG001
        def step() -> Tensor:
            rows = x.float() if widen else x
            return _backward(pair_sum(rows, None, critic, skip=0, kernel=kernel, fast=fast))  # type: ignore[arg-type]

        return step

    return make


def _loss(module: torch.nn.Module) -> Make:
    return lambda x, y: lambda: _backward(module(x, y))


def _infonce(negatives: str, kernel: str, precision: str) -> Make:
    return _loss(
        fmicl.InfoNCELoss(TEMPERATURE, negatives, normalised=True, kernel=kernel, precision=precision)  # type: ignore[arg-type]
    )


# --- rivals of the pairwise sum --------------------------------------------------------------------------------------


def _pdist(x: Tensor, y: Tensor) -> Step:  # noqa: ARG001
    """torch.pdist: each pair once, as a vector of N (N - 1) / 2 distances. It has no half precision."""
    return lambda: _backward(2 * torch.pdist(x.float()).pow(2).mul(-1.0).exp().sum())


def _autocast(x: Tensor, y: Tensor) -> Step:  # noqa: ARG001
    """The dense matrix as mixed-precision training computes it."""

    def step() -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            z = CRITIC.offset + CRITIC.scale * (x @ x.T).float()
            return _backward(z.exp().sum() - z.diagonal().exp().sum())

    return step


def _chunked(x: Tensor, y: Tensor) -> Step:  # noqa: ARG001
    """Rows in chunks, each a cuBLAS product, an exponential in float32 and a second product; gradient by hand.

    The size of a chunk is the fastest of three on this device.
    """
    columns = x.detach()
    n = len(columns)

    def rows(start: int, chunk: int, gradient: Tensor) -> Tensor:
        part = columns[start : start + chunk]
        weights = (part @ columns.T).float().mul_(CRITIC.scale).add_(CRITIC.offset).exp_()
        weights.diagonal(start)[: len(part)].zero_()
        gradient[start : start + chunk] = 2 * CRITIC.scale * (weights.to(columns.dtype) @ columns)
        return weights.sum(dtype=torch.float64)

    def run(stop: int, chunk: int) -> Tensor:
        gradient = torch.empty_like(columns)
        total = torch.stack([rows(start, chunk, gradient) for start in range(0, stop, chunk)]).sum()
        x.grad = gradient
        return total

    def fastest() -> int:
        from measure import _once

        sizes = sorted({max(1, min(n, entries // n)) for entries in (2**22, 2**24, 2**26)})
        stop = sizes[-1]
        return min(sizes, key=lambda size: min(_once(lambda: run(stop, size), (x,)) for _ in range(3)))

    chunk = fastest()
    return lambda: run(n, chunk)


def _keops(x: Tensor, y: Tensor) -> Step:  # noqa: ARG001
    """KeOps: the sum as a symbolic matrix, float32. Columns are constants; the other half of the gradient is equal."""
    from pykeops.torch import LazyTensor

    def step() -> Tensor:
        rows = x.float()
        i, j = LazyTensor(rows[:, None, :]), LazyTensor(rows.detach()[None, :, :])
        total = (CRITIC.offset + CRITIC.scale * (i | j)).exp().sum(dim=1).sum()
        squares = CRITIC.offset + CRITIC.scale * (rows * rows.detach()).sum(dim=1)
        return _backward(2 * (total - squares.exp().sum())) / 2

    return step


# --- rivals of InfoNCE -----------------------------------------------------------------------------------------------


def _inf_cl(x: Tensor, y: Tensor) -> Step:
    """Inf-CL's kernel (DAMO-NLP-SG/Inf-CLIP), which computes in float32 with TF32 products."""
    from inf_cl import cal_inf_loss

    head = min(256, x.shape[1])
    return lambda: _backward(cal_inf_loss(x, y, scale=1 / TEMPERATURE, head_dim=head))


def _cut_cross_entropy(x: Tensor, y: Tensor) -> Step:
    """Apple's cut cross entropy with the second view as the classifier; without its filter, which drops gradients."""
    from cut_cross_entropy import linear_cross_entropy

    targets = torch.arange(len(x), device=x.device)
    return lambda: _backward(linear_cross_entropy(x * (1 / TEMPERATURE), y, targets, filter_eps=None))


def _liger(x: Tensor, y: Tensor) -> Step:
    """Liger's fused linear cross entropy, likewise."""
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    targets, loss = torch.arange(len(x), device=x.device), LigerFusedLinearCrossEntropyLoss()
    return lambda: _backward(loss(y, x * (1 / TEMPERATURE), targets))


def _ranking(x: Tensor, y: Tensor) -> Step:
    """sentence-transformers' MultipleNegativesRankingLoss on embeddings that are there already."""
    from sentence_transformers import util
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    model = torch.nn.Sequential(torch.nn.Identity())
    loss = MultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, similarity_fct=util.dot_score)
    labels = torch.zeros(len(x), device=x.device)
    return lambda: _backward(loss.compute_loss_from_embeddings([x, y], labels))


def _cached_ranking(x: Tensor, y: Tensor) -> Step:
    """Its cached variant: the stage between the two passes through a model, in mini-batches of 1,024 rows."""
    from sentence_transformers import util
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    model = torch.nn.Sequential(torch.nn.Identity())
    loss = CachedMultipleNegativesRankingLoss(
        model, scale=1 / TEMPERATURE, similarity_fct=util.dot_score, mini_batch_size=1024
    )

    def step() -> Tensor:
        parts = [[part.detach().requires_grad_() for part in value.split(1024)] for value in (x, y)]
        total: Tensor = loss.calculate_loss(parts, with_backward=True)
        for leaf, own in zip((x, y), parts, strict=True):
            leaf.grad = torch.cat([part.grad for part in own if part.grad is not None])
        return total

    return step


def _cross_entropy(x: Tensor, y: Tensor) -> Step:
    """Plain PyTorch: one dense matrix of logits."""
    targets = torch.arange(len(x), device=x.device)
    return lambda: _backward(F.cross_entropy((x @ y.T).float() / TEMPERATURE, targets))


def _lightly(x: Tensor, y: Tensor) -> Step:
    from lightly.loss.ntx_ent_loss import NTXentLoss

    loss = NTXentLoss(temperature=TEMPERATURE)
    return lambda: _backward(loss(x, y))


def _metric_learning(x: Tensor, y: Tensor) -> Step:
    """pytorch-metric-learning: a row for each positive pair, as long as all negative pairs."""
    from pytorch_metric_learning.losses import NTXentLoss

    loss, labels = NTXentLoss(temperature=TEMPERATURE), torch.arange(len(x), device=x.device).repeat(2)
    return lambda: _backward(loss(torch.cat([x, y]), labels))


def _rows() -> list[Row]:
    half: dict[str, Any] = {"normalised": True, "precision": "auto"}
    losses = {
        "FMICLLoss KL": fmicl.FMICLLoss("kl", **half),
        "FMICLLoss KL, optimal shift": fmicl.FMICLLoss("kl", shift="optimal", **half),
        "FMICLLoss JS": fmicl.FMICLLoss("js", **half),
        "FMICLLoss JS, optimal shift": fmicl.FMICLLoss("js", shift="optimal", **half),
        "AlignUniformLoss": fmicl.AlignUniformLoss(**half),
        "SpectralContrastiveLoss": fmicl.SpectralContrastiveLoss(**half),
    }
    by_sum, by_loss = "pair_sum", "InfoNCELoss"
    rows = [
        Row("kl", "ours, triton fast", _pair_sum("triton", True), True, by_sum, device="cuda"),
        Row("kl", "ours, triton high", _pair_sum("triton", False), True, by_sum, device="cuda"),
        Row("kl", "ours, tiled", _pair_sum("tiled", False), True, by_sum),
        Row("kl", "ours, reference (dense)", _pair_sum("reference", False), True, by_sum, dense=3),
        Row("kl", "dense, bf16 autocast", _autocast, dense=3, device="cuda"),
        Row("kl", "chunked matrix products, eager", _chunked),
        Row("kl", "KeOps", _keops),
        Row("kl", "torch.pdist", _pdist, dense=2),
        Row("infonce", "ours, auto", _infonce("cross", "auto", "auto"), True, by_loss),
        Row("infonce", "ours, triton high", _infonce("cross", "triton", "high"), True, by_loss, device="cuda"),
        Row("infonce", "ours, reference (dense)", _infonce("cross", "reference", "auto"), True, by_loss, dense=3),
        Row("infonce", "cross entropy of dense logits", _cross_entropy, dense=2.5),
        Row("infonce", "Inf-CL", _inf_cl, device="cuda"),
        Row("infonce", "cut cross entropy, unfiltered", _cut_cross_entropy, device="cuda"),
        Row("infonce", "Liger fused linear cross entropy", _liger, device="cuda"),
        Row("infonce", "sentence-transformers MNRL", _ranking, dense=2),
        Row("infonce", "sentence-transformers cached MNRL", _cached_ranking),
        Row("ntxent", "ours, auto", _infonce("both", "auto", "auto"), True, by_loss),
        Row("ntxent", "ours, triton high", _infonce("both", "triton", "high"), True, by_loss, device="cuda"),
        Row("ntxent", "lightly NTXentLoss", _lightly, dense=12),
        Row("ntxent", "pytorch-metric-learning NTXentLoss", _metric_learning, cubic=32),
    ]
    whole = [Row("loss", name, _loss(module), True, type(module).__name__) for name, module in losses.items()]
    nine = [Row("divergence", name, _pair_sum("auto", True, name), True, by_sum) for name in fmicl.list_divergences()]
    return rows + whole + nine


ROWS = {(row.setting, row.name): row for row in _rows()}
