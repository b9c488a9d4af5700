"""Options of the evaluation of image encoders."""

from __future__ import annotations

from dataclasses import dataclass

from fmicl.utils.options import check_fields, option, require_at_least_zero, require_positive_fields


@dataclass(frozen=True)
class EvaluationOptions:
    """How the features of an image encoder are evaluated.

    Raises:
        ValueError: a value has the wrong type or is out of range.

    Example:
        >>> EvaluationOptions(k=0)
        Traceback (most recent call last):
        ...
        ValueError: k must be positive, but it is 0
    """

    k: int = option(200, "Neighbours in the k-NN classifier.")
    monitor_every: int = option(
        10, "Epochs between two k-NN evaluations during training (0: only at the end).", role="machine"
    )
    probe_views: int = option(
        0,
        "Random crops and flips of each training image for a second linear probe, which is fitted to these as well "
        "(0: no second probe).",
    )
    baselines: bool = option(False, "Also evaluate raw pixels and the untrained encoder.")

    def __post_init__(self) -> None:
        check_fields(self)
        require_positive_fields(self, "k")
        require_at_least_zero(self, "monitor_every", "probe_views")
