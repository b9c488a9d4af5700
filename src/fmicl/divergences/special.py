"""Special functions that torch lacks, or whose derivatives it computes less accurately."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor


def expm1(x: Tensor) -> Tensor:
    """e^x - 1 with the derivative e^x; torch's is expm1(x) + 1, which cancels for very negative x.

    Example:
        >>> x = torch.tensor(-20.0, requires_grad=True)
        >>> expm1(x).backward()
        >>> bool(x.grad == x.detach().exp()), bool(x.grad == x.detach().expm1() + 1)
        (True, False)
    """
    return torch.where(x < -1, torch.exp(x.clamp(max=0.0)) - 1, torch.expm1(x))


class _LogLambertW(torch.autograd.Function):
    """L(s) with L + expm1(L) = s; its derivative 1 / (1 + e^L) is differentiable again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(s: Tensor) -> Tensor:
        # g(L) = L + expm1(L) - s is increasing and convex, so Newton's method from above converges without crossing the
        # root. Start at the least of three upper bounds, each tight somewhere:
        #   expm1(L) >= L           gives L <= s / 2
        #   expm1(L) >= -1          gives L <= s + 1
        #   L >= 0 for s >= 0       gives L <= log(1 + s)
        bound = torch.minimum(s / 2, s + 1)
        root = torch.where(s > 0, torch.minimum(bound, torch.log1p(s.clamp(min=0))), bound)
        for _ in range(8):
            root = root - (root + torch.expm1(root) - s) / (1 + torch.exp(root))
        return root

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (root,) = ctx.saved_tensors
        return grad * torch.sigmoid(-root)


def log_lambert_w(z: Tensor) -> Tensor:
    r"""Logarithm of Lambert's W at e^z: the L that solves e^L + L = z.

    Logarithms keep every z representable: in W(e^z) the argument overflows for z > 709, and the value underflows for
    z < -745.

    Args:
        z: any shape, any real values.

    Returns:
        L with W(e^z) = e^L, same shape; twice differentiable.

    Example:
        >>> import torch
        >>> z = torch.tensor([-1e4, 1.0, 1e4], dtype=torch.float64)
        >>> L = log_lambert_w(z)
        >>> torch.allclose(L.exp() + L, z)
        True
    """
    root: Tensor = _LogLambertW.apply(z - 1)
    return root


@lru_cache(maxsize=256)
def log_hyp0f1(order: float, z: float) -> float:
    r"""log 0F1(; order; z) = log sum_m z^m / (m! (order)_m), for order > 0 and z >= 0.

    All terms are positive, so nothing cancels: lgamma gives the largest term, and the ratio of consecutive terms,
    z / (m (order + m - 1)), its neighbours, until they no longer count.

    With order = d/2 and z = (k/2)^2 this is log[Gamma(d/2) (2/k)^(d/2-1) I_(d/2-1)(k)], the log normaliser of the von
    Mises-Fisher distribution relative to the uniform one on the sphere in R^d.

    Example:
        >>> import math
        >>> abs(log_hyp0f1(1.5, 1.0) - math.log(math.sinh(2.0) / 2.0)) < 1e-14
        True
    """
    if order <= 0 or z < 0:
        raise ValueError(f"log_hyp0f1 needs order > 0 and z >= 0, got order={order} and z={z}")
    if z == 0:
        return 0.0
    # consecutive terms are equal where m (order + m - 1) = z
    half = (order - 1) / 2
    peak = max(0, int(math.sqrt(half * half + z) - half))
    log_peak = peak * math.log(z) - math.lgamma(peak + 1) - (math.lgamma(order + peak) - math.lgamma(order))
    total = term = 1.0
    m = peak
    while term > 1e-17 * total:
        m += 1
        term *= z / (m * (order + m - 1))
        total += term
    term = 1.0
    for m in range(peak, 0, -1):
        term *= m * (order + m - 1) / z
        total += term
        if term <= 1e-17 * total:
            break
    return log_peak + math.log(total)
