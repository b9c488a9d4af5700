"""The base class of f-divergences: f, its derivative and conjugate, score and penalty."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fmicl.utils.learnable import Scalar, format_scalar, log, require_positive_scalar
from fmicl.utils.options import options_of


def as_real(value: Tensor | float) -> Tensor:
    """Convert to a real tensor, half precision to float32: e^r leaves the range of half types."""
    tensor = torch.as_tensor(value)
    if tensor.is_complex():
        raise ValueError(f"a divergence is a function of real numbers, got {tensor.dtype}")
    if not tensor.is_floating_point():
        return tensor.to(torch.get_default_dtype())
    return tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor


class Divergence(ABC):
    r"""An f-divergence: a convex f with f(1) = 0, and the functions derived from it.

    All methods act elementwise on tensors of any shape, and are differentiable. They compute float16 and bfloat16 input
    in float32, and return float32, as autocast does for exp and log.

    A subclass of a divergence of the catalogue may redefine the penalty (`_penalty`). Then the slope and the curvature
    are derived from it, and the closed forms and GPU kernels of its parent are not used. The cosine similarity and the
    optimal shift use f* itself; for them the subclass must redefine `_conjugate` and `_conjugate_derivative` too.

    Attributes:
        name: the name for `divergence(name)`, and in messages; `register_divergence` sets it.
        formula: f(u), for tables.
        supremum: f'(inf), the upper end of the conjugate's domain; f* is +inf above it.
        closed_form: False if score and penalty are derived from f by automatic differentiation.
        piecewise_linear: True if f is piecewise linear, as total variation's: its loss has no gradient.
        learned: True if f has weights that `fmicl.FMICLLoss` trains by the deflection of its score.

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
    piecewise_linear: bool = False
    learned: bool = False

    def __init_subclass__(cls) -> None:
        """Replace what a subclass inherits but its own penalty contradicts, unless it redefines that too."""
        super().__init_subclass__()
        own = {name.removeprefix("_") for name in vars(cls)}
        closed_form = any(base.__dict__.get("closed_form") is True for base in cls.__mro__[1:])
        derived: dict[str, Any] = {}
        if "score" in own:
            derived |= {"score_difference": Divergence._score_difference, "score_slope": Divergence._score_slope}
        if "penalty" in own:
            derived["penalty_slope"] = Divergence._derived_slope
        if own & {"penalty", "penalty_slope"}:
            derived["penalty_and_slope"] = Divergence._penalty_and_slope
        if "penalty" in own and closed_form:
            if "closed_form" not in own:
                cls.closed_form = False
            derived["relative_curvature"] = Divergence._derived_curvature
            derived |= dict.fromkeys(("conjugate", "conjugate_derivative"), Divergence._undefined_conjugate)
        for name in derived.keys() - own:
            setattr(cls, f"_{name}", derived[name])

    def __post_init__(self) -> None:
        """Check the parameters that are numbers, by the types and bounds of their options."""
        if torch.compiler.is_compiling():  # it can't trace the look-up of the options
            return
        kind: Any = type(self)
        for each in options_of(kind):
            value = getattr(self, each.name)
            if not isinstance(value, Tensor):
                each.check(value)

    def f(self, u: Tensor | float) -> Tensor:
        """The generator f(u); +inf for u < 0."""
        u = as_real(u)
        outside = u < 0
        return torch.where(outside, math.inf, self._f(torch.where(outside, 1.0, u)))

    def derivative(self, u: Tensor | float) -> Tensor:
        """f'(u) for u > 0."""
        return self._derivative(as_real(u))

    def conjugate(self, t: Tensor | float) -> Tensor:
        """f*(t) = sup_{u >= 0} (t u - f(u)); +inf above the domain, never NaN."""
        t, outside = self._into_domain(t)
        return torch.where(outside, math.inf, self._conjugate(t))

    def conjugate_derivative(self, t: Tensor | float) -> Tensor:
        """(f*)'(t), the u >= 0 that attains the supremum: the inverse of f'. +inf above the domain."""
        t, outside = self._into_domain(t)
        return torch.where(outside, math.inf, self._conjugate_derivative(t))

    def score(self, r: Tensor | float) -> Tensor:
        """f'(e^r): the reward of a positive pair with log density ratio r."""
        return self._score(as_real(r))

    def score_slope(self, r: Tensor | float) -> Tensor:
        """d score / dr = u f''(u) >= 0 at u = e^r; the slope of the penalty is u times that.

        Example:
            >>> import torch, fmicl
            >>> js, r = fmicl.divergence("js"), torch.tensor([-2.0, 3.0])
            >>> torch.allclose(js.penalty_slope(r), r.exp() * js.score_slope(r))
            True
        """
        return self._score_slope(as_real(r))

    def score_difference(self, r: Tensor | float, reference: Tensor | float) -> Tensor:
        """score(r) - score(reference); the closed forms don't subtract two large scores.

        Example:
            >>> import torch, fmicl
            >>> kind = fmicl.divergence("neyman")
            >>> r, reference = torch.tensor([19.0, 20.0], dtype=torch.float64)
            >>> float(kind.score(r) - kind.score(reference)), f"{kind.score_difference(r, reference):.3g}"
            (0.0, '-2.71e-17')
        """
        return self._score_difference(as_real(r), as_real(reference))

    def penalty(self, r: Tensor | float) -> Tensor:
        """f*(f'(e^r)): the cost of a negative pair with log density ratio r."""
        return self._penalty(as_real(r))

    def penalty_slope(self, r: Tensor | float) -> Tensor:
        """d penalty / dr = u^2 f''(u) >= 0 at u = e^r."""
        return self._penalty_slope(as_real(r))

    def relative_curvature(self, r: Tensor | float) -> Tensor:
        """penalty''(r) / penalty'(r): it has the sign of the penalty's curvature, even where both underflow."""
        return self._relative_curvature(as_real(r))

    def penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, for sums over many pairs. May return one tensor twice, and may overwrite r."""
        return self._penalty_and_slope(as_real(r))

    def activation(self, v: Tensor | float) -> Tensor:
        """Map a free critic value v into the conjugate's domain, as f-GAN's output activations do.

        The identity if every t is allowed (f'(inf) = inf), and otherwise `score`, whose range is the domain.
        f*(activation(v)) is `activated_penalty(v)`.
        """
        return as_real(v) if self.supremum == math.inf else self.score(v)

    def activated_penalty(self, v: Tensor | float) -> Tensor:
        """f*(activation(v)), not computed through t where that loses digits."""
        return self.conjugate(v) if self.supremum == math.inf else self.penalty(v)

    def weighted(self, alpha: Scalar) -> Divergence:
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

    def skew(self, beta: float) -> Divergence:
        r"""This divergence of p(x, y) from the mixture beta p(x, y) + (1 - beta) p(x) p(y).

        It is the f-divergence of f_beta(u) = s f(u / s), s = beta u + 1 - beta (`fmicl.divergences.skewed`). No pair
        counts for more than a density ratio of 1 / beta, so the variance of its bound is bounded. Its largest value is
        smaller too: for KL log(1 / beta).

        Args:
            beta: share of the joint distribution in the mixture, in [0, 1); 0 is this divergence itself.

        Example:
            >>> import torch, fmicl
            >>> skewed = fmicl.divergence("kl").skew(0.1)
            >>> skewed, round(skewed.supremum, 3)                        # beta f(1 / beta) = log(1 / beta)
            (KL().skew(0.1), 2.303)
            >>> bool(skewed.score(torch.tensor(1e3)) <= skewed.supremum)
            True
        """
        from fmicl.divergences.skewed import Skewed

        return Skewed(self, beta) if beta else self

    def frozen(self) -> Divergence:
        """The same f; if it is `learned`, with weights that have no gradient."""
        return self

    @staticmethod
    def from_generator(f: Callable[[Tensor], Tensor], name: str = "custom") -> Divergence:
        r"""Make a divergence from a convex f alone, by automatic differentiation and Fenchel-Young.

        score(r) = f'(e^r) and penalty(r) = u f'(u) - f(u) are computed in float64 if the device has it, since they go
        through u = e^r: for u beyond about 1e8 they lose digits that a closed form keeps. The conjugate solves
        f'(u) = t for each element, by Newton's method; a loss with shift="optimal" does so several times a step, and
        takes many times as long as with a closed form.

        Args:
            f: elementwise function of a tensor of u > 0, made of differentiable torch operations.
            name: its name in messages and tables.

        Raises:
            ValueError: f(1) != 0, f is not convex, or f is not finite; the message says at which u.
            TypeError: f isn't an elementwise function of tensors.

        Example:
            >>> import torch, fmicl
            >>> mine = fmicl.Divergence.from_generator(lambda u: u * torch.log(u), name="my_kl")
            >>> bool(torch.isclose(mine.penalty(torch.tensor(1.0)), torch.tensor(1.0).exp()))
            True
        """
        from fmicl.divergences.custom import Generated

        return Generated.checked(f, name)

    def _into_domain(self, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """T with values above the domain replaced and infinite ones clamped, to keep NaN from gradients; which ones."""
        t = as_real(t)
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

    def _score_slope(self, r: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda value: self.score(value).sum())(r)
        return slope

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return self.score(r) - self.score(reference)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self.penalty(r), self.penalty_slope(r)

    def _derived_slope(self, r: Tensor) -> Tensor:
        slope: Tensor = torch.func.grad(lambda value: self.penalty(value).sum())(r)
        return slope

    def _derived_curvature(self, r: Tensor) -> Tensor:
        slope = self.penalty_slope(r)
        curvature: Tensor = torch.func.grad(lambda value: self.penalty_slope(value).sum())(r)
        return curvature / torch.where(slope == 0, 1.0, slope)

    def _undefined_conjugate(self, t: Tensor) -> Tensor:  # noqa: ARG002
        name = type(self).__name__
        raise NotImplementedError(
            f"{name} redefines its penalty but not its conjugate; define {name}._conjugate and "
            f"{name}._conjugate_derivative as well"
        )


@dataclass(frozen=True, repr=False)
class TransformedDivergence(Divergence):
    """A divergence that is made from another one, its base."""

    base: Divergence

    @property
    def closed_form(self) -> bool:  # type: ignore[override]
        """The base's."""
        return self.base.closed_form

    @property
    def piecewise_linear(self) -> bool:  # type: ignore[override]
        """The base's."""
        return self.base.piecewise_linear

    @property
    def learned(self) -> bool:  # type: ignore[override]
        """The base's."""
        return self.base.learned

    def frozen(self) -> Divergence:
        """With a frozen base."""
        return replace(self, base=self.base.frozen()) if self.learned else self


@dataclass(frozen=True)
class Weighted(TransformedDivergence):
    """f_alpha(x) = alpha f(x / alpha) - alpha f(1 / alpha), made by `Divergence.weighted`."""

    alpha: Scalar

    def __post_init__(self) -> None:
        require_positive_scalar("alpha", self.alpha)

    @property
    def name(self) -> str:  # type: ignore[override]
        """The base's name and the weight."""
        return f"{self.base.name}[alpha={format_scalar(self.alpha)}]"

    @property
    def formula(self) -> str:  # type: ignore[override]
        """f_alpha in terms of the base's f."""
        alpha = format_scalar(self.alpha)
        return f"{alpha} f(u/{alpha}) - {alpha} f(1/{alpha}), f(u) = {self.base.formula}"

    @property
    def supremum(self) -> float:  # type: ignore[override]
        """The base's, as f_alpha'(x) = f'(x / alpha)."""
        return self.base.supremum

    @property
    def constant(self) -> Scalar:
        """alpha f(1 / alpha), computed in float64; a tensor if alpha or the base is learned."""
        value = self.alpha * self.base.f(torch.as_tensor(1 / self.alpha, dtype=torch.float64))
        return value if isinstance(self.alpha, Tensor) or value.requires_grad else float(value)

    def _f(self, u: Tensor) -> Tensor:
        return self.alpha * self.base._f(u / self.alpha) - self.constant

    def _derivative(self, u: Tensor) -> Tensor:
        return self.base._derivative(u / self.alpha)

    def _conjugate(self, t: Tensor) -> Tensor:
        return self.alpha * self.base._conjugate(t) + self.constant

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return self.alpha * self.base._conjugate_derivative(t)

    def _score(self, r: Tensor) -> Tensor:
        return self.base.score(r - log(self.alpha))

    def _score_slope(self, r: Tensor) -> Tensor:
        return self.base.score_slope(r - log(self.alpha))

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        shift = log(self.alpha)
        return self.base.score_difference(r - shift, reference - shift)

    def _penalty(self, r: Tensor) -> Tensor:
        return self.alpha * self.base.penalty(r - log(self.alpha)) + self.constant

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.alpha * self.base.penalty_slope(r - log(self.alpha))

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return self.base._relative_curvature(r - log(self.alpha))
