"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from fmicl.config import OptimisationOptions

__all__ = ["Optimisation", "build_optimizer", "parameter_groups", "warmup_cosine", "warmup_linear"]


@dataclass(frozen=True)
class Optimisation:
    """Optimiser, highest learning rate, and the lengths of warm-up, epoch and run."""

    optimizer: Literal["sgd", "adamw"] = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    batches_per_epoch: int = 1
    total_batches: int = 1
    accumulate: int = 1
    seed: int = 0
    schedule: Literal["cosine", "linear"] = "cosine"

    @classmethod
    def of(cls, options: OptimisationOptions, batches_per_epoch: int) -> Optimisation:
        """Optimiser and schedule for epochs of this many batches."""
        batches = options.epochs * batches_per_epoch
        warmup = min(options.warmup_epochs, options.epochs / 5) / options.epochs
        return cls(
            optimizer=options.optimizer,
            learning_rate=options.peak_learning_rate,
            weight_decay=options.weight_decay,
            warmup_steps=round(warmup * math.ceil(batches / options.accumulate)),
            batches_per_epoch=batches_per_epoch,
            total_batches=batches,
            accumulate=options.accumulate,
            seed=options.seed,
            schedule=options.schedule,
        )

    @property
    def total_steps(self) -> int:
        """Optimiser steps of the run; the last one may have fewer than `accumulate` batches."""
        return math.ceil(self.total_batches / self.accumulate)

    def step(self, batches: int) -> int:
        """Optimiser steps after this many batches."""
        return self.total_steps if batches == self.total_batches else batches // self.accumulate

    def rate(self, step: int) -> float:
        """Learning rate of a step, the first being 0."""
        factor = warmup_cosine if self.schedule == "cosine" else warmup_linear
        return self.learning_rate * factor(step, self.warmup_steps, self.total_steps)


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 1/warmup to 1, then (1 + cos(pi t)) / 2 with t from 0 to 1.

    Example:
        >>> [round(warmup_cosine(step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warmup) / max(1, total - warmup))))


def warmup_linear(step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 1/warmup to 1, then 1 - t with t from 0 to 1.

    Example:
        >>> [round(warmup_linear(step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    return 1 - min(1.0, (step - warmup) / max(1, total - warmup))


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: weights with weight decay, and biases and normalisation parameters (one dimension) without.

    Example:
        >>> groups = parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (3, 0.0)]
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def build_optimizer(module: nn.Module, optimisation: Optimisation) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, or AdamW; on a GPU fused, one kernel for all weights."""
    groups = parameter_groups(module, optimisation.weight_decay)
    fused = all(parameter.is_cuda for parameter in module.parameters())
    if optimisation.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=optimisation.learning_rate, fused=fused)
    return torch.optim.SGD(groups, lr=optimisation.learning_rate, momentum=0.9, fused=fused)
