r"""Skewed divergences: any f against a mixture of the joint distribution and the product of its marginals.

With m = beta p(x, y) + (1 - beta) p(x) p(y), u the density ratio of p(x, y) and p(x) p(y), s = beta u + 1 - beta and
w = u / s that of p(x, y) and m, D_f(p || m) = E_m[f(w)] is an f-divergence too, of

    f_beta(u) = s f(u / s) ,

the perspective of f at an affine function of u: convex, and 0 at u = 1. As w' = (1 - beta) / s^2 and
(1 - beta) / s = 1 - beta w,

    f_beta'(u)            = f'(w) - beta (w f'(w) - f(w))          score    = score(rho) - beta penalty(rho)
    u f_beta'(u) - f_beta = (s - beta u) (w f'(w) - f(w))          penalty  = (1 - beta) penalty(rho)

at rho = log w, computed from r = log u without u. So the bound is that of f with the critic f'(w) and negatives from m,
as it must be: E_p[score_beta] - E_q[penalty_beta] = E_p[score(rho)] - E_m[penalty(rho)].

w < 1 / beta, so scores are bounded above by beta f(1 / beta) and penalties by (1 - beta) f*(f'(1 / beta)): no density
ratio, however large, dominates the estimate (Lee and Shin, 2022, for Renyi's divergence). If f(0) is finite, so are the
variance of the penalty and, as E_p[T^2] = E_m[w T^2], that of the score, whatever p is.

If penalty'' / penalty' of the base is C(rho), that of the skewed divergence is C(rho) (1 - beta w) - beta w. So h of
`fmicl.theory.uniformity` is strictly convex where C(rho) > beta u / (1 - beta): for KL (C = 1) if
mu < (1 - beta) / beta, for Pearson (C = 2) up to twice that, for reverse KL (C = 0) nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fmicl.divergences.base import TransformedDivergence
from fmicl.divergences.inversion import InvertedConjugate
from fmicl.utils.validation import require_skew


@dataclass(frozen=True, repr=False)
class Skewed(TransformedDivergence, InvertedConjugate):
    """f against the mixture beta p(x, y) + (1 - beta) p(x) p(y), made by `Divergence.skew`."""

    beta: float

    def __post_init__(self) -> None:
        require_skew(self.beta)
        if self.beta == 0:
            raise ValueError("a skew of 0 is the divergence itself: take that")

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"{self.base!r}.skew({self.beta})"

    @property
    def name(self) -> str:  # type: ignore[override]
        """The base's name and the skew."""
        return f"{self.base.name}[skew={self.beta:g}]"

    @property
    def formula(self) -> str:  # type: ignore[override]
        """f_beta in terms of the base's f."""
        return f"s f(u/s), s = {self.beta:g} u + {1 - self.beta:g}, f(u) = {self.base.formula}"

    @property
    def supremum(self) -> float:  # type: ignore[override]
        """f_beta'(inf) = beta f(1 / beta)."""
        return self.beta * float(self.base.f(torch.as_tensor(1 / self.beta, dtype=torch.float64)).detach())

    @property
    def log_odds(self) -> float:
        """log(beta / (1 - beta)): beta w = sigmoid(r + this)."""
        return math.log(self.beta) - math.log1p(-self.beta)

    def log_ratio(self, r: Tensor) -> Tensor:
        """Rho = log w of the mixture, whose slope is 1 - beta w; no difference of large numbers on either side."""
        z = r + self.log_odds
        below = r.clamp(max=-self.log_odds)
        near = below - torch.log1p(self.beta * torch.expm1(below))
        return torch.where(z < 0, near, F.logsigmoid(z) - math.log(self.beta))

    def _rest(self, r: Tensor) -> Tensor:
        """1 - beta w = (1 - beta) / s."""
        return torch.sigmoid(-r - self.log_odds)

    def _f(self, u: Tensor) -> Tensor:
        s = self.beta * u + (1 - self.beta)
        return s * self.base._f(u / s)

    def _derivative(self, u: Tensor) -> Tensor:
        return self._score(torch.log(u))

    def _score(self, r: Tensor) -> Tensor:
        if torch.compiler.is_compiling():
            return self._plain_score(r)
        # autograd would give the slope as a difference, f'' w (1 - beta w) - ..., which cancels for large r
        return self._plain_score(r.detach()) + _zero_with_slope(r, self._score_slope)

    def _plain_score(self, r: Tensor) -> Tensor:
        rho = self.log_ratio(r)
        return self.base.score(rho) - self.beta * self.base.penalty(rho)

    def _score_slope(self, r: Tensor) -> Tensor:
        return self.base.score_slope(self.log_ratio(r)) * self._rest(r).square()

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        rho, rho_0 = self.log_ratio(r), self.log_ratio(reference)
        penalties = self.base.penalty(rho) - self.base.penalty(rho_0)
        return self.base.score_difference(rho, rho_0) - self.beta * penalties

    def _penalty(self, r: Tensor) -> Tensor:
        return (1 - self.beta) * self.base.penalty(self.log_ratio(r))

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return (1 - self.beta) * self.base.penalty_slope(self.log_ratio(r)) * self._rest(r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        rest = self._rest(r)
        penalty, slope = self.base.penalty_and_slope(self.log_ratio(r))
        return (1 - self.beta) * penalty, (1 - self.beta) * slope * rest

    def _relative_curvature(self, r: Tensor) -> Tensor:
        # of penalty(rho(r)), rho' = q and q' = -q (1 - q)
        return self.base._relative_curvature(self.log_ratio(r)) * self._rest(r) - torch.sigmoid(r + self.log_odds)


class _ZeroWithSlope(torch.autograd.Function):
    """0 with a given derivative in r, which is differentiable again."""

    @staticmethod
    def forward(r: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004
        return torch.zeros_like(r)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Callable[[Tensor], Tensor]], output: Tensor) -> None:  # noqa: ARG004
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])
        ctx.slope = inputs[1]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (r,) = ctx.saved_tensors
        return grad * ctx.slope(r), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (r,) = ctx.saved_for_forward
        slope: Tensor = ctx.slope(r)
        return tangent * slope

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, None], r: Tensor, slope: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, int | None]:
        return _zero_with_slope(r, slope), in_dims[0]


def _zero_with_slope(r: Tensor, slope: Callable[[Tensor], Tensor]) -> Tensor:
    zero: Tensor = _ZeroWithSlope.apply(r, slope)
    return zero
