r"""Critics shifted by a constant: f*(T(z) - v), and the density ratio at which it is attained, without cancellation.

T may be as large as e^80 (reverse KL at gamma = 20), and v about as large as T of the closest negative pair, while
T - v is of the order of f'(1 / alpha). So it is not computed by subtraction. With z_0 the largest z of a negative pair
and v = T(z_0) - f'(e^s),

    T(z) - v = (T(z) - T(z_0)) + f'(e^s) ,

whose first part has a closed form without cancellation. This holds for every divergence, in float64.

For the divergences of the catalogue, `ShiftedForm` evaluates the penalty and its slope by one exponential of z - z_0
for each pair, which float32 allows too:

- Where the score is a power of u = e^r, g u^p plus a constant, (f*)'(T(z) - v) = W^(1/p) with

      W = e^(p s) + a e^(p z_0) (e^(p (z - z_0)) - 1)

  and a = 1. Jensen-Shannon has the same W at p = -1, as e^-f' = (1 + 1 / u) / 2 there, with
  a = (1 + e^-s) / (1 + e^-z_0). So all these penalties are functions of W.
- The score of Vincze-Le Cam is 1 - 4 q^2 with q = sigmoid(-r), so q_v, that at which f* is attained, has
  q_v^2 = sigmoid(-s)^2 + q^2 - q_0^2, and q - q_0 = q (1 - q_0) (1 - e^(z - z_0)).
- Jeffrey's needs Lambert's W of T - v, as without a shift.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fmicl.divergences.base import Divergence
from fmicl.divergences.catalogue import JS, VLC, Jeffrey, Neyman, Pearson, ReverseKL, SquaredHellinger, Tsallis
from fmicl.divergences.critic import Critic
from fmicl.divergences.special import log_lambert_w
from fmicl.utils.learnable import Scalar

_POWERS = {ReverseKL: -1.0, JS: -1.0, Jeffrey: -1.0, SquaredHellinger: -0.5, Neyman: -2.0, Pearson: 1.0}
LARGEST_EXPONENT = 80.0
"""Of an e^x that float32 represents."""
_PART = 2**15  # elements of a tile that are evaluated at once on a CPU, so that temporary arrays stay in its cache


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
        sizes = [value.abs() if isinstance(value, Tensor) else abs(value) for value in (self.offset, self.scale)]
        return self.rounding * (sizes[0] + sizes[1])

    @functools.cached_property
    def form(self) -> ShiftedForm | None:
        """The closed form; None where there is none, or float32 doesn't represent what it is made of."""
        return _make_form(self)

    def shift(self) -> Tensor:
        """v = T(closest) - f'(e^s)."""
        return self.critic.score(self.closest) - self.critic.divergence.score(self.log_ratio)

    def shifted_score(self, z: Tensor) -> Tensor:
        """T(z) - v, without the difference of large numbers."""
        z = z + torch.where((z - self.closest).abs() <= self.tie, self.closest - z, 0.0).detach()
        return self.critic.score_difference(z, self.closest) + self.critic.divergence.score(self.log_ratio)

    def ratio(self, z: Tensor) -> Tensor:
        """(f*)'(T(z) - v), the density ratio at which f* is attained."""
        form, kind = self.form, self.critic.divergence
        if form is not None:
            return _by_parts(lambda part: form.ratio(self._distance(part)), z)
        return _by_parts(lambda part: kind.conjugate_derivative(self.shifted_score(wide(part))), z)

    def penalty(self, z: Tensor) -> Tensor:
        """f*(T(z) - v)."""
        form, kind = self.form, self.critic.divergence
        if form is not None:
            return _by_parts(lambda part: form.penalty(self._distance(part)), z)
        return _by_parts(lambda part: kind.conjugate(self.shifted_score(wide(part))), z)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z, (f*)'(T - v) T'(z)."""
        slope = torch.empty_like(z)
        rest = iter(_parts(slope))

        def penalty(part: Tensor) -> Tensor:
            value, its_slope = self._penalty_and_slope(part)
            next(rest).copy_(its_slope)
            return value

        return _by_parts(penalty, z), slope

    def _penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        if self.form is not None:
            return self.form.penalty_and_slope(self._distance(z))
        kind, exact = self.critic.divergence, wide(z)
        t = self.shifted_score(exact)
        return kind.conjugate(t), kind.conjugate_derivative(t) * self.critic.score_slope(exact)

    def _distance(self, z: Tensor) -> Tensor:
        """The difference z - z_0; 0 for a tie."""
        distance = z - self.closest
        return distance.add_((F.hardshrink(distance, float(self.tie)) - distance).detach())


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


class ShiftedForm(ABC):
    """Closed form of a shifted penalty and of the ratio at which it is attained, as functions of x = z - z_0 <= 0.

    Args:
        power: p; e^(p x) is what they are computed of.
        scalars: what the form depends on beside x, in the order in which the Triton kernel reads them.
        gain: factor of the penalty.
        constant: added to the penalty.
    """

    def __init__(self, power: float, scalars: tuple[Tensor, ...], gain: float, constant: float) -> None:
        self.power, self.scalars, self.gain, self.constant = power, scalars, gain, constant

    @abstractmethod
    def ratio(self, x: Tensor) -> Tensor:
        """(f*)'(T(z) - v). It may overwrite x, as may the others."""

    @abstractmethod
    def penalty(self, x: Tensor) -> Tensor:
        """f*(T(z) - v)."""

    @abstractmethod
    def penalty_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The penalty and its derivative in z."""


class PowerForm(ShiftedForm):
    """Of a score g u^p plus a constant: gain W^((p + 1) / p) + constant. Scalars: e^(p s), a e^(p z_0), T'(z_0)."""

    def ratio(self, x: Tensor) -> Tensor:
        """W^(1/p)."""
        return self._base(self._power(x)).pow(1 / self.power)

    def penalty(self, x: Tensor) -> Tensor:
        """A function of W."""
        return self._value(self._base(self._power(x))).mul_(self.gain).add_(self.constant)

    def penalty_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Functions of W, and T'(z)."""
        e = self._power(x)
        w = self._base(e)
        slope = self._times_slope(e.mul_(self.scalars[2]), w)
        return self._value(w).mul_(self.gain).add_(self.constant), slope

    def _power(self, x: Tensor) -> Tensor:
        return x.mul_(self.power).exp_()

    def _base(self, e: Tensor) -> Tensor:
        """W of e^(p x); 0 where T - v lies below the range of f'."""
        start, factor, _ = self.scalars
        w = e.sub(1).mul_(factor).add_(start)
        return w.clamp_(min=0) if self.power > 0 else w

    def _value(self, w: Tensor) -> Tensor:
        return w.pow((self.power + 1) / self.power)

    def _times_slope(self, e: Tensor, w: Tensor) -> Tensor:
        return e.mul_(w.pow(1 / self.power))


