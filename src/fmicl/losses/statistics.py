"""Batch statistics over all processes, and the base class of losses that need them in place of negatives.

Barlow Twins and VICReg compare coordinates of the embeddings over the batch, not samples: they take the embeddings as
they are, without normalisation to unit length, and have no negatives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fmicl.kernels import World, all_sum, world_of
from fmicl.kernels.reference import exact_products
from fmicl.losses.base import TwoViewLoss
from fmicl.losses.pairing import check_views
from fmicl.losses.registry import ObjectiveContext, ObjectiveOptions


def prepare_views(x: Tensor, y: Tensor, gather: bool) -> tuple[Tensor, Tensor, World]:
    """Two views in float32 or wider, and the processes that share the batch.

    Raises:
        ValueError: the input isn't a batch of two views of at least two samples; the message says what was seen.
    """
    wrong: ValueError | None = None
    try:
        check_views(x, y)
    except ValueError as error:
        wrong = error  # other processes must learn of it before this one raises, or they would hang
    world = world_of(x, gather, wrong, "" if wrong else f", y {y.dtype}")
    if world.total < 2:
        raise ValueError(f"statistics of a batch need at least two samples, got shape {tuple(x.shape)}")
    wide = torch.promote_types(torch.promote_types(x.dtype, y.dtype), torch.float32)
    return x.to(wide), y.to(wide), world


def centre(x: Tensor, world: World) -> Tensor:
    """x minus its mean over the rows of all processes."""
    return x - all_sum(x.sum(dim=0), world) / world.total


def standardise(x: Tensor, world: World) -> Tensor:
    """x with mean 0 and variance 1 over the rows of all processes, as batch normalisation has them."""
    centred = centre(x, world)
    variance = all_sum(centred.square().sum(dim=0), world) / world.total
    return centred / (variance + 1e-5).sqrt()


def batch_covariance(x: Tensor, y: Tensor, world: World, correction: int = 0) -> Tensor:
    """sum_i x_ik y_il / (N - correction) over the centred rows of all processes: (d, d).

    Example:
        >>> x = torch.tensor([[1.0, 2.0], [-1.0, -2.0]])
        >>> batch_covariance(x, x, World(0, (2,)))
        tensor([[1., 2.],
                [2., 4.]])
    """
    return all_sum(exact_products(x.T, y.T), world) / (world.total - correction)


def off_diagonal_squares(matrix: Tensor) -> Tensor:
    """The sum of the squares of a square matrix's entries off the diagonal."""
    return (matrix - matrix.diagonal().diag()).square().sum()


class BatchStatisticsLoss(TwoViewLoss):
    """A loss of two views without negatives, of statistics over the batch of all processes.

    Args:
        gather: take statistics over all processes (default), or with False over this one alone.
    """

    def __init__(self, gather: bool = True) -> None:
        super().__init__()
        if not isinstance(gather, bool):
            raise ValueError(f"gather must be True or False, got gather={gather!r}")
        self.gather = gather

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d); explicit negatives are refused."""
        self.refuse_negatives(negatives)
        return self.function(x, y, **self.settings(), gather=self.gather)

    def refuse_negatives(self, negatives: Tensor | None) -> None:
        """Raise ValueError for explicit negatives."""
        if negatives is not None:
            raise ValueError(
                f"{type(self).__name__} has no negatives, got {tuple(negatives.shape)}: call it with two views alone"
            )


@dataclass(frozen=True)
class BatchStatisticsOptions(ObjectiveOptions):
    """Options of losses without negatives."""

    def why_unused(self) -> dict[str, str]:
        """There are no negatives."""
        return {"negatives": "the objective has no negatives"}

    def refuse_queue(self, name: str, context: ObjectiveContext) -> None:
        """Raise ValueError for a method that passes negatives of its own."""
        if context.explicit_negatives:
            raise ValueError(
                f"objective {name} has no negatives, so method {context.method} has no use for its queue: "
                "take --method simclr"
            )
