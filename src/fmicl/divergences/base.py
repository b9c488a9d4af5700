"""What every f-divergence has: f, its derivative and conjugate, and their images in the log density ratio."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Divergence", "Weighted", "real"]


def real(value: Tensor | float) -> Tensor:
    """A real tensor, half precision converted to float32: e^r spans far more than half types hold."""
    tensor = torch.as_tensor(value)
    if tensor.is_complex():
        raise ValueError(f"a divergence is a function of real numbers, got {tensor.dtype}")
    if not tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Divergence(ABC):
    r"""A convex f with f(1) = 0 and what follows from it. All methods act elementwise.

    Tensors of any shape go in and come out; float16 and bfloat16 are computed, and returned, in
    float32, as autocast does for exp and log. Every method is differentiable.

    A subclass of a known one may redefine its penalty (`_penalty`); it is then computed as a divergence of one's own
    is, and never by a shortcut of the known one. Where f* itself is asked for (the cosine similarity, the optimal
    shift), it must redefine `_conjugate` and `_conjugate_derivative` too.

    Attributes:
        name: as in `divergence(name)`.
        formula: f(u), for people.
        supremum: f'(inf), the upper end of the conjugate's domain; f* is +inf above it.
        closed_form: False if score and penalty are derived from f by automatic differentiation.
        straight: True if f is made of straight pieces, as total variation's is: a loss of it has no gradient.

    Example:
        >>> import torch, fmicl
        >>> js = fmicl.divergence("js")
        >>> r = torch.tensor([-1.0, 0.0, 1.0])
        >>> torch.allclose(js.conjugate(js.derivative(r.exp())), js.penalty(r), atol=1e-6)
        True
    """

    name: str
    formula: str
    supremum: float
    closed_form: bool
    straight: bool = False

    def __init_subclass__(cls) -> None:
        """What follows from a penalty that a subclass redefines is its own too: derived, unless it is given."""
        super().__init_subclass__()
        own = vars(cls).keys()
        known = any(base.__dict__.get("closed_form") is True for base in cls.__mro__[1:])
        if known and own & {"_penalty", "penalty"}:
            if not own & {"closed_form"}:
                cls.closed_form = False
            if not own & {"_relative_curvature", "relative_curvature"}:
                cls._relative_curvature = Divergence._derived_curvature  # type: ignore[method-assign]
            if not own & {"_conjugate", "conjugate"}:
                cls._conjugate = Divergence._unknown  # type: ignore[method-assign]
            if not own & {"_conjugate_derivative", "conjugate_derivative"}:
                cls._conjugate_derivative = Divergence._unknown  # type: ignore[method-assign]
        if own & {"_penalty", "penalty"} and not own & {"_penalty_slope", "penalty_slope"}:
            cls._penalty_slope = Divergence._derived_slope  # type: ignore[method-assign]
        if own & {"_penalty", "penalty", "_penalty_slope", "penalty_slope"} and "_penalty_and_slope" not in own:
            cls._penalty_and_slope = Divergence._penalty_and_slope  # type: ignore[method-assign]

    def f(self, u: Tensor | float) -> Tensor:
        """The generator f(u); +inf for u < 0, where a density ratio can't be."""
        u = real(u)
        outside = u < 0
        return torch.where(outside, math.inf, self._f(torch.where(outside, 1.0, u)))

    def derivative(self, u: Tensor | float) -> Tensor:
        """f'(u) for u > 0."""
        return self._derivative(real(u))

    def conjugate(self, t: Tensor | float) -> Tensor:
        """f*(t) = sup_{u >= 0} (t u - f(u)); +inf above the domain, never NaN."""
        t, outside = self._into_domain(t)
        return torch.where(outside, math.inf, self._conjugate(t))

    def conjugate_derivative(self, t: Tensor | float) -> Tensor:
        """(f*)'(t), the u >= 0 that attains the supremum: the inverse of f'. +inf above the domain."""
        t, outside = self._into_domain(t)
        return torch.where(outside, math.inf, self._conjugate_derivative(t))

    def score(self, r: Tensor | float) -> Tensor:
        """f'(e^r): what a positive pair with log density ratio r earns."""
        return self._score(real(r))

    def penalty(self, r: Tensor | float) -> Tensor:
        """f*(f'(e^r)): what a negative pair with log density ratio r costs."""
        return self._penalty(real(r))

    def penalty_slope(self, r: Tensor | float) -> Tensor:
        """d penalty / dr = u^2 f''(u) >= 0 at u = e^r."""
        return self._penalty_slope(real(r))

    def relative_curvature(self, r: Tensor | float) -> Tensor:
        """penalty''(r) / penalty'(r): its sign is that of the penalty's curvature, long after both have underflown."""
        return self._relative_curvature(real(r))

    def penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, for sums over many pairs. They may be one tensor, and r may be overwritten."""
        return self._penalty_and_slope(real(r))

    def activation(self, v: Tensor | float) -> Tensor:
        """Map a free critic value v onto the conjugate's domain, as f-GAN's output activations do.

        The identity where every t is allowed (f'(inf) = inf), and `score` otherwise, whose range is
        the domain. f*(activation(v)) is `activated_penalty(v)`.
        """
        return real(v) if self.supremum == math.inf else self.score(v)

    def activated_penalty(self, v: Tensor | float) -> Tensor:
        """f*(activation(v)), without the detour through t where that loses digits."""
        return self.conjugate(v) if self.supremum == math.inf else self.penalty(v)

    def activated_penalty_slope(self, v: Tensor | float) -> Tensor:
        """d activated_penalty / dv."""
        return self.conjugate_derivative(v) if self.supremum == math.inf else self.penalty_slope(v)

    def weighted(self, alpha: float) -> Divergence:
        r"""f_alpha(x) = alpha f(x / alpha) - alpha f(1 / alpha): the weighting parameter as a divergence.

        Its bound at x = alpha u is the bound of f at u with alpha before the negative term:
        E_pos[f_alpha'(x)] - E_neg[f_alpha*(f_alpha'(x))] = E_pos[f'(u)] - alpha E_neg[f*(f'(u))] - alpha f(1/alpha).

        Example:
            >>> import fmicl
            >>> kl = fmicl.divergence("kl")
            >>> float(kl.weighted(40.0).f(1.0))
            0.0
        """
        return Weighted(self, alpha)

    @staticmethod
    def from_generator(f: Callable[[Tensor], Tensor], name: str = "custom") -> Divergence:
        r"""Make a divergence of a convex f alone; the rest by automatic differentiation and Fenchel-Young.

        score(r) = f'(e^r) and penalty(r) = u f'(u) - f(u) are computed in float64 where the device
        has it, since they go through u = e^r: for u beyond about 1e8 digits are lost that a closed
        form would keep. The conjugate solves f'(u) = t for each element, by Newton's method; a loss with
        shift="optimal" does so some ten times a step, and takes many times as long as with a closed form.

        Args:
            f: elementwise function of a tensor of u > 0, built of differentiable torch operations.
            name: how it is called in messages and tables.

        Raises:
            ValueError: if f(1) != 0, f is not convex, or f is not finite; the message says at which u.
            TypeError: if f isn't an elementwise function of tensors.

        Example:
            >>> import torch, fmicl
            >>> mine = fmicl.Divergence.from_generator(lambda u: u * torch.log(u), name="my_kl")
            >>> bool(torch.isclose(mine.penalty(torch.tensor(1.0)), torch.tensor(1.0).exp()))
            True
        """
        from fmicl.divergences.custom import Generated

        return Generated.checked(f, name)

    def _into_domain(self, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """T with what lies above the domain, or is infinite, replaced: no NaN may reach a gradient. And where."""
        t = real(t)
        outside = t > self.supremum
        largest = torch.finfo(t.dtype).max / 8
        return torch.where(outside, min(self.supremum, 0.0) - 1.0, t).clamp(-largest, largest), outside

    @abstractmethod
    def _f(self, u: Tensor) -> Tensor: ...

    @abstractmethod
    def _derivative(self, u: Tensor) -> Tensor: ...

    @abstractmethod
    def _conjugate(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _conjugate_derivative(self, t: Tensor) -> Tensor: ...

    @abstractmethod
    def _score(self, r: Tensor) -> Tensor: ...

    @abstractmethod
    def _penalty(self, r: Tensor) -> Tensor: ...

    @abstractmethod
    def _penalty_slope(self, r: Tensor) -> Tensor: ...

    @abstractmethod
    def _relative_curvature(self, r: Tensor) -> Tensor: ...

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.penalty(r), self.penalty_slope(r)

    def _derived_slope(self, r: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda value: self.penalty(value).sum())(r)
        return slope

    def _derived_curvature(self, r: Tensor) -> Tensor:
        slope = self.penalty_slope(r)
        curvature: Tensor = torch.func.grad(lambda value: self.penalty_slope(value).sum())(r)
        return curvature / torch.where(slope == 0, 1.0, slope)

    def _unknown(self, t: Tensor) -> Tensor:  # noqa: ARG002
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} redefines its penalty, so the conjugate f* of the divergence that it is made of isn't its own; "
            f"define _conjugate and _conjugate_derivative of {name} as well"
        )


@dataclass(frozen=True)
class Weighted(Divergence):
    """f_alpha(x) = alpha f(x / alpha) - alpha f(1 / alpha), made by `Divergence.weighted`."""

    base: Divergence
    alpha: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"weighted needs a finite alpha > 0, got alpha={self.alpha}")

    @property
    def name(self) -> str:  # type: ignore[override]
        """The base's name and the weight."""
        return f"{self.base.name}[alpha={self.alpha:g}]"

    @property
    def formula(self) -> str:  # type: ignore[override]
        """f_alpha in terms of the base's f."""
        return f"{self.alpha:g} f(u/{self.alpha:g}) - {self.alpha:g} f(1/{self.alpha:g}), f(u) = {self.base.formula}"

    @property
    def supremum(self) -> float:  # type: ignore[override]
        """The same as the base's: f_alpha'(x) = f'(x / alpha)."""
        return self.base.supremum

    @property
    def closed_form(self) -> bool:  # type: ignore[override]
        """As the base."""
        return self.base.closed_form

    @property
    def straight(self) -> bool:  # type: ignore[override]
        """As the base."""
        return self.base.straight

    @property
    def constant(self) -> float:
        """alpha f(1 / alpha), in float64."""
        return self.alpha * float(self.base.f(torch.tensor(1 / self.alpha, dtype=torch.float64)))

    def _f(self, u: Tensor) -> Tensor:
        return self.alpha * self.base._f(u / self.alpha) - self.constant

    def _derivative(self, u: Tensor) -> Tensor:
        return self.base._derivative(u / self.alpha)

    def _conjugate(self, t: Tensor) -> Tensor:
        return self.alpha * self.base._conjugate(t) + self.constant

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return self.alpha * self.base._conjugate_derivative(t)

    def _score(self, r: Tensor) -> Tensor:
        return self.base.score(r - math.log(self.alpha))

    def _penalty(self, r: Tensor) -> Tensor:
        return self.alpha * self.base.penalty(r - math.log(self.alpha)) + self.constant

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.alpha * self.base.penalty_slope(r - math.log(self.alpha))

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return self.base._relative_curvature(r - math.log(self.alpha))
