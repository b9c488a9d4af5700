r"""Estimators of f-mutual information: how a critic's scores become a training loss and an estimate.

Every estimator sees the scores of N joint pairs, (N,), and of k independent pairs for each of them, (N, k). At the
optimum a score is the log density ratio r = log p(x, y) / (p(x) p(y)), up to a constant for some.

An estimate is a function of two means: over joint pairs, and over independent pairs. :meth:`Estimator.terms` gives the
summands and :meth:`Estimator.combine` the function, so that bootstrap and cross-fitting are the same for all.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.divergences import Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_curved
from fmicl.information.critics import Critic, log_mean_exp, mlp
from fmicl.utils.options import option, options_of
from fmicl.utils.registry import Registry

Objective = Callable[[Tensor, Tensor], Tensor]

KL_NAME = "kl"


class Terms(NamedTuple):
    """Summands of an estimate: of joint pairs (N,), and of independent pairs (N, k) or None."""

    joint: Tensor
    independent: Tensor | None


def plug_in(divergence: Divergence, r: Tensor) -> Tensor:
    r"""f(u) / (1 + u) at u = e^r: the summand of a plug-in estimate under either distribution.

    :math:`I_f = E_{joint}[f(u) / (1 + u)] + E_{independent}[f(u) / (1 + u)]`. Unlike f(u) under the independent
    distribution alone, it grows as f(u) / u only, as log u for KL.

    Example:
        >>> kl = make_divergence("kl")
        >>> bool(torch.isclose(plug_in(kl, torch.tensor(2.0)), 2 * torch.sigmoid(torch.tensor(2.0))))
        True
    """
    # f = u f'(u) - penalty, without u, which may overflow
    return torch.sigmoid(r) * divergence.score(r) - torch.sigmoid(-r) * divergence.penalty(r)


@dataclass(frozen=True)
class Estimator(ABC):
    """An estimator of the f-mutual information; its options are fields.

    Attributes:
        lower_bound: whether its expectation on samples that the critic has not seen is at most the information.
    """

    lower_bound = True

    def wrap(self, critic: Critic, x_columns: int, hidden: int) -> Critic:  # noqa: ARG002
        """The critic to train, with what the estimator adds to it."""
        return critic

    @abstractmethod
    def objective(self, divergence: Divergence) -> Objective:
        """The loss of joint (B,) and independent (B, k) scores, for one training."""

    def log_ratio(self, joint: Tensor, independent: Tensor, offset: float) -> tuple[Tensor, Tensor]:
        """Log density ratios from scores, given log E_independent[e^score] of the training samples."""
        return (joint - offset, independent - offset) if self.needs_offset else (joint, independent)

    needs_offset = False
    """Whether scores are log ratios up to a constant."""

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """Summands of the estimate from log ratios; by default those of the f-MI bound at these ratios."""
        return Terms(divergence.score(joint), divergence.penalty(independent))

    def combine(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Tensor:  # noqa: ARG002
        """The estimate from the means of the terms."""
        return joint - independent


ESTIMATORS: Registry[type[Estimator]] = Registry("estimator")


def list_estimators(pattern: str = "*") -> list[str]:
    """Names of the estimators that match a shell-style pattern.

    Example:
        >>> list_estimators("f*")
        ['fmi', 'f_dime']
    """
    return ESTIMATORS.names(pattern)


def make_estimator(name: str | Estimator, **options: Any) -> Estimator:
    """An estimator by name, with its options; an `Estimator` is returned as it is.

    Raises:
        ValueError: the name is unknown, or an option is out of range.
        TypeError: this estimator has no such option.

    Example:
        >>> make_estimator("smile", clip=3.0)
        Smile(clip=3.0)
    """
    if isinstance(name, Estimator):
        if options:
            raise TypeError(f"{name!r} is an estimator already and takes no options, got {sorted(options)}")
        return name
    kind = ESTIMATORS[name].value
    accepted = [each.name for each in options_of(kind)]
    unknown = sorted(set(options) - set(accepted))
    if unknown:
        takes = f"takes {', '.join(accepted)}" if accepted else "takes no options"
        raise TypeError(f"estimator {name!r} {takes}, got {', '.join(unknown)}")
    return kind(**options)


def _bound(divergence: Divergence) -> Objective:
    require_curved(divergence)
    return lambda joint, independent: divergence.penalty(independent).mean() - divergence.score(joint).mean()


def _is_kl(divergence: Divergence) -> bool:
    return divergence.name == KL_NAME


@ESTIMATORS.register("fmi", summary="The f-MI bound of this divergence: E[f'(u)] - E[f*(f'(u))] (f-MICL's own).")
@dataclass(frozen=True)
class FMI(Estimator):
    """E_joint[f'(u)] - E_independent[f*(f'(u))], trained and read for the same f."""

    def objective(self, divergence: Divergence) -> Objective:
        """The negative bound."""
        return _bound(divergence)


class _OfKL(Estimator):
    """Trained for KL whatever the divergence, which is estimated by its f-MI bound at the same log ratio."""

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """The negative NWJ bound."""
        return _bound(make_divergence(KL_NAME))


@ESTIMATORS.register("nwj", summary="Nguyen, Wainwright and Jordan (2010): E[r] + 1 - E[e^r], the f-MI bound of KL.")
@dataclass(frozen=True)
class NWJ(_OfKL):
    """E_joint[r] + 1 - E_independent[e^r]."""


@ESTIMATORS.register("tuba", summary="Barber and Agakov's bound with a learned baseline (Poole et al., 2019).")
@dataclass(frozen=True)
class TUBA(_OfKL):
    """E_joint[s] - E[log a(x)] + 1 - E_independent[e^s / a(x)] with a trained baseline a: NWJ of r = s - log a(x)."""

    def wrap(self, critic: Critic, x_columns: int, hidden: int) -> Critic:
        """The critic less a network of x."""
        return _WithBaseline(critic, x_columns, hidden)


class _WithBaseline(Critic):
    def __init__(self, critic: Critic, x_columns: int, hidden: int) -> None:
        super().__init__()
        self.critic, self.baseline = critic, mlp(x_columns, hidden, 1, layers=1)

    @property
    def dense(self) -> bool:  # type: ignore[override]
        return self.critic.dense

    def start(self, x: Tensor, y: Tensor) -> None:
        self.critic.start(x, y)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.critic(x, y) - self.baseline(x.flatten(1)).squeeze(1)
        return scores

    def all_pairs(self, x: Tensor, y: Tensor) -> Tensor:
        scores: Tensor = self.critic.all_pairs(x, y) - self.baseline(x.flatten(1))
        return scores


@ESTIMATORS.register("donsker_varadhan", summary="E[s] - log E[e^s] (Donsker and Varadhan, 1983).")
@dataclass(frozen=True)
class DonskerVaradhan(Estimator):
    """E_joint[s] - log E_independent[e^s]: at least NWJ's value for the same critic."""

    needs_offset = True

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """The negative bound on the batch."""
        return lambda joint, independent: log_mean_exp(independent) - joint.mean()

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """For KL: r, and e^r."""
        if not _is_kl(divergence):
            return super().terms(divergence, joint, independent)
        return Terms(joint, independent.exp())

    def combine(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Tensor:
        """For KL: the difference with a logarithm."""
        return joint - independent.log() if _is_kl(divergence) else super().combine(divergence, joint, independent)


@ESTIMATORS.register("mine", summary="Donsker-Varadhan with MINE's bias-corrected gradient (Belghazi et al., 2018).")
@dataclass(frozen=True)
class MINE(DonskerVaradhan):
    """Donsker-Varadhan; the gradient of log E[e^s] is E[grad e^s] over a moving average of E[e^s]."""

    decay: float = option(0.99, "Weight of the past in MINE's moving average.")

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """A loss with the bias-corrected gradient; its value is the batch's own."""
        average: list[Tensor] = []

        def loss(joint: Tensor, independent: Tensor) -> Tensor:
            now = log_mean_exp(independent)
            fixed = now.detach()
            weights = (
                torch.stack([fixed + math.log1p(-self.decay), average[0] + math.log(self.decay)]) if average else None
            )
            average[:] = [fixed if weights is None else weights.logsumexp(dim=0)]
            corrected = torch.exp(now - average[0])  # its gradient is that of E[e^s], over the average
            return fixed + corrected - corrected.detach() - joint.mean()

        return loss


@ESTIMATORS.register("infonce", summary="InfoNCE (van den Oord et al., 2018): at most log of the number of candidates.")
@dataclass(frozen=True)
class InfoNCE(Estimator):
    """Mean of s_ii - log mean_j e^(s_ij) over the joint pair and the k others: at most log(k + 1)."""

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """Cross-entropy of the joint pair among its row."""
        return lambda joint, independent: -self._rows(joint, independent).mean()

    @staticmethod
    def _rows(joint: Tensor, independent: Tensor) -> Tensor:
        return joint - log_mean_exp(torch.cat([joint.unsqueeze(1), independent], dim=1), dim=1)

    def log_ratio(self, joint: Tensor, independent: Tensor, offset: float) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        """Scores are log ratios up to a function of x, which the mean of e^s over the row removes."""
        normaliser = log_mean_exp(independent, dim=1)
        return joint - normaliser, independent - normaliser.unsqueeze(1)

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """For KL: a term for each row."""
        if not _is_kl(divergence):
            return super().terms(divergence, joint, independent)
        return Terms(self._rows(joint, independent), None)


@ESTIMATORS.register(
    "i_alpha", summary="Between NWJ (alpha 0) and InfoNCE (alpha 1) in bias and variance (Poole et al.)."
)
@dataclass(frozen=True)
class IAlpha(Estimator):
    r"""Interpolated bound: TUBA with the baseline alpha m(x) + (1 - alpha), m(x) the mean of e^s over a row."""

    interpolation: float = option(0.5, "i_alpha's weight of the row's own mean: 0 is NWJ, 1 is InfoNCE.")

    def __post_init__(self) -> None:
        if not 0 <= self.interpolation <= 1:
            raise ValueError(f"interpolation must lie in [0, 1], got {self.interpolation}")

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """The negative bound on the batch."""
        return lambda joint, independent: -self._rows(joint, independent).mean()

    def _rows(self, joint: Tensor, independent: Tensor) -> Tensor:
        own, constant = self.interpolation, independent.new_tensor(1 - self.interpolation).log()
        log_own = math.log(own) if own else -math.inf

        def baseline(log_mean: Tensor) -> Tensor:
            return torch.logaddexp(log_mean + log_own, constant) if own else constant.expand_as(log_mean)

        # both means over k samples: the joint pair with k - 1 others, and k others
        with_joint = log_mean_exp(torch.cat([joint.unsqueeze(1), independent[:, 1:]], dim=1), dim=1)
        without = log_mean_exp(independent, dim=1)
        return 1 + joint - baseline(with_joint) - torch.exp(without - baseline(without))

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """For KL: a term for each row."""
        if not _is_kl(divergence):
            return super().terms(divergence, joint, independent)
        return Terms(self._rows(joint, independent), None)


class _ByDiscrimination(Estimator):
    """Trained by the Jensen-Shannon bound, which is a classifier of joint and independent pairs with logit r."""

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """Twice the binary cross-entropy."""
        return lambda joint, independent: F.softplus(-joint).mean() + F.softplus(independent).mean()


@ESTIMATORS.register("js", summary="Trained by Jensen-Shannon, read as the bound of the divergence (Poole et al.).")
@dataclass(frozen=True)
class JSTrained(_ByDiscrimination):
    """The f-MI bound (KL: NWJ) at a log ratio that was trained by the Jensen-Shannon bound."""


@ESTIMATORS.register(
    "smile", summary="Trained by Jensen-Shannon, read with clipped density ratios (Song and Ermon, 2020)."
)
@dataclass(frozen=True)
class Smile(_ByDiscrimination):
    """E_joint[r] - log E_independent[clip(e^r, e^-clip, e^clip)]: less variance than Donsker-Varadhan, and a bias."""

    clip: float = option(5.0, "smile's largest absolute log ratio of independent pairs.")
    lower_bound = False

    def __post_init__(self) -> None:
        if not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip}")

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """For KL: r, and the clipped ratio; otherwise the bound at clipped ratios."""
        independent = independent.clamp(-self.clip, self.clip)
        if not _is_kl(divergence):
            return super().terms(divergence, joint, independent)
        return Terms(joint, independent.exp())

    def combine(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Tensor:
        """For KL: the difference with a logarithm."""
        return joint - independent.log() if _is_kl(divergence) else super().combine(divergence, joint, independent)


class _PlugIn(Estimator):
    """Read by plugging the log ratio into the information itself: no lower bound, but no variance of e^r either."""

    lower_bound = False

    def terms(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Terms:
        """For KL: r under the joint distribution; otherwise f(u) / (1 + u) under both."""
        if _is_kl(divergence):
            return Terms(joint, None)
        return Terms(plug_in(divergence, joint), plug_in(divergence, independent))

    def combine(self, divergence: Divergence, joint: Tensor, independent: Tensor) -> Tensor:
        """For KL the mean under the joint distribution, otherwise the sum of both."""
        return joint if _is_kl(divergence) else joint + independent


@ESTIMATORS.register("classifier", summary="Plug-in of the logit of a classifier of joint and independent pairs.")
@dataclass(frozen=True)
class ClassifierRatio(_PlugIn, _ByDiscrimination):
    """Density ratio by discrimination: r is the logit of a classifier with equal class frequencies."""


@ESTIMATORS.register("f_dime", summary="f-DIME: trained by the bound of any f, read by plug-in (Letizia et al., 2024).")
@dataclass(frozen=True)
class FDIME(_PlugIn):
    """The ratio (f*)'(T) of a critic that maximises the f-MI bound of one f, plugged into the information of another.

    Independent pairs are made by derangements (shifts), as f-DIME asks.
    """

    trained_by: str = option("squared_hellinger", "f_dime's divergence of the training bound.")

    def objective(self, divergence: Divergence) -> Objective:  # noqa: ARG002
        """The negative bound of the training divergence."""
        return _bound(make_divergence(self.trained_by))


def wrap_module(module: nn.Module) -> Critic:
    """A module of the user's as a critic; one that is a `Critic` is returned as it is."""
    return module if isinstance(module, Critic) else _OfUser(module)


class _OfUser(Critic):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self.module(x, y)
        if not isinstance(scores, Tensor) or scores.numel() != len(x):
            seen = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"the critic must map N rows of x and of y to N scores, but for N={len(x)} it gave {seen}")
        return scores.reshape(len(x))
