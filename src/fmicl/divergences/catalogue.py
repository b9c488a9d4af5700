"""The paper's nine divergences in closed form."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmicl.divergences.base import Divergence
from fmicl.divergences.registry import register_divergence
from fmicl.divergences.special import expm1, log_lambert_w
from fmicl.utils.learnable import Scalar, format_scalar, host_value
from fmicl.utils.options import option


def _power_difference(power: Scalar, r: Tensor, reference: Tensor) -> Tensor:
    """u^power at u = e^r, minus that at u = e^reference."""
    return torch.exp(power * reference) * expm1(power * (r - reference))


@register_divergence("kl", summary="Kullback-Leibler, InfoNCE's divergence: the paper's best overall.")
@dataclass(frozen=True)
class KL(Divergence):
    """Kullback-Leibler, f(u) = u log u. InfoNCE's divergence; strong uniformity, the paper's best overall."""

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

    def _score_slope(self, r: Tensor) -> Tensor:
        return torch.ones_like(r)

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return r - reference

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.exp(r)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.exp(r)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.ones_like(r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.exp_()
        return e, e


@register_divergence("reverse_kl", summary="Reverse Kullback-Leibler: no uniformity, for comparison.")
@dataclass(frozen=True)
class ReverseKL(Divergence):
    """Reverse Kullback-Leibler, f(u) = -log u. Its penalty is linear in r: no uniformity."""

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

    def _score_slope(self, r: Tensor) -> Tensor:
        return torch.exp(-r)

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return -_power_difference(-1.0, r, reference)

    def _penalty(self, r: Tensor) -> Tensor:
        return r - 1

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.ones_like(r)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.zeros_like(r)


@register_divergence("js", summary="Jensen-Shannon: a bounded score, robust to outliers.")
@dataclass(frozen=True)
class JS(Divergence):
    """Jensen-Shannon (twice it), f(u) = u log u - (u + 1) log((u + 1) / 2). Bounded score, robust to outliers."""

    formula = "u log u - (u+1) log((u+1)/2)"
    supremum = math.log(2)
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return torch.xlogy(u, 2 * (u / (u + 1))) - torch.log((u + 1) / 2)

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.log(2 * (u / (u + 1)))

    def _conjugate(self, t: Tensor) -> Tensor:
        # the domain ends at log 2, which rounded to float32 may lie above it
        return -torch.log1p((-torch.expm1(t)).clamp(min=-1.0))

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(t) / (1 - torch.expm1(t)).clamp(min=0.0)

    def _score(self, r: Tensor) -> Tensor:
        return math.log(2) + F.logsigmoid(r)

    def _score_slope(self, r: Tensor) -> Tensor:
        return torch.sigmoid(-r)

    def _penalty(self, r: Tensor) -> Tensor:
        return F.softplus(r, threshold=40.0) - math.log(2)  # torch's threshold of 20 costs float64 seven digits

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.sigmoid(r)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.sigmoid(-r)


class PowerDivergence(Divergence):
    """A divergence of Cressie and Read's power family (1984), up to a factor: u f''(u) is a multiple of a power of u.

    Attributes:
        power: q, of the penalty (factor / q) (u^q - 1); the score is (factor / (q - 1)) (u^(q - 1) - 1).
        factor: f''(1).
    """

    power: float
    factor: float

    def _score(self, r: Tensor) -> Tensor:
        return self.factor / (self.power - 1) * expm1((self.power - 1) * r)

    def _score_slope(self, r: Tensor) -> Tensor:
        return self.factor * torch.exp((self.power - 1) * r)

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return self.factor / (self.power - 1) * _power_difference(self.power - 1, r, reference)

    def _penalty(self, r: Tensor) -> Tensor:
        return self.factor / self.power * expm1(self.power * r)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.factor * torch.exp(self.power * r)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.full_like(r, self.power)


@register_divergence("pearson", summary="Pearson's chi-square, related to the spectral contrastive loss.")
@dataclass(frozen=True)
class Pearson(PowerDivergence):
    """Pearson's chi-square, f(u) = (u - 1)^2. Related to the spectral contrastive loss."""

    power, factor = 2.0, 2.0
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

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(2).exp_()
        return e - 1, 2 * e


@register_divergence("squared_hellinger", summary="Squared Hellinger: a weak penalty, needs a larger alpha than KL.")
@dataclass(frozen=True)
class SquaredHellinger(PowerDivergence):
    """Squared Hellinger, f(u) = (sqrt(u) - 1)^2. Weak penalty tails: needs a larger alpha than KL."""

    power, factor = 0.5, 0.5
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

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(0.5).exp_()
        return e - 1, 0.5 * e


@register_divergence("neyman", summary="Neyman's chi-square: negatives collapse, for comparison.")
@dataclass(frozen=True)
class Neyman(PowerDivergence):
    """Neyman's chi-square, f(u) = (1 - u)^2 / u. Its penalty is concave in the distance: negatives collapse."""

    power, factor = -1.0, 2.0
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

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.neg_().exp_()
        return 2 - 2 * e, 2 * e


