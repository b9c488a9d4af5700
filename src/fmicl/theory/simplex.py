"""The regular simplex, the most uniform arrangement of points on a sphere."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def simplex(n: int, d: int) -> Tensor:
    """The regular simplex: n unit vectors in R^d with inner products -1 / (n - 1).

    Args:
        n: number of vertices, at least 2.
        d: dimension, at least n - 1.

    Returns:
        The vertices, (n, d), in float64.

    Raises:
        ValueError: n or d is too small.

    Example:
        >>> vertices = simplex(3, 2)
        >>> torch.allclose(vertices @ vertices.T, 1.5 * torch.eye(3, dtype=torch.float64) - 0.5)
        True
    """
    if n < 2:
        raise ValueError(f"a simplex needs at least two vertices, got n={n}")
    if d < n - 1:
        raise ValueError(f"a regular simplex of n={n} vertices needs dimension d >= {n - 1}, got d={d}")
    # Vertex k completes its length along axis k; all later ones get the same coordinate there.
    vertices = torch.zeros(n, d, dtype=torch.float64)
    inner = -1 / (n - 1)
    for k in range(n - 1):
        height = math.sqrt(1 - float(vertices[k, :k].square().sum()))
        vertices[k, k] = height
        rest = (inner - float((vertices[k, :k] * vertices[k + 1, :k]).sum())) / height
        vertices[k + 1 :, k] = rest
    return vertices
