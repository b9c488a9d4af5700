"""Relatives of f-MICL against plain loops and lightly, and the identities that tie them to it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fmicl
from fmicl import functional
from fmicl.losses import OBJECTIVES, ObjectiveContext
from two_views import F64, batch, queue, unit

MODES = ["anchor", "both", "cross"]
MOCO = ObjectiveContext(method="moco", explicit_negatives=True)


def negatives_of(x: Tensor, y: Tensor, mode: str, explicit: Tensor | None = None) -> list[tuple[Tensor, list[Tensor]]]:
    """Each anchor with its negatives."""
    n = len(x)
    if explicit is not None:
        return [(a, list(explicit)) for a in x]
    views = {"anchor": [(x, [x])], "cross": [(x, [y])], "both": [(x, [x, y]), (y, [x, y])]}[mode]
    return [(a[i], [b[j] for b in others for j in range(n) if j != i]) for a, others in views for i in range(n)]


def mean(values: list[Tensor]) -> Tensor:
    return torch.stack(values).mean()


def logsumexp(values: list[Tensor]) -> Tensor:
    return torch.stack(values).logsumexp(0)


class TestBarlowTwins:
    def test_equals_plain_loops(self) -> None:
        x, y = batch(7, 3)
        total = torch.zeros((), dtype=F64)

        def standard(v: Tensor, k: int) -> Tensor:
            return (v[:, k] - v[:, k].mean()) / (v[:, k].var(correction=0) + 1e-5).sqrt()

        for k in range(3):
            for m in range(3):
                c = (standard(x, k) * standard(y, m)).mean()
                total = total + ((1 - c) ** 2 if k == m else 0.3 * c**2)
        torch.testing.assert_close(fmicl.BarlowTwinsLoss(0.3)(x, y), total)
        torch.testing.assert_close(fmicl.BarlowTwinsLoss(0.3, scale=0.1)(x, y), 0.1 * total)

    def test_equals_lightlys(self) -> None:
        theirs = pytest.importorskip("lightly.loss").BarlowTwinsLoss(lambda_param=0.01)
        x, y = batch(16, 5)
        torch.testing.assert_close(fmicl.BarlowTwinsLoss(0.01)(x, y), theirs(x, y))

    def test_the_squares_are_a_mean_over_pairs_of_samples(self) -> None:
        """Its relation to the spectral loss: sum_kl C_kl^2 = mean_ij (x_i.x_j)(y_i.y_j), also i = j."""
        x, y = ((v - v.mean(0)) / v.std(0, correction=0) for v in batch(7, 3))
        squares = (x.T @ y / len(x)).square().sum()
        torch.testing.assert_close(squares, ((x @ x.T) * (y @ y.T)).mean())


class TestVICReg:
    def test_equals_plain_loops(self) -> None:
        x, y = batch(7, 3)
        x = 0.3 * x  # a variance below 1
        total = 2.0 * ((x - y) ** 2).mean()
        for view in (x, y):
            covariance = view.T.cov()
            for k in range(3):
                total = total + 5.0 * max(0.0, 1 - math.sqrt(float(covariance[k, k]) + 1e-4)) / (2 * 3)
                total = total + sum(0.7 * covariance[k, m] ** 2 / 3 for m in range(3) if m != k)
        torch.testing.assert_close(fmicl.VICRegLoss(5.0, 2.0, 0.7)(x, y), total)

    def test_equals_lightlys(self) -> None:
        theirs = pytest.importorskip("lightly.loss").VICRegLoss(lambda_param=10.0, mu_param=20.0, nu_param=2.0)
        x, y = batch(16, 5)
        torch.testing.assert_close(fmicl.VICRegLoss(20.0, 10.0, 2.0)(x, y), theirs(x, y))

    def test_the_squares_are_the_spectral_losss_cost(self) -> None:
        x = batch(7, 3)[0]
        centred = x - x.mean(0)
        torch.testing.assert_close(x.T.cov().square().sum(), (7 / 6) ** 2 * (centred @ centred.T).square().mean())


class TestDCL:
    @pytest.mark.parametrize("mode", [*MODES, "explicit"])
    def test_equals_plain_loops(self, mode: str) -> None:
        x, y = batch()
        explicit = queue() if mode == "explicit" else None
        ux, uy, u = unit(x), unit(y), None if explicit is None else unit(explicit)
        anchors = negatives_of(ux, uy, mode, u)
        positives = [*(ux * uy).sum(1)] * (2 if mode == "both" else 1)
        expected = mean(
            [
                logsumexp([a @ b / 0.3 for b in others]) - s / 0.3
                for (a, others), s in zip(anchors, positives, strict=True)
            ]
        )
        loss = fmicl.DCLLoss(0.3, "anchor" if mode == "explicit" else mode)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(x, y, negatives=explicit), expected)
        negatives: Any = mode if explicit is None else explicit
        torch.testing.assert_close(functional.dcl_loss(x, y, temperature=0.3, negatives=negatives), expected)

    def test_equals_lightlys(self) -> None:
        theirs = pytest.importorskip("lightly.loss").DCLLoss(temperature=0.2)
        x, y = batch(16, 5)
        torch.testing.assert_close(fmicl.DCLLoss(0.2)(x, y), theirs(x, y))

    @pytest.mark.parametrize("mode", ["anchor", "cross"])
    def test_is_kl_with_a_shift_for_each_anchor(self, mode: str) -> None:
        """f-MICL of each anchor alone, with the optimal shift: their mean is DCL minus the log of the negatives."""
        x, y = batch()
        ux, uy = unit(x), unit(y)
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=1.5, shift="optimal")
        alone = [
            kl(ux[i : i + 1], uy[i : i + 1], negatives=torch.stack(others))
            for i, (_, others) in enumerate(negatives_of(ux, uy, mode))
        ]
        dcl = fmicl.DCLLoss(1 / 3, mode)(x, y)  # type: ignore[arg-type]
        torch.testing.assert_close(mean(alone), dcl - math.log(len(x) - 1))


class TestDHEL:
    @pytest.mark.parametrize("both_views", [False, True])
    def test_equals_plain_loops(self, both_views: bool) -> None:
        x, y = batch()
        ux, uy = unit(x), unit(y)
        rows = []
        for i in range(len(x)):
            others = [j for j in range(len(x)) if j != i]
            row = logsumexp([ux[i] @ ux[j] / 0.3 for j in others]) - ux[i] @ uy[i] / 0.3
            rows.append(row + (logsumexp([uy[i] @ uy[j] / 0.3 for j in others]) if both_views else 0.0))
        torch.testing.assert_close(fmicl.DHELLoss(0.3, both_views)(x, y), mean(rows))

    def test_is_dcl_with_other_anchors_and_with_a_queue(self) -> None:
        x, y = batch()
        one = fmicl.DHELLoss(0.3, both_views=False)
        torch.testing.assert_close(one(x, y), fmicl.DCLLoss(0.3, "anchor")(x, y))
        for loss in (one, fmicl.DHELLoss(0.3)):
            torch.testing.assert_close(loss(x, y, negatives=queue()), fmicl.DCLLoss(0.3)(x, y, negatives=queue()))

    @given(seed=st.integers(0, 1000), temperature=st.floats(0.05, 2.0))
    @settings(max_examples=10, deadline=None)
    def test_is_never_below_kl_with_the_optimal_shift(self, seed: int, temperature: float) -> None:
        x, y = batch(seed=seed)
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=1 / (2 * temperature), shift="optimal")(x, y)
        dhel = fmicl.DHELLoss(temperature, both_views=False)(x, y)
        assert float(dhel) <= float(kl) + math.log(len(x) - 1) + 1e-6


class TestICon:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", ["kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc"])
    def test_equals_plain_loops(self, name: str, mode: str) -> None:
        """sum_j q_j f(p_j / q_j) of each anchor, with p = (1, 0, 0, ...)."""
        x, y = batch()
        kind, ux, uy = fmicl.divergence(name), unit(x), unit(y)
        positives = [*(ux * uy).sum(1)] * (2 if mode == "both" else 1)
        rows = []
        for (a, others), s in zip(negatives_of(ux, uy, mode), positives, strict=True):
            q = torch.stack([s / 0.3, *(a @ b / 0.3 for b in others)]).softmax(0)
            p = torch.tensor([1.0] + [0.0] * len(others), dtype=F64)
            rows.append((q * kind.f(p / q)).sum())
        loss = fmicl.IConLoss(name, 0.3, mode)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(x, y), mean(rows))

    @pytest.mark.parametrize("mode", MODES)
    def test_with_kl_is_infonce(self, mode: str) -> None:
        x, y = batch()
        for explicit in (None, queue()):
            infonce = fmicl.InfoNCELoss(0.2, mode)(x, y, negatives=explicit)  # type: ignore[arg-type]
            torch.testing.assert_close(fmicl.IConLoss("kl", 0.2, mode)(x, y, negatives=explicit), infonce)  # type: ignore[arg-type]

    @pytest.mark.parametrize("name", ["kl", "pearson", "tsallis"])
    def test_small_temperatures_stay_finite_in_float32(self, name: str) -> None:
        x = torch.eye(4, requires_grad=True)
        loss = fmicl.IConLoss(name, 0.04)(x, -x)  # q = e^-25 / ...: 1 / q^2 is beyond float32
        loss.backward()
        assert bool(loss.isfinite())
        assert x.grad is not None
        assert bool(x.grad.isfinite().all())


class TestRenyi:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("order", [0.5, 1.0, 2.0])
    @pytest.mark.parametrize("skew", [0.0, 0.1])
    def test_equals_plain_loops(self, order: float, skew: float, mode: str) -> None:
        x, y = batch()
        ux, uy = unit(x), unit(y)
        s = (ux * uy).sum(1) / 0.4
        t = torch.stack([a @ b / 0.4 for a, others in negatives_of(ux, uy, mode) for b in others])
        mixture = skew * (order * s).exp().mean() + (1 - skew) * (order * t).exp().mean()
        reward = s.mean() if order == 1 else ((order - 1) * s).exp().mean().log() / (order - 1)
        loss = fmicl.RenyiLoss(order, skew, 0.4, mode)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(x, y), mixture.log() / order - reward)

    def test_orders_near_one_tend_to_kl(self) -> None:
        x, y = batch()
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=1.25, shift="optimal", negatives="cross")(x, y)
        torch.testing.assert_close(fmicl.RenyiLoss(1.0, 0.0, 0.4)(x, y), kl)
        torch.testing.assert_close(fmicl.RenyiLoss(1 + 1e-6, 0.0, 0.4)(x, y), kl, rtol=0, atol=1e-5)

    @given(seed=st.integers(0, 1000), order=st.floats(1.1, 4.0), gamma=st.floats(0.2, 3.0))
    @settings(max_examples=20, deadline=None)
    def test_is_tsallis_at_its_best_mu(self, seed: int, order: float, gamma: float) -> None:
        """L = -log(1 + (g - 1) B) / (g (g - 1)), where B is f-MICL's bound with Tsallis at the best mu."""
        x, y = batch(seed=seed)
        ux, uy = unit(x), unit(y)
        r, t = (-gamma * (2 - 2 * c) for c in ((ux * uy).sum(1), (ux @ uy.T)[~torch.eye(len(x), dtype=torch.bool)]))
        best = float(((order - 1) * r).exp().mean() / (order * t).exp().mean())
        kind = fmicl.divergence("tsallis", order=order)

        def bound(mu: float) -> float:
            return -float(fmicl.FMICLLoss(kind, alpha=1.0, gamma=gamma, mu=mu, negatives="cross")(x, y))

        assert bound(best) >= max(bound(0.99 * best), bound(1.01 * best))
        renyi = fmicl.RenyiLoss(order, 0.0, 1 / (2 * gamma))(x, y)
        expected = -math.log(1 + (order - 1) * bound(best)) / (order * (order - 1))
        assert float(renyi) == pytest.approx(expected, rel=1e-6, abs=1e-9)

    def test_does_not_underflow(self) -> None:
        x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        assert float(fmicl.RenyiLoss(2.0, 0.0, 1e-3)(x, x)) == pytest.approx(-2000.0)


