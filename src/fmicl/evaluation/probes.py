"""Evaluation of frozen features: k-NN classifier and linear probe.

Both take precomputed features (see `fmicl.evaluation.features.extract_features`) and return accuracies in percent. The
probe chooses its weight decay on a held-out part of the training features; test labels are only used to score.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from fmicl.evaluation.geometry import check_matrix, stream_neighbours
from fmicl.evaluation.logistic import LogisticRegression
from fmicl.utils.numerics import exact_matmul
from fmicl.utils.validation import require_positive

WEIGHT_DECAYS: tuple[float, ...] = tuple(10.0 ** (-e / 2) for e in range(15))
"""The probe's grid: from 1 to 1e-7 in half decades."""

# The grid search stops this many values (two decades) after the best one: weaker decay only overfits more, and takes
# most of the iterations.
_PATIENCE = 4


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    *,
    k: int,
    temperature: float = 0.1,
) -> Tensor:
    r"""Predict labels by a weighted vote of the k nearest training features (Wu et al., 2018).

    .. math:: \hat c(x) = \arg\max_c \sum_{i \in N_k(x),\; c_i = c} \exp(\cos(x, x_i) / \tau)

    Exact; the similarity matrix is computed in tiles. Ties between classes go to the smallest label; among training
    features of exactly equal similarity, which one is the k-th is undefined.

    Args:
        train_features: (N, d), any float type; only directions matter.
        train_labels: (N,) integers, not necessarily 0 to C - 1.
        test_features: (Q, d).
        k: number of neighbours, at most N.
        temperature: :math:`\tau`, positive.

    Returns:
        Predicted labels (Q,), with device and type of `train_labels`.

    Raises:
        ValueError: shapes don't match, k, temperature or a label is out of range, or a feature is not finite.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_predict(train, torch.tensor([7, 7, 3]), torch.tensor([[2.0, 0.1], [0.0, 5.0]]), k=2)
        tensor([7, 3])
    """
    _check_labels(train_labels, train_features, "train")
    require_positive("temperature", temperature)
    classes, codes = _class_codes(train_labels)
    codes = codes.to(train_features.device)
    votes: list[Tensor] = []
    for near in stream_neighbours(train_features, test_features, k):
        # Relative to the nearest neighbour: the same vote without overflow at low temperatures.
        weights = ((near.similarities - near.similarities[:, :1]) / temperature).exp()
        score = weights.new_zeros(len(weights), len(classes)).scatter_add_(1, codes[near.indices], weights)
        votes.append(score.argmax(dim=1))
    return classes[torch.cat(votes).to(classes.device)]


def knn_accuracy(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    k: int,
    temperature: float = 0.1,
) -> float:
    """Accuracy of `knn_predict` in percent.

    Raises:
        ValueError: as `knn_predict`, or test labels and features don't match.

    Example:
        >>> train, labels = torch.eye(2), torch.tensor([0, 1])
        >>> test = torch.tensor([[1.0, 0.1], [0.2, 1.0], [0.3, 1.0], [1.0, 0.9]])
        >>> knn_accuracy(train, labels, test, torch.tensor([0, 1, 0, 0]), k=1)
        75.0
    """
    _check_labels(test_labels, test_features, "test")
    predicted = knn_predict(train_features, train_labels, test_features, k=k, temperature=temperature)
    return _percent(predicted == test_labels.to(predicted.device))


@dataclass(frozen=True)
class LinearProbeResult:
    """Result of a linear probe; `dataclasses.asdict` makes it JSON.

    Attributes:
        accuracy: top-1 test accuracy, percent.
        top5: top-5 test accuracy, percent; None with at most 5 classes.
        weight_decay: the chosen one.
        validation_accuracy: held-out accuracy that it was chosen by, percent; None if only one was given.
        converged: whether the final fit converged before the iteration limit.
        protocol: description of the protocol.
    """

    accuracy: float
    top5: float | None
    weight_decay: float
    validation_accuracy: float | None
    converged: bool
    protocol: str


