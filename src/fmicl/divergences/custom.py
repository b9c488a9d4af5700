"""A divergence from its generator f alone: `Divergence.from_generator`."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fmicl.divergences.base import Divergence

# Convexity is looked for on this range of log u, in float64: e^16 is about 9e6.
_CHECKED = 16.0
_POINTS = 4097  # odd, so that u = 1 is one of them
_BISECTION_LIMIT = 300.0  # |log u|; beyond it squares of u leave float64
_NEWTON_STEPS = 12  # to a root that is known to 0.15 in log u; 4 or 5 will do for a smooth f


def _widest(x: Tensor) -> Tensor:
    return x if x.device.type == "mps" else x.double()


@dataclass(frozen=True)
class Generated(Divergence):
    """Everything from f: f' by automatic differentiation, the rest by Fenchel-Young."""

    generator: Callable[[Tensor], Tensor]
    name: str
    supremum: float
    at_zero: float
    at_supremum: float
    """f* there, which may be finite: the limit of u f'(u) - f(u)."""
    straight: bool = False

    formula = "given as code"
    closed_form = False

    def __repr__(self) -> str:
        """As it was made: the function under its own name, which tells more than where in memory it lies."""
        function = getattr(self.generator, "__qualname__", None) or type(self.generator).__name__
        return f"Divergence.from_generator({function}, name={self.name!r})"

    @classmethod
    def checked(cls, f: Callable[[Tensor], Tensor], name: str) -> Generated:
        """Refuse an f that is no generator, saying at which u; otherwise find f'(inf)."""
        u = torch.exp(torch.linspace(-_CHECKED, _CHECKED, _POINTS, dtype=torch.float64))
        _check_elementwise(f, u, name)
        steepest = _check_convex(f, u, name)
        supremum = _supremum(f)
        if supremum < steepest - 1e-6 * (1 + abs(steepest)):
            raise ValueError(
                f"{name}: f is not convex beyond u = {float(u[-1]):g}: its slope falls from {steepest:g} to "
                f"{supremum:g}"
            )
        _, curvature = _slope_and_curvature(f, u)
        straight = not bool((u.square() * curvature > 1e-12).any())
        return cls(f, name, supremum, _at_zero(f), _at_supremum(f), straight)

    def _f(self, u: Tensor) -> Tensor:
        at_zero = u == 0  # where a formula such as u log u has no value of its own, but f has a limit
        values = self.generator(torch.where(at_zero, 1.0, _widest(u)))
        return torch.where(at_zero, self.at_zero, values).to(u.dtype)

    def _derivative(self, u: Tensor) -> Tensor:
        return _slope(self.generator, _widest(u)).to(u.dtype)

    def _conjugate(self, t: Tensor) -> Tensor:
        wide, u = _widest(t), _Maximiser.apply(t, self)
        value = (wide * u - self.generator(u)).to(t.dtype)
        return value if self.supremum == math.inf else torch.where(t >= self.supremum, self.at_supremum, value)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        u = _Maximiser.apply(t, self).to(t.dtype)
        return u if self.supremum == math.inf else torch.where(t >= self.supremum, math.inf, u)

    def _score(self, r: Tensor) -> Tensor:
        return _slope(self.generator, torch.exp(_widest(r))).to(r.dtype)

    def _penalty(self, r: Tensor) -> Tensor:
        u = torch.exp(_widest(r))
        return (u * _slope(self.generator, u) - self.generator(u)).to(r.dtype)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        u = torch.exp(_widest(r))
        curvature = _slope(lambda v: _slope(self.generator, v), u)
        return (u.square() * curvature).to(r.dtype)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        wide = _widest(r)
        slope, curvature = self._penalty_slope(wide), _slope(self._penalty_slope, wide)
        # curvature is a difference of terms as large as the slope: what is left of them by rounding is nothing
        ratio = curvature / torch.where(slope == 0, 1.0, slope)
        return torch.where(ratio.abs() < 1e-10, 0.0, ratio).to(r.dtype)

    @functools.cached_property
    def _table(self) -> tuple[Tensor, Tensor]:
        """log u on a grid, and f' there, which does not fall."""
        log_u = torch.linspace(-_BISECTION_LIMIT, _BISECTION_LIMIT, _POINTS, dtype=torch.float64)
        slopes = _slope(self.generator, torch.exp(log_u))
        slopes = torch.where(slopes.isnan(), log_u.sign() * math.inf, slopes)  # where a formula overflows
        return log_u, slopes.cummax(dim=0).values

    @torch.no_grad()
    def maximiser(self, t: Tensor) -> Tensor:
        """The u with f'(u) = t, in double precision and as near as t is rounded; the nearest end where there is none.

        The table gives an interval around it, in which Newton's steps are taken; one that would leave it, and all where
        f has kinks that they don't get past, are bisections.
        """
        given, t = t, _widest(t)
        rounding = max(1e-2 * torch.finfo(given.dtype).eps, 4 * torch.finfo(t.dtype).eps)
        log_u, slopes = (x.to(t) for x in self._table)
        place = torch.searchsorted(slopes, t.contiguous())
        # a cell to spare on each side, so that steps to a root at the edge don't leave
        low = torch.where(place == _POINTS, log_u[-1], log_u[(place - 2).clamp(min=0)])
        high = torch.where(place == 0, log_u[0], log_u[(place + 1).clamp(max=_POINTS - 1)])
        x = (low + high) / 2
        for step in range(_NEWTON_STEPS + 64):
            if step < _NEWTON_STEPS:
                slope, curvature = _slope_and_curvature(self.generator, torch.exp(x))
                newton = x - (slope - t) / (curvature * torch.exp(x))
            else:
                slope, newton = _slope(self.generator, torch.exp(x)), torch.full_like(x, math.nan)
            low, high = torch.where(slope < t, x, low), torch.where(slope < t, high, x)
            nearest = torch.minimum((newton - x).abs().nan_to_num(math.inf), high - low)
            # or f' is flat here, and log u not known better than f' is
            done = (nearest <= rounding * (1 + x.abs())) | ((slope - t).abs() <= rounding * t.abs())
            if bool(done.all()):
                break
            inside = (newton >= low) & (newton <= high)
            x = torch.where(done, x, torch.where(inside, newton, (low + high) / 2))
        return torch.exp(x)


