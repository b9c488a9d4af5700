"""Pairwise sums: all backends against the dense reference in float64, at any size."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fmicl
from devices import TRITON_DEVICE
from fmicl import kernels
from fmicl.kernels import Kernel, PairFunction, reference, tiled
from fmicl.kernels.backend import Normaliser
from fmicl.kernels.exchange import World
from fmicl.kernels.triton import TritonBackend
from fmicl.utils.triton import interpreting
from pair_functions import FUNCTIONS
from two_views import F64, NAMES
from unit_rows import rows

SIZES = [(2, 1), (3, 2), (17, 5), (64, 16), (130, 33), (200, 128)]


def tolerance(fast: bool) -> float:
    """Relative error: bfloat16 rounds to 3 digits; three TF32 products keep about 6."""
    return 1e-2 if fast else 2e-5


def dense(x: Tensor, other: Tensor | None, function: PairFunction, skip: int | None) -> tuple[Tensor, Tensor]:
    """Value and gradient in x by the reference, in float64."""
    x = x.double().requires_grad_()
    total = reference.pair_sum(x, x if other is None else other.double(), function, skip)
    (grad,) = torch.autograd.grad(total, x)
    return total.detach(), grad


def close(seen: tuple[Tensor, Tensor | None], true: tuple[Tensor, Tensor], tolerance: float) -> None:
    total, grad = seen
    assert grad is not None
    scale = max(1.0, float(true[0].abs()))
    assert float((total - true[0]).abs()) <= tolerance * scale
    assert float((grad.double() - true[1]).norm()) <= tolerance * (1e-3 + float(true[1].norm()))


def test_exchange_uses_the_precision_of_the_products() -> None:
    x = rows(5, 8)
    assert TritonBackend(True).cast_for_exchange(x).dtype == torch.bfloat16
    assert TritonBackend(False).cast_for_exchange(x.bfloat16()).dtype == torch.float32
    assert tiled.cast_for_exchange(x.double()).dtype == torch.float64


class TestPairs:
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_tiled(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tiled, "_CPU_TILE", 32)
        x, other = rows(70, 6, 0, F64), rows(45, 6, 1, F64)
        close(tiled.pair_symmetric(x, FUNCTIONS[name], True), dense(x, None, FUNCTIONS[name], 0), 1e-10)
        for skip in (None, 0, 5, -40, 44, 1000):
            seen = tiled.pair_rows(x, other, FUNCTIONS[name], skip, True)
            close(seen, dense(x, other, FUNCTIONS[name], skip), 1e-10)
            total, none = tiled.pair_rows(x, other, FUNCTIONS[name], skip, False)
            assert none is None
            torch.testing.assert_close(total, seen[0])

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_triton(self, name: str, fast: bool) -> None:
        backend = TritonBackend(fast)
        x, other = rows(70, 6).to(TRITON_DEVICE), rows(45, 6, 1).to(TRITON_DEVICE)
        close(backend.pair_symmetric(x, FUNCTIONS[name], True), dense(x, None, FUNCTIONS[name], 0), tolerance(fast))
        for skip in (None, 0, -40):
            seen = backend.pair_rows(x, other, FUNCTIONS[name], skip, True)
            close(seen, dense(x, other, FUNCTIONS[name], skip), tolerance(fast))

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize(("n", "d", "few"), [
        *((*size, 1024) for size in SIZES), (130, 200, 1024), (70, 520, 1024), (300, 600, 1024), (300, 520, 0),
    ])  # fmt: skip
    def test_triton_sizes(self, n: int, d: int, few: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Odd sizes, both algorithms, small and large tiles, one or several, columns in one part or several."""
        monkeypatch.setattr("fmicl.kernels.triton._SIDE", 256)
        monkeypatch.setattr("fmicl.kernels.triton._FEW", few)
        if few == 0:  # a GPU that large tiles would leave idle
            monkeypatch.setattr("fmicl.kernels.triton.multiprocessors", lambda _: 132)
        backend, function = TritonBackend(fast), FUNCTIONS["vlc"]
        x, other = rows(n, d).to(TRITON_DEVICE), rows(n + 3, d, 1).to(TRITON_DEVICE)
        bound, exact = tolerance(fast), dense(x, None, function, 0)
        close(backend.pair_symmetric(x, function, True), exact, bound)
        close(backend.pair_rows(x, other, function, 1, True), dense(x, other, function, 1), bound)
        total, none = backend.pair_symmetric(x, function, False)
        assert none is None
        assert float(total) == pytest.approx(float(exact[0]), rel=bound, abs=bound)

    @pytest.mark.parametrize(("fast", "d", "fused"), [(False, 40, False), (True, 40, True), (True, 200, False)])
    def test_triton_with_little_shared_memory(
        self, fast: bool, d: int, fused: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GPUs with 99 KiB take two steps where the tiles of a single pass don't fit, and smaller log-sum-exps."""
        monkeypatch.setattr("fmicl.kernels.triton.shared_memory", lambda _: 99 * 1024)
        backend, function = TritonBackend(fast), FUNCTIONS["js"]
        x, other = rows(70, d).to(TRITON_DEVICE), rows(45, d, 1).to(TRITON_DEVICE)
        assert (backend._fused_shape(d, "js", x.device) is not None) == fused
        close(backend.pair_symmetric(x, function, True), dense(x, None, function, 0), tolerance(fast))
        close(backend.pair_rows(x, other, function, 0, True), dense(x, other, function, 0), tolerance(fast))
        exact = [value.double().requires_grad_() for value in (x, other)]
        values = reference.row_logsumexp(exact[0], exact[1], 4.0, 0)
        seen = backend.logsumexp_rows(x, other, 4.0, 0)
        torch.testing.assert_close(seen.double(), values.detach(), rtol=tolerance(fast), atol=tolerance(fast))
        own = Normaliser(seen, torch.ones_like(seen))
        by_rows = backend.logsumexp_both(x, other, 4.0, 0, own)
        for gradient, true in zip(by_rows, torch.autograd.grad(values.sum(), exact), strict=True):
            assert float((gradient.double() - true).norm()) <= tolerance(fast) * float(true.norm())

    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize("d", [40, 300])
    @pytest.mark.parametrize("skip", [None, 0, -7])
    def test_triton_gradients_of_both_sides(
        self, skip: int | None, d: int, fast: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In one pass each, and for large d from one buffer of slopes, over one tile or several."""
        monkeypatch.setattr("fmicl.kernels.triton._SIDE", 256)
        backend, bound = TritonBackend(fast), tolerance(fast)
        x, other = rows(300, d).to(TRITON_DEVICE), rows(150, d, 1).to(TRITON_DEVICE)
        exact = [value.double().requires_grad_() for value in (x, other)]
        wanted = reference.pair_sum(exact[0], exact[1], FUNCTIONS["vlc"], skip)
        total, *gradients = backend.pair_both(x, other, FUNCTIONS["vlc"], skip)
        assert float(total) == pytest.approx(float(wanted.detach()), rel=bound)
        for seen, true in zip(gradients, torch.autograd.grad(wanted, exact), strict=True):
            assert float((seen.double() - true).norm()) <= bound * float(true.norm())
        values = reference.row_logsumexp(exact[0], exact[1], 4.0, skip)
        weights = torch.linspace(-1, 1, len(x), dtype=torch.float64, device=TRITON_DEVICE)
        own = Normaliser(values.detach().float(), weights.float())
        by_rows = backend.logsumexp_both(x, other, 4.0, skip, own)
        for seen, true in zip(by_rows, torch.autograd.grad(values, exact, weights), strict=True):
            assert float((seen.double() - true).norm()) <= bound * float(true.norm())

    @pytest.mark.parametrize("gamma", [1.0, 20.0])
    def test_float32_is_as_good_as_dense_float32(self, gamma: float) -> None:
        """Triton only in its interpreter, whose products are float32; on a GPU they are three TF32 products."""
        x = rows(600, 64)
        function = fmicl.Gaussian(gamma).critic(fmicl.divergence("kl"), 64)
        exact, exact_grad = dense(x, None, function, 0)
        single = x.clone().requires_grad_()
        dense_total = reference.pair_sum(single, single, function, 0)
        (dense_grad,) = torch.autograd.grad(dense_total, single)
        results = [tiled.pair_symmetric(x, function, True)]
        if interpreting():
            results.append(TritonBackend(False).pair_symmetric(x, function, True))
        for total, grad in results:
            assert grad is not None
            allowed = 1.1 * float((dense_grad.double() - exact_grad).norm()) + 1e-6 * float(exact_grad.norm())
            assert float((grad.double() - exact_grad).norm()) <= allowed
            dense_error = abs(float(dense_total.detach().double() - exact))
            assert float((total - exact).abs()) <= dense_error + 1e-6 * float(exact)

    def test_memory_does_not_grow_with_n_squared(self) -> None:
        """No operation returns a tensor larger than a tile."""
        largest = 0

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                nonlocal largest
                out = func(*args, **(kwargs or {}))
                if isinstance(out, Tensor):
                    largest = max(largest, out.numel())
                return out

        x = rows(2500, 8).requires_grad_()
        y = rows(2500, 8, 1)
        with Watch():  # type: ignore[no-untyped-call]
            for loss in (fmicl.FMICLLoss("js"), fmicl.InfoNCELoss(), fmicl.FMICLLoss("js", shift="optimal")):
                loss(x, y).backward()
        assert largest <= tiled._CPU_TILE**2


@pytest.mark.parametrize("kernel", ["tiled", "triton"])
class TestGradient:
    def test_is_not_copied(self, kernel: Kernel) -> None:
        """It may be most of a loss's memory: the leaf keeps the tensor that the kernel wrote."""
        made: list[int] = []

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                out = func(*args, **(kwargs or {}))
                if func.overloadpacket.__name__ in ("clone", "copy_", "new_empty_strided"):
                    made.append(out.numel())
                return out

        x = rows(130, 48).to(TRITON_DEVICE).requires_grad_()
        total = kernels.pair_sum(x, None, FUNCTIONS["kl"], 0, kernel=kernel)
        with Watch():  # type: ignore[no-untyped-call]
            total.backward()
        assert x.grad is not None
        assert x.numel() not in made

    def test_is_computed_with_the_sum(self, kernel: Kernel) -> None:
        """A queue may be overwritten between forward and backward."""
        x, queue = rows(40, 16).to(TRITON_DEVICE).requires_grad_(), rows(60, 16, 1).to(TRITON_DEVICE)
        (wanted,) = torch.autograd.grad(kernels.pair_sum(x, queue, FUNCTIONS["kl"], kernel=kernel), x)
        total = kernels.pair_sum(x, queue, FUNCTIONS["kl"], kernel=kernel)
        queue.zero_()
        total.backward()
        torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)
        with pytest.raises(RuntimeError, match="retain_graph=True"):
            total.backward()

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_batched(self, kernel: Kernel, dtype: torch.dtype) -> None:
        x = rows(20, 300).to(TRITON_DEVICE, dtype).requires_grad_()
        total = kernels.pair_sum(x, None, FUNCTIONS["kl"], 0, kernel=kernel, fast=True)
        (once,) = torch.autograd.grad(total, x, retain_graph=True)
        factors = torch.tensor([1.0, 2.0], device=TRITON_DEVICE)
        (both,) = torch.autograd.grad(total, x, factors, is_grads_batched=True, retain_graph=True)
        torch.testing.assert_close(both, torch.stack([once, 2 * once]))


@pytest.mark.filterwarnings("ignore:overflow encountered")
class TestDegenerateRows:
    """Identical, orthogonal or zero rows, in tiles of 128 columns: the products of JS penalties reach 2^128."""

    @staticmethod
    def check(loss: functools.partial[fmicl.FMICLLoss], x: Tensor, negatives: Tensor | None = None) -> None:
        if negatives is not None:
            negatives = negatives.to(TRITON_DEVICE, torch.bfloat16)
        results = []
        for kernel in ("triton", "tiled"):
            leaf = x.to(TRITON_DEVICE, torch.bfloat16).requires_grad_()
            value = loss(kernel=kernel)(leaf, leaf, negatives)
            value.backward()
            assert leaf.grad is not None
            results.append((value.detach(), leaf.grad))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=2e-2, atol=1e-3)

    @pytest.mark.parametrize("case", ["identical", "orthogonal", "zero"])
    @pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
    @pytest.mark.parametrize("name", NAMES)
    def test_every_divergence(self, name: str, similarity: str, case: str) -> None:
        x, other = torch.eye(16)[:1].expand(2, 16), torch.zeros(128, 16)
        if case != "zero":
            other[:, 0 if case == "identical" else 1] = 1
        self.check(functools.partial(fmicl.FMICLLoss, name, similarity=similarity), x, other)

    @pytest.mark.parametrize("d", [300, 520])
    def test_tile_shapes(self, d: int) -> None:
        x = torch.zeros(2, d)
        self.check(functools.partial(fmicl.FMICLLoss, "js", similarity="cosine"), x, x[:1].expand(128, d))

    def test_batch(self) -> None:
        js = fmicl.divergence("js").weighted(3.0)
        self.check(functools.partial(fmicl.FMICLLoss, js, mu=3.0), torch.eye(16)[:1].expand(130, 16))

    def test_nan_is_not_hidden(self) -> None:
        x, other = (value.to(TRITON_DEVICE, torch.bfloat16) for value in (rows(2, 16), rows(128, 16, 1)))
        other[50, 3] = torch.nan
        assert fmicl.FMICLLoss("js", kernel="triton", normalised=True)(x, x.clone(), other).isnan()


