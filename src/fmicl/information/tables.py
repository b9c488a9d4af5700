"""Exact f-mutual information of discrete joint distributions."""

from __future__ import annotations

import torch
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence


def f_mutual_information(joint: Tensor, divergence: DivergenceName | Divergence) -> Tensor:
    """The exact f-mutual information of a discrete joint distribution.

    I_f(X; Y) = sum_xy p(x) p(y) f(p(x, y) / (p(x) p(y))).

    Args:
        joint: probabilities p(x, y), (X, Y); not negative, of sum 1.
        divergence: a name or a `Divergence`.

    Returns:
        I_f(X; Y), a scalar; 0 for independent variables, and infinite if f(0) is and some p(x, y) = 0 < p(x) p(y). If
        f'(0) is infinite, the gradient of cells with p(x, y) = 0 is left out.

    Raises:
        TypeError: joint is not a tensor.
        ValueError: joint is not a table of probabilities.

    Example:
        >>> import torch
        >>> f_mutual_information(torch.tensor([[0.5, 0.0], [0.0, 0.5]]), "kl")     # one bit
        tensor(0.6931)
    """
    divergence = make_divergence(divergence)
    if not isinstance(joint, Tensor):
        raise TypeError(f"joint must be a tensor (X, Y), got a {type(joint).__name__}; use torch.tensor")
    if joint.dim() != 2 or not joint.is_floating_point():
        raise ValueError(
            f"joint must be a two-dimensional table of probabilities, got {tuple(joint.shape)} of {joint.dtype}"
        )
    total = float(joint.detach().sum())
    if not bool((joint >= 0).all()) or not abs(total - 1) <= 1e-4:
        raise ValueError(
            f"joint must hold probabilities, got a smallest of {float(joint.min()):g} and a sum of {total:g}; divide "
            "counts by their sum"
        )
    independent = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True)
    possible = independent > 0
    # a row or column without mass contributes nothing; keep its ratio 0 / 0 from f
    filled = possible & (joint > 0)
    ratio = torch.where(filled, joint, 1.0) / torch.where(filled, independent, 1.0)
    # f(0) as a number: its slope may be infinite, which would make the gradients of the whole row and column NaN
    zero = joint.new_zeros(())
    at_zero, slope = divergence.f(zero), divergence.derivative(zero)
    if bool(at_zero.isfinite()):
        empty = independent * at_zero + (joint * slope if bool(slope.isfinite()) else 0.0)
    else:
        empty = at_zero  # without a product, whose gradient would be NaN even if no cell is empty
    return torch.where(filled, independent * divergence.f(ratio), torch.where(possible, empty, 0.0)).sum()
