r"""A learned divergence: a positive mixture of certified generators, whose weights are trained.

    f = sum_k w_k f_k,   w = softmax(logits),   f_k(1) = f_k'(1) = 0,  f_k''(1) = 1

over JS, KL and Tsallis of orders 1.5, 2 (Pearson) and 3. Subtracting a multiple of u - 1 from a generator, which makes
f_k'(1) = 0, changes no divergence, and dividing by f_k''(1) leaves no factor to learn.

The uniformity certificate holds for all logits, gamma and mu: f(1) = 0 and f'' > 0, and score, penalty and
h(t) = penalty(log mu - gamma t) are linear in f, so h'' = sum_k w_k h_k'' with w_k > 0 and h_k'' > 0.

How the weights are trained matters, as a larger f always has a larger bound: `fmicl.losses.deflection` has the
criterion. It looks at second moments of scores, so divergences whose scores fall exponentially with the distance
(squared Hellinger, Jeffrey), which it would never choose, are left out; VLC is, since its h is not convex for mu > 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from fmicl.divergences.base import Divergence
from fmicl.divergences.catalogue import JS, KL, Pearson, Tsallis
from fmicl.divergences.inversion import InvertedConjugate
from fmicl.divergences.registry import register_divergence

# f_k, f_k'(1) and f_k''(1)
_COMPONENTS: dict[str, tuple[Divergence, float, float]] = {
    "js": (JS(), 0.0, 0.5),
    "kl": (KL(), 1.0, 1.0),
    "tsallis 1.5": (Tsallis(1.5), 3.0, 1.5),
    "pearson": (Pearson(), 0.0, 2.0),
    "tsallis 3": (Tsallis(3.0), 1.5, 3.0),
}


@register_divergence("learned", summary="A mixture of certified divergences whose weights are trained along.")
@dataclass(frozen=True, eq=False, repr=False)
class Learned(InvertedConjugate):
    """A positive mixture of certified divergences with learned weights; each instance has its own.

    Example:
        >>> import fmicl
        >>> kind = fmicl.divergence("learned")
        >>> fmicl.theory.uniformity(kind).kind, len(kind.logits)
        ('strictly convex', 5)
        >>> kind
        Learned(js=0.2, kl=0.2, tsallis 1.5=0.2, pearson=0.2, tsallis 3=0.2)
    """

    logits: Tensor = field(default_factory=lambda: nn.Parameter(torch.zeros(len(_COMPONENTS))))

    formula = "sum_k w_k f_k(u), w learned"
    supremum = math.inf
    closed_form = True
    learned = True

    def __repr__(self) -> str:
        """The weights."""
        return f"Learned({', '.join(f'{name}={weight:.2g}' for name, weight in self.weights().items())})"

    def weights(self) -> dict[str, float]:
        """The weight of each component."""
        return dict(zip(_COMPONENTS, self.logits.detach().softmax(0).tolist(), strict=True))

    def frozen(self) -> Learned:
        """The same f, with weights that have no gradient."""
        return replace(self, logits=self.logits.detach())

    def _mix(self, like: Tensor, of: Callable[[Divergence], Tensor], offset: Tensor | float = 0.0) -> Tensor:
        """sum_k w_k (of(f_k) - offset f_k'(1)) / f_k''(1), of the type of `like`."""
        total = torch.zeros_like(like)
        weights = self.logits.softmax(0).to(like.dtype).unbind()
        for weight, (kind, slope, curvature) in zip(weights, _COMPONENTS.values(), strict=True):
            total = total + weight * ((of(kind) - offset * slope) / curvature)
        return total

    def _f(self, u: Tensor) -> Tensor:
        return self._mix(u, lambda kind: kind.f(u), u - 1)

    def _derivative(self, u: Tensor) -> Tensor:
        return self._mix(u, lambda kind: kind.derivative(u), 1.0)

    def _score(self, r: Tensor) -> Tensor:
        return self._mix(r, lambda kind: kind.score(r), 1.0)

    def _score_slope(self, r: Tensor) -> Tensor:
        return self._mix(r, lambda kind: kind.score_slope(r))

    def _score_difference(self, r: Tensor, reference: Tensor) -> Tensor:
        return self._mix(r, lambda kind: kind.score_difference(r, reference))

    def _penalty(self, r: Tensor) -> Tensor:
        return self._mix(r, lambda kind: kind.penalty(r), 1.0)

    def _penalty_slope(self, r: Tensor) -> Tensor:
        return self._mix(r, lambda kind: kind.penalty_slope(r))

    def _relative_curvature(self, r: Tensor) -> Tensor:
        slope = self.penalty_slope(r)
        bend = self._mix(r, lambda kind: kind.relative_curvature(r) * kind.penalty_slope(r))
        return torch.where(slope > 0, bend / slope, 1.0)  # the limit for u -> 0, of JS and KL


def require_fixed(divergence: Divergence) -> None:
    """Raise ValueError for a learned divergence, where nothing would train its weights."""
    if divergence.learned:
        raise ValueError(
            f"the weights of divergence {divergence.name!r} are trained by f-MICL alone (FMICLLoss, --objective fmicl "
            "with a similarity on the sphere): take another divergence here"
        )
