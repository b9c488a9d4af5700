"""Rotation prediction (E-SSL): a second term of the loss, by which features tell how far an image was rotated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_finite_at_zero
from fmicl.information import label_information
from fmicl.models.norms import frozen_running_statistics
from fmicl.models.vision import mlp
from fmicl.utils.options import Options, option
from fmicl.utils.validation import require_positive

ROTATIONS = 4
"""By 0, 90, 180 and 270 degrees."""


@dataclass(frozen=True)
class RotationOptions(Options):
    """Options of rotation prediction."""

    rotation_weight: float = option(
        0.0,
        "Weight of rotation prediction (E-SSL), a second term of the loss (0: none). It bounds the f-mutual "
        "information between features and rotations by fmicl's divergence, whose f(0) must be finite, or by KL for "
        "other objectives; E-SSL takes 0.4.",
        at_least=0,
    )
    rotation_size: int | None = option(
        None, "Side of the rotated images, made from the first views (None: half of theirs if that leaves 16)."
    )

    def why_unused(self) -> dict[str, str]:
        """The size needs a weight."""
        return {} if self.rotation_weight else {"rotation_size": "rotation_weight is 0"}

    def size(self, view_size: int) -> int:
        """Side of the rotated images, for views of this side.

        Raises:
            ValueError: they would be larger than the views.

        Example:
            >>> RotationOptions().size(32), RotationOptions().size(8)
            (16, 8)
        """
        if self.rotation_size is None:
            return view_size // 2 if view_size // 2 >= 16 else view_size
        if not 1 <= self.rotation_size <= view_size:
            raise ValueError(
                f"rotation_size must lie between 1 and the side of the views ({view_size}), but it is "
                f"{self.rotation_size}"
            )
        return self.rotation_size


class Rotation(nn.Module):
    r"""Rotation prediction: minus a weighted bound of the f-mutual information between features and rotations.

    Contrastive learning pulls two views of an image together whatever was done to them, so that features forget the
    layout of an image. This term keeps it. Each image comes in all four rotations t, and a small head on the features z
    predicts which:

    .. math:: L = -w \Big( E[s(r_t(z))] - E\Big[\tfrac14 \sum_k p(r_k(z))\Big] \Big) \ge -w I_f(Z; T)

    It is the bound that f-MICL maximises between two views (`fmicl.information.label_information`), here between
    features and rotations. With KL it is w (cross-entropy - log 4), the term of Dangovski et al., "Equivariant
    Contrastive Learning", 2022 (E-SSL), who take w = 0.4 and, on CIFAR-10, images of half the side. Differences from
    theirs: the rotated images are the first views, shrunk, not a third crop; the head has batch normalisation instead
    of layer normalisation; and rotated images, which have statistics of their own, don't update the encoder's running
    statistics.

    Args:
        features: width of the encoder's features.
        divergence: a name or a `Divergence` with a finite f(0). With an infinite one (reverse KL, Jeffrey, Neyman) the
            information is infinite once a rotation is certain.
        weight: w.
        size: side to which views are shrunk before they are rotated.
        hidden: width of the head.

    Raises:
        ValueError: f(0) is infinite, or a number is out of range.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> encoder = SmallConv()
        >>> rotation = Rotation(encoder.num_features, "kl", weight=0.4, size=4, hidden=16)
        >>> rotation(encoder, torch.randn(2, 1, 8, 8)).shape
        torch.Size([])
    """

    def __init__(
        self,
        features: int,
        divergence: DivergenceName | Divergence,
        *,
        weight: float = 0.4,
        size: int = 16,
        hidden: int = 2048,
    ) -> None:
        super().__init__()
        require_positive("weight", weight)
        if size != int(size) or size < 1:
            raise ValueError(f"size must be a number of pixels, got size={size!r}")
        self.divergence = require_finite_at_zero(make_divergence(divergence), "rotation prediction")
        self.weight, self.size = weight, int(size)
        self.head = mlp((features, hidden, hidden, ROTATIONS))

    def forward(self, encoder: nn.Module, images: Tensor) -> Tensor:
        """The term of the loss, a scalar, for square images (N, C, S, S).

        Raises:
            ValueError: the images are smaller than `size`.
        """
        if images.shape[-1] < self.size:
            raise ValueError(f"images must have at least {self.size} pixels a side, but these have {images.shape[-1]}")
        views = rotate(F.adaptive_avg_pool2d(images, self.size))
        with frozen_running_statistics(encoder):
            logits = self.head(encoder(views))
        labels = torch.arange(len(views), device=images.device) // len(images)
        return -self.weight * label_information(self.divergence, logits, labels)

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.divergence}, weight={self.weight:g}, size={self.size}"


def rotate(images: Tensor) -> Tensor:
    """Square images (N, C, S, S) in all four rotations: (4N, C, S, S), the unrotated ones first.

    Example:
        >>> rotate(torch.tensor([[[[1, 2], [3, 4]]]])).flatten(1).tolist()
        [[1, 2, 3, 4], [2, 4, 1, 3], [4, 3, 2, 1], [3, 1, 4, 2]]
    """
    views = torch.cat([images.rot90(turns, (2, 3)) for turns in range(ROTATIONS)])
    last = images.is_contiguous(memory_format=torch.channels_last)
    return views.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
