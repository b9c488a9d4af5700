"""Base classes of the loss modules, each of which calls a pure function of `fmicl.functional`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Unpack

from torch import Tensor, nn

from fmicl.divergences import Divergence
from fmicl.losses.pairing import ComputeOptions, check_options, describe_options
from fmicl.losses.similarities import Similarity
from fmicl.losses.targets import LabelNegatives, require_label_negatives
from fmicl.utils.learnable import format_scalar
from fmicl.utils.live_objects import remember
from fmicl.utils.validation import Negatives, require_negatives


class TwoViewLoss(nn.Module):
    """A pure function of two views whose settings are attributes of the module.

    Attributes:
        function: of `fmicl.functional`.
        arguments: the names of its settings, in the order of `repr`.
    """

    function: ClassVar[Callable[..., Tensor]]
    arguments: ClassVar[tuple[str, ...]]

    def settings(self) -> dict[str, Any]:
        """The settings by name."""
        return {name: getattr(self, name) for name in self.arguments}

    def extra_repr(self) -> str:
        """The settings; a divergence says its own name."""
        return ", ".join(
            f"{value}" if isinstance(value, Divergence) else f"{name}={format_scalar(value)}"
            for name, value in self.settings().items()
        )


class ContrastiveLoss(TwoViewLoss):
    """A loss of two views: where its negatives come from, and how sums over pairs are computed.

    Args:
        negatives: "anchor", "both" or "cross", for calls without explicit negatives.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).
    """

    def __init__(self, negatives: Negatives, **options: Unpack[ComputeOptions]) -> None:
        super().__init__()
        check_options(**options)
        require_negatives(negatives)
        self.negatives = negatives
        self.options = options

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore a copy, whose divergence and similarity torch.compile must know (`fmicl.losses.operator`)."""
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        for value in vars(self).values():
            if isinstance(value, Divergence | Similarity):
                remember(value)

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given."""
        return self.function(x, y, **self.settings() | self.common(negatives))

    def common(self, negatives: Tensor | None) -> dict[str, Any]:
        """The arguments that all functions take; explicit negatives (M, d) replace the others."""
        return {"negatives": self.negatives if negatives is None else negatives, **self.options}

    def extra_repr(self) -> str:
        """The settings, and the options that differ from their defaults."""
        return super().extra_repr() + describe_options(**self.options)


class LabelledLoss(ContrastiveLoss):
    """A contrastive loss that takes labels or soft targets too (`fmicl.losses.targets`).

    Args:
        negatives: "anchor", "both" or "cross", for calls without explicit negatives.
        label_negatives: in calls with labels, "all" other samples are negatives, or "other_classes" only.
        options: `normalised`, `kernel`, `precision`, `gather` (`fmicl.losses.pairing.ComputeOptions`).
    """

    def __init__(
        self, negatives: Negatives, label_negatives: LabelNegatives = "all", **options: Unpack[ComputeOptions]
    ) -> None:
        super().__init__(negatives, **options)
        require_label_negatives(label_negatives)
        self.label_negatives = label_negatives

    def forward(
        self,
        x: Tensor,
        y: Tensor,
        negatives: Tensor | None = None,
        labels: Tensor | None = None,
        targets: Tensor | None = None,
    ) -> Tensor:
        """The loss of two views x, y: (N, d), against explicit negatives (M, d) if given.

        Labels (N,) or (N, K), or targets (N, N), say which samples are positives of each other.
        """
        return self.function(x, y, **self.labelled(negatives, labels, targets))

    def labelled(self, negatives: Tensor | None, labels: Tensor | None, targets: Tensor | None) -> dict[str, Any]:
        """All arguments but the views."""
        known = {"labels": labels, "targets": targets, "label_negatives": self.label_negatives}
        return {**self.settings(), **self.common(negatives), **known}

    def extra_repr(self) -> str:
        """The settings; how labels are used only where it isn't the default."""
        extra = "" if self.label_negatives == "all" else f", label_negatives={self.label_negatives}"
        return f"{TwoViewLoss.extra_repr(self)}{extra}{describe_options(**self.options)}"
