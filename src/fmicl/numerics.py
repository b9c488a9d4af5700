"""Arithmetic that keeps its digits, for whoever computes with embeddings."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["normalise"]


def normalise(x: Tensor) -> Tensor:
    """Rows of x divided by their length. A zero row stays zero, with a finite gradient.

    Example:
        >>> import torch
        >>> normalise(torch.tensor([[3.0, 4.0], [0.0, 0.0]]))
        tensor([[0.6000, 0.8000],
                [0.0000, 0.0000]])
    """
    # by the largest entry first: squares of very small or large ones leave the type
    largest = x.detach().abs().amax(dim=-1, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / torch.where(length > 0, length, 1.0)
