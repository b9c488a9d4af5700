"""MoCo v3: momentum encoder and predictor, without a queue (Chen, Xie and He, 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fmicl.methods.base import Method, PredictionMethod
from fmicl.methods.registry import MomentumOptions, register_method


class MoCoV3(PredictionMethod):
    """Each view predicts the other view's key; the objective decides what a negative is.

    After Chen, Xie and He, "An Empirical Study of Training Self-Supervised Vision Transformers", 2021, whose InfoNCE
    takes the keys of the rest of the batch ("cross"). f-MICL's own choice, the other predictions ("anchor"), has a
    gradient. Keys have none, and with a large alpha they drive all predictions to the far side of the sphere
    (`fmicl.theory.push`). The momentum rises to 1.

    Args:
        encoder: as in :class:`fmicl.methods.base.PredictionMethod`, and so are the other arguments.

    Example:
        >>> import torch
        >>> from fmicl.models.vision import SmallConv
        >>> method = MoCoV3(SmallConv(), torch.nn.Identity(), dim=8, hidden=16)
        >>> round(method.momentum(0.0), 4), round(method.momentum(1.0), 4)
        (0.99, 1.0)
    """

    last_norm = True
    predictor_norm = True
    contrast_views = True


@register_method("mocov3", summary="Momentum encoder and predictor; negatives are the other samples of the batch.")
@dataclass(frozen=True)
class MoCoV3Options(MomentumOptions):
    """Options of MoCo v3."""

    method: ClassVar[type[Method]] = MoCoV3

    def detached(self) -> dict[str, float]:
        """Keys have no gradient, predictions have."""
        return {"anchor": 0.0, "both": 0.5, "cross": 1.0}
