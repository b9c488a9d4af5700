"""The registry of objectives: what a run optimises, by name.

An objective is a frozen dataclass of its options with a `build` method, registered in the file of its loss:

    @register_objective("infonce", summary="InfoNCE / NT-Xent: SimCLR's and MoCo's loss.")
    @dataclass(frozen=True)
    class InfoNCEOptions(ObjectiveOptions):
        temperature: float = option(0.2, "Temperature of the softmax.")

        def build(self, context: ObjectiveContext) -> nn.Module:
            return InfoNCELoss(self.temperature, **self.common(context))
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeVar

from torch import nn

from fmicl.divergences import KL, Divergence
from fmicl.divergences import divergence as make_divergence
from fmicl.utils.options import Options, option
from fmicl.utils.registry import Registry
from fmicl.utils.validation import Negatives


@dataclass(frozen=True)
class ObjectiveContext:
    """What an objective may need to know of the run around it.

    Attributes:
        dim: dimension of the embeddings.
        method: the method's name, for messages.
        contrast_views: whether the usual negatives of a softmax loss are the other second views alone, as in SimCSE
            and MoCo v3, and not all other views of the batch, as in SimCLR.
        high_precision: compute inner products in float32 whatever the type of the embeddings.
        divergence_parameters: the options of the chosen divergence, such as `order`.
        detached: for each source of negatives ("anchor", "both", "cross"), the share of negatives without a gradient,
            such as the keys of a momentum encoder.
        explicit_negatives: whether the method passes negatives of its own, such as a queue, of unit length.
        classes: number of classes of the data; 0 before it is loaded, and without labels.
    """

    dim: int = 512
    method: str = "simclr"
    contrast_views: bool = False
    high_precision: bool = False
    divergence_parameters: Mapping[str, Any] = field(default_factory=dict)
    detached: Mapping[str, float] = field(default_factory=dict)
    explicit_negatives: bool = False
    classes: int = 0


@dataclass(frozen=True)
class ObjectiveOptions(Options, ABC):
    """Options of an objective, and the loss module that they describe."""

    takes_labels: ClassVar[bool] = False
    """Whether the loss takes `labels=`."""
    needs_labels: ClassVar[bool] = False
    """Whether it can't do without them."""
    usual_negatives: ClassVar[Negatives | None] = "anchor"
    """What negatives "auto" stands for; None: all views of the batch (SimCLR), or with some methods the other second
    views (SimCSE, MoCo v3)."""
    collapse_hint: ClassVar[str] = "Lower --learning-rate."
    """What may help a run whose embeddings have collapsed."""

    negatives: Literal["auto", "anchor", "both", "cross"] = option(
        "auto",
        "Negatives: the other anchors, all other views of the batch, or the other second views; auto follows the "
        "objective's paper. moco takes its queue instead.",
    )

    @abstractmethod
    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss module, called with two batches of embeddings (N, d) and optionally `negatives=` (M, d)."""

    def resolved_negatives(self, context: ObjectiveContext) -> Negatives:
        """The negatives, with "auto" resolved."""
        if self.negatives != "auto":
            return self.negatives
        return self.usual_negatives or ("cross" if context.contrast_views else "both")

    def detached_share(self, context: ObjectiveContext) -> float:
        """The share of the negatives that have no gradient."""
        return context.detached.get(self.resolved_negatives(context), 0.0)

    def common(self, context: ObjectiveContext) -> dict[str, Any]:
        """Arguments that all of this package's contrastive losses take."""
        return {"negatives": self.resolved_negatives(context), **self.compute_options(context)}

    def compute_options(self, context: ObjectiveContext) -> dict[str, Any]:
        """How their sums are computed (`fmicl.losses.pairing.ComputeOptions`)."""
        return {"precision": "high"} if context.high_precision else {}

    def why_unused(self) -> dict[str, str]:
        """Options without effect, given the values of the others, each with the reason."""
        return {}

    def warnings(self, context: ObjectiveContext) -> list[str]:
        """What is known to go wrong with these options."""
        del context
        return []

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """What may help a run whose embeddings have collapsed, given the method."""
        del context
        return self.collapse_hint

    def information_divergence(self, context: ObjectiveContext) -> Divergence:
        """The divergence of further terms that bound an f-mutual information: this objective's, or KL."""
        del context
        return KL()


@dataclass(frozen=True)
class MuOptions(ObjectiveOptions):
    """The option `mu`, for the objectives that have it."""

    mu: float | Literal["normalised"] = option(
        1.0,
        "Scale of the density ratio (spectral: the squared radius of the sphere); normalised: the constant that makes "
        "it a density ratio (fmicl only).",
        above=0,
    )


@dataclass(frozen=True)
class DivergenceOptions(ObjectiveOptions):
    """The options `divergence` and `skew`, for the objectives that have them."""

    divergence: str = option("kl", "The f-divergence, by name (fmicl.list_divergences()).")
    skew: float = option(
        0.0,
        "Share of positive pairs in the mixture that the divergence is taken from: above 0 no pair counts for more "
        "than a density ratio of 1 / skew.",
        at_least=0,
        below=1,
    )

    def information_divergence(self, context: ObjectiveContext) -> Divergence:
        """The divergence, with its parameters and its skew."""
        return make_divergence(self.divergence, **context.divergence_parameters).skew(self.skew)


@dataclass(frozen=True)
class LabelOptions(ObjectiveOptions):
    """The option `label_negatives`, for the objectives that can train with labels."""

    takes_labels: ClassVar[bool] = True

    label_negatives: Literal["all", "other_classes"] = option(
        "all", "With --labels: all other samples are negatives (SupCon), or those of other classes (SINCERE)."
    )


@dataclass(frozen=True)
class TemperatureOptions(ObjectiveOptions):
    """The option `temperature`, for the objectives that have it."""

    usual_negatives: ClassVar[Negatives | None] = None
    collapse_hint = "Lower --learning-rate, or change --temperature."

    temperature: float = option(0.2, "Temperature of the softmax.", above=0)


OBJECTIVES: Registry[type[ObjectiveOptions]] = Registry("objective")

T = TypeVar("T", bound=type[ObjectiveOptions])


def register_objective(name: str, *, summary: str) -> Callable[[T], T]:
    """Class decorator that registers the options of an objective under the name that `--objective` takes.

    Raises:
        ValueError: the name is taken.
    """
    return OBJECTIVES.register(name, summary=summary)  # type: ignore[return-value]
