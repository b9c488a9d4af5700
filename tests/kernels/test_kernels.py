"""Three implementations of the pairwise sums that agree: with each other and with float64, at any size."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fmicl
from fmicl import kernels
from fmicl.kernels import Kernel, PairFunction, reference, tiled
from fmicl.kernels.backend import Normaliser
from fmicl.kernels.exchange import World
from fmicl.kernels.triton import TritonBackend
from fmicl.utils.triton import interpreting
from pair_functions import FUNCTIONS
from two_views import F64, NAMES
from unit_rows import needs_triton, rows

SIZES = [(2, 1), (3, 2), (17, 5), (64, 16), (130, 33), (200, 128)]


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


@needs_triton
def test_no_more_digits_travel_than_are_used() -> None:
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

    @needs_triton
    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_triton(self, name: str, fast: bool) -> None:
        backend = TritonBackend(fast)
        tolerance = 1e-2 if fast else 2e-5
        x, other = rows(70, 6), rows(45, 6, 1)
        close(backend.pair_symmetric(x, FUNCTIONS[name], True), dense(x, None, FUNCTIONS[name], 0), tolerance)
        for skip in (None, 0, -40):
            seen = backend.pair_rows(x, other, FUNCTIONS[name], skip, True)
            close(seen, dense(x, other, FUNCTIONS[name], skip), tolerance)

    @needs_triton
    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize(("n", "d", "few"), [
        *((*size, 1024) for size in SIZES), (130, 200, 1024), (70, 520, 1024), (300, 600, 1024), (300, 520, 0),
    ])  # fmt: skip
    def test_triton_sizes(self, n: int, d: int, few: int, fast: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """Odd sizes, both programs, small and large tiles, one and several, columns in one part and several."""
        monkeypatch.setattr("fmicl.kernels.triton._SIDE", 256)
        monkeypatch.setattr("fmicl.kernels.triton._FEW", few)
        if few == 0:  # a GPU that large tiles would leave idle
            monkeypatch.setattr("fmicl.kernels.triton.multiprocessors", lambda _: 132)
        backend, function = TritonBackend(fast), FUNCTIONS["vlc"]
        x, other = rows(n, d), rows(n + 3, d, 1)
        tolerance = 1e-2 if fast else 2e-5
        close(backend.pair_symmetric(x, function, True), dense(x, None, function, 0), tolerance)
        close(backend.pair_rows(x, other, function, 1, True), dense(x, other, function, 1), tolerance)
        total, none = backend.pair_symmetric(x, function, False)
        assert none is None
        assert float(total) == pytest.approx(float(dense(x, None, function, 0)[0]), rel=tolerance, abs=tolerance)

    @needs_triton
    @pytest.mark.parametrize("fast", [False, True])
    @pytest.mark.parametrize("d", [40, 300])
    @pytest.mark.parametrize("skip", [None, 0, -7])
    def test_triton_gradients_of_both_sides(
        self, skip: int | None, d: int, fast: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In a pass each, and for large d from one buffer of slopes, over one tile or several."""
        monkeypatch.setattr("fmicl.kernels.triton._SIDE", 256)
        backend, tolerance = TritonBackend(fast), 1e-2 if fast else 2e-5
        x, other = rows(300, d), rows(150, d, 1)
        exact = [value.double().requires_grad_() for value in (x, other)]
        wanted = reference.pair_sum(exact[0], exact[1], FUNCTIONS["vlc"], skip)
        total, *gradients = backend.pair_both(x, other, FUNCTIONS["vlc"], skip)
        assert float(total) == pytest.approx(float(wanted.detach()), rel=tolerance)
        for seen, true in zip(gradients, torch.autograd.grad(wanted, exact), strict=True):
            assert float((seen.double() - true).norm()) <= tolerance * float(true.norm())
        values = reference.row_logsumexp(exact[0], exact[1], 4.0, skip)
        weights = torch.linspace(-1, 1, len(x), dtype=torch.float64)
        own = Normaliser(values.detach().float(), weights.float())
        by_rows = backend.logsumexp_both(x, other, 4.0, skip, own)
        for seen, true in zip(by_rows, torch.autograd.grad(values, exact, weights), strict=True):
            assert float((seen.double() - true).norm()) <= tolerance * float(true.norm())

    @pytest.mark.parametrize("gamma", [1.0, 20.0])
    def test_float32_is_as_good_as_dense_float32(self, gamma: float) -> None:
        x = rows(600, 64)
        function = fmicl.Gaussian(gamma).critic(fmicl.divergence("kl"), 64)
        exact, exact_grad = dense(x, None, function, 0)
        single = x.clone().requires_grad_()
        dense_total = reference.pair_sum(single, single, function, 0)
        (dense_grad,) = torch.autograd.grad(dense_total, single)
        backends = [tiled.pair_symmetric(x, function, True)]
        if interpreting():
            backends.append(TritonBackend(False).pair_symmetric(x, function, True))
        for total, grad in backends:
            assert grad is not None
            allowed = 1.1 * float((dense_grad.double() - exact_grad).norm()) + 1e-6 * float(exact_grad.norm())
            assert float((grad.double() - exact_grad).norm()) <= allowed
            dense_error = abs(float(dense_total.detach().double() - exact))
            assert float((total - exact).abs()) <= dense_error + 1e-6 * float(exact)

    def test_memory_does_not_grow_with_n_squared(self) -> None:
        """No tensor of more than a tile's size is made: seen by what goes through the dispatcher."""
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


