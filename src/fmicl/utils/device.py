"""The device of this process."""

from __future__ import annotations

import os

import torch


def pick_device(kind: str = "auto") -> torch.device:
    """The device of this process: the one asked for, or for "auto" a GPU if there is one.

    Raises:
        ValueError: an unknown kind, or torch can't use such a device on this machine.

    Example:
        >>> pick_device("cpu")
        device(type='cpu')
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    if kind == "auto":
        kind = next(name for name, there in available.items() if there)
    if kind not in available:
        raise ValueError(f"unknown device {kind!r}; choose one of auto, {', '.join(available)}")
    if not available[kind]:
        raise ValueError(f"device {kind} was requested, but torch finds none on this machine")
    if kind != "cuda":
        return torch.device(kind)
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", 0))))


def describe_device(device: str) -> str:
    """The device, with the model of a GPU."""
    return f"{device} ({torch.cuda.get_device_name(device)})" if device.startswith("cuda") else device
