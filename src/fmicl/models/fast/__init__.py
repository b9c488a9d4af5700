"""GPU-optimised training of ResNets and projection heads: fused kernels and CUDA graphs.

Results are the same up to rounding. Parameters, buffers and their names don't change, and in evaluation mode or on
another device the network's own forward pass runs.
"""

from fmicl.models.fast.graphs import CapturedStep, capture_graph
from fmicl.models.fast.heads import optimise_head
from fmicl.models.fast.resnet import is_supported, optimise_resnet

__all__ = ["CapturedStep", "capture_graph", "is_supported", "optimise_head", "optimise_resnet"]
