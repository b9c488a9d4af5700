"""MoCo v3: momentum encoder and predictor, without a queue (Chen, Xie and He, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from fmicl.methods.base import Comparison, Method, MomentumMethod
from fmicl.methods.registry import MomentumOptions, register_method
from fmicl.models.vision import predictor

__all__ = ["MoCoV3", "MoCoV3Options"]


class MoCoV3(MomentumMethod):
    """Each view predicts the other view's key; the objective decides what a negative is.

    After Chen, Xie and He, "An Empirical Study of Training Self-Supervised Vision Transformers", 2021, whose InfoNCE
    takes the keys of the rest of the batch ("cross"). f-MICL's own choice, the other predictions ("anchor"), has a
    gradient. Keys have none, and with a large alpha they drive all predictions to the far side of the sphere
    (`fmicl.theory.push`). The momentum rises to 1.

    Args:
        encoder: as in :class:`fmicl.methods.base.MomentumMethod`, and so are the other arguments.

    Example:
        >>> from fmicl.models.vision import SmallConv
        >>> method = MoCoV3(SmallConv(), nn.Identity(), dim=8, hidden=16)
        >>> round(method.momentum(0.0), 4), round(method.momentum(1.0), 4)
        (0.99, 1.0)
    """

    last_norm = True
    contrast_views = True
    has_predictor = True

    def __init__(
        self,
        encoder: nn.Module,
        objective: nn.Module,
        *,
        dim: int = 512,
        hidden: int = 2048,
        final_momentum: float | None = 1.0,
        **options: Any,
    ) -> None:
        super().__init__(encoder, objective, dim=dim, hidden=hidden, final_momentum=final_momentum, **options)
        self.predictor = predictor(dim, hidden)

    def networks(self) -> list[nn.Module]:
        """The predictor too."""
        return [*super().networks(), self.predictor]

    def compare_views(self, first: Tensor, second: Tensor) -> Comparison:
        """The mean of both directions: the first view predicts the second one's key, and vice versa."""
        q1, q2 = self.predict(first), self.predict(second)
        k1, k2 = self.target(first), self.target(second)
        return Comparison.mean([self.compare(q1, k2), self.compare(q2, k1)])

    def predict(self, views: Tensor) -> Tensor:
        """The predictor's embeddings (N, d) of views."""
        embeddings: Tensor = self.predictor(self.embed(views))
        return embeddings


@register_method("mocov3", summary="Momentum encoder and predictor; negatives are the other samples of the batch.")
@dataclass(frozen=True)
class MoCoV3Options(MomentumOptions):
    """Options of MoCo v3."""

    method: ClassVar[type[Method]] = MoCoV3

    def detached(self) -> dict[str, float]:
        """Keys have no gradient, predictions have."""
        return {"anchor": 0.0, "both": 0.5, "cross": 1.0}
