"""L-BFGS with few host-device synchronisations.

In each iteration, torch.optim.LBFGS launches several kernels and synchronises once or twice per stored step; on a GPU
this takes most of the time. Here each iteration computes its new inner products as one matrix product with one
synchronisation, and runs the two-loop recursion on these numbers in Python (Chen, Wang and Zhou, "Large-scale L-BFGS
using MapReduce", 2014).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import mul
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["minimise"]

Objective = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Maps a point (P,) to its loss, a scalar, and its gradient (P,)."""

_GRADIENT = 1e-5  # converged if no entry of the gradient is larger
_CHANGE = 1e-9  # converged if neither the loss nor any entry of the point changes by more
_DESCENT, _CURVATURE = 1e-4, 0.9  # constants of the Wolfe conditions
_NOISE = 2e-7  # relative rounding error of a float32 loss
_TRIALS = 20  # points per line search


@torch.no_grad()
def minimise(objective: Objective, start: Tensor, *, iterations: int, memory: int = 20) -> tuple[Tensor, bool]:
    """Minimise a smooth, convex function; returns the minimum and whether the iterations converged.

    Args:
        objective: loss and gradient, scaled so that the Hessian is of order 1.
        start: initial point (P,).
        iterations: iteration limit.
        memory: number of stored steps.

    Example:
        >>> bowl = torch.tensor([1.0, 4.0])
        >>> point, there = minimise(lambda p: ((bowl * p**2).sum() / 2, bowl * p), torch.ones(2), iterations=20)
        >>> bool(point.abs().max() < 1e-5), there
        (True, True)
    """
    point = start
    loss, gradient = objective(point)
    value, largest = torch.stack([loss, gradient.abs().max()]).tolist()
    past = _Past(memory, gradient)
    for _ in range(iterations):
        if largest <= _GRADIENT:
            return point, True
        direction = past.direction()
        found = _search(objective, point, direction, gradient, value)
        if found is None:
            if not past.steps:
                return point, True  # no descent along the gradient itself: the limit of the precision
            past.forget()
            continue
        point, moved = found.point, found.moved
        past.add(found.length * direction, found.gradient - gradient, found.gradient)
        unchanged = moved <= _CHANGE or abs(found.value - value) < _CHANGE
        gradient, value, largest = found.gradient, found.value, found.largest
        if unchanged:
            return point, True
    return point, largest <= _GRADIENT


class _Found(NamedTuple):
    """Result of a line search."""

    length: float
    point: Tensor
    value: float
    gradient: Tensor
    largest: float
    moved: float


def _search(objective: Objective, point: Tensor, direction: Tensor, gradient: Tensor, value: float) -> _Found | None:
    """Line search by doubling and bisection for the weak Wolfe conditions; None if there is no such step."""
    length, low, high = 1.0, 0.0, math.inf
    slope0, reach = direction @ gradient, direction.abs().max()
    for _ in range(_TRIALS):
        there = point + length * direction
        loss, new = objective(there)
        numbers = torch.stack([loss, direction @ new, new.abs().max(), slope0, reach]).tolist()
        here, slope, largest, slope_before, extent = numbers
        if not slope_before < 0:
            return None
        if not here <= value + _DESCENT * length * slope_before + _NOISE * abs(value):  # so that NaN counts as too high
            high = length
        elif slope < _CURVATURE * slope_before:
            low = length
        else:
            return _Found(length, there, here, new, largest, length * extent)
        length = (low + high) / 2 if high < math.inf else 2 * low
    return None


class _Past:
    """Stored steps, gradient changes and the gradient as rows of one matrix, with all their inner products."""

    def __init__(self, memory: int, gradient: Tensor) -> None:
        self.memory = memory
        self.rows = gradient.new_zeros(2 * memory + 1, gradient.numel())
        self.products = [[0.0] * (2 * memory + 1) for _ in range(2 * memory + 1)]
        self.steps: list[int] = []  # rows of the stored steps, oldest first
        self.rows[-1] = gradient

    def forget(self) -> None:
        """Discard all steps."""
        self.steps.clear()

    def add(self, step: Tensor, change: Tensor, gradient: Tensor) -> None:
        """Store a step, instead of the oldest if the memory is full."""
        if len(self.steps) == self.memory:
            self.steps.pop(0)
        place = next(place for place in range(self.memory) if place not in self.steps)
        new = [place, self.memory + place, 2 * self.memory]
        self.rows[place], self.rows[self.memory + place], self.rows[-1] = step, change, gradient
        columns = (self.rows[new] @ self.rows.T).tolist()
        for row, values in zip(new, columns, strict=True):
            self.products[row] = values
            for other, value in enumerate(values):
                self.products[other][row] = value
        if self.products[place][self.memory + place] > 0:  # positive curvature; otherwise the step is unusable
            self.steps.append(place)

    def direction(self) -> Tensor:
        """The search direction: minus the approximate inverse Hessian times the gradient, by the two-loop recursion."""
        if not self.steps:
            return -self.rows[-1]
        factors = [0.0] * len(self.products)  # coefficients of the rows in the direction
        factors[-1] = -1.0
        shares: dict[int, float] = {}
        for place in reversed(self.steps):
            change = self.memory + place
            shares[place] = self._product(factors, place) / self.products[place][change]
            factors[change] -= shares[place]
        last, change = self.steps[-1], self.memory + self.steps[-1]
        scale = self.products[last][change] / self.products[change][change]
        factors = [scale * factor for factor in factors]
        for place in self.steps:
            change = self.memory + place
            factors[place] += shares[place] - self._product(factors, change) / self.products[place][change]
        return torch.tensor(factors, dtype=self.rows.dtype).to(self.rows.device) @ self.rows

    def _product(self, factors: list[float], row: int) -> float:
        """Inner product of the linear combination of rows with one row."""
        return float(sum(map(mul, factors, self.products[row])))
