"""Cross entropy of labels, the supervised baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.kernels import all_sum
from fmicl.losses.registry import ObjectiveContext, register_objective
from fmicl.losses.statistics import BatchStatisticsLoss, BatchStatisticsOptions, prepare_views


class CrossEntropyLoss(BatchStatisticsLoss):
    """Cross entropy of the samples' labels, by a linear classifier of the embeddings of both views.

    The mean is over both views of all samples with a label, of all processes. The classifier is part of the loss.

    Related: `InfoNCELoss` with labels (SupCon) has other samples in place of the classifier's weights. No identity ties
    it to f-MICL with labels.

    Args:
        dim: dimension of the embeddings.
        classes: number of classes.
        gather: take the mean over all processes, or with False over this one alone.

    Example:
        >>> loss = CrossEntropyLoss(dim=16, classes=3)
        >>> loss(torch.randn(4, 16), torch.randn(4, 16), labels=torch.tensor([0, 1, 2, -1])).shape
        torch.Size([])
    """

    def __init__(self, dim: int, classes: int, *, gather: bool = True) -> None:
        super().__init__(gather)
        self.classifier = nn.Linear(dim, classes)

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None, labels: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d) with labels (N,); negative labels don't count.

        Raises:
            ValueError: there are no labels, or explicit negatives.
        """
        self.refuse_negatives(negatives)
        if labels is None:
            raise ValueError("cross entropy needs labels: loss(x, y, labels=labels)")
        _, _, world = prepare_views(x, y, self.gather)
        logits = self.classifier(torch.cat([x, y])).float()
        known = labels.clamp(min=-1)
        total = F.cross_entropy(logits, known.repeat(2), ignore_index=-1, reduction="sum")
        count = all_sum(2 * (known >= 0).sum().to(total.dtype), world).clamp(min=1)
        return total * (world.size / count)

    def extra_repr(self) -> str:
        """The settings."""
        return f"classes={self.classifier.out_features}"


@register_objective("cross_entropy", summary="Cross entropy of labels (--labels): the supervised baseline.")
@dataclass(frozen=True)
class CrossEntropyOptions(BatchStatisticsOptions):
    """Cross entropy has no options of its own."""

    takes_labels: ClassVar[bool] = True
    needs_labels: ClassVar[bool] = True

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module, with a new classifier.

        Raises:
            ValueError: the method has a queue.
        """
        self.refuse_queue("cross_entropy", context)
        return CrossEntropyLoss(context.dim, max(1, context.classes))