class TestRPC:
    @pytest.mark.parametrize("mode", [*MODES, "explicit"])
    @pytest.mark.parametrize("similarity", ["product", "cosine"])
    def test_equals_plain_loops(self, similarity: str, mode: str) -> None:
        x, y = batch()
        explicit = queue() if mode == "explicit" else None
        vx, vy, ve = (
            (x, y, explicit)
            if similarity == "product"
            else (unit(x), unit(y), None if explicit is None else unit(explicit))
        )
        s = (vx * vy).sum(1) / 2.0
        t = torch.stack([a @ b / 2.0 for a, others in negatives_of(vx, vy, mode, ve) for b in others])
        expected = -(s.mean() - 0.7 * t.mean() - 0.2 * (s**2).mean() - 0.6 * (t**2).mean())
        negatives = "anchor" if mode == "explicit" else mode
        loss = fmicl.RPCLoss(0.7, 0.4, 1.2, 2.0, similarity, negatives)  # type: ignore[arg-type]
        torch.testing.assert_close(loss(x, y, negatives=explicit), expected)

    def test_without_beta_is_pearson(self) -> None:
        x, y = batch()
        pearson = fmicl.FMICLLoss(
            "pearson", alpha=3.0, similarity=fmicl.Cosine(0.5 * 3.0 / (2 * 1.4)), negatives="both"
        )
        loss = fmicl.RPCLoss(3.0, 0.0, 1.4, 0.5, "cosine")
        torch.testing.assert_close(loss(x, y), 3.0 / (2 * 1.4) * pearson(x, y))

    @given(alpha=st.floats(0.0, 2.0), beta=st.floats(0.01, 2.0), gamma=st.floats(0.1, 2.0))
    @example(alpha=0.4140625, beta=1.0, gamma=1.0)  # whose terms cancel near 0
    @settings(max_examples=20, deadline=None)
    def test_is_the_bound_of_its_own_divergence(self, alpha: float, beta: float, gamma: float) -> None:
        """f'(u) = s - beta s^2 / 2, f*(f'(u)) = alpha s + gamma s^2 / 2 + c / 2, s = (u - alpha) / (beta u + gamma)."""
        c = (1 - alpha) ** 2 / (beta + gamma)
        kind = fmicl.Divergence.from_generator(lambda u: ((u - alpha) ** 2 / (beta * u + gamma) - c) / 2)
        r = torch.linspace(-2, 2, 9, dtype=F64)
        s = (r.exp() - alpha) / (beta * r.exp() + gamma)
        torch.testing.assert_close(kind.score(r), s - beta / 2 * s**2, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(kind.penalty(r), alpha * s + gamma / 2 * s**2 + c / 2, rtol=1e-7, atol=1e-7)

    def test_with_ones_it_is_half_of_vlc(self) -> None:
        r = torch.linspace(-2, 2, 9, dtype=F64)
        s = torch.tanh(r / 2)
        vlc = fmicl.divergence("vlc")
        torch.testing.assert_close(vlc.score(r) / 2, s - s**2 / 2)
        torch.testing.assert_close(vlc.penalty(r) / 2, s + s**2 / 2)


class TestSigLIP:
    @pytest.mark.parametrize("explicit", [False, True])
    def test_equals_plain_loops(self, explicit: bool) -> None:
        x, y = batch()
        ux, uy, bank = unit(x), unit(y), unit(queue())
        total = torch.zeros((), dtype=F64)
        for i in range(len(x)):
            total = total - torch.sigmoid(3.0 * ux[i] @ uy[i] - 2.0).log()
            for other in bank if explicit else [uy[j] for j in range(len(x)) if j != i]:
                total = total - torch.sigmoid(-(3.0 * ux[i] @ other - 2.0)).log()
        loss = fmicl.SigLIPLoss(3.0, -2.0).double()
        value = loss(x, y, negatives=queue() if explicit else None)
        torch.testing.assert_close(value, total / len(x), rtol=1e-6, atol=1e-6)

    @given(seed=st.integers(0, 1000), t=st.floats(0.5, 20.0), b=st.floats(-20.0, 2.0))
    @settings(max_examples=10, deadline=None)
    def test_is_js(self, seed: int, t: float, b: float) -> None:
        """alpha = N - 1, gamma = t / 2, mu = e^(b + t), cross negatives, and N log 2 in value; the same gradient."""
        x, y = (v.requires_grad_() for v in batch(seed=seed))
        n = len(x)
        js = fmicl.FMICLLoss("js", alpha=n - 1, gamma=t / 2, mu=math.exp(b + t), negatives="cross")(x, y)
        siglip = functional.siglip_loss(x, y, scale=t, bias=b)
        torch.testing.assert_close(siglip, js + n * math.log(2))
        torch.testing.assert_close(torch.autograd.grad(siglip, (x, y)), torch.autograd.grad(js, (x, y)))

    @pytest.mark.parametrize("kernel", ["tiled", "reference"])
    def test_scale_and_bias_are_learned_from_the_published_start(self, kernel: Any) -> None:
        loss = fmicl.SigLIPLoss(kernel=kernel)
        assert float(loss.log_scale.detach().exp()) == pytest.approx(10.0)
        assert float(loss.bias.detach()) == -10.0
        x, y = batch(5, 3)

        def value(log_scale: Tensor, bias: Tensor) -> Tensor:
            return functional.siglip_loss(x, y, scale=log_scale.exp(), bias=bias, kernel=kernel)

        start = (torch.tensor(1.2, dtype=F64, requires_grad=True), torch.tensor(-2.0, dtype=F64, requires_grad=True))
        assert torch.autograd.gradcheck(value, start)
        loss(x.float(), y.float()).backward()
        assert loss.log_scale.grad is not None
        assert loss.bias.grad is not None


LOSSES: dict[str, nn.Module] = {
    "barlow_twins": fmicl.BarlowTwinsLoss(0.1),
    "vicreg": fmicl.VICRegLoss(),
    "dcl": fmicl.DCLLoss(0.3),
    "dhel": fmicl.DHELLoss(0.3),
    "icon, js": fmicl.IConLoss("js", 0.3),
    "renyi": fmicl.RenyiLoss(2.0, 0.1),
    "rpc": fmicl.RPCLoss(temperature=2.0),
    "siglip": fmicl.SigLIPLoss(3.0, -2.0),
}


@pytest.mark.parametrize("name", LOSSES)
def test_gradients(name: str) -> None:
    assert torch.autograd.gradcheck(LOSSES[name], tuple(v.requires_grad_() for v in batch(5, 3)))


@pytest.mark.parametrize("name", LOSSES)
def test_half_precision_is_computed_in_float32(name: str) -> None:
    x, y = (v.to(torch.bfloat16) for v in batch(8, 4))
    value = LOSSES[name](x, y)
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, LOSSES[name](x.float(), y.float()))
    with torch.autocast("cpu", torch.bfloat16):
        assert LOSSES[name](x.float(), y.float()) == LOSSES[name](x.float(), y.float())
        torch.testing.assert_close(LOSSES[name](x.float(), y.float()), value)


