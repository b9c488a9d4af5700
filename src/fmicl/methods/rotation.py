"""How far an image was turned, told from its features: a second term beside the pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.checks import require_positive
from fmicl.divergences import Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.estimators import label_information
from fmicl.models import mlp
from fmicl.norms import unmoved

__all__ = ["TURNS", "Rotation", "turned"]

TURNS = 4
"""By 0, 90, 180 and 270 degrees."""


class Rotation(nn.Module):
    r"""Features that tell how far an image was turned: minus a weighted bound of their f-mutual information.

    Two views of an image are pulled together whatever was done to them, and so the features forget it. What is lost
    with that of an image's layout, this term asks for. Each image comes in all four turns t, and a small head on the
    features z says which:

    .. math:: L = -w \Big( E[s(r_t(z))] - E\Big[\tfrac14 \sum_k p(r_k(z))\Big] \Big) \ge -w I_f(Z; T)

    It is the bound that f-MICL maximises between two views (`fmicl.estimators.label_information`), of features and
    turns. With KL it is w (cross-entropy - log 4), the term of Dangovski et al., "Equivariant Contrastive Learning",
    2022, who take w = 0.4 and on CIFAR-10 images of half the side.

    Images that are turned have statistics of their own, of which the encoder's running ones take no notice.

    Args:
        features: that the encoder gives.
        divergence: a name or a `Divergence`.
        weight: w.
        size: side of the images that are turned, to which views are shrunk.
        hidden: width of the head.

    Example:
        >>> from fmicl.models import SmallConv
        >>> encoder = SmallConv()
        >>> rotation = Rotation(encoder.num_features, "kl", weight=0.4, size=4, hidden=16)
        >>> rotation(encoder, torch.randn(2, 1, 8, 8)).shape
        torch.Size([])
    """

    def __init__(
        self, features: int, divergence: str | Divergence, *, weight: float = 0.4, size: int = 16, hidden: int = 2048
    ) -> None:
        super().__init__()
        require_positive("weight", weight)
        require_positive("size", size)
        self.divergence = make_divergence(divergence)
        self.weight, self.size = weight, size
        self.head = mlp((features, hidden, hidden, TURNS))

    def forward(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """The term of the loss, a scalar, of images (N, C, H, W) of any square size from `size` on."""
        views = turned(F.adaptive_avg_pool2d(images, self.size))
        with unmoved(encoder):
            logits = self.head(encoder(views))
        labels = torch.arange(len(views), device=images.device) // len(images)
        return -self.weight * label_information(self.divergence, logits, labels)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.divergence}, weight={self.weight:g}, size={self.size}"


def turned(images: Tensor) -> Tensor:
    """Square images (N, C, S, S), and after them the same by a quarter turn, a half and three quarters: (4N, C, S, S).

    Example:
        >>> turned(torch.tensor([[[[1, 2], [3, 4]]]])).flatten(1).tolist()
        [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]
    """
    views = torch.cat([images.rot90(turns, (2, 3)) for turns in range(TURNS)])
    last = images.is_contiguous(memory_format=torch.channels_last)
    return views.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
