"""Options of the evaluation of image encoders."""

from __future__ import annotations

from dataclasses import dataclass

from fmicl.utils.options import Options, option


@dataclass(frozen=True)
class EvaluationOptions(Options):
    """How the features of an image encoder are evaluated.

    Example:
        >>> EvaluationOptions(k=0)
        Traceback (most recent call last):
        ...
        ValueError: k must be above 0, but it is 0
    """

    k: int = option(200, "Neighbours in the k-NN classifier.", above=0)
    monitor_every: int = option(
        10, "Epochs between two k-NN evaluations during training (0: only at the end).", role="machine", at_least=0
    )
    probe_views: int = option(
        0,
        "Random crops and flips of each training image for a second linear probe, which is fitted to these as well "
        "(0: no second probe).",
        at_least=0,
    )
    baselines: bool = option(False, "Also evaluate raw pixels and the untrained encoder.")