@register_divergence("jeffrey", summary="Jeffrey's: KL plus reverse KL.")
@dataclass(frozen=True)
class Jeffrey(Divergence):
    """Jeffrey's, KL plus reverse KL, f(u) = (u - 1) log u."""

    formula = "(u-1) log u"
    supremum = math.inf
    closed_form = True

    def _f(self, u: Tensor) -> Tensor:
        return (u - 1) * torch.log(u)

    def _derivative(self, u: Tensor) -> Tensor:
        return torch.log(u) + (u - 1) / u

    def _conjugate(self, t: Tensor) -> Tensor:
        # W + 1/W + t - 2 with W = W(e^(1-t)); as W + log W = 1 - t, it is 1/W - 1 - log W, which doesn't cancel
        log_w = log_lambert_w(1 - t)
        return torch.expm1(-log_w) - log_w

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(-log_lambert_w(1 - t))

    def _score(self, r: Tensor) -> Tensor:
        return r - torch.expm1(-r)

    def _score_slope(self, r: Tensor) -> Tensor:
        return 1 + torch.exp(-r)

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return (r - reference) - _power_difference(-1.0, r, reference)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.expm1(r) + r

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return torch.exp(r) + 1

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.sigmoid(r)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = torch.exp(r)
        return e - 1 + r, e + 1


@register_divergence("tsallis", summary="Tsallis of order a: repels the closest negatives most strongly.")
@dataclass(frozen=True, repr=False)
class Tsallis(Divergence):
    """Tsallis of order a > 1, f(u) = (u^a - 1) / (a - 1). The paper takes a = 3; a -> 1 is KL up to a linear term.

    The order may be a tensor with a gradient; on a GPU its value isn't checked.
    """

    order: float = option(3.0, "Order of tsallis, above 1; the paper takes 3.")

    formula = "(u^a-1)/(a-1)"
    supremum = math.inf
    closed_form = True

    def __post_init__(self) -> None:
        known = host_value(self.order)
        if known is not None and not (math.isfinite(known) and known > 1):
            raise ValueError(f"tsallis needs a finite order > 1, got order={known}; for order -> 1 use kl")

    def __repr__(self) -> str:
        """The call that makes it."""
        return f"Tsallis(order={format_scalar(self.order) if isinstance(self.order, Tensor) else self.order})"

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

    def _score_slope(self, r: Tensor) -> Tensor:
        return self.order * torch.exp((self.order - 1) * r)

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return self.order / (self.order - 1) * _power_difference(self.order - 1, r, reference)

    def _penalty(self, r: Tensor) -> Tensor:
        return torch.exp(self.order * r) + 1 / (self.order - 1)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self.order * torch.exp(self.order * r)

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return torch.full_like(r, self.order)

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        e = r.mul_(self.order).exp_()
        return e + 1 / (self.order - 1), self.order * e


@register_divergence("vlc", summary="Vincze-Le Cam: uniformity is certain for mu < 2 only.")
@dataclass(frozen=True)
class VLC(Divergence):
    """Vincze-Le Cam, f(u) = (u - 1)^2 / (u + 1). Uniformity is certain for mu < 2 only; see docs/errata.md."""

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

    # Score and penalty are polynomials in s = sigmoid(-r) = 1 / (1 + u) and q = 1 - s = sigmoid(r). Far from r = 0 the
    # form in the smaller of s and q keeps the derivative's digits; near it, that in tanh(r / 2) keeps the value's.
    def _score(self, r: Tensor) -> Tensor:
        s, q = torch.sigmoid(-r), torch.sigmoid(r)
        near = torch.tanh(r / 2) * (1 + 2 * s)
        return torch.where(r > 1, 1 - 4 * s.square(), torch.where(r < -1, 4 * q * (2 - q) - 3, near))

    def _score_slope(self, r: Tensor) -> Tensor:
        return 8 * torch.sigmoid(r) * torch.sigmoid(-r).square()

    def _penalty(self, r: Tensor) -> Tensor:
        s, q = torch.sigmoid(-r), torch.sigmoid(r)
        near = torch.tanh(r / 2) * (1 + 2 * q)
        return torch.where(r > 1, 3 - 4 * s * (2 - s), torch.where(r < -1, 4 * q.square() - 1, near))

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return 8 * torch.sigmoid(-r) * torch.sigmoid(r).square()

    def _relative_curvature(self, r: Tensor) -> Tensor:
        return 3 * torch.sigmoid(-r) - 1

    def _penalty_and_slope(self, r: Tensor) -> tuple[Tensor, Tensor]:
        q = torch.sigmoid(r)
        s, square = r.neg_().sigmoid_(), q.square_()
        return 4 * square - 1, s.mul_(8).mul_(square)
