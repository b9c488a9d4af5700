r"""Critics shifted by a constant: f*(T(z) - v), and the density ratio at which it is attained, without cancellation.

T may be as large as e^80 (reverse KL at gamma = 20), and v about as large as T of the closest negative pair, while T - v
is of the order of f'(1 / alpha). So it is not computed by subtraction. With z_0 the largest z of a negative pair and
v = T(z_0) - f'(e^s),

    T(z) - v = (T(z) - T(z_0)) + f'(e^s) ,

whose first part has a closed form without cancellation. This holds for every divergence, in float64.

Where the score is a power of u = e^r, g u^p plus a constant, one exponential per pair is enough, also in float32. Then
(f*)'(T(z) - v) = W^(1/p) with

    W = e^(p s) + a e^(p z_0) (e^(p (z - z_0)) - 1)

at a = 1. Jensen-Shannon has the same form at p = -1, as e^-f' = (1 + 1/u) / 2 there, with
a = (1 + e^-s) / (1 + e^-z_0). So all penalties are functions of W.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmicl.divergences.base import Divergence
from fmicl.divergences.catalogue import JS, Neyman, Pearson, ReverseKL, SquaredHellinger, Tsallis
from fmicl.divergences.critic import Critic
from fmicl.utils.learnable import Scalar

_POWERS = {ReverseKL: -1.0, JS: -1.0, SquaredHellinger: -0.5, Neyman: -2.0, Pearson: 1.0}
LARGEST_EXPONENT = 80.0
"""Of an e^x that float32 represents."""


@dataclass(frozen=True)
class ShiftedCritic:
    """The penalty f*(T(z) - v) of a negative pair, at fixed v.

    Attributes:
        critic: gives T.
        closest: the largest z of a negative pair, a scalar.
        log_ratio: s with v = T(closest) - f'(e^s), a scalar.
        rounding: z may be wrong by this much relative to offset and scale. Pairs that are as close to the closest one
            count as equally close: only so the two orders of a pair, whose products round differently, weigh the same.
    """

    critic: Critic
    closest: Tensor
    log_ratio: Tensor
    rounding: float = 0.0

    @property
    def offset(self) -> Scalar:
        """The critic's."""
        return self.critic.offset

    @property
    def scale(self) -> Scalar:
        """The critic's."""
        return self.critic.scale

    @property
    def tie(self) -> Scalar:
        """Difference of two z up to which they count as equal."""
        return self.rounding * (abs(self.offset) + abs(self.scale))

    @functools.cached_property
    def powers(self) -> PowerForm | None:
        """W and the penalty as a function of it; None where there is no such form."""
        return PowerForm.of(self)

    def shift(self) -> Tensor:
        """v = T(closest) - f'(e^s)."""
        return self.critic.score(self.closest) - self.critic.divergence.score(self.log_ratio)

    def shifted_score(self, z: Tensor) -> Tensor:
        """T(z) - v, without the difference of large numbers."""
        z = z + torch.where((z - self.closest).abs() <= self.tie, self.closest - z, 0.0).detach()
        return self.critic.score_difference(z, self.closest) + self.critic.divergence.score(self.log_ratio)

    def ratio(self, z: Tensor) -> Tensor:
        """(f*)'(T(z) - v), the density ratio at which f* is attained."""
        if self.powers is not None:
            return self.powers.ratio(self.powers.cast(z)).to(z.dtype)
        return self.critic.divergence.conjugate_derivative(self.shifted_score(wide(z))).to(z.dtype)

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z) - v)."""
        if self.powers is not None:
            return self.powers.penalty(self.powers.cast(z)).to(z.dtype)
        return self.critic.divergence.conjugate(self.shifted_score(wide(z))).to(z.dtype)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, (f*)'(T - v) T'(z)."""
        if self.powers is not None:
            penalty, slope = self.powers.penalty_and_slope(self.powers.cast(z))
            return penalty.to(z.dtype), slope.to(z.dtype)
        kind, exact = self.critic.divergence, wide(z)
        t = self.shifted_score(exact)
        slope = kind.conjugate_derivative(t) * self.critic.score_slope(exact)
        return kind.conjugate(t).to(z.dtype), slope.to(z.dtype)


@dataclass(frozen=True)
class AttainedRatio:
    """(f*)'(T(z) - v) of a shifted critic as a pair function: minus the derivative of its penalty in v."""

    shifted: ShiftedCritic

    @property
    def offset(self) -> Scalar:
        """The critic's."""
        return self.shifted.offset

    @property
    def scale(self) -> Scalar:
        """The critic's."""
        return self.shifted.scale

    def penalty(self, z: Tensor) -> Tensor:
        """The ratio."""
        return self.shifted.ratio(z)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """Not defined: the search for v takes sums alone."""
        raise NotImplementedError("the ratio at which f* is attained has no slope here: sum it without gradients")