class LogForm(PowerForm):
    """Of reverse KL, p = -1: the penalty is -log W - 1."""

    def _value(self, w: Tensor) -> Tensor:
        return -w.log()


class JSForm(PowerForm):
    """Of Jensen-Shannon, p = -1: the penalty is log(1 + 1 / W) - log 2. The third scalar is the second."""

    def _value(self, w: Tensor) -> Tensor:
        return w.reciprocal().log1p()

    def _times_slope(self, e: Tensor, w: Tensor) -> Tensor:
        return e.div_(w + w.square())


class VLCForm(ShiftedForm):
    """Of Vincze-Le Cam. Scalars: e^z_0, sigmoid(-z_0), sigmoid(z_0), sigmoid(-s)^2 and 1 - sigmoid(-s)^2."""

    def ratio(self, x: Tensor) -> Tensor:
        """(1 - q_v) / q_v."""
        _, q_v, rest = self._attained(x.exp_())
        return self._odds(q_v, rest)

    def penalty(self, x: Tensor) -> Tensor:
        """4 q_v^2 - 8 q_v + 3."""
        _, q_v, _ = self._attained(x.exp_())
        return self._value(q_v)

    def penalty_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """T'(z) = 8 q^2 (1 - q)."""
        e = x.exp_()
        q, q_v, rest = self._attained(e)
        slope = self._odds(q_v, rest).mul_(q.square()).mul_(q).mul_(e.mul_(8 * self.scalars[0]))
        return self._value(q_v), slope

    def _attained(self, e: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The values q, q_v and 1 - q_v^2."""
        closest, far, near, square, rest = self.scalars
        q = (e * closest).add_(1).reciprocal()
        less = (1 - e).mul_(near).mul(q).mul(q + far)  # q^2 - q_0^2
        return q, (square + less).clamp(max=1).sqrt(), (rest - less).clamp(min=0)

    def _odds(self, q_v: Tensor, rest: Tensor) -> Tensor:
        return rest / (q_v + q_v.square())

    def _value(self, q_v: Tensor) -> Tensor:
        return (4 * q_v - 8).mul(q_v).add(self.constant)


class JeffreyForm(ShiftedForm):
    """Of Jeffrey's, p = -1. Scalars: e^-z_0, f'(e^s)."""

    def ratio(self, x: Tensor) -> Tensor:
        """1 / W."""
        return torch.exp(-self._root(x)[0])

    def penalty(self, x: Tensor) -> Tensor:
        """1 / W - log W - 1."""
        root, _ = self._root(x)
        return torch.exp(-root).sub(root).add(self.constant)

    def penalty_and_slope(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """T'(z) = 1 + e^-z."""
        root, e = self._root(x)
        ratio = torch.exp(-root)
        return (ratio - root).add_(self.constant), ratio * (1 + self.scalars[0] * e)

    def _root(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """log W at T - v, and e^-x."""
        factor, target = self.scalars
        e = torch.exp(-x)
        return log_lambert_w((e - 1).mul(factor).sub(x).add(1 - target)), e


def _make_form(shifted: ShiftedCritic) -> ShiftedForm | None:
    """The form of a divergence of the catalogue; None for others, a learned scale, T = z, and what may overflow.

    Types are compared exactly: a subclass may compute something else.
    """
    critic, kind, z_0, s = shifted.critic, shifted.critic.divergence, shifted.closest, shifted.log_ratio
    offset, scale = critic.offset, critic.scale
    if type(critic) is not Critic or critic.direct or isinstance(offset, Tensor) or isinstance(scale, Tensor):
        return None
    power = 1.0 if type(kind) is VLC else _POWERS.get(type(kind))
    if type(kind) is Tsallis and not isinstance(kind.order, Tensor):
        power = kind.order - 1
    # of e^(p z), and relative to that of z_0
    if power is None or max(power * offset + abs(power) * scale, -2 * power * scale) > LARGEST_EXPONENT:
        return None
    if type(kind) is VLC:
        far, near, far_v, near_v = (torch.sigmoid(value) for value in (-z_0, z_0, -s, s))
        return VLCForm(1.0, (z_0.exp(), far, near, far_v.square(), near_v * (1 + far_v)), 1.0, 3.0)
    if type(kind) is Jeffrey:
        return JeffreyForm(-1.0, ((-z_0).exp(), kind.score(s)), 1.0, -1.0)
    start, peak = torch.exp(power * s), torch.exp(power * z_0)
    if type(kind) is JS:
        factor = (1 + start) * torch.sigmoid(-z_0)
        return JSForm(power, (start, factor, factor), 1.0, -math.log(2))
    rate, value = _at_one(kind)
    if power == -1:
        return LogForm(power, (start, peak, rate * peak), rate, value)
    gain = rate / (power + 1)
    return PowerForm(power, (start, peak, rate * peak), gain, value - gain)


@functools.lru_cache(maxsize=64)
def _at_one(kind: Divergence) -> tuple[float, float]:
    """Slope of the score and penalty at a density ratio of 1."""
    zero = torch.zeros((), dtype=torch.float64)
    return float(kind.score_slope(zero)), float(kind.penalty(zero))


def _parts(tile: Tensor) -> tuple[Tensor, ...]:
    """Blocks of rows of a tile, of up to `_PART` elements on a CPU."""
    if not tile.is_cpu or tile.numel() <= _PART:
        return (tile,)
    return torch.split(tile, max(1, _PART * len(tile) // tile.numel()))


def _by_parts(function: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
    """function(z), evaluated block by block and returned in the type of z."""
    parts = [function(part).to(z.dtype) for part in _parts(z)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def wide(x: Tensor) -> Tensor:
    """In float64, unless the device has none."""
    return x.float() if x.device.type == "mps" else x.double()
