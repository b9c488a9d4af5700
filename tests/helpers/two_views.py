"""Batches of two views, and what their losses take: for tests of the losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

import fmicl

F64 = torch.float64
NAMES = fmicl.list_divergences()
CERTIFIED = [name for name in NAMES if name not in ("neyman", "reverse_kl")]
MODES = ["anchor", "both", "cross", "explicit"]


def batch(n: int = 6, d: int = 4, seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, d, generator=generator, dtype=F64)
    return x.to(dtype), (x + 0.5 * torch.randn(n, d, generator=generator, dtype=F64)).to(dtype)


def queue(m: int = 5, d: int = 4) -> Tensor:
    return torch.randn(m, d, generator=torch.Generator().manual_seed(9), dtype=F64)


def unit(v: Tensor) -> Tensor:
    return F.normalize(v, dim=-1)