@dataclass(frozen=True)
class PowerForm:
    """W = start + factor (e^(power (z - closest)) - 1), and what is computed of it.

    Attributes:
        power: p, by which the score depends on e^(p r).
        closest: z_0.
        start: e^(p s), W of the closest pair.
        factor: a e^(p z_0).
        rate: T'(z) is rate e^(p (z - closest)) at the closest pair's v; for Jensen-Shannon `factor`.
        gain: of W^((p + 1) / p) in the penalty, or of -log W for p = -1.
        constant: the rest of the penalty.
        js: whether it is Jensen-Shannon's, whose penalty is log(1 + 1 / W) plus the constant.
        tie: z closer than this to z_0 counts as z_0.
        moderate: whether e^(p z) and e^(p (z - z_0)) of all pairs don't overflow in float32.
    """

    power: float
    closest: Tensor
    start: Tensor
    factor: Tensor
    rate: Tensor
    gain: float
    constant: float
    js: bool
    tie: float
    moderate: bool

    @classmethod
    def of(cls, shifted: ShiftedCritic) -> PowerForm | None:
        """The form of a divergence of the catalogue; None for others, a learned scale, and T = z."""
        critic, kind = shifted.critic, shifted.critic.divergence
        offset, scale = critic.offset, critic.scale
        if type(critic) is not Critic or critic.direct or isinstance(offset, Tensor) or isinstance(scale, Tensor):
            return None
        found = _power_constants(kind)
        if found is None:
            return None
        power, rate, gain, constant = found
        start, peak, js = torch.exp(power * shifted.log_ratio), torch.exp(power * shifted.closest), type(kind) is JS
        factor = (1 + start) * torch.sigmoid(-shifted.closest) if js else peak
        exponents = power * offset + abs(power) * scale, -2 * power * scale  # the largest, also relative to z_0
        return cls(
            power, shifted.closest, start, factor, factor if js else rate * peak, gain, constant, js,
            float(shifted.tie), max(exponents) <= LARGEST_EXPONENT,
        )  # fmt: skip

    def cast(self, z: Tensor) -> Tensor:
        """A copy of z in a type that represents e^(p z)."""
        return z.clone() if self.moderate or z.dtype == torch.float64 else wide(z)

    def ratio(self, z: Tensor) -> Tensor:
        """W^(1/p). It overwrites z."""
        return self._base(self._relative_power(z)).pow(1 / self.power)

    def penalty(self, z: Tensor) -> Tensor:
        """The penalty. It overwrites z."""
        return self._of_base(self._base(self._relative_power(z)))

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, W^(1/p) T'(z). It overwrites z."""
        e = self._relative_power(z)
        w = self._base(e)
        slope = e.mul_(self.rate)
        slope = slope.div_(w + w.square()) if self.js else slope.mul_(w.pow(1 / self.power))
        return self._of_base(w), slope

    def _relative_power(self, z: Tensor) -> Tensor:
        """e^(p (z - z_0)), 1 for a tie."""
        z = z.sub_(self.closest)
        return z.add_((F.hardshrink(z, self.tie) - z).detach()).mul_(self.power).exp_()

    def _base(self, e: Tensor) -> Tensor:
        """W of e^(p (z - z_0)); 0 where T - v lies below the range of f'."""
        w = e.sub(1).mul_(self.factor).add_(self.start)
        return w.clamp_(min=0) if self.power > 0 else w

    def _of_base(self, w: Tensor) -> Tensor:
        """The penalty of W."""
        if self.js:
            return w.reciprocal().log1p().add_(self.constant)
        value = -w.log() if self.power == -1 else w.pow((self.power + 1) / self.power)
        return value.mul_(self.gain).add_(self.constant)


@functools.lru_cache(maxsize=64)
def _power_constants(kind: Divergence) -> tuple[float, float, float, float] | None:
    """P, T'(0), and gain and constant of the penalty; None if the score is no power of u.

    Types are compared exactly: a subclass may compute something else.
    """
    if type(kind) is Tsallis:
        power = None if isinstance(kind.order, Tensor) else kind.order - 1
    else:
        power = _POWERS.get(type(kind))
    if power is None:
        return None
    zero = torch.zeros((), dtype=torch.float64)
    rate, least = float(kind.score_slope(zero)), float(kind.penalty(zero))
    if type(kind) is JS:
        return power, rate, 1.0, -math.log(2)
    return (power, rate, rate, least) if power == -1 else (power, rate, rate / (power + 1), least - rate / (power + 1))


def wide(x: Tensor) -> Tensor:
    """In float64, unless the device has none."""
    return x.float() if x.device.type == "mps" else x.double()
