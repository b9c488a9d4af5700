"""Input of the losses: degenerate and half-precision rows, torch.func, and errors for invalid input and settings."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import fmicl
from devices import TRITON_DEVICE
from fmicl import functional
from fmicl.kernels import Kernel, Precision
from fmicl.utils.validation import Negatives
from two_views import NAMES, batch, queue
from unit_rows import needs_triton

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

    def test_numpy_numbers_are_accepted(self) -> None:
        import numpy as np

        assert fmicl.FMICLLoss("kl", alpha=np.float32(3), gamma=np.int64(1)).alpha == 3  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        "kind",
        [
            functools.partial(fmicl.FMICLLoss, "kl"),
            fmicl.InfoNCELoss,
            fmicl.AlignUniformLoss,
            fmicl.SpectralContrastiveLoss,
        ],
    )
    def test_repr_has_the_options_that_differ_from_the_defaults(self, kind: Callable[..., torch.nn.Module]) -> None:
        assert repr(kind(kernel="auto", gather=True)) == repr(kind())
        chosen = kind(normalised=True, kernel="tiled", precision="high", gather=False)
        assert repr(chosen) == repr(kind())[:-1] + ", normalised=True, kernel=tiled, precision=high, gather=False)"

    def test_an_infinite_penalty_of_a_sample_with_itself_does_not_count(self) -> None:
        """It is not a negative; in the gradient of the dense kernel it would be 0 * inf."""
        x, y = (torch.randn(4, 768, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
        loss = fmicl.FMICLLoss("tsallis", gamma=20.0, mu="normalised")
        usual = torch.autograd.grad(loss(x.requires_grad_(), y), x)[0]
        assert bool(usual.isfinite().all())
        (twice,) = torch.autograd.grad(loss(x, y), x, create_graph=True)
        once = torch.func.grad(loss)(x.detach(), y)
        for slope in (twice.detach(), once):
            torch.testing.assert_close(slope, usual, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", LOSSES)
    def test_torch_func(self, name: str) -> None:
        x, y = batch(4, 3)
        loss = LOSSES[name]()
        slope: Tensor = torch.func.grad(loss)(x, y)
        torch.testing.assert_close(slope, torch.autograd.grad(loss(x.requires_grad_(), y), x)[0])
        bend: Tensor = torch.func.hessian(loss)(x.detach(), y)
        expected = torch.autograd.functional.hessian(lambda value: loss(value, y), x.detach())
        torch.testing.assert_close(bend, expected)

    def test_torch_func_refuses_other_kernels(self) -> None:
        x, y = batch(4, 3)
        with pytest.raises(ValueError, match="kernel='tiled'"):
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
        [
            ("tiled", "high", (0, 4e-3)),
            pytest.param("triton", "high", (0, 4e-3), marks=needs_triton),
            pytest.param("triton", "fast", (2e-2, 8e-2), marks=needs_triton),
        ],
    )
    def test_the_papers_text_setting_needs_float32_products(
        self, kernel: Kernel, precision: Precision, bounds: tuple[float, float]
    ) -> None:
        """Rows with a coordinate that is large in all of them, as BERT's have: why text is not "fast"."""
        x = torch.randn(64, 512, generator=torch.Generator().manual_seed(0))
        x[:, 7] += 50
        x = x.bfloat16().to(TRITON_DEVICE if kernel == "triton" else "cpu")
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

    def test_one_sample_is_enough_for_explicit_negatives(self) -> None:
        x, y = batch(1)
        assert fmicl.FMICLLoss("kl")(x, y, negatives=queue()).isfinite()


@pytest.mark.parametrize("negatives", ["anchor", "cross", "both"])
@pytest.mark.parametrize("name", ["fmicl", "infonce", "align_uniform", "spectral"])
def test_normalised_bfloat16_rows_are_not_copied(name: str, negatives: Negatives) -> None:
    """But the loss of the rounded rows has float32's accuracy, and their gradient is bfloat16."""
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
