"""Theorem 6, the estimation error: the objective's error on a batch of N, beside the theorem's rate."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.divergences import divergence
from fmicl.reproduce import paper
from fmicl.reproduce.experiment import Experiment, Outcomes, Result, Row, Scale, Table, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot
from fmicl.theory import estimation_error

SIZES = (16, 32, 64, 128, 256, 512)
REPETITIONS = 100
DIMENSION = 8
DELTA = 0.05
GRID = 20001


def cosine_law(d: int, gamma: float) -> tuple[Tensor, Tensor]:
    r"""Grid of cosines of positive pairs, and their probabilities, under the paper's assumption.

    .. math:: p(c) \propto (1 - c^2)^{(d - 3) / 2} e^{2 \gamma c}

    gamma = 0 is the law of two independent, uniform points.

    Example:
        >>> cosine, weight = cosine_law(3, 0.0)         # uniform for d = 3
        >>> round(float((weight * cosine.square()).sum()), 4)
        0.3333
    """
    angle = (torch.arange(GRID, dtype=torch.float64) + 0.5) * (math.pi / GRID)
    logits = (d - 2) * angle.sin().log() + 2 * gamma * angle.cos()
    return angle.cos(), logits.softmax(dim=0)


def exact_objective(name: str, d: int, gamma: float = 1.0) -> float:
    """The objective's expectation: positive pairs by the assumption, negative pairs uniform, by quadrature."""
    f = divergence(name)
    cosine, positive = cosine_law(d, gamma)
    _, negative = cosine_law(d, 0.0)
    r = 2 * gamma * (cosine - 1)
    return float((positive * f.score(r)).sum() - (negative * f.penalty(r)).sum())


def batch_objective(name: str, n: int, d: int, repetitions: int, *, gamma: float = 1.0, seed: int = 0) -> Tensor:
    """The objective on batches of n pairs, (repetitions,); negatives are all pairs of different samples of a batch."""
    f, generator = divergence(name), torch.Generator().manual_seed(seed)
    grid, weight = cosine_law(d, gamma)
    found = []
    for _ in range(repetitions):
        cosine = grid[torch.multinomial(weight, n, replacement=True, generator=generator)]
        x = torch.nn.functional.normalize(torch.randn(n, d, dtype=torch.float64, generator=generator), dim=1)
        others = (x @ x.T)[~torch.eye(n, dtype=torch.bool)]
        found.append(f.score(2 * gamma * (cosine - 1)).mean() - f.penalty(2 * gamma * (others - 1)).mean())
    return torch.stack(found)


@register_experiment("estimation", summary="Error of the empirical objective against N, beside the theorem's rate.")
class Estimation(Experiment):
    """Computed from samples of the paper's model, without training."""

    paper = "Theorem 6"

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:  # noqa: ARG002
        """The error that 95 % of batches stay below, its slope, and the theorem's deviation term."""
        rows: list[Row] = []
        errors, bounds = [], []
        for label, options in paper.DIVERGENCES.items():
            name = options["divergence"]
            exact = exact_objective(name, DIMENSION)
            measured = [
                float((batch_objective(name, n, DIMENSION, REPETITIONS) - exact).abs().quantile(1 - DELTA))
                for n in SIZES
            ]
            bound = [estimation_error(name, n, DELTA) for n in SIZES]
            slope = _slope(SIZES, measured)
            rows.append((label, *(f"{error:.4f}" for error in measured), slope, f"{bound[-1] / measured[-1]:.0f}"))
            errors.append(Line(label, tuple(map(float, SIZES)), tuple(measured)))
            bounds.append(Line(label, tuple(map(float, SIZES)), tuple(bound), "--"))
        head = ("N", *map(str, SIZES), "slope", f"bound / error at {SIZES[-1]}")
        title = f"error of the objective that {100 * (1 - DELTA):.0f} % of batches stay below (d = {DIMENSION})"
        panels = (
            Panel("measured", "N", "error", tuple(errors), log_x=True, log_y=True),
            Panel("the theorem's deviation term", "N", "bound", tuple(bounds), log_x=True, log_y=True),
        )
        caption = "Error of the objective on N samples, and the theorem's bound for a fixed encoder."
        return Result((Table(title, head, tuple(rows)),), (Plot("estimation", caption, panels),))


def _slope(x: tuple[int, ...], y: list[float]) -> float:
    """Slope of a least-squares line in logarithms."""
    u = torch.tensor(x, dtype=torch.float64).log()
    v = torch.tensor(y, dtype=torch.float64).log()
    return float(((u - u.mean()) * (v - v.mean())).sum() / (u - u.mean()).square().sum())
