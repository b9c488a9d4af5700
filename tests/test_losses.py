"""The losses against plain loops, other implementations and the paper's connections between them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl import functional
from fmicl.kernels import Kernel, Precision
from fmicl.kernels.triton import interpreting
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

    def test_three_lines_of_the_readme(self) -> None:
        x, y = (v.requires_grad_() for v in batch(8, 16, dtype=torch.float32))
        loss = fmicl.FMICLLoss("js", alpha=40.0, gamma=1.0)
        loss(x, y).backward()
        assert x.grad is not None
        assert x.grad.isfinite().all()

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

    def test_normalises_unless_told(self) -> None:
        x, y = batch()
        loss, trusting = fmicl.FMICLLoss("kl"), fmicl.FMICLLoss("kl", normalised=True)
        torch.testing.assert_close(loss(3 * x, y / 7), loss(x, y))
        torch.testing.assert_close(trusting(unit(x), unit(y)), loss(x, y))

    def test_normalised_mu(self) -> None:
        x, y = batch(d=4)
        from fmicl.similarities import log_mu

        exact = fmicl.FMICLLoss("js", mu="normalised")(x, y)
        torch.testing.assert_close(exact, fmicl.FMICLLoss("js", mu=math.exp(log_mu(1.0, 4)))(x, y))

    def test_a_divergence_of_ones_own(self) -> None:
        x, y = (v.requires_grad_() for v in batch())
        mine = fmicl.Divergence.from_generator(lambda u: (u - 1) ** 2 / (u + 1), name="mine")
        for loss, known in ((fmicl.FMICLLoss(mine, alpha=2.0), fmicl.FMICLLoss("vlc", alpha=2.0)),):
            torch.testing.assert_close(loss(x, y), known(x, y))
            for seen, true in zip(
                torch.autograd.grad(loss(x, y), (x, y)), torch.autograd.grad(known(x, y), (x, y)), strict=True
            ):
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


LOSSES: dict[str, Callable[[], torch.nn.Module]] = {
    **{name: functools.partial(fmicl.FMICLLoss, name) for name in NAMES},
    "kl, optimal shift": lambda: fmicl.FMICLLoss("kl", shift="optimal"),
    "js, cosine": lambda: fmicl.FMICLLoss("js", similarity="cosine"),
    "js, both": lambda: fmicl.FMICLLoss("js", negatives="both"),
    "infonce": lambda: fmicl.InfoNCELoss(),
    "align_uniform": lambda: fmicl.AlignUniformLoss(),
    "align_uniform, power 1": lambda: fmicl.AlignUniformLoss(power=1.0),
    "spectral": lambda: fmicl.SpectralContrastiveLoss(),
}


class TestRobust:
    @pytest.mark.parametrize("name", LOSSES)
    @pytest.mark.parametrize("case", ["zero row", "all zero", "equal views", "all equal", "opposite", "tiny", "huge"])
    def test_degenerate_input_gives_finite_loss_and_gradient(self, name: str, case: str) -> None:
        x, y = batch(dtype=torch.float32)
        if case == "zero row":
            x[0] = 0
        elif case == "all zero":
            x, y = torch.zeros_like(x), torch.zeros_like(y)
        elif case == "equal views":
            y = x.clone()
        elif case == "all equal":
            x, y = torch.ones_like(x), torch.ones_like(y)
        elif case == "opposite":
            y = -x
        else:
            x, y = (v * (1e-30 if case == "tiny" else 1e30) for v in (x, y))
        x.requires_grad_()
        y.requires_grad_()
        value = LOSSES[name]()(x, y)
        value.backward()
        assert value.isfinite()
        assert x.grad is not None
        assert x.grad.isfinite().all()
        assert y.grad is None or y.grad.isfinite().all()

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    @pytest.mark.parametrize("name", LOSSES)
    def test_half_precision_input_and_autocast(self, name: str, dtype: torch.dtype) -> None:
        x, y = batch(32, 16, dtype=dtype)
        loss = LOSSES[name]()
        exact = loss(x.double(), y.double())
        x.requires_grad_()
        with torch.autocast("cpu", dtype=dtype):
            value = loss(x, y)
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), exact, rtol=1e-4, atol=1e-5)
        value.backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert x.grad.isfinite().all()

    @pytest.mark.parametrize("factor", [1e-30, 1e30])
    def test_length_does_not_matter(self, factor: float) -> None:
        x, y = batch(dtype=torch.float32)
        torch.testing.assert_close(fmicl.FMICLLoss("kl")(factor * x, y), fmicl.FMICLLoss("kl")(x, y))

    def test_autocast_is_seen_through_keywords(self) -> None:
        x, y = batch(32, 16, dtype=torch.float32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = functional.infonce_loss(x=x, y=y, kernel="reference")
        torch.testing.assert_close(value, functional.infonce_loss(x, y, kernel="reference"), rtol=1e-6, atol=1e-6)

    def test_numpy_numbers_are_numbers(self) -> None:
        import numpy as np

        assert fmicl.FMICLLoss("kl", alpha=np.float32(3), gamma=np.int64(1)).alpha == 3  # type: ignore[arg-type]

    def test_an_unknown_option_is_named(self) -> None:
        with pytest.raises(TypeError, match="unknown option kernal; there are normalised, kernel, precision, gather"):
            fmicl.FMICLLoss("kl", kernal="tiled")  # type: ignore[call-arg]

    @pytest.mark.parametrize(
        "kind",
        [
            functools.partial(fmicl.FMICLLoss, "kl"),
            fmicl.InfoNCELoss,
            fmicl.AlignUniformLoss,
            fmicl.SpectralContrastiveLoss,
        ],
    )
    def test_the_repr_says_which_options_were_chosen(self, kind: Callable[..., torch.nn.Module]) -> None:
        assert repr(kind(kernel="auto", gather=True)) == repr(kind())
        chosen = kind(normalised=True, kernel="tiled", precision="high", gather=False)
        assert repr(chosen) == repr(kind())[:-1] + ", normalised=True, kernel=tiled, precision=high, gather=False)"

    @pytest.mark.parametrize("name", LOSSES)
    def test_goes_through_torch_func(self, name: str) -> None:
        x, y = batch(4, 3)
        loss = LOSSES[name]()
        slope: Tensor = torch.func.grad(loss)(x, y)
        torch.testing.assert_close(slope, torch.autograd.grad(loss(x.requires_grad_(), y), x)[0])
        bend: Tensor = torch.func.hessian(loss)(x.detach(), y)
        expected = torch.autograd.functional.hessian(lambda value: loss(value, y), x.detach())
        torch.testing.assert_close(bend, expected)

    def test_torch_func_with_a_kernel_that_it_does_not_go_through(self) -> None:
        x, y = batch(4, 3)
        with pytest.raises(ValueError, match=r"'auto' or 'reference' only, got kernel='tiled'"):
            torch.func.grad(fmicl.FMICLLoss("kl", kernel="tiled"))(x, y)

    def test_the_papers_text_setting_in_bfloat16(self) -> None:
        """alpha = 409600 and gamma = 20: a loss of many magnitudes must be right from bfloat16 input too."""
        x, y = batch(64, 768, dtype=torch.bfloat16)
        loss = fmicl.FMICLLoss("kl", alpha=409600.0, gamma=20.0)
        x64, y64 = (v.double().requires_grad_() for v in (x, y))
        exact = loss(x64, y64)
        exact.backward()
        x.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = loss(x, y)
        value.backward()
        torch.testing.assert_close(value.double(), exact.detach(), rtol=1e-5, atol=1e-5)
        assert x.grad is not None
        assert x64.grad is not None
        error = (x.grad.double() - x64.grad).norm() / x64.grad.norm()
        assert float(error) < 4e-3  # the gradient comes back in bfloat16, whose own rounding is that

    @pytest.mark.parametrize(
        ("kernel", "precision", "bounds"),
        [("tiled", "high", (0, 4e-3)), ("triton", "high", (0, 4e-3)), ("triton", "fast", (2e-2, 8e-2))],
    )
    def test_the_papers_text_setting_needs_float32_products(
        self, kernel: Kernel, precision: Precision, bounds: tuple[float, float]
    ) -> None:
        """Rows of an encoder with a coordinate that is large in all of them, as BERT has: why text is not "fast"."""
        if kernel == "triton" and not interpreting():
            pytest.skip("Triton's interpreter is not on")
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
        x[:, 7] += 50
        x = x.bfloat16()
        x64, leaf = x.double().requires_grad_(), x.clone().requires_grad_()
        text: dict[str, Any] = {"alpha": 409600.0, "gamma": 20.0}
        fmicl.FMICLLoss("kl", **text, kernel="reference")(x64, x64).backward()
        fmicl.FMICLLoss("kl", **text, kernel=kernel, precision=precision)(leaf, leaf).backward()
        assert leaf.grad is not None
        assert x64.grad is not None
        error = float((leaf.grad.double() - x64.grad).norm() / x64.grad.norm())
        assert bounds[0] <= error < bounds[1]

    @pytest.mark.parametrize("name", ["kl", "infonce", "align_uniform", "spectral"])
    def test_rows_may_be_strided(self, name: str) -> None:
        x, y = batch(6, 8)
        wide = torch.stack([x, y], dim=-1)
        torch.testing.assert_close(LOSSES[name]()(wide[..., 0], wide[..., 1]), LOSSES[name]()(x, y))

    @pytest.mark.parametrize("make", [LOSSES["kl"], LOSSES["infonce"], LOSSES["align_uniform"], LOSSES["spectral"]])
    @pytest.mark.parametrize(
        ("x", "y", "negatives", "message"),
        [
            (torch.zeros(4, 3), torch.zeros(4, 2), None, r"\(4, 3\) and \(4, 2\)"),
            (torch.zeros(4, 3), torch.zeros(5, 3), None, r"\(4, 3\) and \(5, 3\)"),
            (torch.zeros(1, 3), torch.zeros(1, 3), None, r"at least two samples in a batch, got shape \(1, 3\)"),
            (torch.zeros(4), torch.zeros(4), None, r"two dimensions \(N, d\), got shape \(4,\)"),
            (
                torch.zeros(4, 3).long(),
                torch.zeros(4, 3),
                None,
                r"x must be float16, bfloat16, float32 or float64, got torch\.int64",
            ),
            (
                torch.zeros(4, 3),
                torch.zeros(4, 3).to(torch.float8_e4m3fn),
                None,
                r"y must be .*, got torch\.float8_e4m3fn",
            ),
            (torch.zeros(4, 0), torch.zeros(4, 0), None, "at least one row and one dimension"),
            (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(5, 2), r"\(5, 2\) for x of shape \(4, 3\)"),
            (torch.zeros(4, 3), torch.zeros(4, 3), torch.zeros(0, 3), "M > 0"),
            (torch.zeros(4, 3), torch.zeros(4, 3, device="meta"), None, "y is on meta but x is on cpu"),
            ([[1.0]], torch.zeros(4, 3), None, "x must be a tensor"),
        ],
    )
    def test_bad_input_says_what_was_seen(
        self, make: Callable[[], torch.nn.Module], x: Tensor, y: Tensor, negatives: Tensor | None, message: str
    ) -> None:
        with pytest.raises(ValueError, match=message):
            make()(x, y, negatives=negatives)

    def test_one_sample_is_enough_for_explicit_negatives(self) -> None:
        x, y = batch(1)
        assert fmicl.FMICLLoss("kl")(x, y, negatives=queue()).isfinite()

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: fmicl.FMICLLoss("kl", alpha=0.0), r"alpha must be a positive number, got alpha=0\.0"),
            (lambda: fmicl.FMICLLoss("kl", alpha=-1.0), r"got alpha=-1\.0"),
            (lambda: fmicl.FMICLLoss("kl", gamma=0.0), r"gamma must be a positive number, got gamma=0\.0"),
            (lambda: fmicl.FMICLLoss("kl", mu=0.0), r"mu must be a positive number, got mu=0\.0"),
            (lambda: fmicl.FMICLLoss("kl", mu="norm"), "got 'norm'"),  # type: ignore[arg-type]
            (lambda: fmicl.FMICLLoss("lk"), "unknown divergence 'lk'"),
            (lambda: fmicl.FMICLLoss("kl", similarity="dot"), "similarity is 'gaussian', 'cosine'"),
            (lambda: fmicl.FMICLLoss("kl", similarity="cosine", mu=2.0), r"has no mu, got mu=2\.0"),
            (
                lambda: fmicl.FMICLLoss("kl", similarity=fmicl.Cosine(), gamma=2.0),
                r"own settings; leave out gamma=2\.0$",
            ),
            (lambda: fmicl.FMICLLoss("kl", similarity=fmicl.Cosine(), mu=2.0), r"own settings; leave out mu=2\.0$"),
            (lambda: fmicl.FMICLLoss("kl", negatives="all"), "'anchor', 'both', 'cross' or a tensor"),  # type: ignore[arg-type]
            (lambda: fmicl.FMICLLoss("kl", shift="best"), "shift is None or 'optimal', got 'best'"),  # type: ignore[arg-type]
            (lambda: fmicl.InfoNCELoss(temperature=0.0), r"temperature must be a positive number"),
            (lambda: fmicl.AlignUniformLoss(power=0.5), r"at least 1, got power=0\.5"),
            (lambda: fmicl.AlignUniformLoss(gamma=math.inf), "gamma must be a positive number, got gamma=inf"),
            (lambda: fmicl.SpectralContrastiveLoss(mu=-1.0), r"mu must be a positive number, got mu=-1\.0"),
        ],
    )
    def test_bad_settings_are_refused_when_made(self, make: Callable[[], torch.nn.Module], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            make()


@pytest.mark.parametrize("negatives", ["anchor", "cross", "both"])
@pytest.mark.parametrize("name", ["fmicl", "infonce", "align_uniform", "spectral"])
def test_bfloat16_rows_on_the_sphere_are_taken_as_they_are(name: str, negatives: functional.Negatives) -> None:
    """No copy in float32, but float32's accuracy: the loss of the rounded rows, and a gradient in their own type."""
    losses: dict[str, Callable[..., Tensor]] = {
        "fmicl": functional.fmicl_loss,
        "infonce": functional.infonce_loss,
        "align_uniform": functional.align_uniform_loss,
        "spectral": functional.spectral_contrastive_loss,
    }
    generator = torch.Generator().manual_seed(3)
    x = F.normalize(torch.randn(12, 5, generator=generator), dim=-1)
    rows = [x.bfloat16(), F.normalize(x + 0.1 * torch.randn(12, 5, generator=generator), dim=-1).bfloat16()]
    leaves = [value.clone().requires_grad_() for value in rows]
    seen = losses[name](*leaves, negatives=negatives, normalised=True)
    exact = [value.double().requires_grad_() for value in rows]
    expected = losses[name](*exact, negatives=negatives, normalised=True)
    assert seen.dtype == torch.float32
    torch.testing.assert_close(seen.double(), expected, rtol=1e-5, atol=1e-5)
    seen.backward()
    expected.backward()
    for leaf, true in zip(leaves, exact, strict=True):
        assert leaf.grad is not None
        assert true.grad is not None
        assert leaf.grad.dtype == torch.bfloat16
        assert float((leaf.grad.double() - true.grad).norm()) <= 6e-3 * float(true.grad.norm())
