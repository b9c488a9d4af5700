"""The losses against plain loops, other implementations and the paper's connections between them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fmicl
from fmicl import functional
from fmicl.losses.similarities import log_mu
from two_views import MODES, NAMES, batch, queue, unit

F64 = torch.float64


def negative_pairs(x: Tensor, y: Tensor, mode: str, explicit: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """The negatives of each mode, spelled out with loops."""
    n = len(x)
    others = [(i, j) for i in range(n) for j in range(n) if i != j]
    if explicit is not None:
        return [(a, b) for a in x for b in explicit]
    if mode == "anchor":
        return [(x[i], x[j]) for i, j in others]
    if mode == "cross":
        return [(x[i], y[j]) for i, j in others]
    return [(a[i], b[j]) for a in (x, y) for b in (x, y) for i, j in others]


def plain_fmicl(
    x: Tensor, y: Tensor, name: str, mode: str, explicit: Tensor | None, alpha: float, gamma: float, mu: float
) -> Tensor:
    kind = fmicl.divergence(name)
    x, y, explicit = unit(x), unit(y), None if explicit is None else unit(explicit)

    def u(a: Tensor, b: Tensor) -> Tensor:
        return mu * torch.exp(-gamma * ((a - b) ** 2).sum())

    earned = sum(kind.derivative(u(a, b)) for a, b in zip(x, y, strict=True)) / len(x)
    pairs = negative_pairs(x, y, mode, explicit)
    cost = sum(kind.conjugate(kind.derivative(u(a, b))) for a, b in pairs) / len(pairs)
    return -(earned - alpha * torch.as_tensor(cost))


class TestFMICL:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", NAMES)
    def test_equals_plain_loops(self, name: str, mode: str) -> None:
        x, y = batch()
        explicit = queue() if mode == "explicit" else None
        negatives = "anchor" if mode == "explicit" else mode
        loss = fmicl.FMICLLoss(name, alpha=3.0, gamma=0.7, mu=1.5, negatives=negatives)  # type: ignore[arg-type]
        expected = plain_fmicl(x, y, name, mode, explicit, 3.0, 0.7, 1.5)
        torch.testing.assert_close(loss(x, y, negatives=explicit), expected, rtol=1e-9, atol=1e-10)

    @pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("name", NAMES)
    def test_gradients(self, name: str, mode: str, similarity: str) -> None:
        x, y = (v.requires_grad_() for v in batch(4, 3))
        explicit = [queue(3, 3).requires_grad_()] if mode == "explicit" else []
        negatives = "anchor" if mode == "explicit" else mode
        loss = fmicl.FMICLLoss(name, alpha=2.0, similarity=similarity, negatives=negatives)  # type: ignore[arg-type]
        assert torch.autograd.gradcheck(loss, (x, y, *explicit))

    @pytest.mark.parametrize("name", NAMES)
    def test_cosine_by_hand(self, name: str) -> None:
        x, y = batch()
        kind = fmicl.divergence(name)
        v = unit(x) @ unit(x).T / 0.5
        off = ~torch.eye(len(x), dtype=torch.bool)
        t_positive = kind.activation((unit(x) * unit(y)).sum(-1) / 0.5)
        expected = -(t_positive.mean() - 2.0 * kind.conjugate(kind.activation(v[off])).mean())
        for similarity, gamma in (("cosine", 1.0), (fmicl.Cosine(0.5), 1.0)):
            loss = fmicl.FMICLLoss(name, alpha=2.0, gamma=gamma, similarity=similarity)
            torch.testing.assert_close(loss(x, y), expected)

    def test_function_and_module_agree(self) -> None:
        x, y = batch()
        loss = fmicl.FMICLLoss("vlc", alpha=2.0, gamma=0.5, mu=1.2, negatives="both")
        value = functional.fmicl_loss(x, y, "vlc", alpha=2.0, gamma=0.5, mu=1.2, negatives="both")
        assert torch.equal(loss(x, y), value)
        assert "VLC()" in repr(loss)
        assert "alpha=2" in repr(loss)

    @pytest.mark.parametrize("shift", [None, "optimal"])
    def test_terms_add_up(self, shift: str | None) -> None:
        x, y = batch()
        loss = fmicl.FMICLLoss("js", alpha=2.0, shift=shift)  # type: ignore[arg-type]
        terms = loss.terms(x, y)
        torch.testing.assert_close(terms.alignment + terms.uniformity, loss(x, y))
        r = -((unit(x) - unit(y)) ** 2).sum(-1)
        torch.testing.assert_close(terms.alignment, -fmicl.divergence("js").score(r).mean())

    def test_normalises_by_default(self) -> None:
        x, y = batch()
        loss, trusting = fmicl.FMICLLoss("kl"), fmicl.FMICLLoss("kl", normalised=True)
        torch.testing.assert_close(loss(3 * x, y / 7), loss(x, y))
        torch.testing.assert_close(trusting(unit(x), unit(y)), loss(x, y))

    def test_normalised_mu(self) -> None:
        x, y = batch(d=4)
        exact = fmicl.FMICLLoss("js", mu="normalised")(x, y)
        torch.testing.assert_close(exact, fmicl.FMICLLoss("js", mu=math.exp(log_mu(1.0, 4)))(x, y))

    def test_user_defined_divergence(self) -> None:
        x, y = (v.requires_grad_() for v in batch())
        mine = fmicl.Divergence.from_generator(lambda u: (u - 1) ** 2 / (u + 1), name="mine")
        loss, known = fmicl.FMICLLoss(mine, alpha=2.0), fmicl.FMICLLoss("vlc", alpha=2.0)
        torch.testing.assert_close(loss(x, y), known(x, y))
        seen, true = (torch.autograd.grad(each(x, y), (x, y)) for each in (loss, known))
        torch.testing.assert_close(seen, true, rtol=1e-6, atol=1e-8)


def plain_ntxent(x: Tensor, y: Tensor, temperature: float) -> Tensor:
    """SimCLR's loss the way most implementations have it: a cross entropy over 2N - 1 logits."""
    z = F.normalize(torch.cat([x, y]), dim=-1)
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    n = len(x)
    return F.cross_entropy(logits, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


class TestInfoNCE:
    @given(n=st.integers(2, 9), d=st.integers(1, 6), temperature=st.floats(0.05, 2.0), seed=st.integers(0, 99))
    @settings(max_examples=30, deadline=None)
    def test_is_ntxent(self, n: int, d: int, temperature: float, seed: int) -> None:
        x, y = batch(n, d, seed)
        torch.testing.assert_close(fmicl.InfoNCELoss(temperature)(x, y), plain_ntxent(x, y, temperature))

    def test_is_mocos_with_a_queue(self) -> None:
        q, k = batch()
        q_unit, k_unit, bank = unit(q), unit(k), unit(queue())
        logits = torch.cat([(q_unit * k_unit).sum(-1, keepdim=True), q_unit @ bank.T], dim=1) / 0.07
        expected = F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))
        torch.testing.assert_close(fmicl.InfoNCELoss(0.07)(q, k, negatives=queue()), expected)

    def test_is_one_direction_of_clip_with_cross(self) -> None:
        x, y = batch()
        expected = F.cross_entropy(unit(x) @ unit(y).T / 0.1, torch.arange(len(x)))
        torch.testing.assert_close(fmicl.InfoNCELoss(0.1, negatives="cross")(x, y), expected)

    def test_anchor(self) -> None:
        x, y = batch()
        logits = (unit(x) @ unit(x).T / 0.1).fill_diagonal_(-math.inf)
        positive = (unit(x) * unit(y)).sum(-1, keepdim=True) / 0.1
        expected = F.cross_entropy(torch.cat([positive, logits], 1), torch.zeros(len(x), dtype=torch.long))
        torch.testing.assert_close(fmicl.InfoNCELoss(0.1, negatives="anchor")(x, y), expected)

    @pytest.mark.parametrize("decoupled", [False, True])
    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    def test_gradients(self, mode: str, decoupled: bool) -> None:
        x, y = (v.requires_grad_() for v in batch(4, 3))
        loss = fmicl.InfoNCELoss(0.3, mode, decoupled=decoupled)  # type: ignore[arg-type]
        assert torch.autograd.gradcheck(loss, (x, y))
        assert torch.autograd.gradcheck(lambda a, b, c: loss(a, b, negatives=c), (x, y, queue(3, 3).requires_grad_()))


