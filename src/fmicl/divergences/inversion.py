"""Numerical inversion of the score: the conjugate of divergences that have none in closed form."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Any, ClassVar

import torch
from torch import Tensor

from fmicl.divergences.base import Divergence
from fmicl.utils.learnable import leaf_tensors
from fmicl.utils.numerics import to_float64

_STEPS = 100  # at most; about 15 if a value can be read
_CAPTURED_STEPS = 40  # in a CUDA graph, where none can


class InvertedConjugate(Divergence):
    """A divergence whose conjugate solves score(r) = t for each element: f*(t) = penalty(r), (f*)'(t) = e^r.

    All is computed in float64 if the device has it, and is differentiable in t and in what the divergence learns.
    """

    _range: ClassVar[float] = 350.0  # largest |r|: squares of e^r are still numbers

    def _conjugate(self, t: Tensor) -> Tensor:
        return self.penalty(self._log_maximiser(t)).to(t.dtype)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(self._log_maximiser(t)).to(t.dtype)

    def _log_maximiser(self, t: Tensor) -> Tensor:
        """The r with score(r) = t, in float64."""
        r: Tensor = _LogMaximiser.apply(t, self)
        if torch.is_grad_enabled() and self._learned_tensors(r):
            # implicit differentiation in the parameters p: dr/dp = -d_p score / score'
            score = self.score(r.detach())
            r = r - (score - score.detach()) * _inverse_slope(self, r.detach()).detach()
        return r

    def _learned_tensors(self, like: Tensor) -> list[Tensor]:
        """The tensors with a gradient that the score depends on."""
        return leaf_tensors(self.score, like.detach().new_zeros(1))

    @abstractmethod
    def _score_slope(self, r: Tensor) -> Tensor: ...

    @torch.no_grad()
    def _solve(self, t: Tensor) -> Tensor:
        """The r with score(r) = t, in float64; the nearer end of the range if there is none.

        Newton's method in an interval that halves where a step would leave it or is too long.
        """
        t = to_float64(t)
        rounding = 4 * torch.finfo(t.dtype).eps
        capturing = t.is_cuda and torch.cuda.is_current_stream_capturing()
        low, high = torch.full_like(t, -self._range), torch.full_like(t, self._range)
        r = torch.zeros_like(t)
        step = before = torch.full_like(t, math.inf)
        for _ in range(_CAPTURED_STEPS if capturing else _STEPS):
            excess = self.score(r) - t
            low, high = torch.where(excess < 0, r, low), torch.where(excess < 0, high, r)
            newton = r - excess / self.score_slope(r)
            done = ((newton - r).abs() <= rounding * (1 + r.abs())) | (high - low <= rounding * (1 + r.abs()))
            if not capturing and bool(done.all()):
                break
            good = (newton >= low) & (newton <= high) & ((newton - r).abs() <= before / 2)
            target = torch.where(done, r, torch.where(good, newton, (low + high) / 2))
            step, before = (target - r).abs(), step
            r = target
        return r


class _LogMaximiser(torch.autograd.Function):
    """The r with score(r) = t; its derivative 1 / score'(r) is differentiable again."""

    @staticmethod
    def forward(t: Tensor, divergence: InvertedConjugate) -> Tensor:
        return divergence._solve(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, InvertedConjugate], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        ctx.divergence, ctx.dtype = inputs[1], inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * _inverse_slope(ctx.divergence, *ctx.saved_tensors)).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (r,) = ctx.saved_for_forward
        return tangent.to(r.dtype) * _inverse_slope(ctx.divergence, r)

    @staticmethod
    def vmap(
        _: Any, in_dims: tuple[int | None, None], t: Tensor, divergence: InvertedConjugate
    ) -> tuple[Tensor, int | None]:
        return _LogMaximiser.apply(t, divergence), in_dims[0]


def _inverse_slope(divergence: InvertedConjugate, r: Tensor) -> Tensor:
    """1 / score'(r); 0 where r doesn't depend on t: where f has kinks or is linear, and at the ends of the range."""
    slope = divergence.score_slope(r)
    moves = (slope > 0) & (r.abs() < divergence._range - 1e-3)
    return torch.where(moves, 1 / torch.where(moves, slope, 1.0), 0.0)
