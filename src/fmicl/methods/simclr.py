"""SimCLR: two views of a batch through one encoder."""

from __future__ import annotations

import torch
from torch import Tensor

from fmicl.methods.base import Compared, Method


class SimCLR(Method):
    """Both views through the same encoder; who is a negative, the objective says (Chen et al., 2020).

    With ``InfoNCELoss`` it is SimCLR, with ``FMICLLoss`` the f-MICL of the paper's Algorithm 1.

    Example:
        >>> from fmicl.methods.base import Optimisation
        >>> from fmicl.models import SmallConv
        >>> method = SimCLR(SmallConv(), torch.nn.Identity(), Optimisation(), dim=8, hidden=16)
        >>> method.embed(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 8])
    """

    def pairs(self, first: Tensor, second: Tensor) -> Compared:
        """The loss between the two views; one pass through the encoder, so that both share its statistics."""
        x, y = self.embed(torch.cat([first, second])).chunk(2)
        return self.compare(x, y)
