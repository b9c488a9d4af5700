"""A similarity fitted to a density ratio: its shape, its gradients in every kernel, and what it is read from."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl.config import recipe
from fmicl.kernels.lowering import lower
from fmicl.losses import Fitted

F64 = torch.float64
BENT = Fitted(-0.5, slopes=(0.5, 3.0, 1.0), knots=(-0.2, 0.4), width=0.1)


def views(n: int = 9, d: int = 5) -> tuple[Tensor, Tensor]:
    x, noise = torch.randn(2, n, d, dtype=F64, generator=torch.Generator().manual_seed(0))
    return torch.nn.functional.normalize(x, dim=1), torch.nn.functional.normalize(x + noise, dim=1)


def test_h_increases_and_has_its_slope() -> None:
    c = torch.linspace(-1, 1, 201, dtype=F64).requires_grad_()
    r = BENT.log_ratio(c)
    assert bool((r.diff() > 0).all())
    (slope,) = torch.autograd.grad(r.sum(), c)
    torch.testing.assert_close(slope, BENT.slope(c.detach()))
    ends = BENT.slope(torch.tensor([-1.0, 0.1, 1.0], dtype=F64))
    torch.testing.assert_close(ends, torch.tensor([0.5, 3.0, 1.0], dtype=F64), atol=0.25, rtol=0)


@pytest.mark.parametrize("divergence", ["kl", "js", "pearson", "vlc", "reverse_kl"])
@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_loss_and_gradient_by_plain_loops(divergence: str, kernel: Literal["reference", "tiled"]) -> None:
    """Of -mean s(h(x_i.y_i)) + alpha mean p(h(x_i.x_j)), differentiated through the loops."""
    f = fmicl.divergence(divergence)
    found: list[Tensor] = []
    expected: list[Tensor] = []
    for loss in (0, 1):
        x, y = (part.requires_grad_() for part in views())
        n = len(x)
        if loss:
            a, b = (torch.nn.functional.normalize(part, dim=1) for part in (x, y))
            positive = torch.stack([f.score(BENT.log_ratio(a[i] @ b[i])) for i in range(n)])
            pairs = [f.penalty(BENT.log_ratio(a[i] @ a[j])) for i in range(n) for j in range(n) if i != j]
            value = -positive.mean() + 3.0 * torch.stack(pairs).mean()
            expected = [value, *torch.autograd.grad(value, (x, y))]
        else:
            module = fmicl.FMICLLoss(divergence, alpha=3.0, similarity=BENT, kernel=kernel)
            value = module(x, y)
            found = [value, *torch.autograd.grad(value, (x, y))]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize("divergence", ["kl", "js", "tsallis"])
def test_a_straight_line_is_the_gaussian_kernel(divergence: str) -> None:
    gamma, mu = 0.7, 2.0
    line = Fitted(math.log(mu) - 2 * gamma, (2 * gamma,))
    x, y = views()
    torch.testing.assert_close(
        fmicl.FMICLLoss(divergence, similarity=line)(x, y), fmicl.FMICLLoss(divergence, gamma=gamma, mu=mu)(x, y)
    )


def test_no_triton_kernel_takes_it_for_the_gaussian() -> None:
    assert lower(BENT.critic(fmicl.divergence("kl"), 8)) is None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-3, 3), min_size=30, max_size=40), st.floats(1, 20))
def test_a_fit_increases_whatever_the_noise(noise: list[float], slope: float) -> None:
    c = torch.linspace(-1, 1, len(noise))
    r = [slope * float(v) + e for v, e in zip(c, noise, strict=True)]
    try:
        found = Fitted.fit(c.tolist(), r, [1.0] * len(r))
    except ValueError as error:
        assert "must increase" in str(error)  # noqa: PT017 (noise may outweigh the slope)
        return
    assert bool((found.log_ratio(torch.linspace(-1.2, 1.2, 101, dtype=F64)).diff() > 0).all())


def test_a_fit_finds_a_bend() -> None:
    c = torch.linspace(-1, 1, 48, dtype=F64)
    r = torch.where(c < 0, c, 4 * c) - 1
    found = Fitted.fit(c.tolist(), r.tolist(), [1.0] * 48)
    assert float((found.log_ratio(c) - r).abs().max()) < 0.1


def assumption(path: Path, **changes: Any) -> Path:
    c = torch.linspace(-0.5, 1, 20).tolist()
    bins = {"cosines": c, "log_ratios": [3 * v for v in c], "errors": [0.1] * 20, "joint": [50.0] * 20,
            "independent": [9.0] * 20}  # fmt: skip
    path.write_text(json.dumps({"density_ratio": bins | changes}))
    return path


def test_it_is_read_from_a_run_or_a_file(tmp_path: Path) -> None:
    file = assumption(tmp_path / "assumption.json", log_ratios=[3 * (-0.5 + 1.5 * k / 19) for k in range(19)] + [99.0],
                      independent=[9.0] * 19 + [1.0])  # fmt: skip
    found = Fitted.read(tmp_path)
    assert found == Fitted.read(file)
    torch.testing.assert_close(found.log_ratio(torch.tensor([0.5])), torch.tensor([1.5]), atol=0.02, rtol=0)


def test_a_recipe_takes_it(tmp_path: Path) -> None:
    file = assumption(tmp_path / "assumption.json")
    chosen = recipe("digits", similarity="fitted", similarity_from=file, alpha=3.0)
    loss = chosen.objective_options.build(chosen.objective_context())
    assert isinstance(loss.similarity, Fitted)
    assert {"gamma", "mu"} <= chosen.objective_options.why_unused().keys()
    assert "similarity_from" in recipe("digits", similarity_from=file).objective_options.why_unused()


@pytest.mark.parametrize(
    ("make", "fact"),
    [
        (lambda _: Fitted(0.0, (1.0, 2.0)), "2 and 0"),
        (lambda _: Fitted(0.0, (1.0, -2.0), (0.0,)), "positive"),
        (lambda _: Fitted(0.0, (1.0, 2.0, 3.0), (0.5, 0.0)), "increase"),
        (lambda _: Fitted.fit([0.0, 1.0], [0.0, 1.0], [1.0, 1.0]), "3 bins"),
        (lambda _: Fitted.fit([0.0, 0.5, 1.0], [1.0, 0.5, 0.0], [1.0] * 3), "slope"),
        (lambda p: Fitted.read(p / "none.json"), "check-assumption"),
        (lambda p: Fitted.read(assumption(p / "a.json", errors=[0.1])), "density ratio"),
        (lambda _: recipe("digits", similarity="fitted"), "similarity_from"),
        (lambda p: recipe("digits", similarity="fitted", similarity_from=p, shift="optimal"), "shift=optimal"),
        (lambda p: recipe("digits", similarity="fitted", similarity_from=p, mu=2.0), r"mu=2\.0"),
        (lambda _: fmicl.FMICLLoss("kl", similarity=BENT, shift="optimal")(*views()), "shift=optimal"),
        (lambda _: fmicl.FMICLLoss("kl", alpha="auto", similarity=BENT)(*views()), "alpha=auto"),
        (lambda _: fmicl.FMICLLoss("kl", gamma=2.0, similarity=BENT), r"gamma=2\.0"),
    ],
)
def test_refuses(make: Any, fact: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=fact):
        make(tmp_path)