class TestAlignUniform:
    def test_is_wang_and_isolas(self) -> None:
        x, y = batch()
        ux, uy = unit(x), unit(y)
        align = (ux - uy).norm(dim=1).pow(2).mean()
        uniform = [torch.pdist(v).pow(2).mul(-2).exp().mean().log() for v in (ux, uy)]
        loss = fmicl.AlignUniformLoss()
        torch.testing.assert_close((loss(x, y) + loss(y, x)) / 2, align + sum(uniform) / 2)

    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    def test_gradients_and_power(self, mode: str) -> None:
        x, y = (v.requires_grad_() for v in batch(4, 3))
        loss = fmicl.AlignUniformLoss(gamma=1.5, power=1.0, weight=0.5, negatives=mode)  # type: ignore[arg-type]
        assert torch.autograd.gradcheck(loss, (x, y))
        pairs = negative_pairs(unit(x), unit(y), mode, None)
        uniform = torch.stack([torch.exp(-1.5 * ((a - b) ** 2).sum()) for a, b in pairs]).mean().log()
        torch.testing.assert_close(loss(x, y), (unit(x) - unit(y)).norm(dim=1).mean() + 0.5 * uniform)

    def test_far_apart_does_not_underflow(self) -> None:
        x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        assert float(fmicl.AlignUniformLoss(gamma=1000.0)(x, x)) == pytest.approx(-4000.0)


