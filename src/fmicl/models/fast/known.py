"""What the faster networks ask before they take over."""

from __future__ import annotations

from torch import Tensor, nn

from fmicl.models.norms import RunningStatisticsNorm

__all__ = ["on_gpu", "plain_norm"]


def on_gpu(x: Tensor) -> bool:
    """Whether Triton's programs run where a tensor is: on a GPU, or in its interpreter."""
    if x.device.type == "cuda":
        return True
    from fmicl.kernels.triton import interpreting

    return interpreting() and x.device.type == "cpu"


def plain_norm(norm: object) -> bool:
    """Whether `fmicl.models.fast.norm` knows the module: batch normalisation, torch's own or ours, with all it can hold."""
    if isinstance(norm, RunningStatisticsNorm):
        return norm.affine and not list(norm.children())
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return False  # timm's own, which hold their activation, are subclasses
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    return norm.affine and norm.track_running_stats and norm.momentum is not None