@pytest.mark.parametrize("loss", [fmicl.BarlowTwinsLoss(), fmicl.VICRegLoss()], ids=repr)
def test_losses_without_negatives_refuse_them(loss: nn.Module) -> None:
    x, y = batch()
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        loss(x, y, negatives=queue())
    with pytest.raises(ValueError, match=r"two samples.*\(1, 4\)"):
        loss(x[:1], y[:1])
    with pytest.raises(ValueError, match=r"\(6, 4\) and \(5, 4\)"):
        loss(x, y[:5])


@pytest.mark.parametrize("name", ["barlow_twins", "vicreg"])
def test_objectives_without_negatives_refuse_a_queue(name: str) -> None:
    options = OBJECTIVES[name].value()
    with pytest.raises(ValueError, match=rf"{name}.*moco"):
        options.build(MOCO)
    assert "negatives" in options.why_unused()


def test_rpc_refuses_a_queue_of_unit_keys_unless_it_compares_cosines() -> None:
    kind = OBJECTIVES["rpc"].value
    with pytest.raises(ValueError, match=r"moco.*--rpc-similarity cosine"):
        kind().build(MOCO)
    assert kind(rpc_similarity="cosine", rpc_temperature=0.5).build(MOCO).similarity == "cosine"  # type: ignore[call-arg]