class TestSpectral:
    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    def test_plain(self, mode: str) -> None:
        x, y = (v.requires_grad_() for v in batch(4, 3))
        loss = fmicl.SpectralContrastiveLoss(mu=3.0, negatives=mode)  # type: ignore[arg-type]
        root = math.sqrt(3.0)
        pairs = negative_pairs(root * unit(x), root * unit(y), mode, None)
        cost = torch.stack([(a @ b) ** 2 for a, b in pairs]).mean()
        expected = -2 * (root * unit(x) * root * unit(y)).sum(-1).mean() + cost
        torch.testing.assert_close(loss(x, y), expected)
        assert torch.autograd.gradcheck(loss, (x, y))


class TestConnections:
    """The paper's connections between objectives, to 1e-6 in float64."""

    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    @given(seed=st.integers(0, 1000), gamma=st.floats(0.1, 10.0))
    @settings(max_examples=10, deadline=None)
    def test_kl_with_the_optimal_shift_is_au(self, mode: str, seed: int, gamma: float) -> None:
        x, y = batch(seed=seed)
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=gamma, mu=2.0, negatives=mode, shift="optimal")  # type: ignore[arg-type]
        au = fmicl.AlignUniformLoss(gamma=gamma, weight=1 / gamma, negatives=mode)  # type: ignore[arg-type]
        torch.testing.assert_close(kl(x, y), gamma * au(x, y), rtol=0, atol=1e-6)
        weighted = fmicl.FMICLLoss("kl", alpha=40.0, gamma=gamma, negatives=mode, shift="optimal")  # type: ignore[arg-type]
        torch.testing.assert_close(weighted(x, y), gamma * au(x, y) + math.log(40.0), rtol=0, atol=1e-6)

    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    @given(seed=st.integers(0, 1000), temperature=st.floats(0.05, 2.0))
    @settings(max_examples=20, deadline=None)
    def test_kl_with_the_optimal_shift_is_never_above_infonce(self, mode: str, seed: int, temperature: float) -> None:
        """As maximised objectives with the same similarity and negatives; Jensen's inequality."""
        x, y = batch(seed=seed)
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=1 / (2 * temperature), negatives=mode, shift="optimal")  # type: ignore[arg-type]
        infonce = fmicl.InfoNCELoss(temperature, negatives=mode, decoupled=True)  # type: ignore[arg-type]
        count = 2 * len(x) - 2 if mode == "both" else len(x) - 1
        assert -float(kl(x, y)) <= -float(infonce(x, y)) + math.log(count) + 1e-6

    def test_and_equal_where_all_anchors_are_alike(self) -> None:
        x = torch.eye(5, dtype=F64)
        kl = fmicl.FMICLLoss("kl", alpha=1.0, gamma=1.0, shift="optimal")
        infonce = fmicl.InfoNCELoss(0.5, negatives="anchor", decoupled=True)
        assert -float(kl(x, x)) == pytest.approx(-float(infonce(x, x)) + math.log(4), abs=1e-12)

    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    def test_pearson_at_u_equal_to_the_inner_product_is_spectral(self, mode: str) -> None:
        x, y = batch()
        pearson = fmicl.divergence("pearson")
        pairs = negative_pairs(unit(x), unit(y), mode, None)
        u_positive = (unit(x) * unit(y)).sum(-1)
        u_negative = torch.stack([a @ b for a, b in pairs])
        penalty = u_negative * pearson.derivative(u_negative) - (u_negative - 1) ** 2  # Fenchel-Young; u may be < 0
        objective = -(pearson.derivative(u_positive).mean() - penalty.mean())
        spectral = fmicl.SpectralContrastiveLoss(negatives=mode)(x, y)  # type: ignore[arg-type]
        torch.testing.assert_close(objective, spectral + 1, rtol=0, atol=1e-6)

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("mode", MODES)
    def test_weighted_is_alpha_in_the_loss(self, name: str, mode: str) -> None:
        """f_alpha at mu alpha, with weight 1, is f at mu with weight alpha, plus the constant alpha f(1 / alpha)."""
        x, y = batch()
        alpha, kind = 40.0, fmicl.divergence(name)
        explicit = queue() if mode == "explicit" else None
        negatives = "anchor" if mode == "explicit" else mode
        left = fmicl.FMICLLoss(kind.weighted(alpha), alpha=1.0, mu=alpha, negatives=negatives)  # type: ignore[arg-type]
        right = fmicl.FMICLLoss(kind, alpha=alpha, mu=1.0, negatives=negatives)  # type: ignore[arg-type]
        constant = alpha * kind.f(torch.tensor(1 / alpha, dtype=F64))
        torch.testing.assert_close(left(x, y, explicit), right(x, y, explicit) + constant, rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("loss", [fmicl.FMICLLoss("kl"), fmicl.FMICLLoss("vlc"), fmicl.InfoNCELoss()], ids=str)
def test_several_gradients_at_once(loss: nn.Module) -> None:
    """A backward pass must not change in place what the others need."""
    x, y = (v.requires_grad_() for v in batch(6, 3))
    (one,) = torch.autograd.grad(loss(x, y), x)
    for keep in (True, False):
        value = loss(x, y) * torch.ones(3, dtype=F64)
        (seen,) = torch.autograd.grad(value, x, torch.eye(3, dtype=F64), is_grads_batched=True, retain_graph=keep)
        torch.testing.assert_close(seen, one.expand(3, -1, -1))


class TestZeroRows:
    """A zero row is orthogonal to every row: as a positive, as a negative, and to itself."""

    @pytest.mark.parametrize("kernel", ["tiled", "reference"])
    def test_count_the_same_as_positives_and_as_negatives(self, kernel: Any) -> None:
        x = torch.eye(4, dtype=torch.float64)[:3]
        x = torch.cat([x, torch.zeros_like(x[:1])])
        options: Any = {"kernel": kernel, "negatives": "cross"}
        for name in ("kl", "js"):
            kind = fmicl.divergence(name)
            terms = fmicl.functional.fmicl_terms(x, x.roll(1, 0), kind, alpha=1.0, **options)
            orthogonal = torch.tensor(-2.0, dtype=torch.float64)
            torch.testing.assert_close(terms.alignment, -kind.score(orthogonal))
            both_zero = fmicl.functional.fmicl_terms(x[2:], x[2:], kind, **options).alignment
            torch.testing.assert_close(both_zero, -(kind.score(orthogonal) + kind.score(orthogonal + 2)) / 2)
        lonely = torch.zeros(2, 4, dtype=torch.float64)
        torch.testing.assert_close(
            fmicl.functional.infonce_loss(lonely, lonely, kernel=kernel), torch.tensor(math.log(3), dtype=torch.float64)
        )
        for power in (1.0, 2.0):
            seen = fmicl.functional.align_uniform_loss(lonely, lonely, power=power, kernel=kernel)
            assert float(seen) == pytest.approx(2 ** (power / 2) - 4)
