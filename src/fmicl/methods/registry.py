"""The registry of methods: which embeddings are pairs and which are negatives, by name.

A method is registered with a frozen dataclass of its options, in the file of its class:

    @register_method("simclr", summary="All views of a batch through one encoder.")
    @dataclass(frozen=True)
    class SimCLROptions(MethodOptions):
        method: ClassVar[type[Method]] = SimCLR
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self, TypeVar

from torch import nn

from fmicl.losses import ObjectiveContext, ObjectiveOptions
from fmicl.methods.base import Method
from fmicl.utils.options import Options, fraction, option
from fmicl.utils.registry import Registry


@dataclass(frozen=True)
class MethodOptions(Options):
    """Options of a method, and the module that they describe."""

    method: ClassVar[type[Method]]
    """The class that is built."""
    own_loss: ClassVar[bool] = False
    """Whether the method has a loss of its own, so that `--objective` and its options have no effect."""

    feature_maps: ClassVar[bool] = False
    """Whether the method takes the encoder's feature maps, and so their width as `local_width`: images alone."""

    def resolve_objective(self, chosen: ObjectiveOptions) -> ObjectiveOptions:
        """What is optimised: the chosen objective, unless the method has a loss of its own.

        Raises:
            ValueError: the method doesn't take this objective.
        """
        return chosen

    def arguments(self) -> dict[str, Any]:
        """Arguments of the class that follow from the options: by default, the options under their own names."""
        return dataclasses.asdict(self)

    def build(self, encoder: nn.Module, objective: nn.Module, **heads: Any) -> Method:
        """The method around an encoder; ``heads`` are dim, hidden and projection of :class:`Method`."""
        return self.method(encoder, objective, **self.arguments(), **heads)

    def resolved(self) -> Self:
        """The same options with automatic values replaced by those that are used."""
        return self

    def why_unused(self) -> dict[str, str]:
        """Options, of this method or of others, that have no effect with this method, each with the reason."""
        return {}

    def detached(self) -> dict[str, float]:
        """For each source of negatives ("anchor", "both", "cross"), the share of negatives without a gradient."""
        return {"anchor": 0.0, "both": 0.0, "cross": 0.0}

    def input_sizes(self, size: int) -> dict[str, int]:
        """Other image sizes that the encoder sees, beside views of this size, with a description of each.

        Raises:
            ValueError: the views are too small.
        """
        del size
        return {}

    def check_batch(self, batch_size: int) -> None:
        """Refuse a batch that the method can't work with.

        Raises:
            ValueError: the options don't fit the batch.
        """


@dataclass(frozen=True)
class MomentumOptions(MethodOptions):
    """Options of methods with a momentum encoder."""

    encoder_momentum: float = fraction(
        0.99, "Momentum of the momentum encoder per step. MoCo's own 0.999 is for runs of a million steps."
    )
    encoder_momentum_end: float | None = fraction(
        None, "Momentum at the end of the run, reached along half a cosine (None: constant for moco, 1 for others)."
    )
    key_statistics: Literal["auto", "batch", "past"] = option(
        "auto",
        "Statistics that the momentum encoder normalises by: those of the batch, or of past batches, with which a key "
        "doesn't reveal its batch. auto: past for moco --symmetric, where both networks see one batch, else batch.",
    )

    def __post_init__(self) -> None:
        """Refuse a momentum that falls."""
        super().__post_init__()
        end = self.encoder_momentum_end
        if end is not None and end < self.encoder_momentum:
            raise ValueError(
                f"encoder_momentum_end must not be below encoder_momentum ({self.encoder_momentum}), but it is {end}"
            )

    def statistics(self) -> Literal["batch", "past"]:
        """The statistics that are used."""
        return "batch" if self.key_statistics == "auto" else self.key_statistics

    def resolved(self) -> Self:
        """With the statistics that are used."""
        return dataclasses.replace(self, key_statistics=self.statistics())

    def arguments(self) -> dict[str, Any]:
        """Momentum and statistics."""
        found: dict[str, Any] = {"momentum": self.encoder_momentum, "statistics": self.statistics()}
        if self.encoder_momentum_end is not None:
            found["final_momentum"] = self.encoder_momentum_end
        return found


@dataclass(frozen=True, kw_only=True)
class OwnLoss(ObjectiveOptions):
    """The loss of a method that has its own, which takes the place of the chosen objective.

    Attributes:
        make: builds the loss.
        advice: what may help a run whose embeddings have collapsed.
    """

    make: Callable[[ObjectiveContext], nn.Module]
    advice: str

    def build(self, context: ObjectiveContext) -> nn.Module:
        """The loss."""
        return self.make(context)

    def collapse_advice(self, context: ObjectiveContext) -> str:
        """The method's advice."""
        del context
        return self.advice


METHODS: Registry[type[MethodOptions]] = Registry("method")

T = TypeVar("T", bound=type[MethodOptions])


def register_method(name: str, *, summary: str) -> Callable[[T], T]:
    """Class decorator that registers the options of a method under the name that `--method` takes.

    Raises:
        ValueError: the name is taken.
    """
    return METHODS.register(name, summary=summary)  # type: ignore[return-value]
