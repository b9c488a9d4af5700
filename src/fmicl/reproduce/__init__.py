"""The paper's tables and figures: one file each, run by `fmicl reproduce NAME`."""

from fmicl.reproduce import (
    alpha,
    batch_size,
    curves,
    estimation,
    gaussian,
    imagenet,
    objectives,
    relations,
    similarity,
    simplex,
    uniformity,
)
from fmicl.reproduce.experiment import EXPERIMENTS, Experiment, Scale, register_experiment

__all__ = ["EXPERIMENTS", "Experiment", "Scale", "register_experiment"]
_ = (  # registered by import, in the order of the paper
    objectives, imagenet, similarity, uniformity, batch_size, alpha, curves, gaussian, simplex, estimation, relations,
)  # fmt: skip
