r"""Variational lower bounds of f-mutual information.

For any critic s,

    I_f(X; Y)  >=  E_joint[s] - E_independent[f*(s)]

with equality at s = f'(u), u the density ratio p(x, y) / (p(x) p(y)).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.base import as_real


def variational_bound(
    divergence: DivergenceName | Divergence,
    joint_scores: Tensor,
    independent_scores: Tensor,
    *,
    joint_weights: Tensor | None = None,
    independent_weights: Tensor | None = None,
    free: bool = False,
) -> Tensor:
    """E_joint[s] - E_independent[f*(s)], a lower bound of the f-mutual information for any critic s.

    f* is infinite above f'(inf), 0.69 for JS: the bound of a network that knows nothing of that is minus infinity
    there, without a gradient. To train a critic, pass its unconstrained output v and `free=True`. Then s = a(v) with
    f-GAN's output activation (`Divergence.activation`), every v has a finite bound and a gradient, and the optimum,
    a(v) = f'(u), is reached for every density ratio u.

    Args:
        divergence: a name or a `Divergence`.
        joint_scores: s (or v) at samples of the joint distribution, any shape.
        independent_scores: s (or v) at samples of the product of the marginals, any shape.
        joint_weights: probabilities of the joint scores, or proportional to them, same shape; None: equal.
        independent_weights: likewise, of the independent scores.
        free: the scores are v, to be mapped into the domain of f*.

    Returns:
        The bound, a scalar; minus infinity if a score s lies above the conjugate's domain.

    Raises:
        ValueError: there are no scores, or weights have another shape or are no probabilities.

    Example:
        >>> import torch, fmicl
        >>> kl = fmicl.divergence("kl")
        >>> joint = torch.tensor([[0.4, 0.1], [0.1, 0.4]])
        >>> s = kl.derivative(joint / 0.25)
        >>> bound = variational_bound(kl, s, s, joint_weights=joint, independent_weights=torch.full((2, 2), 0.25))
        >>> bool(torch.isclose(bound, fmicl.information.f_mutual_information(joint, kl)))
        True
        >>> v = torch.tensor([0.5, 2.0, 30.0])
        >>> float(variational_bound("js", v, v)), float(variational_bound("js", v, v, free=True)) > -math.inf
        (-inf, True)
    """
    divergence = make_divergence(divergence)
    if free:
        joint, independent = divergence.activation(joint_scores), divergence.activated_penalty(independent_scores)
    else:
        joint, independent = as_real(joint_scores), divergence.conjugate(independent_scores)
    return _expectation("joint_weights", joint, joint_weights) - _expectation(
        "independent_weights", independent, independent_weights
    )


def label_information(divergence: DivergenceName | Divergence, logits: Tensor, labels: Tensor) -> Tensor:
    r"""A classifier's lower bound of the f-mutual information between its input and a label.

    .. math:: I_f(X; Y) \ge \frac1N \sum_i s(r_{i y_i}) - \frac1{NK} \sum_{ik} p(r_{ik}), \qquad
        r_{ik} = \log K + \log \mathrm{softmax}(\text{logits}_i)_k

    with s the divergence's score and p its penalty: u = e^r is the classifier's p(k | x) over p(k) = 1/K. The sum over
    all K labels is the expectation under the product of the marginals, so no negatives are drawn. It is a proper
    scoring rule for every f: KL is log K minus the cross-entropy, and Pearson is K - 1 minus K times the Brier score.

    Args:
        divergence: a name or a `Divergence`.
        logits: (N, K), of N samples for K labels.
        labels: (N,) integers from 0 to K - 1, all equally frequent, as those of a uniformly drawn label.

    Returns:
        The bound, a scalar; its negative is a loss. At the true posterior it is the mutual information. If f(0) is
        infinite (reverse KL, Jeffrey, Neyman), so is the information of labels that the input determines, and the loss
        is unbounded.

    Raises:
        ValueError: shapes or types don't fit, or (on the CPU) a label is out of range.

    Example:
        >>> import torch
        >>> logits, labels = torch.tensor([[2.0, 0.0], [0.0, 2.0]]), torch.tensor([0, 1])
        >>> label_information("kl", logits, labels)
        tensor(0.5662)
        >>> math.log(2) - torch.nn.functional.cross_entropy(logits, labels)
        tensor(0.5662)
    """
    divergence = make_divergence(divergence)
    integers = not (labels.is_floating_point() or labels.is_complex())
    if logits.dim() != 2 or labels.shape != logits.shape[:1] or not logits.numel() or not integers:
        raise ValueError(
            f"logits must be (N, K) and labels (N,) integers, got {tuple(logits.shape)} and {tuple(labels.shape)} of "
            f"{labels.dtype}"
        )
    if labels.device.type == "cpu":  # on a GPU the check would synchronise
        least, largest = int(labels.min()), int(labels.max())
        if least < 0 or largest >= logits.shape[1]:
            raise ValueError(
                f"labels must be from 0 to {logits.shape[1] - 1}, the number of columns of logits minus 1, got labels "
                f"from {least} to {largest}"
            )
    ratios = math.log(logits.shape[1]) + torch.log_softmax(as_real(logits), dim=1)
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
            f"{name} must be probabilities, or proportional to them: not negative, and not all 0; "
            f"got a smallest of {float(weights.min()):g} and a sum of {float(weights.sum()):g}"
        )
    # a value of weight 0 doesn't count, even an infinite one
    return torch.where(weights > 0, values * weights, 0.0).sum() / weights.sum()
