"""Log-sum-exps over pairs and their gradients: all backends against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import fmicl
from devices import TRITON_DEVICE
from fmicl import kernels
from fmicl.kernels import Kernel, reference, tiled
from fmicl.kernels.backend import Normaliser, is_moderate
from fmicl.kernels.triton import TritonBackend
from unit_rows import rows

BACKENDS: list[tuple[Any, float]] = [(tiled, 2e-5), (TritonBackend(False), 3e-5), (TritonBackend(True), 1e-2)]
"""Each backend with the bound of its relative error."""


class TestLogSumExp:
    @pytest.mark.parametrize("kernel", ["tiled", "triton"])
    @pytest.mark.parametrize(("n", "d"), [(2, 1), (17, 5), (130, 33), (70, 520)])
    @pytest.mark.parametrize("skip", [None, 0])
    def test_values_and_gradients(
        self, kernel: Kernel, n: int, d: int, skip: int | None, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(tiled, "_CPU_TILE", 32)
        weight = torch.randn(n, generator=torch.Generator().manual_seed(3)).to(TRITON_DEVICE)
        results = []
        for name in (kernel, "reference"):
            x, other = (rows(n, d, seed).to(TRITON_DEVICE).requires_grad_() for seed in (0, 1))
            within = kernels.row_logsumexp(x, None, 7.0, skip, kernel=name)
            across = kernels.row_logsumexp(x, other, 7.0, skip, kernel=name)
            total = (weight * (within + 2 * across)).sum()
            results.append((within, across, *torch.autograd.grad(total, (x, other))))
        for seen, true in zip(*results, strict=True):
            torch.testing.assert_close(seen, true, rtol=1e-4, atol=1e-5 * max(1.0, float(true.detach().abs().max())))

    @pytest.mark.parametrize("gradient", [False, True])
    def test_large_logits_do_not_overflow(self, gradient: bool) -> None:
        x = rows(9, 4).requires_grad_(gradient)
        seen = kernels.row_logsumexp(x, None, 5000.0, 0, kernel="tiled")
        torch.testing.assert_close(seen, reference.row_logsumexp(x, x, 5000.0, 0))

    def test_terms_of_a_few_tiles_are_kept(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiled, "_CPU_TILE", 8)
        monkeypatch.setattr(tiled, "_KEPT", 3)
        x, other = rows(12, 5), rows(16, 5, 1)
        found = tiled.logsumexp_with_terms(x, other, 3.0, 1)
        assert found is not None
        value, terms, total = found
        z = (3.0 * x @ other.T).masked_fill(torch.eye(12, 16).roll(1, 1).bool(), -torch.inf)
        torch.testing.assert_close((value, terms / total[:, None]), (z.logsumexp(1), z.softmax(1)))
        assert tiled.logsumexp_with_terms(x, rows(17, 5), 3.0, 1) is None

    @pytest.mark.parametrize("scale", [43.0, -43.0, 44.0, -44.0, 200.0, -200.0])
    @pytest.mark.parametrize("kept", [0, 8])
    def test_smallest_and_largest_terms(self, kept: int, scale: float, monkeypatch: pytest.MonkeyPatch) -> None:
        """Rows of nothing but such terms; from a scale of 43.7 on, a maximum is subtracted."""
        monkeypatch.setattr(tiled, "_KEPT", kept)
        assert is_moderate(scale, torch.float32) == (abs(scale) < 43.7)
        x = torch.eye(3)[:1].requires_grad_()
        other = torch.stack([-torch.eye(3)[0], -torch.eye(3)[0] + 1e-3 * torch.eye(3)[1]]).repeat(300, 1)
        value = kernels.row_logsumexp(x, other, scale, kernel="tiled")
        value.sum().backward()
        exact = torch.eye(3, dtype=torch.float64)[:1].requires_grad_()
        wanted = (scale * exact @ other.double().T).logsumexp(1)
        wanted.sum().backward()
        torch.testing.assert_close(value.double(), wanted, rtol=1e-6, atol=1e-5)
        assert x.grad is not None
        torch.testing.assert_close(x.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)

    @pytest.mark.parametrize("kept", [0, 8])
    @pytest.mark.parametrize("symmetric", [False, True])
    def test_retained_graph(self, symmetric: bool, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiled, "_KEPT", kept)
        x, other = rows(12, 5).requires_grad_(), rows(12, 5, 1).requires_grad_()
        inputs = (x,) if symmetric else (x, other)
        total = kernels.row_logsumexp(x, None if symmetric else other, 3.0, 0, kernel="tiled").square().sum()
        first = torch.autograd.grad(total, inputs, retain_graph=True)
        again = torch.autograd.grad(total, inputs, retain_graph=True)
        last = torch.autograd.grad(total, inputs)
        for one, two, three in zip(first, again, last, strict=True):
            assert torch.equal(one, two)
            assert torch.equal(one, three)

    @pytest.mark.parametrize("kept", [0, 8])
    def test_row_without_pairs(self, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiled, "_KEPT", kept)
        x = rows(2, 4).requires_grad_()
        seen = kernels.row_logsumexp(x, None, 3.0, 0, kernel="tiled", paired=True)
        assert torch.equal(seen, torch.full((2,), -torch.inf))
        (gradient,) = torch.autograd.grad(seen.clamp_min(-1.0).sum(), x)
        assert torch.equal(gradient, torch.zeros_like(x))

    def test_gradient_of_one_side_only(self) -> None:
        x, other = rows(12, 5), rows(9, 5, 1)
        for one, two in ((True, False), (False, True)):
            a, b = x.clone().requires_grad_(one), other.clone().requires_grad_(two)
            kernels.row_logsumexp(a, b, 3.0, kernel="tiled").sum().backward()
            exact = [x.double().requires_grad_(), other.double().requires_grad_()]
            reference.row_logsumexp(exact[0], exact[1], 3.0, None).sum().backward()
            for leaf, true, wanted in ((a, exact[0], one), (b, exact[1], two)):
                assert (leaf.grad is not None) == wanted
                if leaf.grad is not None:
                    torch.testing.assert_close(leaf.grad.double(), true.grad, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize(("skip", "paired"), [(None, False), (0, False), (0, True)])
    @pytest.mark.parametrize(("n", "d", "few"), [(4, 5, 1024), (300, 40, 1024), (300, 300, 1024), (300, 300, 0)])
    @pytest.mark.parametrize("scale", [4.0, 60.0])
    def test_symmetric_log_sum_exps(
        self, scale: float, n: int, d: int, few: int, skip: int | None, paired: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Rows with themselves, gradients of either sign, over one tile and several."""
        monkeypatch.setattr("fmicl.kernels.triton._SIDE", 128)
        monkeypatch.setattr("fmicl.kernels.triton._FEW", few)
        monkeypatch.setattr(tiled, "_tile", lambda _: 70)
        x = rows(n, d).to(TRITON_DEVICE).bfloat16().float()  # so that only the kernel's own error is seen
        exact = x.double().requires_grad_()
        values = scale * exact @ exact.T
        if skip is not None:
            same = torch.arange(n, device=TRITON_DEVICE) // (2 if paired else 1)
            values = values.masked_fill(same[:, None] == same[None, :], -torch.inf)
        values = values.logsumexp(dim=1)
        weights = torch.linspace(-1, 1, n, dtype=torch.float64, device=TRITON_DEVICE)
        (wanted,) = torch.autograd.grad(values, exact, weights)
        own = Normaliser(values.detach().float(), weights.float())
        torch.testing.assert_close(reference.row_logsumexp(exact, exact, scale, skip, paired), values)
        for backend, bound in BACKENDS:
            seen = backend.logsumexp_symmetric(x, scale, skip, own, paired)
            assert float((seen.double() - wanted).norm()) <= bound * float(wanted.norm())
            twice = backend.logsumexp_gradient(x, x, scale, skip, own, own, paired)
            assert float((twice.double() - wanted).norm()) <= bound * float(wanted.norm())
            found = backend.logsumexp_rows(x, x, scale, skip, paired)
            torch.testing.assert_close(found.double(), values.detach(), rtol=bound, atol=bound)

    @pytest.mark.parametrize("skip", [-4, 2, 66])
    @pytest.mark.parametrize("d", [20, 200, 300])
    def test_paired_rows_with_those_of_another_process(self, d: int, skip: int) -> None:
        """Rows with an offset among the columns, as with several processes, by every kernel."""
        x, other = (rows(count, d, seed).to(TRITON_DEVICE).bfloat16().float() for count, seed in ((150, 0), (214, 1)))
        exact = x.double().requires_grad_()
        values = 4.0 * exact @ other.double().T
        row, column = torch.arange(150, device=TRITON_DEVICE), torch.arange(214, device=TRITON_DEVICE)
        same = (row[:, None] + skip) // 2 == column[None, :] // 2
        values = values.masked_fill(same, -torch.inf).logsumexp(dim=1)
        weights = torch.linspace(-1, 1, 150, dtype=torch.float64, device=TRITON_DEVICE)
        (wanted,) = torch.autograd.grad(values, exact, weights)
        own = Normaliser(values.detach().float(), weights.float())
        for backend, bound in BACKENDS:
            seen = backend.logsumexp_gradient(x, other, 4.0, skip, own, None, True)
            assert float((seen.double() - wanted).norm()) <= bound * float(wanted.norm())
            found = backend.logsumexp_rows(x, other, 4.0, skip, True)
            torch.testing.assert_close(found.double(), values.detach(), rtol=bound, atol=bound)

    @pytest.mark.parametrize("shift", [-6, 0, 2, 4])
    @pytest.mark.parametrize("height", [4, 7])
    def test_skipped_entries_of_a_tile(self, shift: int, height: int) -> None:
        """Both views of a sample, in a tile anywhere."""
        seen = torch.zeros(height, 5)
        for part in tiled._skipped(seen, shift, slice(8, 8 + height), slice(8, 13), paired=True):
            part.fill_(1.0)
        row, column = torch.arange(8, 8 + height), torch.arange(8, 13)
        assert torch.equal(seen.bool(), (row[:, None] + shift) // 2 == column[None, :] // 2)

    def test_paired_needs_two_views_of_each_sample(self) -> None:
        x = rows(6, 4)
        for wrong in ({"other": x}, {"skip": 2}, {"x": x[:5]}):
            given: dict[str, Any] = {"x": x, "other": None, "scale": 1.0, "skip": 0} | wrong
            with pytest.raises(ValueError, match="paired"):
                kernels.row_logsumexp(**given, paired=True)


@pytest.mark.parametrize("half", [False, True])
def test_loss_near_zero(half: bool) -> None:
    """Where every positive is found, gradients are tiny: rounding errors of a positive in the sums would hide them."""
    x = rows(40, 24).to(TRITON_DEVICE, torch.bfloat16 if half else torch.float32)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    value = fmicl.InfoNCELoss(0.02, normalised=True, kernel="triton", precision="fast")(leaf, leaf)
    wanted = fmicl.InfoNCELoss(0.02, normalised=True, kernel="reference")(exact, exact)
    assert 0 <= float(value.detach()) < 1e-6
    value.backward()
    wanted.backward()
    assert leaf.grad is not None
    assert exact.grad is not None
    assert float((leaf.grad.double() - exact.grad).norm()) < 1e-5
