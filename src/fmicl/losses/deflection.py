r"""The deflection of a score: the criterion by which a learned f is trained.

.. math:: d(f) = \frac{E_{pos}[T] - E_{neg}[T]}{\sqrt{\mathrm{Var}_{pos}[T] + \mathrm{Var}_{neg}[T]}} ,
    \quad T(r) = f'(e^r)

It says how far apart the scores of positive and negative pairs are in units of their spread: Fisher's criterion, and
the power of a test of dependence between the views by the mean score. A learned divergence
(`fmicl.divergences.learned`) is trained to maximise it, while the encoder, at these weights, maximises the bound.

Why not by the bound itself: that of c f is c times as large, and an f that grows faster has a larger one, so it
measures f and not the representation. d needs no labels and is the same for a f + b (u - 1) for any a > 0 and b, and an
f that grows fast pays by its variance. In a mixture T is linear in the weights, so d is quasi-concave in them: a
maximum is the maximum. Nor can encoder and f collude: no gradient of d reaches the encoder, and none of the bound f.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import Critic
from fmicl.losses.pairing import Pairs
from fmicl.losses.similarities import Similarity, make_similarity
from fmicl.utils.learnable import Scalar
from fmicl.utils.validation import Negatives


def deflection(
    x: Tensor,
    y: Tensor,
    divergence: DivergenceName | Divergence,
    *,
    gamma: Scalar = 1.0,
    mu: Scalar | Literal["normalised"] = 1.0,
    similarity: str | Similarity = "gaussian",
    negatives: Negatives | Tensor = "anchor",
    **options: Any,
) -> Tensor:
    """The deflection of a divergence's score on a batch, a scalar to be maximised; differentiable in all it depends on.

    Over several processes each takes its own batch.

    Args:
        x: embeddings of the first view, (N, d).
        y: embeddings of the second view, (N, d).
        divergence: a name or a `Divergence`.
        gamma: as in `fmicl_loss`, and so are the others.
        mu: scale of the density ratio.
        similarity: of two embeddings.
        negatives: "anchor", "both", "cross" or a tensor of explicit ones, (M, d).
        options: `normalised`, `kernel`, `precision` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import fmicl
        >>> x, y = torch.randn(8, 4), torch.randn(8, 4)
        >>> twice = fmicl.Divergence.from_generator(lambda u: 2 * u * torch.log(u) - 5 * (u - 1))
        >>> bool(torch.isclose(deflection(x, y, twice), deflection(x, y, "kl"), rtol=1e-3))
        True
    """
    pairs = Pairs.prepare(x, y, negatives, **{**options, "gather": False})
    critic = make_similarity(similarity, gamma, mu).critic(make_divergence(divergence), x.shape[1])
    scores = pairs.scores(critic)
    centre = scores.detach().mean()  # near which all scores are at first: moments about it lose few digits
    first, second = (pairs.mean(_Moment(critic, power, centre)) for power in (1, 2))
    variance = scores.var(unbiased=False) + (second - first.square())
    # far below any variance of embeddings that are not one point, whose gradient would be infinite
    return (scores.mean() - centre - first) / (variance.clamp(min=0) + 1e-12).sqrt()


@dataclass(frozen=True)
class _Moment:
    """A power of the score of a pair, about a centre."""

    critic: Critic
    power: int
    centre: Tensor

    @property
    def offset(self) -> Scalar:
        return self.critic.offset

    @property
    def scale(self) -> Scalar:
        return self.critic.scale

    def penalty(self, z: Tensor) -> Tensor:
        return (self.critic.score(z) - self.centre).pow(self.power)

    def penalty_and_slope(self, z: Tensor) -> tuple[Tensor, Tensor]:
        slope: Tensor = torch.func.grad(lambda value: self.penalty(value).sum())(z)
        return self.penalty(z), slope
