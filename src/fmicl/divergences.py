r"""f-divergences, each as a handful of scalar functions.

An f-divergence D_f(p || q) = E_q[f(p/q)] comes from a convex f with f(1) = 0. Contrastive learning
sees it through two functions of the log density ratio r = log u, u = p(x, y) / (p(x) p(y)):

    score(r)   = f'(e^r)          what a positive pair earns
    penalty(r) = f*(f'(e^r))      what a negative pair costs;  = u f'(u) - f(u)  (Fenchel-Young)

where f*(t) = sup_u (t u - f(u)) is the convex conjugate. Both are written in r and never in u, so KL
is linear, JS is a softplus and chi-square is an expm1: nothing overflows or cancels on the way.

`divergence(name)` makes one, `list_divergences()` says which there are, and
`Divergence.from_generator(f)` makes one of a convex f of your own.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fmicl.special import log_lambert_w

__all__ = [
    "JS",
    "KL",
    "VLC",
    "Divergence",
    "Jeffrey",
    "Neyman",
    "Pearson",
    "ReverseKL",
    "SquaredHellinger",
    "Tsallis",
    "Weighted",
    "divergence",
    "list_divergences",
]


def _real(value: Tensor | float) -> Tensor:
    """A real tensor, half precision widened to float32: e^r spans far more than half types hold."""
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

    Attributes:
        name: as in `divergence(name)`.
        formula: f(u), for people.
        supremum: f'(inf), the upper end of the conjugate's domain; f* is +inf above it.
        closed_form: False if score and penalty are derived from f by automatic differentiation.

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

    def f(self, u: Tensor | float) -> Tensor:
        """The generator f(u); +inf for u < 0, where a density ratio can't be."""
        u = _real(u)
        outside = u < 0
        return torch.where(outside, math.inf, self._f(torch.where(outside, 1.0, u)))

    def derivative(self, u: Tensor | float) -> Tensor:
        """f'(u) for u > 0."""
        return self._derivative(_real(u))

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
        return self._score(_real(r))

    def penalty(self, r: Tensor | float) -> Tensor:
        """f*(f'(e^r)): what a negative pair with log density ratio r costs."""
        return self._penalty(_real(r))

    def penalty_slope(self, r: Tensor | float) -> Tensor:
        """d penalty / dr = u^2 f''(u) >= 0 at u = e^r."""
        return self._penalty_slope(_real(r))

    def penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        """Both at once, for sums over many pairs. They may be one tensor, and r may be overwritten."""
        return self._penalty_and_slope(_real(r))

    def activation(self, v: Tensor | float) -> Tensor:
        """Map a free critic value v onto the conjugate's domain, as f-GAN's output activations do.

        The identity where every t is allowed (f'(inf) = inf), and `score` otherwise, whose range is
        the domain. f*(activation(v)) is `activated_penalty(v)`.
        """
        return _real(v) if self.supremum == math.inf else self.score(v)

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
        form would keep. The conjugate is found by bisection on f'(u) = t.

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
        from fmicl._generated import Generated

        return Generated.checked(f, name)

    def _into_domain(self, t: Tensor | float) -> tuple[Tensor, Tensor]:
        """T with what lies above the domain replaced (so that no NaN reaches a gradient), and where."""
        t = _real(t)
        outside = t > self.supremum
        return torch.where(outside, min(self.supremum, 0.0) - 1.0, t), outside

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

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        return self._penalty(r), self._penalty_slope(r)


