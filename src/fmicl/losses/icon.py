"""I-Con with any f-divergence: conditional distributions for each anchor (Alshammari et al., 2025)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from torch import nn

from fmicl.divergences import Divergence, DivergenceName
from fmicl.divergences import divergence as make_divergence
from fmicl.divergences.critic import require_finite_at_zero
from fmicl.divergences.learned import require_fixed
from fmicl.losses import functional
from fmicl.losses.base import LabelledLoss
from fmicl.losses.pairing import ComputeOptions
from fmicl.losses.registry import (
    DivergenceOptions,
    LabelOptions,
    ObjectiveContext,
    TemperatureOptions,
    register_objective,
)
from fmicl.losses.targets import LabelNegatives
from fmicl.utils.learnable import Scalar, require_positive_scalar
from fmicl.utils.live_objects import remember
from fmicl.utils.validation import Negatives


class IConLoss(LabelledLoss):
    """I-Con: the f-divergence of p(j | i), the anchor's positive, from q(j | i), a softmax. See `functional.icon_loss`.

    Related: with KL it is `InfoNCELoss`. `FMICLLoss` bounds the divergence of the joint distribution of both views from
    the product of its marginals instead; no identity ties the two for other f.

    Args:
        divergence: a name of `fmicl.list_divergences()` or a `Divergence`, with a finite f(0).
        temperature: of the softmax.
        negatives: "both", "cross" or "anchor"; pass explicit ones to the call.
        label_negatives: in calls with labels, "all" other samples are negatives, or "other_classes" only.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).

    Example:
        >>> import torch, fmicl
        >>> fmicl.IConLoss("js")(torch.randn(8, 16), torch.randn(8, 16)).shape
        torch.Size([])
    """

    function = staticmethod(functional.icon_loss)
    arguments = ("divergence", "temperature", "negatives")

    def __init__(
        self,
        divergence: DivergenceName | Divergence = "kl",
        temperature: Scalar = 0.5,
        negatives: Negatives = "both",
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> None:
        super().__init__(negatives, label_negatives, **options)
        require_positive_scalar("temperature", temperature)
        self.divergence = remember(make_divergence(divergence))
        require_fixed(self.divergence)
        require_finite_at_zero(self.divergence, "I-Con")
        self.temperature = temperature


@register_objective("icon", summary="I-Con with any f: a divergence for each anchor (Alshammari et al., 2025).")
@dataclass(frozen=True)
class IConOptions(TemperatureOptions, LabelOptions, DivergenceOptions):
    """Options of I-Con."""

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module.

        Raises:
            ValueError: there is no such divergence, or its f(0) is infinite.
        """
        return IConLoss(
            self.information_divergence(context),
            self.temperature,
            label_negatives=self.label_negatives,
            **self.common(context),
        )
