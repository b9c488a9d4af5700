"""Theorem 4 and Figure 5: points on the sphere that minimise each penalty, for N <= d + 1 and beyond."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fmicl.divergences import Divergence, divergence, list_divergences
from fmicl.reproduce.experiment import Experiment, Outcomes, Result, Row, Scale, Table, register_experiment
from fmicl.reproduce.plots import Line, Panel, Plot

SIZES = ((4, 3), (8, 8), (16, 15), (6, 3), (12, 3), (16, 8))
"""(N, d): three with N <= d + 1, then an octahedron's, an icosahedron's and a cross-polytope's numbers of points."""
STARTS = 3
"""Random starts of each minimisation; the lowest energy counts."""


def minimise_energy(f: Divergence, n: int, d: int, *, steps: int = 200, starts: int = STARTS, seed: int = 0) -> Tensor:
    r"""n unit vectors in R^d that minimise :math:`\sum_{i<j} h(|x_i - x_j|^2)`, h(t) = penalty(-t).

    Args:
        f: the divergence; gamma = mu = 1.
        n: number of points.
        d: dimension.
        steps: iterations of L-BFGS.
        starts: random starts, of which the best is returned.
        seed: of the starts.

    Returns:
        The points, (n, d), in float64.

    Example:
        >>> points = minimise_energy(divergence("kl"), 3, 2)
        >>> torch.pdist(points)                                     # an equilateral triangle
        tensor([1.7321, 1.7321, 1.7321], dtype=torch.float64)
    """
    generator = torch.Generator().manual_seed(seed)
    found: list[tuple[float, Tensor]] = []
    for _ in range(starts):
        raw = torch.randn(n, d, dtype=torch.float64, generator=generator).requires_grad_()
        optimizer = torch.optim.LBFGS([raw], max_iter=steps, tolerance_grad=1e-12, tolerance_change=1e-14,
                                      line_search_fn="strong_wolfe")  # fmt: skip

        def closure(raw: Tensor = raw, optimizer: torch.optim.LBFGS = optimizer) -> Tensor:
            optimizer.zero_grad()
            points = torch.nn.functional.normalize(raw, dim=1)
            cosine = (points @ points.T)[torch.triu(torch.ones(n, n, dtype=torch.bool), 1)]
            energy = f.penalty(2 * cosine - 2).sum()
            energy.backward()
            return energy

        energy = float(optimizer.step(closure).detach())
        found.append((energy, torch.nn.functional.normalize(raw.detach(), dim=1)))
    return min(found, key=lambda pair: pair[0])[1]


@register_experiment("simplex", summary="N points on the sphere under each penalty, N <= d + 1 and beyond.")
class Simplex(Experiment):
    """Minimisers of the negatives' cost; computed in seconds, without training."""

    paper = "Theorem 4 and Figure 5"

    def present(self, outcomes: Outcomes, scale: Scale) -> Result:  # noqa: ARG002
        """Smallest and largest pair distance of each minimiser, beside the regular simplex's where there is one."""
        names = list_divergences()
        rows: list[Row] = []
        expected = (f"{math.sqrt(2 * n / (n - 1)):.3f}" if n <= d + 1 else "" for n, d in SIZES)
        rows.append(("regular simplex", *expected))
        panels: dict[tuple[int, int], list[Line]] = {size: [] for size in SIZES}
        for name in names:
            entries = []
            for n, d in SIZES:
                distances = torch.pdist(minimise_energy(divergence(name), n, d)).sort().values
                entries.append(f"{float(distances[0]):.3f} to {float(distances[-1]):.3f}")
                share = torch.linspace(0, 100, len(distances)).tolist()
                panels[n, d].append(Line(name, tuple(share), tuple(distances.tolist())))
            rows.append((name, *entries))
        head = ("smallest and largest distance", *(f"N = {n}, d = {d}" for n, d in SIZES))
        plot = Plot(
            "simplex",
            "Sorted pair distances of the points that minimise the negatives' cost (gamma = mu = 1).",
            tuple(
                Panel(f"N = {n}, d = {d}", "share of pairs, percent", "distance", tuple(lines))
                for (n, d), lines in panels.items()
            ),
        )
        return Result((Table("Minimisers on the sphere", head, tuple(rows)),), (plot,))
