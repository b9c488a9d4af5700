"""L-BFGS against closed forms, torch.optim.LBFGS and the conditions of a minimum."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fmicl.evaluation import lbfgs
from fmicl.evaluation.lbfgs import minimise


def quadratic(size: int, condition: float, seed: int) -> tuple[Tensor, Tensor]:
    """A symmetric matrix with eigenvalues from 1 / condition to 1, and a point."""
    generator = torch.Generator().manual_seed(seed)
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
    values = torch.logspace(0, -math.log10(condition), size, dtype=torch.float64)
    return (basis * values) @ basis.T, torch.randn(size, generator=generator, dtype=torch.float64)


@given(size=st.integers(1, 40), condition=st.sampled_from([1.0, 10.0, 1000.0]), seed=st.integers(0, 100))
@settings(deadline=None)
def test_a_quadratic_is_solved(size: int, condition: float, seed: int) -> None:
    matrix, target = quadratic(size, condition, seed)
    losses: list[float] = []

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        gradient = matrix @ (point - target)
        losses.append(float((point - target) @ gradient) / 2)
        return (point - target) @ gradient / 2, gradient

    point, converged = minimise(objective, torch.zeros(size, dtype=torch.float64), iterations=400)
    assert converged
    # it also stops when the loss no longer changes; the worst of these cases reach 5e-4 and 4.5e-6
    value, gradient = objective(point)
    assert float(gradient.abs().max()) < 1e-3
    assert float(value) < 1e-5
    assert losses[-1] <= losses[0]


def logistic(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(300, 8, generator=generator) * torch.logspace(0, -2, 8)
    return x, (x @ torch.randn(8, generator=generator) + 0.1 * torch.randn(300, generator=generator) > 0).float()


@pytest.mark.parametrize("memory", [1, 3, 20])
def test_torch_optim_lbfgs_finds_no_lower_loss(memory: int) -> None:
    x, y = logistic(0)

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        logits = x @ point
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, y) + 5e-3 * point.square().sum()
        return loss, x.T @ (logits.sigmoid() - y) / len(x) + 1e-2 * point

    point, converged = minimise(objective, torch.zeros(8), iterations=500, memory=memory)
    assert converged
    theirs = torch.zeros(8)
    solver = torch.optim.LBFGS([theirs], max_iter=500, line_search_fn="strong_wolfe")

    @torch.no_grad()
    def closure() -> float:
        loss, theirs.grad = objective(theirs)
        return float(loss)

    solver.step(closure)
    assert float(objective(point)[0]) <= float(objective(theirs)[0]) + 1e-6


def test_each_iteration_synchronises_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once per point of the line search, once for the inner products."""
    matrix, target = quadratic(30, 1000.0, 0)
    synchronisations = trials = 0
    usual = Tensor.tolist

    def counted(tensor: Tensor) -> list[float]:
        nonlocal synchronisations
        synchronisations += 1
        found: list[float] = usual(tensor)
        return found

    monkeypatch.setattr(Tensor, "tolist", counted)
    for name in ("__bool__", "__float__", "item"):
        monkeypatch.setattr(Tensor, name, lambda *_: pytest.fail("another synchronisation"))

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal trials
        trials += 1
        gradient = matrix @ (point - target)
        return (point - target) @ gradient / 2, gradient

    assert minimise(objective, torch.zeros(30, dtype=torch.float64), iterations=200)[1]
    assert trials < 120
    assert synchronisations <= 2 * trials


def test_a_step_that_is_too_long_is_shortened() -> None:
    """Where the function is undefined, or increases after the full step."""
    seen: list[float] = []

    def objective(point: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(float(point))
        return (point - point.log()).sum(), 1 - 1 / point  # minimum at 1, undefined below 0

    point, converged = minimise(objective, torch.tensor([20.0]), iterations=100)
    assert converged
    assert float(point) == pytest.approx(1.0, abs=1e-3)
    seen.clear()
    point, converged = minimise(objective, torch.tensor([0.05]), iterations=100)
    assert converged
    assert float(point) == pytest.approx(1.0, abs=1e-3)
    assert max(seen) > 1


def test_a_step_of_negative_curvature_replaces_no_other() -> None:
    """Rounding can make the curvature along a step negative."""
    past = lbfgs._Past(3, torch.ones(2))
    for k in range(1, 4):
        past.add(torch.tensor([float(k), 0.0]), torch.tensor([float(k), 0.0]), torch.ones(2))
    past.add(torch.tensor([9.0, 0.0]), torch.tensor([-9.0, 0.0]), torch.ones(2))
    past.add(torch.tensor([5.0, 0.0]), torch.tensor([5.0, 0.0]), torch.ones(2))
    assert past.rows[past.steps, 0].tolist() == [2.0, 3.0, 5.0]
    torch.testing.assert_close(past.direction(), -torch.ones(2))  # the Hessian is 1


def test_too_few_iterations_do_not_converge() -> None:
    matrix, target = quadratic(20, 1000.0, 1)
    point, converged = minimise(
        lambda p: ((p - target) @ matrix @ (p - target) / 2, matrix @ (p - target)),
        torch.zeros_like(target),
        iterations=2,
    )
    assert not converged
    assert float((matrix @ (point - target)).abs().max()) > lbfgs._GRADIENT
    assert minimise(lambda p: (p.sum() * 0, p * 0), target, iterations=1)[1]
