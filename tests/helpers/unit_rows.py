"""Random unit rows for tests of the kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fmicl.utils.triton import interpreting

needs_triton = pytest.mark.skipif(
    not (interpreting() or torch.cuda.is_available()), reason="Triton has neither a GPU nor its interpreter"
)


def rows(n: int, d: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    x = torch.randn(n, d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return torch.nn.functional.normalize(x, dim=-1).to(dtype)
