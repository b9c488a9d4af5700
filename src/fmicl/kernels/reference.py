"""The pairwise sums written out: one dense matrix, plain autograd. What the others are tested against."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.kernels.contract import PairFunction

__all__ = ["pair_sum", "row_logsumexp"]


def pair_sum(x: Tensor, other: Tensor, function: PairFunction, skip: int | None = None) -> Tensor:
    """sum_ij function.penalty(offset + scale * x_i.o_j), without the pairs j = i + skip."""
    values = function.penalty(function.offset + function.scale * (x @ other.T))
    if skip is not None:
        values = values.masked_fill(_skipped(x, other, skip), 0.0)
    return values.sum()


def row_logsumexp(x: Tensor, other: Tensor, scale: float, skip: int | None = None) -> Tensor:
    """log sum_j exp(scale * x_i.o_j) for each row i, without the pairs j = i + skip."""
    logits = scale * (x @ other.T)
    if skip is not None:
        logits = logits.masked_fill(_skipped(x, other, skip), -math.inf)
    return logits.logsumexp(dim=1)


def _skipped(x: Tensor, other: Tensor, skip: int) -> Tensor:
    return torch.ones(len(x), len(other), dtype=torch.bool, device=x.device).triu(skip).tril(skip)