def test_world() -> None:
    world = World(1, (3, 4, 5))
    assert (world.size, world.first, world.total) == (3, 3, 12)


def test_kernels_import_only_lower_packages() -> None:
    for path in Path(kernels.__file__).parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [node.module for node in imported if node.module is not None and node.module.startswith("fmicl.")]
        assert {module.split(".")[1] for module in ours} <= {"divergences", "kernels", "utils"}, path.name


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_x_with_itself_skips_only_the_diagonal(kernel: Kernel) -> None:
    """Pairs j = i + 1 are not skipped in both orders, which the symmetric gradient relies on."""
    x = rows(6, 16)
    with pytest.raises(ValueError, match="skip=1"):
        kernels.pair_sum(x, None, FUNCTIONS["kl"], 1, kernel=kernel)
    total = kernels.pair_sum(x, x, FUNCTIONS["kl"], 1, kernel=kernel)
    torch.testing.assert_close(total, reference.pair_sum(x, x, FUNCTIONS["kl"], 1), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("fast", [False, True])
def test_rows_need_no_alignment(fast: bool) -> None:
    """A slice of a larger tensor may start anywhere; tensor descriptors need a multiple of 16 bytes."""
    dtype = torch.bfloat16 if fast and not interpreting() else torch.float32
    x = rows(5, 16).to(TRITON_DEVICE, dtype)
    shifted = torch.empty(5 * 16 + 1, dtype=dtype, device=TRITON_DEVICE)[1:].view(5, 16).copy_(x)
    assert shifted.data_ptr() % 16
    seen, aligned = (
        kernels.pair_sum(value, None, FUNCTIONS["kl"], 0, kernel="triton", fast=fast) for value in (shifted, x)
    )
    torch.testing.assert_close(seen, aligned)
