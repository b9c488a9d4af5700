"""The balanced weight of the negatives: closed forms, stationarity in mu, gradients, every kernel, the option."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fmicl
from fmicl.config import recipe
from fmicl.losses.balance import balance
from fmicl.losses.fmicl import FMICLOptions
from fmicl.losses.pairing import Pairs
from fmicl.losses.registry import ObjectiveContext
from fmicl.losses.similarities import Fitted, make_similarity
from fmicl.theory import balanced_alpha, push
from two_views import F64, MODES, NAMES, batch, queue, unit

# 1 / push(alpha=1) by hand, at the ratio u = mu e^(-2 gamma) of orthogonal negatives
CLOSED = {
    "kl": lambda g, mu: math.exp(2 * g) / mu,
    "reverse_kl": lambda g, mu: 1 / mu,  # noqa: ARG005
    "js": lambda g, mu: (1 + math.exp(2 * g) / mu) / (1 + mu),
    "pearson": lambda g, mu: math.exp(4 * g) / mu,
    "squared_hellinger": lambda g, mu: math.exp(g) / mu,
    "neyman": lambda g, mu: math.exp(-2 * g) / mu,
    "jeffrey": lambda g, mu: (1 + mu) / (1 + mu * math.exp(-2 * g)) / mu,
    "tsallis": lambda g, mu: math.exp(6 * g) / mu,
    "vlc": lambda g, mu: math.exp(4 * g) * ((1 + mu * math.exp(-2 * g)) / (1 + mu)) ** 3 / mu,
}


@pytest.mark.parametrize(("gamma", "mu"), [(1.0, 1.0), (0.4, 2.5), (3.0, 0.7)])
@pytest.mark.parametrize("name", NAMES)
def test_closed_forms(name: str, gamma: float, mu: float) -> None:
    """Of pairs that coincide and orthogonal negatives."""
    expected = CLOSED[name](gamma, mu)
    assert balanced_alpha(name, gamma, mu) == pytest.approx(expected, rel=1e-9)
    assert push(name, expected, gamma, mu) == pytest.approx(1.0)
    critic = fmicl.Gaussian(gamma, mu).critic(fmicl.divergence(name), 5)
    x = torch.eye(5, dtype=F64)
    assert float(balance(Pairs.prepare(x, x, "anchor"), critic)) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_equals_a_loss_with_this_alpha(name: str, mode: str, similarity: str) -> None:
    """Value, as the bound of f_alpha, and gradient; alpha from plain sums of slopes."""
    kind = fmicl.divergence(name).skew(0.2) if name == "vlc" else fmicl.divergence(name)
    options: dict[str, Any] = {"gamma": 0.8, "similarity": similarity}
    options["negatives"] = "anchor" if mode == "explicit" else mode
    x, y = (view.requires_grad_() for view in batch(7, 4))
    explicit = [queue(5, 4).requires_grad_()] if mode == "explicit" else []
    critic = make_similarity(similarity, 0.8).critic(kind, 4)
    vx, vy = unit(x.detach()), unit(y.detach())
    others = ~torch.eye(7, dtype=torch.bool)
    blocks = {
        "anchor": [(vx @ vx.T)[others]],
        "cross": [(vx @ vy.T)[others]],
        "both": [(vx @ vx.T)[others], (vy @ vy.T)[others], (vx @ vy.T)[others], (vy @ vx.T)[others]],
        "explicit": [(vx @ unit(value.detach()).T).flatten() for value in explicit],
    }
    pull = torch.func.grad(lambda z: critic.score(z).mean())(critic.z((vx * vy).sum(1))).sum()
    push_ = torch.func.grad(lambda z: critic.penalty(z).mean())(critic.z(torch.cat(blocks[mode]))).sum()
    alpha = float(pull / push_)
    fixed = fmicl.FMICLLoss(kind, alpha, **options)(x, y, *explicit)
    expected = [
        fixed + alpha * kind.f(torch.tensor(1 / alpha, dtype=F64)),
        *torch.autograd.grad(fixed, [x, y, *explicit]),
    ]
    for kernel in ("tiled", "reference"):
        value = fmicl.FMICLLoss(kind, "auto", kernel=kernel, **options)(x, y, *explicit)
        found = [value, *torch.autograd.grad(value, [x, y, *explicit])]
        for seen, true in zip(found, expected, strict=True):
            torch.testing.assert_close(seen, true, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("kl", "neyman")])
def test_no_other_mu_has_a_larger_bound(name: str) -> None:
    """At this alpha the scale of u is at its optimum."""
    x, y = batch(8, 4)
    x = x + 2 * y
    kind = fmicl.divergence(name)
    alpha = float(balance(Pairs.prepare(x, y, "anchor"), fmicl.Gaussian().critic(kind, 4)))
    losses = [float(fmicl.FMICLLoss(kind, alpha, mu=math.exp(step))(x, y)) for step in (-0.05, 0.0, 0.05)]
    assert losses[1] < min(losses[0], losses[2])


def test_of_kl_is_the_optimal_shift() -> None:
    x, y = batch()
    auto, shifted = fmicl.FMICLLoss("kl", "auto", mu=3.0), fmicl.FMICLLoss("kl", 1.0, mu=3.0, shift="optimal")
    assert auto(x, y) == shifted(x, y)
    critic = fmicl.Gaussian(mu=3.0).critic(fmicl.divergence("kl"), 4)
    alpha = float(balance(Pairs.prepare(x, y, "anchor"), critic))
    expected = float(fmicl.FMICLLoss("kl", alpha, mu=3.0)(x, y)) - math.log(alpha)
    assert float(auto(x, y)) == pytest.approx(expected)
    assert torch.autograd.gradgradcheck(auto, tuple(view.requires_grad_() for view in batch(4, 3)))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("gamma", [0.1, 20.0])
def test_finite_in_float32(name: str, gamma: float) -> None:
    """At gamma = 20 slopes of orthogonal negatives underflow for steep f."""
    x, y = (torch.randn(64, 128, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    y = (x + 0.3 * y).requires_grad_()
    x.requires_grad_()
    value = fmicl.FMICLLoss(name, "auto", gamma=gamma)(x, y)
    value.backward()
    assert value.isfinite()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert bool((x.grad != 0).any())


def test_with_labels() -> None:
    """All positives of a class pull, and the others push."""
    x, y = (unit(view) for view in batch(6, 4))
    labels = torch.tensor([0, 0, 1, 1, 2, 2])
    kind = fmicl.divergence("js")
    critic = fmicl.Gaussian().critic(kind, 4)
    same = (labels[:, None] == labels).to(F64)
    positive = (same / same.sum(1, keepdim=True) * kind.score_slope(critic.z(x @ y.T))).sum(1).mean()
    negative = kind.penalty_slope(critic.z((x @ x.T)[~torch.eye(6, dtype=torch.bool)])).mean()
    alpha = float(positive / negative)
    expected = fmicl.FMICLLoss("js", alpha)(x, y, labels=labels) + alpha * kind.f(torch.tensor(1 / alpha, dtype=F64))
    torch.testing.assert_close(fmicl.FMICLLoss("js", "auto")(x, y, labels=labels), expected)


def test_refuses() -> None:
    with pytest.raises(ValueError, match=r"alpha .*'much'"):
        fmicl.FMICLLoss("kl", "much")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"alpha='auto'.*shift='optimal'"):
        fmicl.FMICLLoss("js", "auto", shift="optimal")
    with pytest.raises(ValueError, match=r"alpha='auto'.*shift='optimal'"):
        recipe("digits", alpha="auto", shift="optimal")
    x, y = (view.requires_grad_() for view in batch())
    bent = Fitted(0.0, slopes=(1.0, 3.0), knots=(0.0,))
    for name in ("kl", "js"):
        with pytest.raises(ValueError, match="alpha=auto"):
            fmicl.FMICLLoss(name, "auto", similarity=bent)(x, y)
    loss = fmicl.FMICLLoss("js", "auto")
    with pytest.raises(RuntimeError, match=r"twice.*alpha='auto'"):
        torch.autograd.grad(loss(x, y), x, create_graph=True)
    with pytest.raises(ValueError, match=r"torch\.func.*js"):
        torch.func.grad(loss)(x.detach(), y.detach())


def test_the_option() -> None:
    settings = recipe("digits", divergence="js", alpha="auto")
    context = settings.objective_context()
    assert "alpha=auto" in repr(settings.objective_options.build(context))
    assert settings.arguments() == ["--divergence", "js", "--alpha", "auto"]
    assert settings.hash != recipe("digits", divergence="js").hash
    moco = ObjectiveContext(method="moco", detached={"anchor": 1.0})
    assert FMICLOptions(alpha=40.0).warnings(moco)
    assert not FMICLOptions(alpha="auto").warnings(moco)
    assert "--alpha" not in FMICLOptions(alpha="auto").collapse_advice(moco)