@dataclass(frozen=True)
class KL(Divergence):
    """Kullback-Leibler, f(u) = u log u. InfoNCE's divergence; strong uniformity, the paper's best all-rounder."""

    name = "kl"
    formula = "u log u"
    supremum = math.inf
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return torch.xlogy(u, u)

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.log(u) + 1

    def _conjugate(self, t: Tensor) -> Tensor:
        return torch.exp(t - 1)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(t - 1)

    def _score(self, r: Tensor) -> Tensor:
        return r + 1

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.exp(r)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.exp(r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.exp_()
        return e, e


@dataclass(frozen=True)
class ReverseKL(Divergence):
    """Reverse Kullback-Leibler, f(u) = -log u. Its penalty is linear in r: no uniformity."""

    name = "reverse_kl"
    formula = "-log u"
    supremum = 0.0
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return -torch.log(u)

    def _derivative(self, u: Tensor) -> Tensor:
        return -1 / u

    def _conjugate(self, t: Tensor) -> Tensor:
        return -1 - torch.log(-t)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return 1 / t.abs()

    def _score(self, r: Tensor) -> Tensor:
        return -torch.exp(-r)

    def _penalty(self, r: Tensor) -> Tensor:
        return r - 1

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.ones_like(r)


@dataclass(frozen=True)
class JS(Divergence):
    """Jensen-Shannon (twice it), f(u) = u log u - (u + 1) log((u + 1) / 2). Bounded score, forgiving of outliers."""

    name = "js"
    formula = "u log u - (u+1) log((u+1)/2)"
    supremum = math.log(2)
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return torch.xlogy(u, 2 * (u / (u + 1))) - torch.log((u + 1) / 2)

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.log(2 * (u / (u + 1)))

    def _conjugate(self, t: Tensor) -> Tensor:
        # float32's log 2 may lie a rounding above the real one; the domain ends there all the same
        return -torch.log1p((-torch.expm1(t)).clamp(min=-1.0))

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(t) / (1 - torch.expm1(t)).clamp(min=0.0)

    def _score(self, r: Tensor) -> Tensor:
        return math.log(2) + F.logsigmoid(r)

    def _penalty(self, r: Tensor) -> Tensor:
        return F.softplus(r) - math.log(2)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.sigmoid(r)


@dataclass(frozen=True)
class Pearson(Divergence):
    """Pearson's chi-square, f(u) = (u - 1)^2. The spectral contrastive loss is its relative."""

    name = "pearson"
    formula = "(u-1)^2"
    supremum = math.inf
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (u - 1).square()

    def _derivative(self, u: Tensor) -> Tensor:
        return 2 * (u - 1)

    def _conjugate(self, t: Tensor) -> Tensor:
        t = t.clamp(min=-2)
        return t * (t / 4 + 1)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return (t / 2 + 1).clamp(min=0)

    def _score(self, r: Tensor) -> Tensor:
        return 2 * torch.expm1(r)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.expm1(2 * r)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return 2 * torch.exp(2 * r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(2).exp_()
        return e - 1, 2 * e


@dataclass(frozen=True)
class SquaredHellinger(Divergence):
    """Squared Hellinger, f(u) = (sqrt(u) - 1)^2. Weak penalty tails: wants a larger alpha than KL."""

    name = "squared_hellinger"
    formula = "(sqrt(u)-1)^2"
    supremum = 1.0
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (torch.sqrt(u) - 1).square()

    def _derivative(self, u: Tensor) -> Tensor:
        return 1 - torch.rsqrt(u)

    def _conjugate(self, t: Tensor) -> Tensor:
        return t / (1 - t)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return 1 / (1 - t).square()

    def _score(self, r: Tensor) -> Tensor:
        return -torch.expm1(-r / 2)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.expm1(r / 2)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.exp(r / 2) / 2

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(0.5).exp_()
        return e - 1, 0.5 * e


@dataclass(frozen=True)
class Neyman(Divergence):
    """Neyman's chi-square, f(u) = (1 - u)^2 / u. Its penalty is concave in the distance: negatives collapse."""

    name = "neyman"
    formula = "(1-u)^2 / u"
    supremum = 1.0
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (1 - u).square() / u

    def _derivative(self, u: Tensor) -> Tensor:
        return 1 - u.pow(-2)

    def _conjugate(self, t: Tensor) -> Tensor:
        return 2 * t / (1 + torch.sqrt(1 - t))

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.rsqrt(1 - t)

    def _score(self, r: Tensor) -> Tensor:
        return -torch.expm1(-2 * r)

    def _penalty(self, r: Tensor) -> Tensor:
        return -2 * torch.expm1(-r)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return 2 * torch.exp(-r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.neg_().exp_()
        return 2 - 2 * e, 2 * e


@dataclass(frozen=True)
class Jeffrey(Divergence):
    """Jeffrey's, KL plus reverse KL, f(u) = (u - 1) log u."""

    name = "jeffrey"
    formula = "(u-1) log u"
    supremum = math.inf
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (u - 1) * torch.log(u)

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.log(u) + (u - 1) / u

    def _conjugate(self, t: Tensor) -> Tensor:
        # W + 1/W + t - 2 with W = W(e^(1-t)); as W + log W = 1 - t, it is 1/W - 1 - log W, free of cancellation
        log_w = log_lambert_w(1 - t)
        return torch.expm1(-log_w) - log_w

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(-log_lambert_w(1 - t))

    def _score(self, r: Tensor) -> Tensor:
        return r - torch.expm1(-r)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.expm1(r) + r

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.exp(r) + 1

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.exp(r)
        return e - 1 + r, e + 1


@dataclass(frozen=True)
class Tsallis(Divergence):
    """Tsallis of order a > 1, f(u) = (u^a - 1) / (a - 1). The paper takes a = 3; a -> 1 is KL up to a linear term."""

    order: float = 3.0

    name = "tsallis"
    formula = "(u^a-1)/(a-1)"
    supremum = math.inf
    closed_form = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.order) and self.order > 1):
            raise ValueError(f"tsallis needs a finite order > 1, got order={self.order}; KL is the limit of order -> 1")

    def _f(self, u: Tensor) -> Tensor:
        return (u.pow(self.order) - 1) / (self.order - 1)

    def _derivative(self, u: Tensor) -> Tensor:
        return self.order / (self.order - 1) * u.pow(self.order - 1)

    def _conjugate(self, t: Tensor) -> Tensor:
        base = (t * ((self.order - 1) / self.order)).clamp(min=0)
        return base.pow(self.order / (self.order - 1)) + 1 / (self.order - 1)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return (t * ((self.order - 1) / self.order)).clamp(min=0).pow(1 / (self.order - 1))

    def _score(self, r: Tensor) -> Tensor:
        return self.order / (self.order - 1) * torch.exp((self.order - 1) * r)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.exp(self.order * r) + 1 / (self.order - 1)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.order * torch.exp(self.order * r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(self.order).exp_()
        return e + 1 / (self.order - 1), self.order * e


@dataclass(frozen=True)
class VLC(Divergence):
    """Vincze-Le Cam, f(u) = (u - 1)^2 / (u + 1). Uniformity is certain for mu < 2 only; see docs/errata.md."""

    name = "vlc"
    formula = "(u-1)^2 / (u+1)"
    supremum = 1.0
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (u - 1) * ((u - 1) / (u + 1))

    def _derivative(self, u: Tensor) -> Tensor:
        return ((u - 1) / (u + 1)) * ((u + 3) / (u + 1))

    def _conjugate(self, t: Tensor) -> Tensor:
        # 4 - t - 4 sqrt(1 - t) = (2 - sqrt(1 - t))^2 - 1 = (1 - q)(3 - q) at q = sqrt(1 - t), 1 - q = t / (1 + q)
        q = torch.sqrt(1 - t.clamp(min=-3))
        return t.clamp(min=-3) / (1 + q) * (3 - q)

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return 2 * torch.rsqrt(1 - t.clamp(min=-3)) - 1

    # With s = sigmoid(-r) = 1 / (1 + u), 1 - 2s = tanh(r / 2): the factored forms keep all digits near r = 0.
    def _score(self, r: Tensor) -> Tensor:
        return (torch.tanh(r / 2) * (1 + 2 * torch.sigmoid(-r))).clamp(max=1)  # by no rounding out of the domain

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.tanh(r / 2) * (3 - 2 * torch.sigmoid(-r))

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return 8 * torch.sigmoid(-r) * torch.sigmoid(r).square()

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        s = r.neg_().sigmoid_()
        return 3 + s * (4 * s - 8), 8 * s * (1 - s).square_()


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
        return self.base._score(r - math.log(self.alpha))

    def _penalty(self, r: Tensor) -> Tensor:
        return self.alpha * self.base._penalty(r - math.log(self.alpha)) + self.constant

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.alpha * self.base._penalty_slope(r - math.log(self.alpha))


_KNOWN: dict[str, type[Divergence]] = {
    kind.name: kind for kind in (KL, ReverseKL, JS, Pearson, SquaredHellinger, Neyman, Jeffrey, Tsallis, VLC)
}


def list_divergences(pattern: str = "*") -> list[str]:
    """Names of the divergences that match a shell-style pattern.

    Example:
        >>> list_divergences("*kl")
        ['kl', 'reverse_kl']
    """
    return [name for name in _KNOWN if fnmatch.fnmatch(name, pattern)]


def divergence(name: str | Divergence, **parameters: float) -> Divergence:
    """Make a divergence by name; a `Divergence` passes through.

    Args:
        name: one of `list_divergences()`.
        parameters: of that divergence: `order` for tsallis, none for the others.

    Raises:
        ValueError: for an unknown name, with the near ones, or a parameter out of range.
        TypeError: for a parameter that this divergence doesn't have.

    Example:
        >>> divergence("tsallis", order=2.0)
        Tsallis(order=2.0)
    """
    if isinstance(name, Divergence):
        if parameters:
            raise TypeError(f"{name!r} is a divergence already and takes no parameters, got {sorted(parameters)}")
        return name
    kind = _KNOWN.get(name)
    if kind is None:
        near = difflib.get_close_matches(str(name).lower().replace("-", "_"), _KNOWN, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(map(repr, near))}? " if near else ""
        raise ValueError(f"unknown divergence {name!r}; {hint}known: {', '.join(_KNOWN)}")
    accepted = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    unknown = sorted(set(parameters) - set(accepted))
    if unknown:
        takes = f"takes {', '.join(accepted)}" if accepted else "takes no parameters"
        raise TypeError(f"divergence {name!r} {takes}, got {', '.join(unknown)}")
    return kind(**parameters)
