r"""f-mutual information: exact for a table, and bounded from below by any critic.

    I_f(X; Y) = sum_xy p(x) p(y) f(p(x, y) / (p(x) p(y)))  >=  E_joint[s] - E_independent[f*(s)]

with equality at s = f'(u), u the density ratio.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.divergences import Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.base import real

__all__ = ["f_mutual_information", "label_information", "variational_bound"]


def f_mutual_information(joint: Tensor, divergence: str | Divergence) -> Tensor:
    """The f-mutual information of a discrete joint distribution, exactly.

    Args:
        joint: probabilities p(x, y), (X, Y); not negative, with sum 1.
        divergence: a name or a `Divergence`.

    Returns:
        I_f(X; Y), a scalar; 0 for independent variables, and infinite where f(0) is and p(x, y) = 0 < p(x) p(y). Its
        gradient leaves cells at 0 where f'(0) is infinite.

    Example:
        >>> import torch
        >>> f_mutual_information(torch.tensor([[0.5, 0.0], [0.0, 0.5]]), "kl")     # one bit
        tensor(0.6931)
    """
    divergence = make_divergence(divergence)
    if not isinstance(joint, Tensor):
        raise TypeError(f"joint must be a tensor (X, Y), got a {type(joint).__name__}: torch.tensor(...) makes one")
    if joint.dim() != 2 or not joint.is_floating_point():
        raise ValueError(
            f"joint must be a two-dimensional table of probabilities, got {tuple(joint.shape)} of {joint.dtype}"
        )
    total = float(joint.detach().sum())
    if not bool((joint >= 0).all()) or not abs(total - 1) <= 1e-4:
        raise ValueError(
            f"joint must hold probabilities: smallest {float(joint.min()):g}, sum {total:g}; divide counts by their sum"
        )
    independent = joint.sum(dim=1, keepdim=True) * joint.sum(dim=0, keepdim=True)
    possible = independent > 0
    # a row or column without mass contributes nothing; its ratio 0 / 0 must not reach f
    filled = possible & (joint > 0)
    ratio = torch.where(filled, joint, 1.0) / torch.where(filled, independent, 1.0)
    # f at 0 as a number: its slope there may be infinite, and would make NaN of every cell of its row and column
    zero = joint.new_zeros(())
    at_zero, slope = divergence.f(zero), divergence.derivative(zero)
    if bool(at_zero.isfinite()):
        empty = independent * at_zero + (joint * slope if bool(slope.isfinite()) else 0.0)
    else:
        empty = at_zero  # and no product with it, whose gradient would be NaN where no cell is empty, too
    return torch.where(filled, independent * divergence.f(ratio), torch.where(possible, empty, 0.0)).sum()


def variational_bound(
    divergence: str | Divergence,
    joint_scores: Tensor,
    independent_scores: Tensor,
    *,
    joint_weights: Tensor | None = None,
    independent_weights: Tensor | None = None,
) -> Tensor:
    """E_joint[s] - E_independent[f*(s)], a lower bound of the f-mutual information for any critic s.

    Args:
        divergence: a name or a `Divergence`.
        joint_scores: s at samples of the joint distribution, any shape.
        independent_scores: s at samples of the product of the marginals, any shape.
        joint_weights: probabilities of the joint scores, same shape; equal if not given.
        independent_weights: probabilities of the independent scores, same shape; equal if not given.

    Returns:
        The bound, a scalar; minus infinity if a score lies above the conjugate's domain.

    Example:
        >>> import torch, fmicl
        >>> kl = fmicl.divergence("kl")
        >>> joint = torch.tensor([[0.4, 0.1], [0.1, 0.4]])
        >>> s = kl.derivative(joint / 0.25)
        >>> bound = variational_bound(kl, s, s, joint_weights=joint, independent_weights=torch.full((2, 2), 0.25))
        >>> bool(torch.isclose(bound, f_mutual_information(joint, kl)))
        True
    """
    divergence = make_divergence(divergence)
    return _expectation("joint_weights", real(joint_scores), joint_weights) - _expectation(
        "independent_weights", divergence.conjugate(independent_scores), independent_weights
    )


def label_information(divergence: str | Divergence, logits: Tensor, labels: Tensor) -> Tensor:
    r"""A classifier's lower bound of the f-mutual information between what it looks at and a label.

    .. math:: I_f(X; Y) \ge \frac1N \sum_i s(r_{i y_i}) - \frac1{NK} \sum_{ik} p(r_{ik}), \qquad
        r_{ik} = \log K + \log \mathrm{softmax}(\text{logits}_i)_k

    with s the divergence's score and p its penalty: u = e^r is the classifier's p(k | x) over p(k) = 1/K, and for the
    product of the marginals all K labels count, so that no negatives are drawn. Every f makes a proper scoring rule of
    it: KL is log K less the cross-entropy, and Pearson is K - 1 less K times the Brier score.

    Args:
        divergence: a name or a `Divergence`.
        logits: (N, K), of N samples for K labels.
        labels: (N,) integers from 0 to K - 1, each as often as every other, as of a label that is drawn uniformly.

    Returns:
        The bound, a scalar; its negative is a loss. At the true posterior it is the mutual information. Where f(0) is
        infinite (reverse KL, Jeffrey, Neyman), so is that of labels which are told for certain, and a loss has no end.

    Example:
        >>> import torch
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> label_information("kl", logits, labels)
        tensor(0.5662)
        >>> math.log(2) - torch.nn.functional.cross_entropy(logits, labels)
        tensor(0.5662)
    """
    divergence = make_divergence(divergence)
    whole = not (labels.is_floating_point() or labels.is_complex())
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not logits.numel() or not whole:
        raise ValueError(
            f"logits must be (N, K) and labels (N,) integers, got {tuple(logits.shape)} and {tuple(labels.shape)} of "
            f"{labels.dtype}"
        )
    if labels.device.type == "cpu":  # a look at a GPU's values would wait for them
        least, largest = int(labels.min()), int(labels.max())
        if least < 0 or largest >= logits.shape[1]:
            raise ValueError(
                f"labels must be from 0 to {logits.shape[1] - 1}, as logits has {logits.shape[1]} columns, got some "
                f"from {least} to {largest}"
            )
    ratios = math.log(logits.shape[1]) + torch.log_softmax(real(logits), dim=1)
    own = ratios.gather(1, labels.long().unsqueeze(1))
    return divergence.score(own).mean() - divergence.penalty(ratios).mean()


def _expectation(name: str, values: Tensor, weights: Tensor | None) -> Tensor:
    if values.numel() == 0:
        raise ValueError("no scores were given: an expectation needs at least one sample")
    if weights is None:
        return values.mean()
    if weights.shape != values.shape:
        raise ValueError(f"{name} must have its scores' shape {tuple(values.shape)}, got {tuple(weights.shape)}")
    if not (bool((weights >= 0).all()) and 0 < float(weights.sum()) < math.inf):
        raise ValueError(
            f"{name} must be probabilities, or in proportion to them: not negative, and not all 0; "
            f"got a least of {float(weights.min()):g} and a sum of {float(weights.sum()):g}"
        )
    # a value that has no weight doesn't count, even an infinite one
    return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum()
