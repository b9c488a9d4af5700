"""How far an image was turned, told from its features: a second term beside the pairs."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.divergences import Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.information.bounds import label_information
from fmicl.models.norms import frozen_running_statistics
from fmicl.models.vision import mlp
from fmicl.utils.validation import require_positive

__all__ = ["TURNS", "Rotation", "finite_at_zero", "turned"]

TURNS = 4
"""By 0, 90, 180 and 270 degrees."""


class Rotation(nn.Module):
    r"""Features that tell how far an image was turned: minus a weighted bound of their f-mutual information.

    Two views of an image are pulled together whatever was done to them, and so the features forget it. What is lost
    with that of an image's layout, this term asks for. Each image comes in all four turns t, and a small head on the
    features z says which:

    .. math:: L = -w \Big( E[s(r_t(z))] - E\Big[\tfrac14 \sum_k p(r_k(z))\Big] \Big) \ge -w I_f(Z; T)

    It is the bound that f-MICL maximises between two views (`fmicl.information.label_information`), of features and
    turns. With KL it is w (cross-entropy - log 4), the term of Dangovski et al., "Equivariant Contrastive Learning",
    2022 (E-SSL), who take w = 0.4 and on CIFAR-10 images of half the side. Otherwise than theirs, the images that are
    turned are the first views, made smaller, and not a third crop; the head has batch normalisation in place of layer
    normalisation; and turned images, which have statistics of their own, leave the encoder's running ones alone.

    Args:
        features: that the encoder gives.
        divergence: a name or a `Divergence`, with a finite f(0): of the others, reverse KL, Jeffrey and Neyman, the
            information that is asked for is infinite once a turn is told for certain.
        weight: w.
        size: side of the images that are turned, to which views are shrunk.
        hidden: width of the head.

    Raises:
        ValueError: such a divergence, or numbers that can't be meant.

    Example:
        >>> from fmicl.models.vision import SmallConv
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
        if size != int(size) or size < 1:
            raise ValueError(f"size must be a number of pixels, got size={size!r}")
        self.divergence = finite_at_zero(make_divergence(divergence))
        self.weight, self.size = weight, int(size)
        self.head = mlp((features, hidden, hidden, TURNS))

    def forward(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """The term of the loss, a scalar, of square images (N, C, S, S).

        Raises:
            ValueError: they are smaller than those that are to be turned.
        """
        if images.shape[-1] < self.size:
            raise ValueError(f"images of {self.size} pixels are turned, but these have {images.shape[-1]}")
        views = turned(F.adaptive_avg_pool2d(images, self.size))
        with frozen_running_statistics(encoder):
            logits = self.head(encoder(views))
        labels = torch.arange(len(views), device=images.device) // len(images)
        return -self.weight * label_information(self.divergence, logits, labels)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.divergence}, weight={self.weight:g}, size={self.size}"


def finite_at_zero(divergence: Divergence) -> Divergence:
    """The same, if its f(0) is finite: the mutual information with a label then is, however well that is told.

    Raises:
        ValueError: it isn't.

    Example:
        >>> finite_at_zero(make_divergence("js")).name
        'js'
    """
    if not bool(divergence.f(0.0).isfinite()):
        raise ValueError(
            f"features that tell a turn for certain have infinite information about it by {divergence.name}, whose "
            "f(0) is infinite, so that this term of the loss has no end: take a divergence with a finite one, such as "
            "kl or js, or leave rotation_weight at 0"
        )
    return divergence


def turned(images: Tensor) -> Tensor:
    """Square images (N, C, S, S), and after them the same by a quarter turn, a half and three quarters: (4N, C, S, S).

    Example:
        >>> turned(torch.tensor([[[[1, 2], [3, 4]]]])).flatten(1).tolist()
        [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]
    """
    views = torch.cat([images.rot90(turns, (2, 3)) for turns in range(TURNS)])
    last = images.is_contiguous(memory_format=torch.channels_last)
    return views.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