@pytest.mark.parametrize("kernel", ["tiled", pytest.param("triton", marks=needs_triton)])
def test_a_gradient_is_handed_on_and_not_copied(kernel: Kernel) -> None:
    """It may be most of a loss's memory: the leaf keeps the tensor that the kernel wrote."""
    made: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ in ("clone", "copy_", "new_empty_strided"):
                made.append(out.numel())
            return out

    x = rows(130, 48).requires_grad_()
    total = kernels.pair_sum(x, None, FUNCTIONS["kl"], 0, kernel=kernel)
    with Watch():  # type: ignore[no-untyped-call]
        total.backward()
    assert x.grad is not None
    assert x.numel() not in made


@pytest.mark.parametrize("kernel", ["tiled", pytest.param("triton", marks=needs_triton)])
def test_what_a_sum_was_taken_of_may_change_before_its_gradient_is_asked_for(kernel: Kernel) -> None:
    """A queue is overwritten when it is convenient; the gradient was ready with the sum."""
    x, queue = rows(40, 16).requires_grad_(), rows(60, 16, 1)
    (wanted,) = torch.autograd.grad(kernels.pair_sum(x, queue, FUNCTIONS["kl"], kernel=kernel), x)
    total = kernels.pair_sum(x, queue, FUNCTIONS["kl"], kernel=kernel)
    queue.zero_()
    total.backward()
    torch.testing.assert_close(x.grad, wanted, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        total.backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kernel", ["tiled", pytest.param("triton", marks=needs_triton)])
def test_gradients_of_several_factors_at_once(kernel: Kernel, dtype: torch.dtype) -> None:
    x = rows(20, 300).to(dtype).requires_grad_()
    total = kernels.pair_sum(x, None, FUNCTIONS["kl"], 0, kernel=kernel, fast=True)
    (once,) = torch.autograd.grad(total, x, retain_graph=True)
    factors = torch.tensor([1.0, 2.0])
    (both,) = torch.autograd.grad(total, x, factors, is_grads_batched=True, retain_graph=True)
    torch.testing.assert_close(both, torch.stack([once, 2 * once]))


@needs_triton
@pytest.mark.filterwarnings("ignore:overflow encountered")
class TestAlike:
    """Rows alike, at right angles or zero, in tiles of 128 columns: penalties that are products meet 2^128."""

    @staticmethod
    def check(loss: functools.partial[fmicl.FMICLLoss], x: Tensor, negatives: Tensor | None = None) -> None:
        results = []
        for kernel in ("triton", "tiled"):
            leaf = x.bfloat16().requires_grad_()
            value = loss(kernel=kernel)(leaf, leaf, None if negatives is None else negatives.bfloat16())
            value.backward()
            assert leaf.grad is not None
            results.append((value.detach(), leaf.grad))
        torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(results[0][1], results[1][1], rtol=2e-2, atol=1e-3)

    @pytest.mark.parametrize("case", ["identical", "at right angles", "zero"])
    @pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
    @pytest.mark.parametrize("name", NAMES)
    def test_every_divergence(self, name: str, similarity: str, case: str) -> None:
        x, other = torch.eye(16)[:1].expand(2, 16), torch.zeros(128, 16)
        if case != "zero":
            other[:, 0 if case == "identical" else 1] = 1
        self.check(functools.partial(fmicl.FMICLLoss, name, similarity=similarity), x, other)

    @pytest.mark.parametrize("d", [300, 520])
    def test_tiles_of_every_shape(self, d: int) -> None:
        x = torch.zeros(2, d)
        self.check(functools.partial(fmicl.FMICLLoss, "js", similarity="cosine"), x, x[:1].expand(128, d))

    def test_of_a_batch(self) -> None:
        js = fmicl.divergence("js").weighted(3.0)
        self.check(functools.partial(fmicl.FMICLLoss, js, mu=3.0), torch.eye(16)[:1].expand(130, 16))

    def test_a_number_that_is_none_is_still_seen(self) -> None:
        x, other = rows(2, 16).bfloat16(), rows(128, 16, 1).bfloat16()
        other[50, 3] = torch.nan
        assert fmicl.FMICLLoss("js", kernel="triton", normalised=True)(x, x.clone(), other).isnan()


def test_world() -> None:
    world = World(1, (3, 4, 5))
    assert (world.size, world.first, world.total) == (3, 3, 12)


def test_the_kernels_import_from_the_rooms_below_them_alone() -> None:
    below = {"checks", "divergences", "kernels", "numerics", "similarities", "special", "theory"}
    for path in Path(kernels.__file__).parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [node.module for node in imported if node.module is not None and node.module.startswith("fmicl")]
        assert {module.split(".")[1] for module in ours} <= below, path.name


@pytest.mark.parametrize("kernel", ["reference", "tiled"])
def test_of_x_against_itself_only_each_row_with_itself_is_left_out(kernel: Kernel) -> None:
    """Pairs j = i + 1 are not left out from both sides, and the gradient counts on that."""
    x = rows(6, 16)
    with pytest.raises(ValueError, match=r"skip=0 or None can be left out, got skip=1; give x as `other`"):
        kernels.pair_sum(x, None, FUNCTIONS["kl"], 1, kernel=kernel)
    total = kernels.pair_sum(x, x, FUNCTIONS["kl"], 1, kernel=kernel)
    torch.testing.assert_close(total, reference.pair_sum(x, x, FUNCTIONS["kl"], 1), rtol=1e-4, atol=1e-4)


@needs_triton
@pytest.mark.parametrize("fast", [False, True])
def test_rows_may_begin_anywhere_in_memory(fast: bool) -> None:
    """As a part of a larger tensor does; the hardware's copies want a whole 16 bytes."""
    dtype = torch.bfloat16 if fast and not interpreting() else torch.float32
    x = rows(5, 16).to("cpu" if interpreting() else "cuda", dtype)
    shifted = torch.empty(5 * 16 + 1, dtype=dtype, device=x.device)[1:].view(5, 16).copy_(x)
    assert shifted.data_ptr() % 16
    seen, usual = (
        kernels.pair_sum(value, None, FUNCTIONS["kl"], 0, kernel="triton", fast=fast) for value in (shifted, x)
    )
    torch.testing.assert_close(seen, usual)