@torch.no_grad()
def linear_probe(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    test_labels: Tensor,
    *,
    weight_decays: Iterable[float] = WEIGHT_DECAYS,
    validation: float = 0.1,
    seed: int = 0,
    max_iterations: int = 300,
    views: tuple[Tensor, Tensor] | None = None,
) -> LinearProbeResult:
    r"""Fit multinomial logistic regression to frozen features and score it on test features.

    The classifier minimises, with z the features after centring and division by their mean standard deviation,

    .. math:: \frac1N \sum_i -\log \mathrm{softmax}(W z_i + b)_{c_i} + \frac\lambda2 \lVert W\rVert^2

    with L-BFGS until convergence or ``max_iterations``. :math:`\lambda` is the value with the best accuracy on a
    held-out, stratified part of the training features; the classifier is then refitted to all of them.

    This is the protocol of Kornblith et al. (2019), used by SimCLR, BYOL and CLIP on precomputed features. The other
    common protocol, 100 epochs of SGD, approximates the same minimum, and its result depends on learning rate, batch
    size, schedule and seed. Here the problem is convex: each :math:`\lambda` has one solution, and the seed only
    affects the held-out part. Published CIFAR-10 numbers come from both protocols. Many also train on random crops and
    flips; ``views`` adds their features to the fit, while :math:`\lambda` is still chosen on unaugmented samples, no
    view of which was fitted to. Centring and scaling don't change the family of classifiers; they make one grid suit
    every encoder.

    Args:
        train_features: (N, d).
        train_labels: (N,) integers, not necessarily 0 to C - 1.
        test_features: (Q, d).
        test_labels: (Q,) integers; a class without training samples counts as an error.
        weight_decays: candidates for :math:`\lambda`; with a single one, nothing is held out.
        validation: fraction of each class to hold out.
        seed: seed of the held-out part.
        max_iterations: iteration limit of each fit.
        views: features (M, d) of random views of training samples, and their sample indices (M,).

    Raises:
        ValueError: shapes don't match, a sample index or an option is out of range, there are fewer than 2 classes, or
            a feature is not finite.

    Example:
        >>> x = torch.cat([torch.linspace(-2, -1, 40), torch.linspace(1, 2, 40)]).unsqueeze(1)
        >>> result = linear_probe(x[::2], (x[::2, 0] > 0).long(), x[1::2], (x[1::2, 0] > 0).long())
        >>> result.accuracy
        100.0
    """
    _check_labels(train_labels, train_features, "train")
    _check_labels(test_labels, test_features, "test")
    path = sorted({float(value) for value in weight_decays}, reverse=True)
    if not path or not path[-1] > 0:
        raise ValueError(f"weight_decays must be positive numbers, at least one, got {path}")
    if not 0 < validation < 1:
        raise ValueError(f"validation must lie between 0 and 1, got {validation}")
    require_positive("max_iterations", max_iterations)
    train = check_matrix(train_features, "train_features").float()
    test = check_matrix(test_features, "test_features").to(train)
    if test.shape[1] != train.shape[1]:
        raise ValueError(f"train features have {train.shape[1]} dimensions, test features {test.shape[1]}")
    classes, codes = _class_codes(train_labels.to(train.device))
    if len(classes) < 2:
        raise ValueError("a linear probe needs training labels of at least 2 classes, got 1")

    rows, samples = _append_views(train, views)
    rows, test, spectrum = _standardise(rows, test)
    with exact_matmul(train.device):
        chosen, best = path[0], None
        if len(path) > 1:
            chosen, best = _choose_decay(rows, samples, codes, spectrum, path, validation, seed, max_iterations)
        model = LogisticRegression(rows, codes[samples], len(classes), spectrum)
        converged = model.fit(chosen, max_iterations)
        ranked = model.logits(test).topk(min(5, len(classes)), dim=1).indices
    hits = classes[ranked] == test_labels.to(train.device).unsqueeze(1)

    added = len(rows) - len(train)
    data = f"with those of {added} random views of the training samples" if added else "no augmentation"
    protocol = f"logistic regression on frozen features, {data}, L-BFGS "
    protocol += "to convergence" if converged else f"for {max_iterations} iterations"
    if len(path) == 1:
        protocol += f", weight decay {chosen:.1e}"
    else:
        protocol += (
            f"; weight decay out of {len(path)} values from {path[-1]:.0e} to {path[0]:.0e} by accuracy on "
            f"{validation:.0%} of the training features (stratified, seed {seed}), then fitted again to all of them"
        )
    return LinearProbeResult(
        accuracy=_percent(hits[:, 0]),
        top5=_percent(hits.any(dim=1)) if len(classes) > 5 else None,
        weight_decay=chosen,
        validation_accuracy=best,
        converged=converged,
        protocol=protocol,
    )