class _Maximiser(torch.autograd.Function):
    """The u with f'(u) = t, of which the derivative is 1 / f''(u); it is differentiable in turn."""

    @staticmethod
    def forward(t: Tensor, divergence: Generated) -> Tensor:
        return divergence.maximiser(t)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Generated], output: Tensor) -> None:
        ctx.save_for_backward(output)
        ctx.save_for_forward(output)
        ctx.generator, ctx.dtype = inputs[1].generator, inputs[0].dtype

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * _steepness(ctx.generator, *ctx.saved_tensors)).to(ctx.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: None) -> Tensor:
        (u,) = ctx.saved_for_forward
        return tangent.to(u.dtype) * _steepness(ctx.generator, u)

    @staticmethod
    def vmap(_: Any, in_dims: tuple[int | None, None], t: Tensor, divergence: Generated) -> tuple[Tensor, int | None]:
        return _Maximiser.apply(t, divergence), in_dims[0]


def _steepness(f: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """1 / f''(u); 0 where u doesn't follow t: at kinks, in straight pieces, and at the ends, beyond which t lies."""
    curvature = _slope(lambda v: _slope(f, v), u)
    bends = (curvature > 0) & (u.log().abs() < _BISECTION_LIMIT - 1e-3)
    return torch.where(bends, 1 / torch.where(bends, curvature, 1.0), 0.0)


def _slope_and_curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """f'(u) and f''(u) elementwise."""

    def total(v: Tensor) -> tuple[Tensor, Tensor]:
        slope = _slope(f, v)
        return slope.sum(), slope

    curvature, slope = torch.func.grad(total, has_aux=True)(u)
    return slope, curvature


def _slope(f: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """f'(u) elementwise, differentiable again, whether or not gradients are being recorded."""
    derivative: Tensor = torch.func.grad(lambda v: f(v).sum())(u)
    return derivative


def _check_elementwise(f: Callable[[Tensor], Tensor], u: Tensor, name: str) -> None:
    try:
        values = f(u)
    except Exception as error:
        raise TypeError(f"{name}: f must be made of torch operations on a tensor, but it raised: {error}") from error
    if not isinstance(values, Tensor) or values.shape != u.shape:
        seen = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
        raise TypeError(f"{name}: f must return a tensor of its argument's shape {tuple(u.shape)}, got {seen}")
    try:
        _slope(f, u[:7])
    except Exception as error:
        raise TypeError(
            f"{name}: f must be made of torch operations, which can be differentiated (torch.log, not numpy's or "
            f"math's); torch says: {error}"
        ) from error
    alone = f(u[:7].reshape(7, 1)).reshape(7)
    if not torch.allclose(alone, values[:7], rtol=1e-9, atol=1e-12, equal_nan=True):
        raise TypeError(f"{name}: f must act on each element alone, but its values change with the rest of the tensor")


def _check_convex(f: Callable[[Tensor], Tensor], u: Tensor, name: str) -> float:
    """Refuse an f that isn't finite and convex on the grid u; return its largest slope there."""
    at_one = float(f(torch.ones(1, dtype=torch.float64)))
    if not math.isfinite(at_one):
        raise ValueError(f"{name}: f(1) must be 0, but f has no value ({at_one:g}) at u = 1")
    if not abs(at_one) <= 1e-9:
        hint = " (a constant in it that is rounded to float32?)" if abs(at_one) < 1e-5 else ""
        raise ValueError(f"{name}: f(1) must be 0, but f(u) = {at_one:g} at u = 1{hint}; subtract that constant")
    values = f(u)
    wrong = values.isnan() | (values == -math.inf)
    if wrong.any():
        where = float(u[wrong][0])
        raise ValueError(f"{name}: f must be finite for u > 0, but f(u) = {float(f(u[wrong][:1])):g} at u = {where:g}")
    # A convex function may be +inf beyond some u (exp(u) overflows); what lies within must be convex.
    inside = values.isfinite()
    u, values = u[inside], values[inside]
    slopes = _slope(f, u)
    secants = values.diff() / u.diff()
    noise = 1e-14 * (values[1:].abs() + values[:-1].abs()) / u.diff() + 1e-9 * secants.abs() + 1e-12
    # f' must not fall from one point to the next, and the secant must lie between the two: the second
    # sees the jumps and kinks that automatic differentiation steps over.
    falls = slopes[1:] < slopes[:-1] - 1e-9 * (slopes[:-1].abs() + slopes[1:].abs()) - 1e-12
    jumps = (secants < slopes[:-1] - noise) | (secants > slopes[1:] + noise)
    bad = falls | jumps | slopes[1:].isnan()
    if bad.any():
        i = int(torch.where(bad, u[:-1].log().abs(), math.inf).argmin())  # nearest to 1: the least surprising one
        raise ValueError(
            f"{name}: f is not convex near u = {float(u[i]):g}: f' goes from {float(slopes[i]):g} "
            f"to {float(slopes[i + 1]):g} at u = {float(u[i + 1]):g}, with {float(secants[i]):g} on average between"
        )
    return float(slopes[-1])


def _at_zero(f: Callable[[Tensor], Tensor]) -> float:
    """f(0), as a limit where the formula has none."""
    exact, nearer, near = f(torch.tensor([0.0, math.exp(-700), math.exp(-350)], dtype=torch.float64)).tolist()
    if not math.isnan(exact):
        return float(exact)
    return nearer if abs(nearer - near) <= 1e-9 * (1 + abs(nearer)) else math.inf


def _at_supremum(f: Callable[[Tensor], Tensor]) -> float:
    """f*(f'(inf)), the limit of u f'(u) - f(u); inf where that goes on growing, or f' does.

    It is looked for up to u = e^16: beyond, more digits cancel than the limit is nearer.
    """
    u = torch.tensor([_CHECKED - 6, _CHECKED - 3, _CHECKED], dtype=torch.float64).exp()
    first, second, third = (u * _slope(f, u) - f(u)).tolist()
    before, last = second - first, third - second
    if abs(last) <= 1e-8 * (1 + abs(third)):
        return float(third)
    share = last / before if before > 0 else math.inf
    return float(third + last * share / (1 - share)) if 0 <= share < 0.5 else math.inf


def _supremum(f: Callable[[Tensor], Tensor]) -> float:
    """f'(inf): where f' stops growing, or inf if it doesn't."""
    for log_u in (200.0, 100.0, 50.0, 25.0):
        near, far = _slope(f, torch.tensor([log_u / 2, log_u], dtype=torch.float64).exp()).tolist()
        if math.isfinite(near) and math.isfinite(far):
            return far if abs(far - near) <= 1e-6 * (1 + abs(far)) else math.inf
    return math.inf
