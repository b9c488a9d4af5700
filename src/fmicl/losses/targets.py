"""Labels and soft targets: which samples of a batch are positives of each other, and with which weight.

Every pair of samples (i, j) has a weight T_ij >= 0, and T_ij / sum_j T_ij is the share of j among the positives of i:

    labels (N,)      T_ij = 1 for samples of one class; a negative label is unknown, and has its own sample alone
    labels (N, K)    T_ij = l_i.l_j: the number of shared labels of a multi-hot l, or the probability that two samples
                     are of one class for rows of probabilities; a sample's weight with itself is at least 1
    targets (N, N)   T_ij as given, dense or sparse; a row of zeros has no positives

Labels stay vectors: no N x N matrix of weights is made, but a few rows of it at a time. A process has the labels of its
own samples, or its own rows of the targets with columns for the samples of all processes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fmicl.kernels import World, all_sum
from fmicl.kernels.exchange import gather_rows, gather_with_gradient
from fmicl.kernels.rows import chunks_of_rows, row_map
from fmicl.utils.learnable import leaf_tensors

LabelNegatives = Literal["all", "other_classes"]


def require_label_negatives(label_negatives: str) -> None:
    """Raise ValueError for an unknown choice of negatives."""
    if label_negatives not in ("all", "other_classes"):
        raise ValueError(f"label_negatives must be 'all' or 'other_classes', got {label_negatives!r}")


def make_targets(labels: Tensor | None, targets: Tensor | None) -> Targets | None:
    """What the arguments `labels` and `targets` of a loss describe; None without both.

    Raises:
        ValueError: both are given, or one has a wrong type or number of dimensions.

    Example:
        >>> make_targets(torch.tensor([0, 1, 0]), None).kind
        'classes'
    """
    if labels is not None and targets is not None:
        raise ValueError("labels and targets both say which samples are positives: give one of them")
    given, name = (labels, "labels") if targets is None else (targets, "targets")
    if given is None:
        return None
    if not isinstance(given, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(given).__name__}")
    if given.is_complex():
        raise ValueError(f"{name} must be real, got {given.dtype}")
    if targets is not None:
        if given.dim() != 2:
            raise ValueError(f"targets must be (N, N), got shape {tuple(given.shape)}")
        sparse = given.layout != torch.strided
        return Targets(given.to_sparse_coo().coalesce() if sparse else given, "matrix")
    if given.dim() == 2:
        return Targets(given, "multi_label")
    if given.dim() != 1 or given.is_floating_point() or given.dtype == torch.bool:
        raise ValueError(
            f"labels must be whole numbers (N,), or (N, K) for several labels of a sample; got {given.dtype} of shape "
            f"{tuple(given.shape)}"
        )
    return Targets(given, "classes")


@dataclass(frozen=True)
class Targets:
    """Labels of this process's samples, or its rows of the targets."""

    given: Tensor
    kind: Literal["classes", "multi_label", "matrix"]

    def check(self, x: Tensor) -> None:
        """Raise ValueError for another number of rows than x has, another device, or negative weights."""
        name = "targets" if self.kind == "matrix" else "labels"
        if len(self.given) != len(x):
            raise ValueError(
                f"{name} must have a row for each of the {len(x)} samples of x, got shape {tuple(self.given.shape)}"
            )
        if self.given.device != x.device:
            raise ValueError(f"{name} are on {self.given.device} but x is on {x.device}")
        if self.kind != "classes" and self.given.device.type == "cpu":  # elsewhere it would synchronise
            values = self.given.values() if self.given.is_sparse else self.given
            if values.numel() and not bool(values.min() >= 0):
                raise ValueError(f"{name} must not be negative or NaN, but the smallest is {values.min()}")

    def of_all_processes(self, dtype: torch.dtype, world: World) -> PairWeights:
        """The weights of this process's rows with the samples of all processes."""
        if self.kind == "matrix":
            return PairWeights(self.given.to(dtype), None, world)
        given = self.given if self.kind == "classes" else self.given.to(dtype)
        return PairWeights(given, gather_rows(given, world), world)


