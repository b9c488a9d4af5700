"""User-defined divergences: from a generator f, or by redefining the penalty of a subclass."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import Tensor

import fmicl
from fmicl import functional, theory
from fmicl.divergences import Divergence
from fmicl.divergences.catalogue import KL
from fmicl.information import f_mutual_information, variational_bound
from fmicl.utils.options import option
from two_views import F64, NAMES, batch


def mine(name: str) -> Divergence:
    return Divergence.from_generator(fmicl.divergence(name).f, name="mine")


def slope(value: Tensor, t: Tensor) -> Tensor:
    if not value.requires_grad:  # a constant
        return torch.zeros_like(t)
    return torch.autograd.grad(value.sum(), t, create_graph=True)[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_conjugate_is_differentiable_more_than_once(name: str) -> None:
    r = torch.linspace(-2, 2, 5, dtype=F64)
    t = fmicl.divergence(name).score(r).requires_grad_()
    for method in ("conjugate", "conjugate_derivative"):
        seen, true = getattr(mine(name), method)(t), getattr(fmicl.divergence(name), method)(t)
        for _ in range(2):
            seen, true = slope(seen, t), slope(true, t)
            torch.testing.assert_close(seen, true, rtol=1e-6, atol=1e-6)


def test_the_conjugate_in_torch_func() -> None:
    t = torch.linspace(-1, 2, 4, dtype=F64)
    kind, known = mine("kl"), fmicl.divergence("kl")
    transforms: list[Callable[..., Callable[..., Tensor]]] = [
        lambda f: torch.func.jacrev(torch.func.jacrev(f)),
        lambda f: torch.func.jacfwd(torch.func.jacrev(f)),
        lambda f: torch.func.vmap(torch.func.grad(f)),
    ]
    for twice in transforms:
        torch.testing.assert_close(
            twice(lambda t: kind.conjugate(t).sum())(t), twice(lambda t: known.conjugate(t).sum())(t)
        )


@pytest.mark.parametrize("kernel", ["auto", "reference"])
def test_hessian_of_the_loss(kernel: str) -> None:
    x, y = batch(3, 2)
    hessians = [
        torch.autograd.functional.hessian(
            lambda x, kind=kind: fmicl.FMICLLoss(kind, alpha=2.0, similarity="cosine", kernel=kernel)(x, y),  # type: ignore[arg-type]
            x,
        )
        for kind in (mine("kl"), fmicl.divergence("kl"))
    ]
    torch.testing.assert_close(*hessians)


@pytest.mark.parametrize(
    ("f", "at_supremum"),
    [
        (lambda u: (u - 1).abs() / 2, 0.5),  # total variation
        (lambda u: (u - 2).clamp(min=0.0), 2.0),  # hockey-stick
        (lambda u: (1 - u) ** 2 / u, 2.0),  # Neyman
        (lambda u: (u - 1) ** 2 / (u + 1), 3.0),  # Vincze-Le Cam
        (lambda u: (u.sqrt() - 1) ** 2, math.inf),
        (lambda u: -u.log(), math.inf),
    ],
)
def test_conjugate_at_the_supremum(f: Callable[[Tensor], Tensor], at_supremum: float) -> None:
    kind = Divergence.from_generator(f)
    end = torch.tensor(kind.supremum, dtype=F64)
    assert float(kind.conjugate(end)) == pytest.approx(at_supremum, rel=1e-6)
    assert float(kind.conjugate(end + 1e-6)) == math.inf


def test_the_bound_of_total_variation_is_tight() -> None:
    kind = Divergence.from_generator(lambda u: (u - 1).abs() / 2, name="tv")
    joint = torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=F64)
    scores = kind.derivative(joint / 0.25)
    bound = variational_bound(
        kind, scores, scores, joint_weights=joint, independent_weights=torch.full((2, 2), 0.25, dtype=F64)
    )
    assert float(bound) == pytest.approx(float(f_mutual_information(joint, kind))) == pytest.approx(0.3)


PIECEWISE_LINEAR: dict[str, Callable[[Tensor], Tensor]] = {
    "total variation": lambda u: (u - 1).abs() / 2,
    "hockey-stick": lambda u: (u - 2).clamp(min=0.0),
    "nothing": lambda u: 0 * u,
}


CURVED: dict[str, Divergence] = {
    **{name: fmicl.divergence(name) for name in NAMES},
    **{f"{name} from f": mine(name) for name in NAMES},
    "in one place": Divergence.from_generator(lambda u: torch.where(u > 1, (u - 1) ** 2, 0 * u)),
    "a little": Divergence.from_generator(lambda u: 1e-6 * u * u.log()),
}


@pytest.mark.parametrize("name", [*PIECEWISE_LINEAR, *CURVED])
def test_piecewise_linear_is_detected(name: str) -> None:
    kind = CURVED[name] if name in CURVED else Divergence.from_generator(PIECEWISE_LINEAR[name])
    assert kind.piecewise_linear == kind.weighted(3.0).piecewise_linear == (name in PIECEWISE_LINEAR)


@pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
@pytest.mark.parametrize("name", PIECEWISE_LINEAR)
def test_piecewise_linear_f_has_an_information_but_no_loss(
    name: str, similarity: Literal["gaussian", "cosine"]
) -> None:
    kind = Divergence.from_generator(PIECEWISE_LINEAR[name], name=name)
    for refused in (kind, kind.weighted(2.0)):
        with pytest.raises(ValueError, match=rf"{name}.*piecewise linear"):
            fmicl.FMICLLoss(refused, similarity=similarity)
    with pytest.raises(ValueError, match=rf"{name}.*piecewise linear.*f_mutual_information"):
        functional.fmicl_loss(*batch(), kind, similarity=similarity)
    with pytest.raises(ValueError, match=rf"{name}.*piecewise linear"):
        theory.push(kind)
    joint = torch.tensor([[0.4, 0.1], [0.1, 0.4]], dtype=F64)
    ratios = joint / 0.25
    assert float(f_mutual_information(joint, kind)) == pytest.approx(float(PIECEWISE_LINEAR[name](ratios).mean()))


@pytest.mark.filterwarnings("ignore:__array_wrap__:DeprecationWarning")
def test_numpy_operations_are_refused() -> None:
    for f in (lambda u: u * np.log(u), lambda u: u * torch.from_numpy(np.log(u.numpy()))):
        with pytest.raises(TypeError, match=r"mine: .*torch\.log, not numpy"):
            Divergence.from_generator(f, name="mine")


@pytest.mark.parametrize(
    ("f", "value"),
    [(lambda u: (u - 1) / (u - 1), "nan"), (lambda u: (u - 1).log(), "-inf"), (lambda u: 1 / (u - 1), "inf")],
)
def test_an_f_without_a_value_at_one_is_refused(f: Callable[[Tensor], Tensor], value: str) -> None:
    with pytest.raises(ValueError, match=rf"mine: f\(1\) .*{value}"):
        Divergence.from_generator(f, name="mine")


def own_f(u: Tensor) -> Tensor:
    return u * u.log()


def test_repr_names_the_function() -> None:
    assert repr(Divergence.from_generator(own_f, name="mine")) == "Divergence.from_generator(own_f, name='mine')"
    assert repr(mine("kl")) == "Divergence.from_generator(Divergence.f, name='mine')"
    assert repr(Divergence.from_generator(functools.partial(own_f))).startswith("Divergence.from_generator(partial, ")
    assert "<function" not in repr(Divergence.from_generator(lambda u: u * u.log()).weighted(2.0))


class Concave(KL):
    def _penalty(self, r: Tensor) -> Tensor:
        return -torch.exp(-r)


class Half(KL):
    def _penalty(self, r: Tensor) -> Tensor:
        return r.exp() / 2


class Whole(Half):
    def _conjugate(self, t: Tensor) -> Tensor:
        return torch.exp(t - 1) / 2

    def _conjugate_derivative(self, t: Tensor) -> Tensor:
        return torch.exp(t - 1) / 2


@dataclass(frozen=True)
class Scaled(KL):
    """KL with parameters that are unused."""

    scale: float = option(2.0, "A number above 1.", above=1)


@pytest.mark.parametrize(("value", "facts"), [(1.0, "above 1.*1.0"), (math.nan, "nan"), ("2", "number.*'2'")])
def test_parameters_are_checked_as_their_options_declare(value: Any, facts: str) -> None:
    with pytest.raises(ValueError, match=f"scale.*{facts}"):
        Scaled(scale=value)
    learned: Any = torch.tensor(3.0, requires_grad=True)
    assert Scaled(scale=1.5).scale == 1.5
    assert Scaled(scale=learned).scale is learned


def test_a_redefined_penalty_has_its_own_curvature() -> None:
    assert theory.uniformity(fmicl.divergence("kl")).kind == "strictly convex"
    assert theory.uniformity(Concave()).kind not in ("strictly convex", "convex")
    assert not Concave().closed_form
    r = torch.linspace(-3, 3, 7, dtype=F64)
    torch.testing.assert_close(Concave().relative_curvature(r), -torch.ones(7, dtype=F64))


def test_a_redefined_penalty_does_not_inherit_the_conjugate() -> None:
    x, y = batch()
    for options in ({"similarity": "cosine"}, {"shift": "optimal"}):
        with pytest.raises(NotImplementedError, match=r"Half\._conjugate"):
            fmicl.FMICLLoss(Half(), **options)(x, y)  # type: ignore[arg-type]
    given = fmicl.FMICLLoss(Whole(), alpha=4.0, similarity="cosine")(x, y)
    torch.testing.assert_close(given, fmicl.FMICLLoss("kl", alpha=2.0, similarity="cosine")(x, y))


@pytest.mark.parametrize("order", [0.5, 0.9, 0.95, 0.97, 0.99, 0.999, 0.9999])
def test_the_limit_of_a_slowly_saturating_slope(order: float) -> None:
    """Alpha-divergences, f'(u) = (1 - u^(a-1)) / (1 - a), and Tsallis's form of them, f'(u) = -a u^(a-1) / (1 - a)."""
    alpha = Divergence.from_generator(lambda u: (u**order - 1 - order * (u - 1)) / (order * (order - 1)))
    assert alpha.supremum == pytest.approx(1 / (1 - order), rel=1e-6)
    tsallis = Divergence.from_generator(lambda u: (u**order - 1) / (order - 1))
    assert tsallis.supremum == pytest.approx(0, abs=1e-6 / (1 - order))
    x, y = batch()
    for kind in (alpha, tsallis):
        assert bool(functional.fmicl_loss(x, y, kind, similarity="cosine", gamma=50.0).isfinite())


@pytest.mark.parametrize(
    "f", [lambda u: u * u.log(), lambda u: u**1.001 - 1, lambda u: (u - 1) * u.log(), lambda u: (u - 1) ** 2]
)
def test_a_slope_that_grows_for_ever(f: Callable[[Tensor], Tensor]) -> None:
    assert Divergence.from_generator(f).supremum == math.inf
