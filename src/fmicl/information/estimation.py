r"""Estimation of f-mutual information from samples: cross-fitting, early stopping, bootstrap intervals.

The samples are split into folds. For each fold a critic is trained on the other folds, less a part for early stopping,
and evaluated on the fold itself, so that every sample enters the estimate once, by a critic that has not seen it.
Where a critic names alternatives, all are trained, and a weighted mean of their scores takes the place of the simplest
where that is better on the samples for early stopping.

A critic of finitely many samples is below the optimum on new ones, and above it on those that it was trained on, by the
same amount to first order (the two halves of the optimism of a likelihood). So the held-out estimate is one for a lower
bound, and the mean of both (``corrected``) one for the information itself.

That holds for a critic that can represent the log ratio, and no data can show that one can: no upper confidence bound
of the information holds for every distribution. What data show is whether the critic is still learning. So a critic of
half as many samples is evaluated, too (:meth:`InformationEstimator.interval`); without the alternatives if they were
no better.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.information.critics import CRITICS, Critic, Stack, infonce_rows, log_mean_exp
from fmicl.information.estimators import Estimator, make_estimator, wrap_module
from fmicl.information.preparation import Marginals, as_samples, prepare
from fmicl.utils.device import pick_device
from fmicl.utils.seeding import mix_seed

BLOCK = 2048
"""Samples that are paired with each other in an evaluation: memory is the square of it."""
SHIFTS = 64
"""Independent pairs of each sample in an evaluation, for a critic that scores pairs one by one."""
CHECK_SHIFTS = 16
"""The same for early stopping, which is often."""
SLOWEST_RATE = 1 / 3
"""Intervals assume that what a critic of n samples lacks falls at least as fast as n to minus this."""


class Estimate(NamedTuple):
    """An estimate of the information, with its interval; `float(estimate)` is its value.

    Attributes:
        value: the estimate.
        low: lower end of the interval.
        high: upper end of the interval.
        held_out: the estimator's own value on samples that its critic has not seen.
        in_sample: its value on the samples that the critic was trained on.
        half: its value on samples that the critic has not seen, for critics of half as many samples; NaN where the
            estimate is not ``corrected``, so that the interval has no use for it.
    """

    value: float
    low: float
    high: float
    held_out: float
    in_sample: float
    half: float

    def __float__(self) -> float:
        return self.value


@dataclass(frozen=True)
class Training:
    """How a critic is trained.

    Attributes:
        hidden: width of the hidden layers.
        batch_size: joint pairs in a step.
        steps: steps at most.
        check_every: steps between two evaluations on the samples for early stopping.
        patience: evaluations without improvement after which training stops.
        learning_rate: of Adam; its last half of the steps decays to 0.
        averaging: weight of the past in the moving average of the parameters (Polyak), which is what is evaluated.
        weight_decay: of AdamW.
        validation: share of the training samples for early stopping.
        shifts: independent pairs of each joint one, for critics that score pairs one by one.
    """

    hidden: int = 64
    batch_size: int = 512
    steps: int = 800
    check_every: int = 50
    patience: int = 4
    learning_rate: float = 5e-3
    averaging: float = 0.98
    weight_decay: float = 1e-2
    validation: float = 0.15
    shifts: int = 4

    def __post_init__(self) -> None:
        for name in ("hidden", "batch_size", "steps", "check_every", "patience", "learning_rate", "shifts"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be positive, but it is {getattr(self, name)}")
        if not 0 < self.validation < 1:
            raise ValueError(f"validation must lie between 0 and 1, but it is {self.validation}")
        if not 0 <= self.averaging < 1:
            raise ValueError(f"averaging must lie in [0, 1), but it is {self.averaging}")


class _Scores(NamedTuple):
    """Scores of N joint pairs (N,), of k independent pairs each (N, k), and the shifts of y (k,); None: all others."""

    joint: Tensor
    independent: Tensor
    shifts: Tensor | None


class _Trained(NamedTuple):
    """A critic, and log E_independent[e^score] on its samples."""

    critic: Critic
    offset: float


class _Share(NamedTuple):
    """The part of the whole work that a training is: where it starts, and its size."""

    start: float
    size: float


class _Sums(NamedTuple):
    """Of each sample, its share of the mean of joint terms and of independent terms, (N,) each, in float64."""

    joint: Tensor
    independent: Tensor


class InformationEstimator:
    """Estimator of f-mutual information with a trained critic: `fit`, then `estimate` and `interval`.

    Args:
        divergence: a name or a `Divergence`.
        estimator: a name (`list_estimators()`) or an `Estimator`.
        critic: a name (`list_critics()`), or a module of your own that maps rows (N, ...) of x and of y to N scores.
        marginals: what is done to continuous columns first: "normal" (normal scores), "standard", or "none", which
            leaves the samples' shape as it is, for a module of your own.
        folds: parts that are held out in turn; 2 at least.
        corrected: whether the estimate is the mean of held-out and in-sample values, see above, or the held-out value.
        seed: seed of folds, weights and batches.
        device: where to compute: cpu, cuda, mps, or auto.
        progress: called with the share of work that is done, in (0, 1]; None for no display.
        training: a `Training`; None for the defaults.
        options: of the estimator.

    Raises:
        ValueError, TypeError: an unknown name, or options out of range.

    Example:
        >>> x = torch.randn(600, 1, generator=torch.Generator().manual_seed(0))
        >>> y = x + torch.randn(600, 1, generator=torch.Generator().manual_seed(1))     # 0.3466 nats
        >>> fitted = InformationEstimator(estimator="nwj", critic="copula", training=Training(steps=100)).fit(x, y)
        >>> low, high = fitted.interval()
        >>> low < 0.3466 < high
        True
    """

    def __init__(
        self,
        divergence: DivergenceName | Divergence = "kl",
        estimator: str | Estimator = "donsker_varadhan",
        critic: str | nn.Module = "copula",
        *,
        marginals: Marginals = "normal",
        folds: int = 3,
        corrected: bool = True,
        seed: int = 0,
        device: str = "cpu",
        progress: Callable[[float], None] | None = None,
        training: Training | None = None,
        **options: Any,
    ) -> None:
        self.divergence = make_divergence(divergence)
        self.estimator = make_estimator(estimator, **options)
        if isinstance(critic, str):
            CRITICS[critic]  # an unknown name is an error now
        elif not isinstance(critic, nn.Module):
            raise TypeError(f"critic must be a name or a torch module, got a {type(critic).__name__}")
        self.critic = critic
        if marginals not in ("normal", "standard", "none"):
            raise ValueError(f"marginals must be 'normal', 'standard' or 'none', got {marginals!r}")
        if folds < 2:
            raise ValueError(f"folds must be at least 2, got {folds}")
        self.marginals: Marginals = marginals
        self.folds, self.corrected, self.seed = folds, corrected, seed
        self.device = pick_device(device)
        self.progress = progress
        self.training = training or Training()
        self._held_out: _Sums | None = None
        self._in_sample: _Sums | None = None
        self._half: _Sums | None = None

    def fit(self, x: Any, y: Any) -> InformationEstimator:
        """Train the critics on samples (N, ...) of x and y whose rows belong together.

        Raises:
            ValueError: shapes don't fit, values are not finite, a variable is constant, or there are too few samples.
        """
        samples = as_samples(x, "x"), as_samples(y, "y")
        n = len(samples[0])
        if len(samples[1]) != n:
            raise ValueError(f"x and y must have as many rows as each other, got {n} and {len(samples[1])}")
        if n < 8 * self.folds:
            raise ValueError(f"{n} samples are too few for {self.folds} folds: {8 * self.folds} are the least")
        columns = [
            prepare(part, self.marginals, name).to(self.device) for part, name in zip(samples, ("x", "y"), strict=True)
        ]
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 0))
        order = torch.randperm(n, generator=generator)
        fold_of = torch.arange(n) % self.folds
        inside = [order[fold_of == fold] for fold in range(self.folds)]
        outside = [order[fold_of != fold] for fold in range(self.folds)]
        number = 2 * self.folds if self.corrected else self.folds
        held_out, in_sample, half, stacked = [], [], [], []
        for fold in range(self.folds):
            trained = self._train([part[outside[fold]] for part in columns], fold, number)
            held_out.append(self._sums(trained, [part[inside[fold]] for part in columns]))
            in_sample.append(self._sums(trained, [part[outside[fold]] for part in columns]))
            stacked.append(isinstance(trained.critic, Stack))
        for fold in range(self.folds if self.corrected else 0):
            some = outside[fold][: len(outside[fold]) // 2]
            trained = self._train([part[some] for part in columns], self.folds + fold, number, stacked[fold])
            half.append(self._sums(trained, [part[inside[fold]] for part in columns]))
        if self.progress is not None:
            self.progress(1.0)
        self._held_out, self._in_sample = _joined(held_out), _joined(in_sample)
        self._half = _joined(half) if half else None
        return self

    def estimate(self) -> float:
        """The estimate: the held-out value, or with ``corrected`` its mean with the in-sample value.

        Raises:
            RuntimeError: `fit` has not been called.
        """
        held_out, in_sample, _ = self._values()
        return (held_out + in_sample) / 2 if self.corrected else held_out

    def interval(self, level: float = 0.95, resamples: int = 1000) -> tuple[float, float]:
        r"""A bootstrap interval of the estimate, widened by what the critic may lack.

        Samples are drawn with replacement, with the critics as they are, and the estimate is linearised in its means.
        With ``corrected``, the truth is taken as uniform between the held-out value V and V + L, L being what the
        critic may lack, and its variance :math:`L^2 / 12` is added. L is the in-sample value less V if the critic can
        represent the log ratio. That is assumed at the lower end. The upper end adds
        :math:`(V - V_{1/2}) / (2^{1/3} - 1)`, where :math:`V_{1/2}` is the value of half as many samples, or 0 where
        that is negative, as no information is: the bias that is left if it falls as :math:`n^{-1/3}`. It assumes that
        it falls at least that fast: of a dependence that the critics do not begin to find, no data tell.

        Raises:
            ValueError: the level is not in (0, 1).
            RuntimeError: `fit` has not been called.
        """
        if not 0 < level < 1:
            raise ValueError(f"level must lie between 0 and 1, got {level}")
        held_out, in_sample, half = self._values()
        assert self._held_out is not None
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 1))
        rows = self._rows(self._held_out)
        n = len(rows)
        drawn = []
        for part in torch.full((resamples,), n).split(max(1, 2**22 // n)):
            index = torch.randint(n, (len(part), n), generator=generator)
            drawn.append(rows[index].mean(dim=1))
        tail = (1 - level) / 2
        low, high = torch.quantile(torch.cat(drawn), torch.tensor([tail, 1 - tail], dtype=rows.dtype)).tolist()
        if not self.corrected:
            return low, high
        z = math.sqrt(2) * float(torch.special.erfinv(torch.tensor(level)))
        lack = in_sample - held_out
        bias = max(0.0, held_out - max(0.0, half)) / (2**SLOWEST_RATE - 1) if self._half is not None else 0.0
        most = lack + bias
        return (
            held_out + lack / 2 - math.hypot(held_out - low, z * lack / math.sqrt(12)),
            held_out + most / 2 + math.hypot(high - held_out, z * most / math.sqrt(12)),
        )

    def result(self, level: float = 0.95) -> Estimate:
        """Estimate, interval, and the values they come from."""
        return Estimate(self.estimate(), *self.interval(level), *self._values())

    # --- training ----------------------------------------------------------------------------------------------------

    def _train(self, columns: list[Tensor], number: int, trainings: int, alternatives: bool = True) -> _Trained:
        """A critic trained on these samples, with or without its alternatives; which of all trainings it is."""
        options = self.training
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 2, number))
        x, y = columns
        n = len(x)
        split = max(4, round(options.validation * n))
        validation, train = (slice(0, split), slice(split, n))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(mix_seed(self.seed, 3, number))
            critic = self._build(x, y).to(self.device)
            critic.start(x[train], y[train])
            choices = critic.alternatives(x[train], y[train]) if alternatives else (critic,)
        for k, choice in enumerate(choices):
            share = _Share((number + k / len(choices)) / trainings, 1 / (len(choices) * trainings))
            if any(parameter.requires_grad for parameter in choice.parameters()):
                self._optimise(choice, (x[train], y[train]), (x[validation], y[validation]), generator, share)
        critic = choices[0] if len(choices) == 1 else self._choose(choices, x[validation], y[validation])
        critic.eval()
        with torch.no_grad():
            offsets = [log_mean_exp(scores.independent.double()) for scores in self._scores(critic, x, y)]
        return _Trained(critic, float(log_mean_exp(torch.stack(offsets))))

    def _choose(self, choices: Sequence[Critic], x: Tensor, y: Tensor) -> Critic:
        """A weighted mean of critics if its InfoNCE bound here is higher by two standard errors, or the first critic.

        By InfoNCE whatever the estimator, since a bound that is limited by the number of independent pairs can't be
        fooled by a critic that has seen too few of them.
        """
        stack = Stack(choices).to(self.device).eval()
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 5))
        with torch.no_grad():
            scores = _pair_scores(stack.each, x, y, SHIFTS, generator)
        candidates = torch.cat([scores.joint.unsqueeze(1), scores.independent], dim=1).double()
        stack.fit(candidates)
        gain = infonce_rows(candidates @ stack.weights.double()) - infonce_rows(candidates[..., 0])
        return stack if bool(gain.mean() > 2 * gain.std() / math.sqrt(len(gain))) else choices[0]

    def _build(self, x: Tensor, y: Tensor) -> Critic:
        hidden = self.training.hidden
        if isinstance(self.critic, str):
            critic = CRITICS[self.critic].value(x.flatten(1).shape[1], y.flatten(1).shape[1], hidden)
        else:
            critic = wrap_module(copy.deepcopy(self.critic))
        return self.estimator.wrap(critic, x.flatten(1).shape[1], hidden)

    def _optimise(
        self,
        critic: Critic,
        train: tuple[Tensor, Tensor],
        validation: tuple[Tensor, Tensor],
        generator: torch.Generator,
        share: _Share,
    ) -> None:
        """Train with early stopping on the samples for it."""
        options = self.training
        objective, check = self.estimator.objective(self.divergence), self.estimator.objective(self.divergence)
        n = len(train[0])
        batch = min(options.batch_size, n)
        average = copy.deepcopy(critic)
        raw: list[Tensor] = list(critic.parameters())
        averaged: list[Tensor] = list(average.parameters())
        optimiser = torch.optim.AdamW(raw, options.learning_rate, weight_decay=options.weight_decay)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimiser, lambda step: min(1.0, 2 * (1 - step / options.steps)) if options.steps > 1 else 1.0
        )
        best, best_state, since = self._loss(critic, check, validation), copy.deepcopy(critic.state_dict()), 0
        for step, index in zip(range(1, options.steps + 1), _batches(n, batch, generator), strict=False):
            critic.train()
            index = index.to(self.device)
            scores = _pair_scores(critic, train[0][index], train[1][index], options.shifts, generator)
            loss = objective(scores.joint, scores.independent)
            optimiser.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(raw, 5.0)
            optimiser.step()
            schedule.step()
            with torch.no_grad():  # of few steps at first
                torch._foreach_lerp_(averaged, raw, 1 - min(options.averaging, step / (step + 10)))
            if step % options.check_every == 0 or step == options.steps:
                found = self._loss(average, check, validation)
                if found < best:
                    best, best_state, since = found, copy.deepcopy(average.state_dict()), 0
                else:
                    since += 1
                if self.progress is not None:
                    self.progress(share.start + share.size * step / options.steps)
                if since >= options.patience:
                    break
        critic.load_state_dict(best_state)
        if self.progress is not None:
            self.progress(share.start + share.size)

    def _loss(
        self, critic: Critic, objective: Callable[[Tensor, Tensor], Tensor], part: tuple[Tensor, Tensor]
    ) -> float:
        critic.eval()
        with torch.no_grad():
            found = self._scores(critic, part[0], part[1], CHECK_SHIFTS)
            losses = [objective(scores.joint, scores.independent) for scores in found]
            loss = float(torch.stack(losses).mean())
        return loss if math.isfinite(loss) else math.inf

    # --- evaluation --------------------------------------------------------------------------------------------------

    def _scores(self, critic: Critic, x: Tensor, y: Tensor, shifts: int = SHIFTS) -> Iterator[_Scores]:
        generator = torch.Generator().manual_seed(mix_seed(self.seed, 4))
        for block in range(blocks := max(1, math.ceil(len(x) / BLOCK))):
            part = slice(block * len(x) // blocks, (block + 1) * len(x) // blocks)
            yield _pair_scores(critic, x[part], y[part], shifts, generator)

    def _sums(self, trained: _Trained, columns: list[Tensor]) -> _Sums:
        """Each sample's share of the two means of terms.

        The mean of g(x_i, y_j) over independent pairs is linearised (Hájek projection): sample i has the mean over its
        row, plus that over its column, less the mean over all.
        """
        with torch.no_grad():
            scores = self._scores(trained.critic, columns[0], columns[1])
            return _joined([self._shares_of(each, trained.offset) for each in scores])

    def _shares_of(self, scores: _Scores, offset: float) -> _Sums:
        r = self.estimator.log_ratio(scores.joint.double(), scores.independent.double(), offset)
        joint, independent = self.estimator.terms(self.divergence, *r)
        shares = torch.zeros_like(joint) if independent is None else _shares(independent, scores.shifts)
        return _Sums(joint.cpu(), shares.cpu())

    def _rows(self, sums: _Sums) -> Tensor:
        """Of each sample, its share of the estimate, (N,): the value plus its linear part, whose mean is the value.

        Linear in the means, since a resampled mean of linearised terms may be negative, which has no logarithm.
        """
        terms = torch.stack(list(sums), dim=1)
        at = terms.mean(dim=0).requires_grad_()
        value = self.estimator.combine(self.divergence, at[0], at[1])
        (slope,) = torch.autograd.grad(value, at)
        return value.detach() + (terms - at.detach()) @ slope

    def _values(self) -> tuple[float, float, float]:
        """The held-out and the in-sample value, and the held-out one of half as many samples."""
        if self._held_out is None or self._in_sample is None:
            raise RuntimeError("fit(x, y) comes first")
        held_out, in_sample, half = (
            math.nan
            if sums is None
            else float(self.estimator.combine(self.divergence, sums.joint.mean(), sums.independent.mean()))
            for sums in (self._held_out, self._in_sample, self._half)
        )
        return held_out, in_sample, half


def _joined(parts: list[_Sums]) -> _Sums:
    return _Sums(*(torch.cat(each) for each in zip(*parts, strict=True)))


def _batches(n: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Endless batches of indices, without repetition within an epoch."""
    while True:
        order = torch.randperm(n, generator=generator)
        yield from order[: n - n % batch].split(batch)


