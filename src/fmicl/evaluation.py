"""How good frozen features are: a k-NN vote and a linear probe.

Both take features that were extracted once (`extract_features`); the probe may have those of random views of its
training samples too. Accuracies are in percent. Neither sees test labels before it is done predicting, and what the
probe chooses (its weight decay) it chooses on a part of the training features.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fmicl.analysis import matrix, stream_neighbours
from fmicl.norms import evaluating
from fmicl.numerics import exact_matmul

__all__ = [
    "LinearProbeResult",
    "extract_features",
    "knn_accuracy",
    "knn_predict",
    "linear_probe",
]

WEIGHT_DECAYS: tuple[float, ...] = tuple(10.0 ** (-e / 2) for e in range(0, 15))
"""The probe's grid, from strong (1) to weak (1e-7) in half decades; the order of the path, too."""

# The path ends this many values (two decades) after the best one: weaker decay only fits noise more closely,
# and takes by far the most iterations.
_PATIENCE = 4

# Rows of a partial sum of the probe's objective: on a CPU, few enough for the cache to hold them from the forward to
# the backward pass; on an accelerator, as many as have this many logits (128 MiB).
_ROWS_CPU = 2048
_LOGITS = 2**25

_GIVEN = "logistic regression on frozen features, {views}, {fit}, weight decay {high:.1e}"
_CHOSEN = (
    "logistic regression on frozen features, {views}, {fit}; weight decay out of "
    "{grid} values from {low:.0e} to {high:.0e} by accuracy on {share:.0%} of the training features "
    "(stratified, seed {seed}), then fitted again to all of them"
)


@torch.no_grad()
def extract_features(
    encoder: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor | None]],
    device: torch.device | str,
    into: torch.device | str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Features of every batch, in order, as float32, with the labels if the batches have them.

    The encoder runs in evaluation mode; each of its modules is given its own mode back, also after an error.

    Args:
        encoder: maps a batch (B, ...) to features (B, d).
        batches: pairs of inputs and labels (or None), on any device.
        device: where the encoder is.
        into: where the features will be; None: on that device.

    Returns:
        (N, d) features, and (N,) labels or None.

    Raises:
        ValueError: if there are no batches, if only some have labels, or if a feature is not a flat vector.

    Example:
        >>> images, labels = torch.ones(3, 1, 2, 2), torch.tensor([0, 1, 1])
        >>> features, kept = extract_features(nn.Flatten(), [(images, labels)], "cpu")
        >>> features.shape, kept.tolist()
        (torch.Size([3, 4]), [0, 1, 1])
    """
    gathered = device if into is None else into
    features: list[Tensor] = []
    labels: list[Tensor | None] = []
    # As it was written, where it is compiled: that was for the batches of training, and others would compile it again.
    run = encoder if encoder._compiled_call_impl is None else encoder.forward
    with evaluating(encoder):
        for inputs, target in batches:
            output = run(inputs.to(device, non_blocking=True))
            if output.ndim != 2:
                raise ValueError(
                    f"the encoder should give (batch, d) features; it gave {tuple(output.shape)}. "
                    "Pool or flatten them first"
                )
            features.append(output.detach().to(gathered, torch.float32))
            labels.append(None if target is None else target.to(gathered))
    if not features:
        raise ValueError("there is nothing to extract features from: no batches came")
    known = [label for label in labels if label is not None]
    if known and len(known) < len(labels):
        raise ValueError(f"{len(labels) - len(known)} of {len(labels)} batches have no labels, the others do")
    return torch.cat(features), torch.cat(known) if known else None


@torch.no_grad()
def knn_predict(
    train_features: Tensor,
    train_labels: Tensor,
    test_features: Tensor,
    *,
    k: int,
    temperature: float = 0.1,
    num_classes: int | None = None,
    chunk: int | None = None,
) -> Tensor:
    r"""Labels by a weighted vote of the k nearest training features (Wu et al., 2018).

    .. math:: \hat c(x) = \arg\max_c \sum_{i \in N_k(x),\; c_i = c} \exp(\cos(x, x_i) / \tau)

    Exact and streaming: the similarity matrix only ever exists as a tile. Equal votes go to the smallest
    label; which of several training features with the very same similarity is the k-th is not defined.

    Args:
        train_features: (N, d), of any float type; directions count, lengths don't.
        train_labels: (N,) integers, not necessarily 0 to C - 1.
        test_features: (Q, d).
        k: number of neighbours, at most N.
        temperature: :math:`\tau`, positive.
        num_classes: promise that labels are 0 to num_classes - 1, which is checked; None takes the labels
            as they come.
        chunk: test features at a time; None takes what suits the device.

    Returns:
        (Q,) predicted labels, on the device and of the type of `train_labels`.

    Raises:
        ValueError: if shapes don't fit, k is out of range, the temperature is not positive, a label is out
            of the promised range, or a feature is not finite.

    Example:
        >>> train = torch.tensor([[1.0, 0.0], [0.9, 0.1], [0.0, 1.0]])
        >>> knn_predict(train, torch.tensor([7, 7, 3]), torch.tensor([[2.0, 0.1], [0.0, 5.0]]), k=2)
        tensor([7, 3])
    """
    _check_labels(train_labels, train_features, "train")
    if not temperature > 0:
        raise ValueError(f"temperature should be positive; got {temperature}")
    device = train_features.device
    if num_classes is None:
        classes, codes = _encode(train_labels)
    else:
        low, high = int(train_labels.min()), int(train_labels.max())
        if low < 0 or high >= num_classes:
            raise ValueError(
                f"labels run from {low} to {high}, which is outside 0 to {num_classes - 1} (num_classes={num_classes})"
            )
        classes, codes = torch.arange(num_classes, device=device).to(train_labels), train_labels.long()
    codes = codes.to(device)
    votes: list[Tensor] = []
    for _, near in stream_neighbours(train_features, test_features, k, chunk=chunk):
        # Relative to the nearest one: the same vote, and no overflow at a low temperature.
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
    """Percentage of test features that `knn_predict` labels rightly.

    Raises:
        ValueError: as `knn_predict`, or if the test labels don't fit their features.

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
    """What a linear probe gave, and how it was made; `dataclasses.asdict` is ready for JSON."""

    accuracy: float
    """Top-1 accuracy on the test features, percent."""
    top5: float | None
    """Top-5 accuracy, percent; None with 5 classes or fewer."""
    weight_decay: float
    """The chosen one, in the units of `linear_probe`'s objective."""
    validation_accuracy: float | None
    """Accuracy that chose it, on the held-out part of the training features, percent; None if it was given."""
    converged: bool
    """Whether the final fit ended before its limit of iterations."""
    protocol: str
    """The protocol and its settings, in words."""