@dataclass(frozen=True)
class PairWeights:
    """Rows of T: of this process's samples with the M samples of all processes."""

    rows: Tensor
    columns: Tensor | None
    world: World

    def __call__(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """T (n, M) of some samples of this process (n,), and where a column is the sample itself: (n, M) bool."""
        own = (self.world.first + samples)[:, None] == torch.arange(self.world.total, device=samples.device)
        if self.columns is None:
            weights = self.rows.index_select(0, samples)
            return weights.to_dense() if weights.is_sparse else weights, own
        chosen = self.rows[samples]
        if self.columns.dim() == 1:
            same = (chosen[:, None] == self.columns) & (chosen[:, None] >= 0)
            return (same | own).to(torch.get_default_dtype()), own
        shared = chosen @ self.columns.T
        return torch.where(own, shared.clamp(min=1), shared), own


class Chunk(NamedTuple):
    """Some rows of anchors against all columns, (n, M) each.

    Attributes:
        positives: share of each column among the anchor's positives; a row's sum is 1, or 0 if it has none.
        negatives: whether the column is a negative of the anchor.
    """

    positives: Tensor
    negatives: Tensor


@dataclass(frozen=True)
class LabelledPairs:
    """Anchors against columns of all processes, which labels divide into positives and negatives.

    Positives are the second views of positive samples; with negatives "both", anchors and positives are all views.

    Attributes:
        anchors: (N, d), or for "both" the first views followed by the second, (2 N, d).
        columns: (M, d), differentiable.
        weights: T of this process's samples.
        mode: "anchor", "both", "cross" or "explicit".
        other_classes: whether samples of positive weight are no negatives.
        dense: whether to use plain autograd, for the kernel "reference".
    """

    anchors: Tensor
    columns: Tensor
    weights: PairWeights
    mode: str
    other_classes: bool
    dense: bool

    @classmethod
    def of(
        cls,
        x: Tensor,
        y: Tensor,
        explicit: Tensor | None,
        mode: str,
        targets: Targets,
        label_negatives: LabelNegatives,
        world: World,
        dense: bool,
    ) -> LabelledPairs:
        """The pairs of two views of unit length."""
        wide = torch.promote_types(x.dtype, torch.float32)
        x, y = x.to(wide), y.to(wide)
        seconds = gather_with_gradient(y, world)
        if explicit is not None:
            columns, mode = torch.cat([seconds, explicit.to(wide)]), "explicit"
        else:
            columns = seconds if mode == "cross" else torch.cat([gather_with_gradient(x, world), seconds])
        anchors = torch.cat([x, y]) if mode == "both" else x
        weights = targets.of_all_processes(wide, world)
        return cls(anchors, columns, weights, mode, label_negatives == "other_classes", dense)

    def detached(self) -> LabelledPairs:
        """The same without gradients."""
        return replace(self, anchors=self.anchors.detach(), columns=self.columns.detach())

    def chunk(self, rows: slice) -> Chunk:
        """Positives and negatives of some anchors."""
        n = len(self.anchors) // (2 if self.mode == "both" else 1)
        index = torch.arange(rows.start, rows.stop, device=self.anchors.device)
        weights, own = self.weights(index % n)
        weights = weights.to(self.anchors.dtype)
        others = ~own & (weights == 0) if self.other_classes else ~own
        if self.mode == "cross":
            return Chunk(_shares(weights), others)
        if self.mode == "anchor":
            return Chunk(
                _shares(torch.cat([torch.zeros_like(weights), weights], 1)),
                torch.cat([others, torch.zeros_like(others)], 1),
            )
        if self.mode == "explicit":
            extra = weights.new_zeros(len(weights), len(self.columns) - weights.shape[1])
            return Chunk(
                _shares(torch.cat([weights, extra], 1)),
                torch.cat([torch.zeros_like(own), torch.ones_like(extra, dtype=torch.bool)], 1),
            )
        first = (index < n)[:, None]  # an anchor's own column: among the first views, or among the second
        itself = torch.cat([own & first, own & ~first], 1)
        both = torch.cat([weights, weights], 1).masked_fill(itself, 0.0)
        return Chunk(_shares(both), torch.cat([others, others], 1))

    def map(self, function: Callable[[Tensor, Chunk], Tensor]) -> Tensor:
        """A function of each anchor's inner products (n, M), with its positives and negatives: one number a row.

        Differentiable in the embeddings and in the leaf tensors that the function depends on, such as a temperature.
        """

        def of_rows(products: Tensor, rows: slice) -> Tensor:
            return function(products, self.chunk(rows))

        learned: list[Tensor] = []
        if torch.is_grad_enabled() and not self.dense:
            learned = leaf_tensors(lambda z: of_rows(z, slice(0, 1)), self.anchors.new_zeros(1, len(self.columns)))
        return row_map(self.anchors, self.columns, of_rows, learned, dense=self.dense)

    def negative_count(self) -> Tensor:
        """Number of negative pairs of all processes, at least 1: a tensor, so that no value is read on the host."""
        counts = [
            self.chunk(rows).negatives.sum()
            for rows in chunks_of_rows(len(self.anchors), len(self.columns), self.anchors.device)
        ]
        return all_sum(torch.stack(counts).sum().to(self.anchors.dtype), self.weights.world).clamp(min=1)


def _shares(weights: Tensor) -> Tensor:
    total = weights.sum(dim=1, keepdim=True)
    return weights / torch.where(total > 0, total, 1.0)


def masked_logsumexp(logits: Tensor, mask: Tensor) -> Tensor:
    """log sum exp over the entries of a row where the mask is set; a large negative number if there are none."""
    return logits.masked_fill(~mask, torch.finfo(logits.dtype).min / 4).logsumexp(dim=1)
