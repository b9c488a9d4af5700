"""Base class of the loss modules."""

from __future__ import annotations

from typing import Any, Unpack

from torch import Tensor, nn

from fmicl.losses.pairing import ComputeOptions, check_options, describe_options
from fmicl.utils.validation import Negatives, require_negatives

__all__ = ["ContrastiveLoss"]


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

    def common(self, negatives: Tensor | None) -> dict[str, Any]:
        """The arguments that all functions of `fmicl.functional` take; explicit negatives (M, d) replace the others."""
        return {"negatives": self.negatives if negatives is None else negatives, **self.options}

    def extra_repr(self) -> str:
        """The settings."""
        return f"{self.settings()}{describe_options(**self.options)}"

    def settings(self) -> str:
        """The settings of this loss, for `repr`."""
        return f"negatives={self.negatives}"
