"""SimCLR: all views of a batch through one encoder (Chen et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

import torch
from torch import Tensor

from fmicl.methods.base import Comparison, Method
from fmicl.methods.registry import MethodOptions, register_method


class SimCLR(Method):
    """All views through the same encoder; the objective decides what a negative is.

    With ``InfoNCELoss`` it is SimCLR, with ``FMICLLoss`` the paper's Algorithm 1. Of K > 2 views of each sample every
    two are a pair, and the loss is the mean over all K (K - 1) / 2 pairs: for a batch of N samples the same bound of
    the mutual information, estimated with less noise. At a fixed number K N of views there are fewer samples and so
    fewer negatives: less noise in the positives and more in the negatives, and another bound for InfoNCE, which
    depends on N.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = SimCLR(SmallConv(), torch.nn.Identity(), dim=8, hidden=16)
        >>> method.embed(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 8])
    """

    many_views = True
    local_crops = True

    def compare_views(self, first: Tensor, second: Tensor, local: Tensor | None = None) -> Comparison:
        """The mean loss over pairs of views; one pass through the encoder, so that all views share its statistics.

        Each local crop is a pair with each view, the anchor with every other one.
        """
        views = self.embed(torch.cat([first, second])).split(len(first))
        pairs = [(views[i], views[j]) for i, j in anchored_pairs(len(views))]
        for crop in self.embed_local(local, len(first)):
            pairs += [(view, crop) if place % 2 else (crop, view) for place, view in enumerate(views)]
        return Comparison.mean([self.compare(x, y) for x, y in pairs])


def anchored_pairs(views: int) -> list[tuple[int, int]]:
    """All pairs of K views, the anchor first; each view is the anchor equally often if K is odd, else within one.

    The anchor is the earlier view if their distance is odd, else the later one.

    Example:
        >>> anchored_pairs(2), anchored_pairs(3)
        ([(0, 1)], [(0, 1), (2, 0), (1, 2)])
    """
    return [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(views), 2)]


@register_method("simclr", summary="One encoder; negatives are the other samples of the batch.")
@dataclass(frozen=True)
class SimCLROptions(MethodOptions):
    """SimCLR has no options of its own."""

    method: ClassVar[type[Method]] = SimCLR
