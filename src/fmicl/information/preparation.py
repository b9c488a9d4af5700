"""Samples for estimators: validation, one-hot columns of discrete variables, marginals made Gaussian.

f-mutual information does not change under a bijection of x alone or of y alone. So every continuous column may be
mapped to its normal scores (:func:`normal_scores`), which removes heavy tails and skewed marginals from what a
critic learns.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

Marginals = Literal["normal", "standard", "none"]
"""What is done to continuous columns: normal scores (ranks), mean 0 and variance 1, or nothing."""

MAX_CATEGORIES = 512
"""Largest number of distinct values of a discrete variable, over all its columns."""


def as_samples(values: Any, name: str) -> Tensor:
    """A tensor (N, ...) of finite numbers from a tensor, an array or nested lists.

    Raises:
        ValueError: it has no rows or columns, is not numeric, or a value is not finite; the message says how many.

    Example:
        >>> as_samples([[0.0, 1.0], [2.0, 3.0]], "x").shape
        torch.Size([2, 2])
    """
    try:
        samples = torch.as_tensor(values).detach()
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name} must be an array of numbers, got {_describe(values)}: {error}") from None
    if samples.is_complex():
        raise ValueError(f"{name} must be real, got {samples.dtype}")
    if samples.dim() == 0 or samples.numel() == 0:
        raise ValueError(f"{name} must have shape (N, ...) with N samples, got {tuple(samples.shape)}")
    if samples.is_floating_point():
        bad = int((~samples.flatten(1).isfinite().all(dim=1)).sum()) if samples.dim() > 1 else None
        bad = int((~samples.isfinite()).sum()) if bad is None else bad
        if bad:
            raise ValueError(f"{name} has NaN or infinite values in {bad} of {len(samples)} rows: remove these rows")
    return samples


def prepare(samples: Tensor, marginals: Marginals, name: str) -> Tensor:
    """Columns for a critic: (N, D) float32, or the samples in their own shape for ``marginals="none"``.

    Integers and truth values are discrete, and become one-hot columns. Constant columns are dropped.

    Raises:
        ValueError: every column is constant, or a discrete variable has too many distinct values.

    Example:
        >>> prepare(torch.tensor([3, 7, 3]), "normal", "x")
        tensor([[1., 0.], [0., 1.], [1., 0.]])
    """
    if marginals == "none":
        return samples if samples.is_floating_point() else samples.float()
    columns = samples.reshape(len(samples), -1)
    columns = columns[:, (columns != columns[:1]).any(dim=0)]
    if not columns.shape[1]:
        raise ValueError(f"{name} is constant: all {len(samples)} samples are equal, so there is no information")
    if not samples.is_floating_point():
        return one_hot(columns, name)
    return (normal_scores(columns) if marginals == "normal" else standardise(columns)).float()


def one_hot(columns: Tensor, name: str = "x") -> Tensor:
    """One column for each distinct value of each column, (N, total number of distinct values).

    Raises:
        ValueError: there are more than 512 of them.

    Example:
        >>> one_hot(torch.tensor([[5, 0], [9, 0], [5, 1]]))
        tensor([[1., 0., 1., 0.], [0., 1., 1., 0.], [1., 0., 0., 1.]])
    """
    found = [column.unique(return_inverse=True) for column in columns.T]
    total = sum(len(values) for values, _ in found)
    if total > MAX_CATEGORIES:
        raise ValueError(
            f"{name} has integers with {total} distinct values, more than the {MAX_CATEGORIES} that are taken as "
            "categories: convert them to floats if they are measurements or counts"
        )
    return torch.cat([torch.nn.functional.one_hot(index, len(values)) for values, index in found], dim=1).float()


def normal_scores(columns: Tensor) -> Tensor:
    r"""Each column mapped to :math:`\Phi^{-1}((\mathrm{rank} - 1/2) / N)`, a monotone map to standard Gaussians.

    Equal values get their mean rank.

    Example:
        >>> normal_scores(torch.tensor([[1.0], [100.0], [2.0]])).T.round(decimals=3)
        tensor([[-0.9670,  0.9670,  0.0000]], dtype=torch.float64)
    """
    n = len(columns)
    ranks = torch.empty(columns.shape, dtype=torch.float64, device=columns.device)
    for k, column in enumerate(columns.T):
        _, inverse, counts = column.unique(return_inverse=True, return_counts=True)
        last = counts.cumsum(0).double()
        ranks[:, k] = (last - (counts - 1) / 2)[inverse]  # 1-based mean rank
    scores: Tensor = torch.special.ndtri((ranks - 0.5) / n)
    return scores


def standardise(columns: Tensor) -> Tensor:
    """Columns of mean 0 and variance 1.

    Example:
        >>> standardise(torch.tensor([[0.0], [2.0]]))
        tensor([[-1.], [ 1.]], dtype=torch.float64)
    """
    columns = columns.double()
    centred = columns - columns.mean(dim=0)
    scale = centred.square().mean(dim=0).sqrt()
    return centred / torch.where((scale > 0) & (scale < math.inf), scale, 1.0)


def _describe(values: Any) -> str:
    dtype = getattr(values, "dtype", None)
    return f"an array of {dtype}" if dtype is not None else f"a {type(values).__name__}"
