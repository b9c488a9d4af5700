"""The paper's tables and figures: one file each, run by `fmicl reproduce NAME`."""

# Registered by import, from its main table to its appendix.
# isort: off
from fmicl.reproduce import objectives, imagenet, similarity, uniformity, batch_size, alpha, curves, gaussian
from fmicl.reproduce import simplex, estimation, relations

# isort: on
from fmicl.reproduce.experiment import EXPERIMENTS, Experiment, Scale, register_experiment

__all__ = ["EXPERIMENTS", "Experiment", "Scale", "register_experiment"]
_ = objectives, imagenet, similarity, uniformity, batch_size, alpha, curves, gaussian, simplex, estimation, relations
