"""MoCo v3: momentum encoder and predictor, without a queue."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from fmicl.methods.base import Compared, MomentumMethod, Optimisation
from fmicl.models.vision import predictor


class MoCoV3(MomentumMethod):
    """Each view predicts the other one's key; who is a negative, the objective says.

    After Chen, Xie and He, "An Empirical Study of Training Self-Supervised Vision Transformers", 2021, whose InfoNCE
    takes the keys of the rest of the batch ("cross"). f-MICL's own choice, the other predictions ("anchor"), has a
    gradient; keys have none, and with a large alpha drive all predictions to the far side of the sphere
    (`fmicl.theory.push`). The momentum rises to 1.

    Args:
        encoder: as in :class:`fmicl.methods.base.MomentumMethod`, and the others alike.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = MoCoV3(SmallConv(), nn.Identity(), Optimisation(total_steps=10), dim=8, hidden=16)
        >>> start = method.momentum(); method.batches = 10
        >>> round(start, 4), round(method.momentum(), 4)
        (0.99, 1.0)
    """

    last_norm = True

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        optimisation: Optimisation,
        *,
        dim: int = 512,
        hidden: int = 2048,
        projection: nn.Module | None = None,
        momentum: float = 0.99,
        final_momentum: float | None = 1.0,
        statistics: Literal["batch", "past"] = "batch",
    ) -> None:
        super().__init__(
            encoder, objective, optimisation, dim=dim, hidden=hidden, projection=projection, momentum=momentum,
            final_momentum=final_momentum, statistics=statistics,
        )  # fmt: skip
        self.predictor = predictor(dim, hidden)

    def networks(self) -> list[nn.Module]:
        """The predictor too."""
        return [*super().networks(), self.predictor]

    def pairs(self, first: Tensor, second: Tensor) -> Compared:
        """The mean of both directions: the first view predicts the second one's key, and the other way round."""
        q1, q2 = self.predict(first), self.predict(second)
        k1, k2 = self.target(first), self.target(second)
        return Compared.mean([self.compare(q1, k2), self.compare(q2, k1)])

    def predict(self, images: Tensor) -> Tensor:
        """The predictor's embeddings (N, d) of images."""
        embeddings: Tensor = self.predictor(self.embed(images))
        return embeddings