@torch.inference_mode(False)  # fits need autograd, also where the caller evaluates in inference mode
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
    r"""Accuracy of the best linear classifier on frozen features.

    The classifier minimises, with z the centred features, scaled by one number to unit variance on average,

    .. math:: \frac1N \sum_i -\log \mathrm{softmax}(W z_i + b)_{c_i} + \frac\lambda2 \lVert W\rVert^2 ,

    by L-BFGS to convergence, if that comes within ``max_iterations``. :math:`\lambda` is the one with the best
    accuracy on a held-out, stratified part of the training features; the classifier is then fitted again to all
    of them, and only that one meets the test features.

    This is the protocol of Kornblith et al. (2019), which SimCLR, BYOL and CLIP use for evaluation on
    precomputed features. The other common one, 100 epochs of SGD with a cosine schedule, minimises the same
    function less far, and its result depends on learning rate, batch size, schedule and seed; here the
    problem is convex, so that there is one answer per :math:`\lambda`, the seed only deals the held-out
    part, and nothing is left to tune. Published CIFAR-10 numbers come from both. Many train the classifier on
    random crops and flips of the training images: with ``views`` it is fitted to features of these too, and
    :math:`\lambda` is still chosen on features of samples as they are, no view of which was fitted to.
    Centring and the common scale change neither the family of classifiers nor the path of solutions; they
    make the grid mean the same for any encoder.

    Args:
        train_features: (N, d).
        train_labels: (N,) integers, not necessarily 0 to C - 1.
        test_features: (Q, d).
        test_labels: (Q,) integers; a class that training doesn't have counts as an error.
        weight_decays: candidates for :math:`\lambda`; with one, nothing is held out.
        validation: share of each class to hold out for the choice.
        seed: seed of the held-out part.
        max_iterations: limit for each fit.
        views: (M, d) features of random views of training samples, and (M,) which samples they are of.

    Raises:
        ValueError: if shapes don't fit, views are of samples that there aren't, there are fewer than 2 classes,
            the settings are out of range, or a feature is not finite.

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
        raise ValueError(f"weight_decays should be positive numbers; got {path}")
    if not 0 < validation < 1:
        raise ValueError(f"validation is a share of the training features, between 0 and 1; got {validation}")
    if max_iterations < 1:
        raise ValueError(f"max_iterations should be at least 1; got {max_iterations}")
    train = matrix(train_features, "train_features").float()
    test = matrix(test_features, "test_features").to(train)
    if test.shape[1] != train.shape[1]:
        raise ValueError(f"train features have {train.shape[1]} dimensions, test features {test.shape[1]}")
    classes, codes = _encode(train_labels.to(train.device))
    if len(classes) < 2:
        raise ValueError("a linear probe needs at least 2 classes in the training labels; got 1")

    rows, owners = _with_views(train, views)
    rows, test, spectrum = _prepare(rows, test)
    with exact_matmul(train.device):
        chosen, best = path[0], None
        if len(path) > 1:
            chosen, best = _choose(rows, owners, codes, spectrum, path, validation, seed, max_iterations)
        model = _LogisticRegression(rows, codes[owners], len(classes), spectrum)
        converged = model.fit(chosen, max_iterations)
        ranked = model.logits(test).topk(min(5, len(classes)), dim=1).indices
    hits = classes[ranked] == test_labels.to(train.device).unsqueeze(1)
    settings: dict[str, Any] = {"grid": len(path), "low": path[-1], "high": path[0], "share": validation, "seed": seed}
    settings["fit"] = f"L-BFGS {'to convergence' if converged else f'for {max_iterations} iterations'}"
    added = len(rows) - len(train)
    settings["views"] = f"with those of {added} random views of the training samples" if added else "no augmentation"
    return LinearProbeResult(
        accuracy=_percent(hits[:, 0]),
        top5=_percent(hits.any(dim=1)) if len(classes) > 5 else None,
        weight_decay=chosen,
        validation_accuracy=best,
        converged=converged,
        protocol=(_CHOSEN if len(path) > 1 else _GIVEN).format(**settings),
    )


def _with_views(train: Tensor, views: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
    """Features of samples as they are, then of their views; and which sample each row is of."""
    own = torch.arange(len(train), device=train.device)
    if views is None:
        return train, own
    features, owners = matrix(views[0], "features of views").to(train), views[1].to(train.device)
    if features.shape[1] != train.shape[1]:
        raise ValueError(f"train features have {train.shape[1]} dimensions, those of their views {features.shape[1]}")
    if owners.shape != (len(features),) or owners.is_floating_point() or owners.is_complex():
        raise ValueError(
            f"each of the {len(features)} views needs the index of its sample; "
            f"got {tuple(owners.shape)} of {owners.dtype}"
        )
    unknown = owners[(owners < 0) | (owners >= len(train))]
    if len(unknown):
        raise ValueError(f"views are of the training samples 0 to {len(train) - 1}, but one is of {int(unknown[0])}")
    return torch.cat([train, features]), torch.cat([own, owners])


def _prepare(train: Tensor, test: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centred by the training mean, at unit mean variance, along the training covariance's eigenvectors."""
    centre = train.mean(dim=0)
    # Twice: a mean that is large beside the spread leaves its own rounding error behind the first time.
    again = (train - centre).mean(dim=0)
    train, test = train - centre - again, test - centre - again
    scale = train.square().mean().sqrt()
    if bool(scale > 0):
        train, test = train / scale, test / scale
    with exact_matmul(train.device):
        covariance = (train.T @ train) / len(train)
        spectrum, basis = torch.linalg.eigh(covariance.cpu().double())
        basis = basis.to(train)
        return train @ basis, test @ basis, spectrum.clamp_min(0.0).to(train)


