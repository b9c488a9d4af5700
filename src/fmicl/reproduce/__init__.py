"""The paper's tables and figures: one file each, run by `fmicl reproduce NAME`."""

from fmicl.reproduce import (
    alpha,
    batch_size,
    curves,
    estimation,
    imagenet,
    objectives,
    relations,
    simplex,
    uniformity,
)
from fmicl.reproduce.experiment import EXPERIMENTS, Experiment, Scale, register_experiment

__all__ = ["EXPERIMENTS", "Experiment", "Scale", "register_experiment"]
_ = (
    objectives,
    imagenet,
    uniformity,
    batch_size,
    alpha,
    curves,
    simplex,
    estimation,
    relations,
)  # registered by import
