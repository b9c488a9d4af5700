"""Base class of the loss modules."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from fmicl.divergences import Divergence
from fmicl.losses.pairing import ComputeOptions, check_options, describe_options
from fmicl.losses.similarities import Similarity
from fmicl.losses.targets import LabelNegatives, require_label_negatives
from fmicl.utils.live_objects import remember
from fmicl.utils.validation import Negatives, require_negatives


class ContrastiveLoss(nn.Module):
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

    def common(self, negatives: Tensor | None) -> dict[str, Any]:
        """The arguments that all functions of `fmicl.functional` take; explicit negatives (M, d) replace the others."""
        return {"negatives": self.negatives if negatives is None else negatives, **self.options}

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.settings()}{describe_options(**self.options)}"

    def settings(self) -> str:
        """The settings of this loss, for `repr`."""
        return f"negatives={self.negatives}"


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

    def labelled(self, negatives: Tensor | None, labels: Tensor | None, targets: Tensor | None) -> dict[str, Any]:
        """`common`, with the labels."""
        known = {"labels": labels, "targets": targets, "label_negatives": self.label_negatives}
        return {**self.common(negatives), **known}

    def extra_repr(self) -> str:
        """The settings; how labels are used only where it isn't the default."""
        extra = "" if self.label_negatives == "all" else f", label_negatives={self.label_negatives}"
        return f"{self.settings()}{extra}{describe_options(**self.options)}"
