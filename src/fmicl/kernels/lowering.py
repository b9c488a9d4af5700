"""Lowering of pair functions to the penalty kinds of the Triton kernels, with factors and constants taken out."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fmicl.divergences import (
    JS,
    KL,
    VLC,
    Divergence,
    Jeffrey,
    Neyman,
    Pearson,
    ReverseKL,
    SquaredHellinger,
    Tsallis,
    Weighted,
)
from fmicl.divergences.critic import Critic
from fmicl.divergences.shifted import AttainedRatio, JeffreyForm, JSForm, LogForm, ShiftedCritic, VLCForm
from fmicl.divergences.skewed import Skewed
from fmicl.kernels.backend import PairFunction, Square, is_moderate

LOG2E = math.log2(math.e)
_SUPPORTED = {JS, KL, VLC, Jeffrey, Neyman, Pearson, ReverseKL, Skewed, SquaredHellinger, Tsallis, Weighted}
_SMALLEST_POWER = 20.0  # of e^-this, by which a skewed power may come closer to the underflow of float32


class Lowered(NamedTuple):
    """A pair function as a kind of `device.penalty_and_slope` at z = offset + scale * c.

    penalty = gain * (the kind's penalty) + constant, and d penalty / dc = slope * (the kind's slope).
    """

    kind: str
    offset: float
    scale: float
    slope: float
    gain: float = 1.0
    constant: float = 0.0
    order: float = 2.0
    scalars: Tensor | None = None
    """Of a shifted kind, on the device: what `device.shifted_penalty_and_slope` reads."""


SOFTMAX_KINDS = ("softmax", "softmax_wide")


def lower_softmax(scale: float) -> Lowered:
    """The weights of log-sum-exps of scale * c: "softmax" where e^(scale c) can be taken as it is.

    Example:
        >>> lower_softmax(2.0).kind, lower_softmax(100.0).kind
        ('softmax', 'softmax_wide')
    """
    kind = "softmax" if is_moderate(scale, torch.float32) else "softmax_wide"
    return Lowered(kind, 0.0, LOG2E * scale, scale)


def lower(function: PairFunction) -> Lowered | None:
    """The Triton form of a pair function; None if there is none (a user-defined or learned divergence).

    Types are compared exactly: a subclass may compute something else.

    Example:
        >>> import fmicl
        >>> critic = fmicl.Gaussian(gamma=0.5).critic(fmicl.divergence("pearson"), d=8)
        >>> lower(critic).kind, lower(critic).constant      # expm1(2 r) = exp(2 r) - 1
        ('exp', -1.0)
    """
    if isinstance(function.offset, Tensor) or isinstance(function.scale, Tensor):
        return None
    if type(function) is Square:
        return Lowered("square", function.offset, function.scale, slope=function.scale)
    if type(function) is Critic:
        if function.direct and function.divergence.supremum < math.inf:
            return None  # f* itself, without the activation
        return _lower(function.divergence, function.offset, function.scale, function.free)
    if type(function) is ShiftedCritic:
        return _lower_shifted(function, ratio=False)
    if type(function) is AttainedRatio:
        return _lower_shifted(function.shifted, ratio=True)
    return None


def _lower(divergence: Divergence, offset: float, scale: float, free: bool) -> Lowered | None:
    def exponential(power: float, gain: float, constant: float, slope: float) -> Lowered:
        """gain * e^(power r) + constant."""
        return Lowered("exp", power * LOG2E * offset, power * LOG2E * scale, slope * scale, gain, constant)

    if type(divergence) not in _SUPPORTED:
        return None
    if any(isinstance(value, Tensor) for value in vars(divergence).values()):
        return None  # learned
    unbounded = free and divergence.supremum == math.inf
    match divergence:
        case Weighted(alpha=float() | int() as alpha):
            inner = _lower(divergence.base, offset - (0 if unbounded else math.log(alpha)), scale, free)
            constant = divergence.constant
            if isinstance(constant, Tensor):
                return None  # the base is learned
            return inner and inner._replace(
                slope=alpha * inner.slope, gain=alpha * inner.gain, constant=alpha * inner.constant + constant
            )
        case Skewed():
            return _lower_skewed(divergence, offset, scale)
        case KL():
            return _lower(KL(), offset - 1, scale, False) if free else exponential(1.0, 1.0, 0.0, 1.0)
        case Pearson() if not free:
            return exponential(2.0, 1.0, -1.0, 2.0)
        case SquaredHellinger():
            return exponential(0.5, 1.0, -1.0, 0.5)
        case Neyman():
            return exponential(-1.0, -2.0, 2.0, 2.0)
        case Tsallis() if not free:
            return exponential(divergence.order, 1.0, 1 / (divergence.order - 1), divergence.order)
        case ReverseKL():
            return Lowered("linear", offset - 1, scale, scale)
        case JS():
            return Lowered("js", LOG2E * offset, LOG2E * scale, scale, constant=-math.log(2))
        case VLC():
            return Lowered("vlc", LOG2E * offset, LOG2E * scale, 8 * scale, gain=4.0, constant=-1.0)
        case Jeffrey() if not free:
            return Lowered("jeffrey", LOG2E * offset, LOG2E * scale, scale, constant=-1.0)
        case Pearson():
            return Lowered("free_pearson", offset, scale, scale)
        case Tsallis():
            constant = 1 / (divergence.order - 1)
            return Lowered("free_tsallis", offset, scale, scale, constant=constant, order=divergence.order)
        case Jeffrey():
            return Lowered("free_jeffrey", offset, scale, scale, constant=-1.0)
        case _:
            return None


def _lower_skewed(divergence: Skewed, offset: float, scale: float) -> Lowered | None:
    """Powers of w = sigmoid(r + log(beta / (1 - beta))) / beta, for a base whose penalty is a power of u."""
    beta, base = divergence.beta, _lower(divergence.base, 0.0, 1.0, False)
    if base is None or base.kind != "exp":
        return None
    power, shift = base.scale / LOG2E, base.offset / LOG2E
    if abs(power * math.log(beta)) > _SMALLEST_POWER:
        return None
    factor = (1 - beta) * math.exp(shift - power * math.log(beta))
    return Lowered(
        "skewed",
        LOG2E * (offset + divergence.log_odds),
        LOG2E * scale,
        slope=factor * base.slope * scale,
        gain=factor * base.gain,
        constant=(1 - beta) * base.constant,
        order=power,
    )


def _lower_shifted(shifted: ShiftedCritic, ratio: bool) -> Lowered | None:
    """The penalty of a shifted critic, or the ratio at which it is attained; z in units of log 2 / p."""
    form, offset, scale = shifted.form, shifted.offset, shifted.scale
    if form is None or isinstance(offset, Tensor) or isinstance(scale, Tensor):
        return None
    unit, order = LOG2E * form.power, 2.0
    match form:
        case VLCForm():
            kind = "ratio_vlc" if ratio else "shifted_vlc"
        case JeffreyForm():
            kind = "ratio_jeffrey" if ratio else "shifted_jeffrey"
        case JSForm() if not ratio:
            kind = "shifted_js"
        case LogForm() if not ratio:
            kind = "shifted_log"
        case _:
            kind, order = "shifted_power", (1.0 if ratio else 1 + form.power) / form.power
    tie = torch.full_like(shifted.closest, abs(unit) * float(shifted.tie))
    scalars = torch.stack([unit * (shifted.closest - offset), tie, *form.scalars]).float()
    gain, constant = (1.0, 0.0) if ratio else (form.gain, form.constant)
    return Lowered(kind, 0.0, unit * scale, scale, gain, constant, order, scalars)


class LoweredScore(NamedTuple):
    """A score as a kind of `views_device.score` at r, the log density ratio.

    score = (the kind's score) + constant; that of "exp" is linear * r + gain * e^(power r).
    """

    kind: str
    linear: float = 0.0
    gain: float = 0.0
    power: float = 0.0
    constant: float = 0.0


def lower_score(divergence: Divergence) -> LoweredScore | None:
    """The Triton form of a divergence's score; None if there is none. Types are compared exactly.

    Example:
        >>> import fmicl
        >>> lower_score(fmicl.divergence("pearson"))      # 2 (e^r - 1)
        LoweredScore(kind='exp', linear=0.0, gain=2.0, power=1.0, constant=-2.0)
    """
    if type(divergence) not in _SUPPORTED or any(isinstance(value, Tensor) for value in vars(divergence).values()):
        return None
    match divergence:
        case KL():
            return LoweredScore("exp", linear=1.0, constant=1.0)
        case ReverseKL():
            return LoweredScore("exp", gain=-1.0, power=-1.0)
        case Pearson():
            return LoweredScore("exp", gain=2.0, power=1.0, constant=-2.0)
        case SquaredHellinger():
            return LoweredScore("exp", gain=-1.0, power=-0.5, constant=1.0)
        case Neyman():
            return LoweredScore("exp", gain=-1.0, power=-2.0, constant=1.0)
        case Jeffrey():
            return LoweredScore("exp", linear=1.0, gain=-1.0, power=-1.0, constant=1.0)
        case Tsallis(order=float() | int() as order):
            return LoweredScore("exp", gain=order / (order - 1), power=order - 1)
        case JS():
            return LoweredScore("js", constant=math.log(2))
        case VLC():
            return LoweredScore("vlc", constant=1.0)
        case _:
            return None
