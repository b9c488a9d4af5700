"""L-BFGS that asks a GPU for little: there, what takes time is to ask, not to compute.

torch's own starts several kernels, and waits for a number or two, for each past step in each iteration. Here the inner
products that an iteration adds are one matrix product and one wait; the recursion over past steps runs on them alone,
in Python (Chen, Wang and Zhou, "Large-scale L-BFGS using MapReduce", 2014).
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
"""A point (P,) to its loss, a scalar, and its gradient (P,)."""

_GRADIENT = 1e-5  # largest entry at which a gradient counts as zero
_CHANGE = 1e-9  # of the loss, or of every entry of the point, which counts as none
_DESCENT, _CURVATURE = 1e-4, 0.9  # Wolfe's two conditions
_NOISE = 2e-7  # relative, of a loss in float32
_TRIALS = 20


@torch.no_grad()
def minimise(objective: Objective, start: Tensor, *, iterations: int, memory: int = 20) -> tuple[Tensor, bool]:
    """The point at which a smooth, convex function is least, and whether it was reached within the iterations.

    Args:
        objective: gives loss and gradient. In its coordinates the Hessian should be of the order of 1.
        start: where to begin, (P,).
        iterations: at most so many.
        memory: past steps that the next one is made of.

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
                return point, True  # nothing lower along the gradient itself: that is all the digits there are
            past.forget()
            continue
        point, moved = found.point, found.moved
        past.add(found.length * direction, found.gradient - gradient, found.gradient)
        settled = moved <= _CHANGE or abs(found.value - value) < _CHANGE
        gradient, value, largest = found.gradient, found.value, found.largest
        if settled:
            return point, True
    return point, largest <= _GRADIENT


class _Found(NamedTuple):
    """Where a search along a direction ended."""

    length: float
    point: Tensor
    value: float
    gradient: Tensor
    largest: float
    moved: float


def _search(objective: Objective, point: Tensor, direction: Tensor, gradient: Tensor, value: float) -> _Found | None:
    """A step that goes down enough, to where it is flatter, by doubling and halving; None if there is none."""
    length, low, high = 1.0, 0.0, math.inf
    slope0, reach = direction @ gradient, direction.abs().max()
    for _ in range(_TRIALS):
        there = point + length * direction
        loss, new = objective(there)
        told = torch.stack([loss, direction @ new, new.abs().max(), slope0, reach]).tolist()
        here, slope, largest, slope_before, extent = told
        if not slope_before < 0:
            return None
        if not here <= value + _DESCENT * length * slope_before + _NOISE * abs(value):  # not a number is not below
            high = length
        elif slope < _CURVATURE * slope_before:
            low = length
        else:
            return _Found(length, there, here, new, largest, length * extent)
        length = (low + high) / 2 if high < math.inf else 2 * low
    return None


class _Past:
    """The last steps, changes of the gradient and the gradient, as rows of one matrix, and their inner products."""

    def __init__(self, memory: int, gradient: Tensor) -> None:
        self.memory = memory
        self.rows = gradient.new_zeros(2 * memory + 1, gradient.numel())
        self.products = [[0.0] * (2 * memory + 1) for _ in range(2 * memory + 1)]
        self.steps: list[int] = []  # places of those that are there, the oldest first
        self.rows[-1] = gradient

    def forget(self) -> None:
        """All but the gradient."""
        self.steps.clear()

    def add(self, step: Tensor, change: Tensor, gradient: Tensor) -> None:
        """A step that was made; the oldest goes if there are too many."""
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
        if self.products[place][self.memory + place] > 0:  # else it says nothing of the curvature
            self.steps.append(place)

    def direction(self) -> Tensor:
        """Where to go: minus the gradient times what past steps tell of the inverse Hessian."""
        if not self.steps:
            return -self.rows[-1]
        factors = [0.0] * len(self.products)  # of the rows, in the direction
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
        """Of the sum of rows with these factors, with one of them."""
        return float(sum(map(mul, factors, self.products[row])))
