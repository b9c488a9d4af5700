"""Settings that are small enough for a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fmicl.config import Settings, recipe
from fmicl.data.augmentations.views import IMAGENET_MEAN, IMAGENET_STD

# What makes each recipe small enough for a test: little data, and a narrower head and a smaller sibling of its encoder.
SMALL: dict[str, dict[str, Any]] = {
    "digits": {"batch_size": 256},
    "cifar10": {"batch_size": 15},
    "stl10": {"batch_size": 12, "encoder": "resnet18", "size": 64},
    "tinyimagenet": {"batch_size": 6, "encoder": "resnet18"},
    "imagenet": {"batch_size": 6, "encoder": "vit_tiny_patch16_224", "depth": 2, "size": 32, "memory_gib": 0.0},
    "imagenet_mocov3": {"batch_size": 6, "encoder": "vit_tiny_patch16_224", "depth": 1, "size": 32, "memory_gib": 0.0},
    "images": {
        "batch_size": 4, "size": 32, "encoder": "resnet18", "learning_rate": 0.1, "baselines": False,
        "mean": IMAGENET_MEAN, "std": IMAGENET_STD,
    },
}  # fmt: skip


def small(name: str, folder: Path | None, **changes: Any) -> Settings:
    """A recipe for a few steps on a small data set."""
    common = {"epochs": 2, "workers": 0, "checksum": False, "hidden": 32, "dim": 16, "device": "cpu"}
    return recipe(name, data_dir=folder, **{**common, **SMALL[name], **changes})


def digits(**changes: Any) -> Settings:
    return small("digits", None, **{"baselines": False, "monitor_every": 0, **changes})
