r"""The balanced weight of the negatives, `alpha="auto"`.

The pull of positive pairs and the push of negatives are the slopes of the loss in r. They balance if

.. math:: \alpha = E_{pos}[T'(r)] \,/\, E_{neg}[(f^* \circ T)'(r)], \quad T(r) = f'(e^r) ,

which is computed anew from each batch. Three reasons for this alpha:

- It is where a common change of all r, a scale of u, no longer changes the bound: mu is at its optimum. If alpha u is
  the true density ratio, E_pos[T'] = E_neg[alpha u T'] = alpha E_neg[(f* T)'], so it is this alpha for every f.
- For KL it is 1 / E_neg[u]: the bound and its gradient are those of the optimal (Donsker-Varadhan) shift.
- If positive pairs coincide and negatives are orthogonal it is `fmicl.theory.balanced_alpha`, at which
  `fmicl.theory.push` is 1. Where negatives are closer, at a large gamma or a steep f, they push harder than orthogonal
  ones by orders of magnitude, and the weight that balances them is smaller.

The loss is minus the bound of f_alpha (`Divergence.weighted`), with alpha as a constant of this batch:
-(E_pos[T] - alpha E_neg[f*(T)] - alpha f(1 / alpha)).
"""

from __future__ import annotations

from dataclasses import fields, replace

import torch
from torch import Tensor

from fmicl.divergences import KL
from fmicl.divergences.critic import Critic
from fmicl.kernels import all_sum
from fmicl.kernels.transforms import in_transforms
from fmicl.losses.pairing import Pairs
from fmicl.losses.shift import differentiable_once, optimally_shifted
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.validation import require_shift

_LEAST_PUSH = 1e-30  # below, slopes of all negatives have underflowed in float32; alpha stays a number


def require_alpha(alpha: Scalar | str, shift: str | None) -> None:
    """Raise ValueError unless alpha is positive, or "auto" without the optimal shift, which does the same."""
    require_shift(shift)
    if not isinstance(alpha, str):
        require_positive_scalar("alpha", alpha)
    elif alpha != "auto":
        raise ValueError(f"alpha must be a positive number or 'auto', got alpha={alpha!r}")
    elif shift is not None:
        raise ValueError(f"alpha='auto' and shift={shift!r} both weigh the negatives by the batch: take one of them")


def balanced_uniformity(pairs: Pairs, critic: Critic) -> Tensor:
    """f-MICL's uniformity term with the balanced weight: alpha (E_neg[f*(T)] + f(1 / alpha)).

    Raises:
        ValueError: the divergence isn't KL, and the call is within a transform of torch.func.
    """
    if type(critic.divergence) is KL:  # not a subclass, which may compute something else
        return optimally_shifted(pairs, critic, 1.0)
    if in_transforms():
        raise ValueError(
            f"within torch.func alpha='auto' works with kl alone, got {critic.divergence.name}: the gradient holds "
            "alpha fixed. torch.autograd gives a first derivative"
        )
    alpha = balance(pairs, critic)
    value = alpha * (pairs.mean(critic) + critic.divergence.f(1 / alpha).detach())
    return differentiable_once(value, "the gradient of alpha='auto' holds alpha fixed")


@torch.no_grad()
def balance(pairs: Pairs, critic: Critic) -> Tensor:
    """The alpha of a batch at which the negatives of all processes push as hard as the positives pull, a scalar.

    Example:
        >>> import fmicl
        >>> x = torch.eye(4)                        # pairs that coincide, and orthogonal negatives
        >>> critic = fmicl.Gaussian(gamma=1.0).critic(fmicl.divergence("js"), d=4)
        >>> round(float(balance(Pairs.prepare(x, x, "anchor"), critic)), 2)
        4.19
        >>> round(fmicl.theory.balanced_alpha("js", gamma=1.0), 2)
        4.19
    """
    pairs = pairs.detached()
    if pairs.kernel == "triton":
        pairs = replace(pairs, kernel="tiled")  # slopes have no program of their own
    slopes = _Slopes(**{field.name: getattr(critic, field.name) for field in fields(critic)})
    pull = all_sum(pairs.mean_of_rows(pairs.scores(slopes)), pairs.world) / len(pairs.world.sizes)
    return pull / pairs.global_mean(slopes).clamp(min=_LEAST_PUSH)


class _Slopes(Critic):
    """The slopes of T and f*(T) in z, in place of themselves."""

    def score(self, z: Tensor) -> Tensor:
        return self.score_slope(z)

    def penalty(self, z: Tensor) -> Tensor:
        return self.penalty_and_slope(z.clone())[1]  # which may overwrite z
