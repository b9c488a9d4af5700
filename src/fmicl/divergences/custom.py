"""User-defined divergences: everything from the generator f (`Divergence.from_generator`)."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from fmicl.divergences.inversion import InvertedConjugate
from fmicl.utils.learnable import leaf_tensors
from fmicl.utils.numerics import to_float64

_CHECKED = 16.0  # largest |log u| at which convexity is checked; e^16 is about 9e6
_POINTS = 4097  # odd, so that u = 1 is one of them
_NEWTON_STEPS = 12  # to a root within 0.15 in log u; a smooth f needs 4 or 5

T = TypeVar("T")


class _Limits(NamedTuple):
    """f'(inf), f(0) and f* at f'(inf), the limit of u f'(u) - f(u), which may be finite."""

    supremum: float
    at_zero: float
    at_supremum: float


@dataclass(frozen=True)
class Generated(InvertedConjugate):
    """A divergence from f alone: f' by automatic differentiation, the rest by Fenchel-Young.

    If f depends on tensors that are trained, its limits and its table of slopes are computed again when they change.
    """

    generator: Callable[[Tensor], Tensor]
    name: str
    piecewise_linear: bool = False

    formula = "given as code"
    closed_form = False
    _range = 300.0

    def __repr__(self) -> str:
        """The call that makes it, with the function's name instead of its address."""
        function = getattr(self.generator, "__qualname__", None) or type(self.generator).__name__
        return f"Divergence.from_generator({function}, name={self.name!r})"

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle, which finds functions by name.

        Raises:
            pickle.PicklingError: f is a lambda or was defined within a function.
        """
        try:
            pickle.dumps(self.generator)
        except Exception as error:
            raise pickle.PicklingError(
                f"{self!r} can't be pickled, since pickle can't find its f by name: define f by def at the top level "
                "of a module"
            ) from error
        return type(self), tuple(getattr(self, field.name) for field in fields(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> Generated:
        return replace(self, generator=copy.deepcopy(self.generator, memo))

    @classmethod
    def checked(cls, f: Callable[[Tensor], Tensor], name: str) -> Generated:
        """Check that f is a generator, and find f'(inf), f(0) and f*(f'(inf))."""
        u = torch.exp(torch.linspace(-_CHECKED, _CHECKED, _POINTS, dtype=torch.float64))
        with torch.no_grad():
            _check_elementwise(f, u, name)
            steepest = _check_convex(f, u, name)
            _, curvature = _slope_and_curvature(f, u)
        made = cls(f, name, piecewise_linear=not bool((u.square() * curvature > 1e-12).any()))
        if made.supremum < steepest - 1e-6 * (1 + abs(steepest)):
            raise ValueError(
                f"{name}: f is not convex beyond u = {float(u[-1]):g}: its slope falls from {steepest:g} to "
                f"{made.supremum:g}"
            )
        return made

    @property
    def supremum(self) -> float:  # type: ignore[override]
        """f'(inf)."""
        return self._limits.supremum

    @property
    def _limits(self) -> _Limits:
        f = self.generator
        return self._cached("limits", lambda: _Limits(_supremum(f), _at_zero(f), _at_supremum(f)))

    @functools.cached_property
    def _cache(self) -> dict[str, tuple[object, Any]]:
        return {}

    def _cached(self, name: str, compute: Callable[[], T]) -> T:
        """A result that is computed again when the tensors that f depends on have changed."""
        state = self._state()
        known = self._cache.get(name)
        if known is None or known[0] != state:
            with torch.no_grad():
                known = self._cache[name] = state, compute()
        result: T = known[1]
        return result

    def _state(self) -> object:
        """Identity and version of each tensor with a gradient that f depends on."""
        if not self._learned:
            return None
        device = next(iter(self._learned)).device
        found = leaf_tensors(self.generator, torch.ones(1, dtype=torch.float64, device=device))
        return tuple((id(each), each._version, each.device) for each in found)

    @functools.cached_property
    def _learned(self) -> list[Tensor]:
        return leaf_tensors(self.generator, torch.ones(1, dtype=torch.float64))

    def _f(self, u: Tensor) -> Tensor:
        at_zero = u == 0  # a formula such as u log u is NaN there, but f has a limit
        values = self.generator(torch.where(at_zero, 1.0, to_float64(u)))
        return torch.where(at_zero, self._limits.at_zero, values).to(u.dtype)

    def _derivative(self, u: Tensor) -> Tensor:
        return _slope(self.generator, to_float64(u)).to(u.dtype)

    def _conjugate(self, t: Tensor) -> Tensor:
        u = torch.exp(self._log_maximiser(t))
        value = (to_float64(t) * u - self.generator(u)).to(t.dtype)  # at a kink, unlike the penalty
        return value if self.supremum == math.inf else torch.where(t >= self.supremum, self._limits.at_supremum, value)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        u = super()._conjugate_derivative(t)
        return u if self.supremum == math.inf else torch.where(t >= self.supremum, math.inf, u)

    def _learned_tensors(self, like: Tensor) -> list[Tensor]:  # noqa: ARG002
        return self._learned

    def _score(self, r: Tensor) -> Tensor:
        return _slope(self.generator, torch.exp(to_float64(r))).to(r.dtype)

    def _penalty(self, r: Tensor) -> Tensor:
        u = torch.exp(to_float64(r))
        return (u * _slope(self.generator, u) - self.generator(u)).to(r.dtype)

    def _score_slope(self, r: Tensor) -> Tensor:
        u = torch.exp(to_float64(r))
        return (u * _curvature(self.generator, u)).to(r.dtype)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        u = torch.exp(to_float64(r))
        return (u.square() * _curvature(self.generator, u)).to(r.dtype)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        wide = to_float64(r)
        slope, curvature = self._penalty_slope(wide), _slope(self._penalty_slope, wide)
        # the curvature is a difference of terms as large as the slope: what is within their rounding error is zero
        ratio = curvature / torch.where(slope == 0, 1.0, slope)
        return torch.where(ratio.abs() < 1e-10, 0.0, ratio).to(r.dtype)

    def _table(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """A grid of log u, and f' there, made non-decreasing; of the type and on the device of t."""
        return self._cached(f"table {t.dtype} {t.device}", lambda: self._slopes(t))

    def _slopes(self, t: Tensor) -> tuple[Tensor, Tensor]:
        log_u = torch.linspace(-self._range, self._range, _POINTS, dtype=t.dtype, device=t.device)
        slopes = _slope(self.generator, torch.exp(log_u))
        slopes = torch.where(slopes.isnan(), log_u.sign() * math.inf, slopes)  # f overflows there
        return log_u, slopes.cummax(dim=0).values

    @torch.no_grad()
    def _solve(self, t: Tensor) -> Tensor:
        """The log u with f'(u) = t, to the rounding of t; the nearer end of the range if there is none.

        Newton's method in an interval from the table. Steps that would leave it are bisections, and so are all after
        the first ones, as f may have kinks.
        """
        given, t = t, to_float64(t)
        rounding = max(1e-2 * torch.finfo(given.dtype).eps, 4 * torch.finfo(t.dtype).eps)
        log_u, slopes = self._table(t)
        place = torch.searchsorted(slopes, t.contiguous())
        # one more cell on each side, so that steps to a root at the edge don't leave the interval
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
            # the second case: f' is flat, so its rounding limits that of log u
            done = (nearest <= rounding * (1 + x.abs())) | ((slope - t).abs() <= rounding * t.abs())
            if bool(done.all()):
                break
            inside = (newton >= low) & (newton <= high)
            x = torch.where(done, x, torch.where(inside, newton, (low + high) / 2))
        return x


def _slope_and_curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> tuple[Tensor, Tensor]:
    """f'(u) and f''(u) elementwise."""

    def total(v: Tensor) -> tuple[Tensor, Tensor]:
        slope = _slope(f, v)
        return slope.sum(), slope

    curvature, slope = torch.func.grad(total, has_aux=True)(u)
    return slope, curvature


def _curvature(f: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """f''(u) elementwise, differentiable again."""
    return _slope(lambda v: _slope(f, v), u)


def _slope(f: Callable[[Tensor], Tensor], u: Tensor) -> Tensor:
    """f'(u) elementwise, differentiable again, also under no_grad."""
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
            f"{name}: f must be made of differentiable torch operations (torch.log, not numpy's or math's); torch "
            f"raised: {error}"
        ) from error
    alone = f(u[:7].reshape(7, 1)).reshape(7)
    if not torch.allclose(alone, values[:7], rtol=1e-9, atol=1e-12, equal_nan=True):
        raise TypeError(f"{name}: f must act elementwise, but its values depend on other elements of the tensor")


def _check_convex(f: Callable[[Tensor], Tensor], u: Tensor, name: str) -> float:
    """The largest slope of f on the grid u; ValueError if f isn't finite and convex there."""
    at_one = float(f(torch.ones(1, dtype=torch.float64)))
    if not math.isfinite(at_one):
        raise ValueError(f"{name}: f(1) must be 0, but f has no value ({at_one:g}) at u = 1")
    if not abs(at_one) <= 1e-9:
        hint = " (has it a constant that is rounded to float32?)" if abs(at_one) < 1e-5 else ""
        raise ValueError(f"{name}: f(1) must be 0, but f(u) = {at_one:g} at u = 1{hint}; subtract that constant")
    values = f(u)
    wrong = values.isnan() | (values == -math.inf)
    if wrong.any():
        where = float(u[wrong][0])
        raise ValueError(f"{name}: f must be finite for u > 0, but f(u) = {float(f(u[wrong][:1])):g} at u = {where:g}")
    # A convex function may be +inf beyond some u (exp(u) overflows).
    inside = values.isfinite()
    u, values = u[inside], values[inside]
    slopes = _slope(f, u)
    secants = values.diff() / u.diff()
    # of the terms that f adds up, which may cancel: as large as f is around 1
    size = values.abs().clamp(min=float(values[u.log().abs() <= 1].abs().max()))
    noise = 1e-14 * (size[1:] + size[:-1]) / u.diff() + 1e-9 * secants.abs() + 1e-12
    # f' must not decrease from one point to the next, and the slope of the secant must lie between the two: that shows
    # the jumps and kinks that automatic differentiation misses.
    falls = slopes[1:] < slopes[:-1] - 1e-9 * (slopes[:-1].abs() + slopes[1:].abs()) - 1e-12
    jumps = (secants < slopes[:-1] - noise) | (secants > slopes[1:] + noise)
    bad = falls | jumps | slopes[1:].isnan()
    if bad.any():
        i = int(torch.where(bad, u[:-1].log().abs(), math.inf).argmin())  # report the one nearest to 1
        raise ValueError(
            f"{name}: f is not convex near u = {float(u[i]):g}: f' goes from {float(slopes[i]):g} "
            f"to {float(slopes[i + 1]):g} at u = {float(u[i + 1]):g}, with {float(secants[i]):g} on average between"
        )
    return float(slopes[-1])


def _at_zero(f: Callable[[Tensor], Tensor]) -> float:
    """f(0), as a limit if the formula is NaN there."""
    exact, nearer, near = f(torch.tensor([0.0, math.exp(-700), math.exp(-350)], dtype=torch.float64)).tolist()
    if not math.isnan(exact):
        return float(exact)
    return nearer if abs(nearer - near) <= 1e-9 * (1 + abs(nearer)) else math.inf


def _at_supremum(f: Callable[[Tensor], Tensor]) -> float:
    """f*(f'(inf)), the limit of u f'(u) - f(u); inf if that or f' keeps growing.

    Extrapolated from u up to e^16: beyond, cancellation costs more digits than the limit gains.
    """
    u = torch.tensor([_CHECKED - 6, _CHECKED - 3, _CHECKED], dtype=torch.float64).exp()
    first, second, third = (u * _slope(f, u) - f(u)).tolist()
    before, last = second - first, third - second
    if abs(last) <= 1e-8 * (1 + abs(third)):
        return float(third)
    share = last / before if before > 0 else math.inf
    return float(third + last * share / (1 - share)) if 0 <= share < 0.5 else math.inf


def _supremum(f: Callable[[Tensor], Tensor]) -> float:
    """f'(inf), inf if f' keeps growing.

    An f' that approaches its limit as a power of u, such as (1 - u^-0.001) / 0.001, is still far from it at the largest
    u. Its increments over equal steps of log u fall by a constant factor, and their geometric series gives the rest.
    """
    for log_u in (640.0, 320.0, 160.0, 80.0, 40.0, 20.0):
        places = torch.arange(1, 6, dtype=torch.float64) * (log_u / 5)
        slopes = _slope(f, places.exp())
        if not bool(slopes.isfinite().all()):
            continue
        last, increments = float(slopes[-1]), slopes.diff()
        if abs(float(increments[-1])) <= 1e-9 * (1 + abs(last)):
            return last
        *others, factor = (increments[1:] / increments[:-1]).tolist()
        geometric = all(abs(other - factor) <= 1e-2 * (1 - factor) for other in others)
        return last + float(increments[-1]) * factor / (1 - factor) if geometric and 0 < factor < 1 - 1e-6 else math.inf
    return math.inf
