"""Optimiser and learning-rate schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fmicl.config import OptimisationOptions


@dataclass(frozen=True)
class Optimisation:
    """Optimiser, highest learning rate, and the lengths of warm-up, epoch and run."""

    optimizer: Literal["sgd", "adamw", "lars"] = "sgd"
    learning_rate: float = 0.1
    weight_decay: float = 1e-4
    warmup_steps: int = 0
    batches_per_epoch: int = 1
    total_batches: int = 1
    accumulate: int = 1
    seed: int = 0
    schedule: Literal["cosine", "linear"] = "cosine"
    scalar_factor: float = 1.0
    """Factor of the learning rate of an objective's learned scalars, see `parameter_groups`."""

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
            scalar_factor=1.0 if options.optimizer == "adamw" else 1 / options.batch_size,
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
        return self.learning_rate * rate_factor(self.schedule, step, self.warmup_steps, self.total_steps)


def rate_factor(schedule: Literal["cosine", "linear"], step: int, warmup: int, total: int) -> float:
    """Factor of the learning rate: linear from 1/warmup to 1, then (1 + cos(pi t)) / 2 or 1 - t with t from 0 to 1.

    Example:
        >>> [round(rate_factor("cosine", step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146]
        >>> [round(rate_factor("linear", step, 2, 6), 3) for step in range(6)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    """
    if step < warmup:
        return (step + 1) / warmup
    t = min(1.0, (step - warmup) / max(1, total - warmup))
    return 0.5 * (1 + math.cos(math.pi * t)) if schedule == "cosine" else 1 - t


def parameter_groups(module: nn.Module, weight_decay: float, scalar_factor: float = 1.0) -> list[dict[str, Any]]:
    """Weights with weight decay, biases and normalisation parameters (one dimension) without, and scalars.

    Learned scalars are those of the objective, such as SigLIP's scale and bias. Each pair of the batch adds to their
    gradient, which is up to N times as large as that of an embedding's direction. With SGD their learning rate is
    therefore divided by N (the group's "factor"); Adam normalises gradients by itself.

    Example:
        >>> groups = parameter_groups(nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), 0.1)
        >>> [(len(group["params"]), group["weight_decay"]) for group in groups]
        [(1, 0.1), (3, 0.0)]
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim == 1], "weight_decay": 0.0},
        {"params": [p for p in trained if p.ndim == 0], "weight_decay": 0.0, "factor": scalar_factor},
    ]
    return [group for group in groups if group["params"]]


class LARS(torch.optim.Optimizer):
    r"""SGD with momentum whose gradients are scaled layer by layer (You, Gitman and Ginsburg, 2017).

    .. math:: v \leftarrow m v + s (g + \lambda w), \quad w \leftarrow w - \mathrm{lr}\, v, \qquad
        s = \min\Big(\frac{\eta |w|}{\mathrm{lr}\, (|g| + \lambda |w|)}, 1\Big)

    with s = 1 where weight or gradient are 0. Groups with `scale` False, meant for biases and normalisation parameters,
    have s = 1 always. The bound s <= 1 makes it SGD where that step is smaller (LARC), as in solo-learn's
    configurations for CIFAR-10, whose eta = 0.02 is the default. Nothing is read on the host.

    Args:
        params: parameters or groups.
        lr: learning rate.
        momentum: m.
        weight_decay: lambda.
        eta: trust coefficient.
        scale: whether s is applied.

    Example:
        >>> weight = nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> weight.grad = torch.tensor([[0.0, 10.0]])
        >>> LARS([weight], lr=0.1).step()           # s = 0.02 * 5 / (0.1 * 10)
        >>> weight.data
        tensor([[3.0000, 3.9000]])
    """

    def __init__(
        self,
        params: Any,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        eta: float = 0.02,
        scale: bool = True,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "eta": eta, "scale": scale}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One step; a closure, if given, computes gradients and the loss that is returned."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            updates = [weight.grad for weight in weights]
            sizes, gradients = torch._foreach_norm(weights), torch._foreach_norm(updates)
            if group["weight_decay"]:
                updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
            if group["scale"]:
                size, gradient = torch.stack(sizes), torch.stack(gradients)
                trust = group["eta"] * size / (group["lr"] * (gradient + group["weight_decay"] * size))
                scales = torch.where((size > 0) & (gradient > 0), trust.clamp(max=1.0), 1.0)
                updates = list(torch._foreach_mul(updates, list(scales.unbind())))
            velocities = [self._velocity(weight) for weight in weights]
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, updates)
            torch._foreach_add_(weights, velocities, alpha=-group["lr"])
        return loss

    def _velocity(self, weight: Tensor) -> Tensor:
        state = self.state[weight]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(weight)
        velocity: Tensor = state["velocity"]
        return velocity


def build_optimizer(module: nn.Module, optimisation: Optimisation) -> torch.optim.Optimizer:
    """SGD with momentum 0.9, AdamW, or LARS; on a GPU the first two are fused, one kernel for all weights."""
    groups = parameter_groups(module, optimisation.weight_decay, optimisation.scalar_factor)
    if optimisation.optimizer == "lars":
        scaled = [{**group, "scale": group["params"][0].ndim > 1} for group in groups]
        return LARS(scaled, optimisation.learning_rate)
    fused = all(parameter.is_cuda for parameter in module.parameters())
    if optimisation.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=optimisation.learning_rate, fused=fused)
    return torch.optim.SGD(groups, lr=optimisation.learning_rate, momentum=0.9, fused=fused)