def _pair_scores(
    critic: Critic | Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    shifts: int,
    generator: torch.Generator,
) -> _Scores:
    """Scores of joint pairs, and of all others (dense critics) or of a few shifts of y, never a joint pair."""
    n = len(x)
    if isinstance(critic, Critic) and critic.dense:
        scores = critic.all_pairs(x, y)
        # without the diagonal: after the first entry, it is the last of each n + 1
        return _Scores(scores.diagonal(), scores.flatten()[1:].view(n - 1, n + 1)[:, :-1].reshape(n, n - 1), None)
    k = min(shifts, n - 1)
    by = (torch.randperm(n - 1, generator=generator)[:k] + 1).to(x.device)
    own = torch.arange(n, device=x.device)
    rows = torch.cat([own, ((own + by.unsqueeze(1)) % n).flatten()])
    scores = critic(x.repeat(k + 1, *[1] * (x.dim() - 1)), y[rows])
    return _Scores(scores[:n], scores[n:].unflatten(0, (k, n)).transpose(0, 1), by)


def _shares(independent: Tensor, shifts: Tensor | None) -> Tensor:
    """Row mean plus column mean less the mean, of terms (N, k) of independent pairs as `_pair_scores` lays them out."""
    n, k = independent.shape
    if shifts is None:
        square = independent.new_zeros(n * n)
        square[1:].view(n - 1, n + 1)[:, :-1] = independent.reshape(n - 1, n)
        by_column = square.view(n, n).sum(dim=0) / k
    else:  # y of row j came to row j - shift
        rows = (torch.arange(n, device=independent.device).unsqueeze(1) - shifts) % n
        by_column = independent.gather(0, rows).mean(dim=1)
    return independent.mean(dim=1) + by_column - independent.mean()


def estimate(
    x: Any,
    y: Any,
    divergence: DivergenceName | Divergence = "kl",
    estimator: str | Estimator = "donsker_varadhan",
    critic: str | nn.Module = "copula",
    *,
    level: float = 0.95,
    **options: Any,
) -> Estimate:
    """Estimate the f-mutual information of samples x and y, (N, ...) each, with a bootstrap interval.

    Args:
        x: array or tensor; integers and truth values are categories, floats are continuous.
        y: as x, with as many rows.
        divergence: a name or a `Divergence`, such as one of your own f.
        estimator: a name (`list_estimators()`) or an `Estimator`.
        critic: a name (`list_critics()`) or a module.
        level: of the interval.
        options: of :class:`InformationEstimator` and of the estimator.

    Raises:
        ValueError, TypeError: as :class:`InformationEstimator`.

    Example:
        >>> x = torch.tensor([0, 1] * 200)
        >>> found = estimate(x, x, critic="bilinear", estimator="infonce", training=Training(steps=200))  # one bit
        >>> round(found.value, 1)
        0.7
    """
    return InformationEstimator(divergence, estimator, critic, **options).fit(x, y).result(level)