def _append_views(train: Tensor, views: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Features of the samples followed by those of their views, and the sample index of each row."""
    own = torch.arange(len(train), device=train.device)
    if views is None:
        return train, own
    features, samples = check_matrix(views[0], "features of views").to(train), views[1].to(train.device)
    if features.shape[1] != train.shape[1]:
        raise ValueError(f"train features have {train.shape[1]} dimensions, those of their views {features.shape[1]}")
    if samples.shape != (len(features),) or samples.is_floating_point() or samples.is_complex():
        raise ValueError(
            f"views need {len(features)} integer sample indices, got {tuple(samples.shape)} of {samples.dtype}"
        )
    unknown = samples[(samples < 0) | (samples >= len(train))]
    if len(unknown):
        raise ValueError(f"sample indices of views must lie in 0 to {len(train) - 1}, got {int(unknown[0])}")
    return torch.cat([train, features]), torch.cat([own, samples])


def _standardise(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre and scale to unit mean variance, rotate to the eigenbasis of the training covariance; its spectrum.

    With fewer samples than dimensions, only those that the samples span are left: raw pixels take seconds, not minutes.
    """
    centre = train.mean(dim=0)
    # A second pass removes the rounding error of a mean that is large compared with the spread.
    again = (train - centre).mean(dim=0)
    train, test = train - centre - again, test - centre - again
    scale = train.square().mean().sqrt()
    if bool(scale > 0):
        train, test = train / scale, test / scale
    with exact_matmul(train.device):
        if len(train) < train.shape[1]:  # the minimum lies in the span of the samples
            gram = (train @ train.T) / len(train)
            values, vectors = torch.linalg.eigh(gram.cpu().double())
            kept = values > values[-1] * len(values) * torch.finfo(train.dtype).eps
            kept[-1] = True  # also if all samples are the same
            spectrum = values[kept]
            length = (spectrum * len(train)).clamp_min(torch.finfo(train.dtype).tiny).sqrt()
            basis = (train.T.cpu().double() @ vectors[:, kept]) / length
        else:
            spectrum, basis = torch.linalg.eigh(((train.T @ train) / len(train)).cpu().double())
        basis = basis.to(train)
        return train @ basis, test @ basis, spectrum.clamp_min(0.0).to(train)


def _choose_decay(
    rows: Tensor,
    samples: Tensor,
    codes: Tensor,
    spectrum: Tensor,
    path: list[float],
    validation: float,
    seed: int,
    max_iterations: int,
) -> tuple[float, float]:
    """The weight decay with the best held-out accuracy (ties: lower loss), and that accuracy."""
    held = _held_out(codes, validation, seed)
    fitted = ~held[samples]
    model = LogisticRegression(rows[fitted], codes[samples[fitted]], int(codes.max()) + 1, spectrum)
    unseen, truth = rows[: len(codes)][held], codes[held]  # unaugmented
    best = (float("-inf"), float("-inf"))
    chosen, worse = path[0], 0
    for decay in path:  # from strong to weak, each warm-started from the one before
        model.fit(decay, max_iterations)
        logits = model.logits(unseen)
        score = _percent(logits.argmax(dim=1) == truth), -float(functional.cross_entropy(logits, truth))
        if score > best:
            best, chosen, worse = score, decay, 0
        elif (worse := worse + 1) == _PATIENCE:
            break
    return chosen, best[0]


def _held_out(codes: Tensor, fraction: float, seed: int) -> Tensor:
    """Mask of a stratified random part: at least one sample of each class that has two."""
    labels = codes.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    rank = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]  # within the class
    quota = (counts * fraction).long().clamp_min(1).minimum(counts - 1)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order] = rank < quota[labels[order]]
    if not bool(mask.any()):
        raise ValueError(
            "no class has 2 training samples, so none can be held out: pass a single value as weight_decays"
        )
    return mask.to(codes.device)


def _class_codes(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sorted distinct labels, and the position of each sample's label among them."""
    found: tuple[Tensor, Tensor] = torch.unique(labels, return_inverse=True)
    return found


def _check_labels(labels: Tensor, features: Tensor, name: str) -> None:
    if labels.ndim != 1 or len(labels) != len(features):
        raise ValueError(f"{name} labels must be ({len(features)},) like the features, got {tuple(labels.shape)}")
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"{name} labels must be integers, got {labels.dtype}")


def _percent(hits: Tensor) -> float:
    return 100.0 * int(hits.sum()) / len(hits)
