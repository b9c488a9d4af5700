"""Support checks of the fused layers."""

from __future__ import annotations

from torch import nn

from fmicl.models.norms import RunningStatisticsNorm


def is_supported_norm(norm: object) -> bool:
    """Whether `fmicl.models.fast.norm` supports the module: affine batch normalisation with running statistics."""
    if isinstance(norm, RunningStatisticsNorm):
        return norm.affine and not list(norm.children())
    if type(norm) not in (nn.BatchNorm1d, nn.BatchNorm2d):
        return False  # such as timm's subclasses, which include an activation
    assert isinstance(norm, nn.BatchNorm1d | nn.BatchNorm2d)
    return norm.affine and norm.track_running_stats and norm.momentum is not None