def _choose(
    rows: Tensor,
    owners: Tensor,
    codes: Tensor,
    spectrum: Tensor,
    path: list[float],
    validation: float,
    seed: int,
    max_iterations: int,
) -> tuple[float, float]:
    """The weight decay with the best held-out accuracy, and that accuracy; lower loss decides among equals."""
    held = _held_out(codes, validation, seed)
    fitted = ~held[owners]
    model = _LogisticRegression(rows[fitted], codes[owners[fitted]], int(codes.max()) + 1, spectrum)
    unseen, truth = rows[: len(codes)][held], codes[held]  # samples as they are
    best = (float("-inf"), float("-inf"))
    chosen, worse = path[0], 0
    for decay in path:  # from strong to weak, each fit starting at the one before
        model.fit(decay, max_iterations)
        logits = model.logits(unseen)
        score = _percent(logits.argmax(dim=1) == truth), -float(functional.cross_entropy(logits, truth))
        if score > best:
            best, chosen, worse = score, decay, 0
        elif (worse := worse + 1) == _PATIENCE:
            break
    return chosen, best[0]


class _LogisticRegression:
    r"""Multinomial logistic regression by torch.optim.LBFGS with a diagonal preconditioner, warm-started.

    Minimises the mean cross-entropy of W x + b plus decay / 2 |W|^2. The Hessian is bounded by S / 2 + decay for each
    class, S being the covariance of the features (Boehning, 1992). In the eigenbasis of S the bound is diagonal, and
    L-BFGS runs in coordinates scaled by its square root, where the condition number of the features no longer counts.

    Args:
        features: (N, d) float32, centred, in coordinates where their covariance is (nearly) diagonal.
        labels: (N,) int64 from 0 to classes - 1.
        classes: number of classes.
        spectrum: (d,) the variances along these coordinates.
    """

    def __init__(self, features: Tensor, labels: Tensor, classes: int, spectrum: Tensor) -> None:
        self.features, self.labels, self.spectrum = features, labels, spectrum
        self.weight = features.new_zeros(classes, features.shape[1])
        self.bias = features.new_zeros(classes, 1)

    def fit(self, decay: float, max_iterations: int) -> bool:
        """Minimise, starting from the current weights; returns whether that converged within the limit."""
        scale = torch.cat([self.spectrum / 2 + decay, self.spectrum.new_tensor([0.5])]).rsqrt()
        parts = [self.weight.shape[1], 1]
        point = torch.cat([self.weight, self.bias], dim=1) / scale
        optimiser = torch.optim.LBFGS(
            [point],
            max_iter=max_iterations,
            max_eval=4 * max_iterations,
            tolerance_grad=1e-5,
            tolerance_change=1e-9,
            history_size=20,
            line_search_fn="strong_wolfe",
        )

        def closure() -> Tensor:
            weight, bias = (scale * point).split_with_sizes(parts, dim=1)
            loss, *gradients = self._objective(weight, bias, decay)
            point.grad = scale * torch.cat(gradients, dim=1)
            return loss

        optimiser.step(closure)  # type: ignore[no-untyped-call, unused-ignore]
        self.weight, self.bias = (scale * point).split_with_sizes(parts, dim=1)
        state = optimiser.state[point]
        return bool(state["n_iter"] < max_iterations and state["func_evals"] < 4 * max_iterations)

    def logits(self, features: Tensor) -> Tensor:
        """(Q, classes) logits of (Q, d) features."""
        return functional.linear(features, self.weight, self.bias.squeeze(1))

    def _objective(self, weight: Tensor, bias: Tensor, decay: float) -> tuple[Tensor, Tensor, Tensor]:
        """The loss, and its gradients by weight and bias."""
        # Logits are (classes, rows): with few classes, products and softmax are faster than in the usual layout.
        # gather in place of cross_entropy, whose sum in this layout depends on the order of threads on CUDA.
        count = len(self.features)
        rows = _ROWS_CPU if weight.device.type == "cpu" else max(1, _LOGITS // len(weight))
        leaves = weight.detach().requires_grad_(), bias.detach().requires_grad_()
        gradients = [decay * leaves[0].detach(), torch.zeros_like(bias)]
        losses = [decay / 2 * leaves[0].detach().square().sum()]
        for x, labels in zip(self.features.split(rows), self.labels.split(rows), strict=True):
            with torch.enable_grad():
                logs = functional.log_softmax(torch.addmm(leaves[1], leaves[0], x.T), dim=0)
                loss = -logs.gather(0, labels.unsqueeze(0)).sum() / count
            for total, part in zip(gradients, torch.autograd.grad(loss, leaves), strict=True):
                total += part
            losses.append(loss.detach())
        return torch.stack(losses).sum(), gradients[0], gradients[1]


def _held_out(codes: Tensor, share: float, seed: int) -> Tensor:
    """A mask over the samples: that share of each class, and at least one of each that has two."""
    labels = codes.cpu()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    order = order[labels[order].argsort(stable=True)]
    counts = labels.bincount()
    place = torch.arange(len(labels)) - (counts.cumsum(0) - counts)[labels[order]]
    quota = (counts * share).long().clamp_min(1).minimum(counts - 1)
    mask = torch.zeros(len(labels), dtype=torch.bool)
    mask[order] = place < quota[labels[order]]
    if not bool(mask.any()):
        raise ValueError(
            "no class has two training samples, so that none can be held out to choose the weight decay; "
            "give one value as weight_decays"
        )
    return mask.to(codes.device)


def _encode(labels: Tensor) -> tuple[Tensor, Tensor]:
    """The labels that occur, in order, and for each sample the place of its own among them."""
    classes: Tensor
    codes: Tensor
    classes, codes = torch.unique(labels, return_inverse=True)
    return classes, codes


def _check_labels(labels: Tensor, features: Tensor, name: str) -> None:
    if labels.ndim != 1 or len(labels) != len(features):
        raise ValueError(
            f"{name} labels should be ({len(features)},), one for each of the {name} features; "
            f"got {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or labels.is_complex():
        raise ValueError(f"{name} labels should be integers; got {labels.dtype}")


def _percent(hits: Tensor) -> float:
    return 100.0 * int(hits.sum()) / len(hits)
