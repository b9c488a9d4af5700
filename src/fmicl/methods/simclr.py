"""SimCLR: views of a batch through one encoder."""

from __future__ import annotations

from itertools import combinations

import torch
from torch import Tensor

from fmicl.methods.base import Compared, Method


class SimCLR(Method):
    """All views through the same encoder; who is a negative, the objective says (Chen et al., 2020).

    With ``InfoNCELoss`` it is SimCLR, with ``FMICLLoss`` the f-MICL of the paper's Algorithm 1. Of K > 2 views of each
    sample every two are a pair, and the loss is the mean over all K (K - 1) / 2 of them: for a batch of N samples the
    same bound of the mutual information, estimated with less noise. For the same number K N of views there are fewer
    samples, and so fewer negatives: the positives' noise is less then and the negatives' more, and the bound of
    InfoNCE, which depends on N, is another one.

    Example:
        >>> from fmicl.methods.base import Optimisation
        >>> from fmicl.models.vision import SmallConv
        >>> method = SimCLR(SmallConv(), torch.nn.Identity(), Optimisation(), dim=8, hidden=16)
        >>> method.embed(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 8])
    """

    many_views = True

    def pairs(self, first: Tensor, second: Tensor) -> Compared:
        """The mean loss over pairs of views; one pass through the encoder, so that all share its statistics.

        Args:
            first: (N, ...) one view of each sample.
            second: (N, ...) the other one, or ((K - 1) N, ...) the others one after another.
        """
        views = self.embed(torch.cat([first, second])).split(len(first))
        return Compared.mean([self.compare(views[i], views[j]) for i, j in anchored_pairs(len(views))])


def anchored_pairs(views: int) -> list[tuple[int, int]]:
    """Every two of K views, the anchor first; each view is the anchor equally often if K is odd, else within one.

    The anchor is the earlier one where their distance is odd, and else the later one.

    Example:
        >>> anchored_pairs(2), anchored_pairs(3)
        ([(0, 1)], [(0, 1), (2, 0), (1, 2)])
    """
    return [(i, j) if (j - i) % 2 else (j, i) for i, j in combinations(range(views), 2)]
