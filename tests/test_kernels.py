"""Three implementations of the pairwise sums that agree: with each other, with float64, through the losses."""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fmicl
from fmicl import kernels
from fmicl.divergences import KL
from fmicl.kernels import Kernel, PairFunction, Precision, Square, reference, tiled
from fmicl.kernels.columns import World
from fmicl.kernels.contract import Normaliser
from fmicl.kernels.lowering import lower
from fmicl.kernels.triton import TritonBackend, interpreting
from fmicl.numerics import exact_matmul
from fmicl.shift import ShiftedCritic
from unit_rows import needs_triton, rows

F64 = torch.float64
NAMES = fmicl.list_divergences()
SIZES = [(2, 1), (3, 2), (17, 5), (64, 16), (130, 33), (200, 128)]


class HalfPenalty(KL):
    """KL, less by half of its penalty."""

    def _penalty(self, r: Tensor) -> Tensor:
        return r.exp() / 2


class HalfWithSlope(HalfPenalty):
    def _penalty_slope(self, r: Tensor) -> Tensor:
        return r.exp() / 2


class HalfInPublic(KL):
    def penalty(self, r: Tensor | float) -> Tensor:
        return super().penalty(r) / 2


def functions() -> dict[str, PairFunction]:
    made: dict[str, PairFunction] = {"square": Square(1.5)}
    for name in NAMES:
        kind = fmicl.divergence(name)
        made[name] = fmicl.Gaussian(gamma=0.8, mu=1.2).critic(kind, 4)
        made[f"{name}, cosine"] = fmicl.Cosine(temperature=0.4).critic(kind, 4)
    made["weighted"] = fmicl.Gaussian().critic(fmicl.divergence("js").weighted(3.0), 4)
    made["weighted, cosine"] = fmicl.Cosine().critic(fmicl.divergence("pearson").weighted(3.0), 4)
    return made


FUNCTIONS = functions()


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
    assert TritonBackend(True).to_send(x).dtype == torch.bfloat16
    assert TritonBackend(False).to_send(x.bfloat16()).dtype == torch.float32
    assert tiled.to_send(x.double()).dtype == torch.float64


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
            monkeypatch.setattr("fmicl.kernels.triton.processors", lambda _: 132)
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
@pytest.mark.parametrize("name", ["kl", "infonce", "align_uniform", "spectral"])
def test_no_number_is_copied_to_the_device(name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that is recorded as a CUDA graph can't wait for one: every constant is made where it is used."""
    monkeypatch.setattr("fmicl.kernels.triton._SIDE", 128)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func.overloadpacket.__name__ != "lift_fresh", "torch.tensor or new_tensor of a number"
            return func(*args, **(kwargs or {}))

    x, y = (rows(130, 520, seed).bfloat16().requires_grad_() for seed in (0, 1))
    with Watch():  # type: ignore[no-untyped-call]
        make(name, None if name == "kl" else "both", kernel)(x, y).backward()


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


def test_the_guard_leaves_a_setting_above_it_in_charge() -> None:
    matmul = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    try:
        matmul.fp32_precision = "none"  # torch.set_float32_matmul_precision would have given it one
        torch.backends.fp32_precision = "tf32"  # type: ignore[attr-defined]
        with exact_matmul(torch.device("cpu")):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"  # type: ignore[attr-defined]
        assert matmul.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = "none"  # type: ignore[attr-defined]


class TestTF32:
    """Training lets torch round float32 products (to TF32 on a GPU, to bfloat16 on some CPUs): not those of a loss."""

    @pytest.fixture(autouse=True)
    def rounding(self) -> Iterator[None]:
        torch.set_float32_matmul_precision("medium")
        yield
        assert self.setting() == "bf16"
        torch.set_float32_matmul_precision("highest")

    def setting(self) -> str:
        return str(torch.backends.mkldnn.matmul.fp32_precision)  # type: ignore[attr-defined]

    @pytest.mark.parametrize("kernel", ["tiled", "reference"])
    @pytest.mark.parametrize("name", ["kl", "infonce", "own", "shifted"])
    def test_products_of_a_loss_are_exact(self, name: str, kernel: Kernel) -> None:
        seen: list[str] = []
        setting = self.setting

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
                if func.overloadpacket.__name__ in ("mm", "addmm", "addmm_"):
                    seen.append(setting())
                return func(*args, **(kwargs or {}))

        own = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="own")
        made = {
            "own": fmicl.FMICLLoss(own, kernel=kernel),
            "shifted": fmicl.FMICLLoss("js", shift="optimal", kernel=kernel),
        }
        loss = made.get(name) or make(name, "both", kernel)
        x, y = rows(20, 7).requires_grad_(), rows(20, 7, 1).requires_grad_()
        with Watch():  # type: ignore[no-untyped-call]
            value = loss(x, y)
            forward = len(seen)
            value.backward()
        assert forward > 0
        if kernel == "reference" or name == "infonce":  # the others have their gradient before it is asked for
            assert len(seen) > forward
        assert set(seen) == {"ieee"}

    def test_the_guard_of_a_gpu(self) -> None:
        matmul = torch.backends.cuda.matmul
        assert matmul.fp32_precision == "tf32"
        with exact_matmul(torch.device("cuda", 0)):
            assert matmul.fp32_precision == "ieee"
        assert matmul.fp32_precision == "tf32"

    def test_the_reference_keeps_all_its_derivatives(self) -> None:
        x, y = rows(5, 3, 0, F64), rows(5, 3, 1, F64)
        module = fmicl.FMICLLoss("js", kernel="reference")

        def loss(x: Tensor) -> Tensor:
            value: Tensor = module(x, y)
            return value

        slope = torch.func.grad(loss)(x)
        along = torch.func.jvp(loss, (x,), (y,))[1]
        torch.testing.assert_close(along, (slope * y).sum())
        torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(torch.stack([x, y]))[0], slope)
        compiled = torch.compile(loss, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x), loss(x))


LOSSES = [*NAMES, "infonce", "align_uniform", "spectral"]


def make(
    name: str, negatives: str | None = None, kernel: str = "auto", precision: Precision = "auto"
) -> torch.nn.Module:
    """A loss by name, with its own choice of negatives unless told."""
    options: dict[str, Any] = {"kernel": kernel, "precision": precision}
    if negatives is not None:
        options["negatives"] = negatives
    match name:
        case "infonce":
            return fmicl.InfoNCELoss(**options)
        case "align_uniform":
            return fmicl.AlignUniformLoss(**options)
        case "spectral":
            return fmicl.SpectralContrastiveLoss(**options)
        case _:
            return fmicl.FMICLLoss(name, **options)


class TestLosses:
    """Every loss takes the same road, whichever kernel is asked for."""

    @pytest.mark.parametrize("kernel", ["tiled", "auto", pytest.param("triton", marks=needs_triton)])
    @pytest.mark.parametrize("mode", ["anchor", "both", "cross", "explicit"])
    @pytest.mark.parametrize("name", LOSSES)
    def test_kernels_agree(self, name: str, mode: str, kernel: Kernel) -> None:
        explicit = rows(11, 7, 5) if mode == "explicit" else None
        negatives = "anchor" if mode == "explicit" else mode
        results = []
        for chosen in (kernel, "reference"):
            x, y = rows(20, 7).requires_grad_(), rows(20, 7, 1).requires_grad_()
            value = make(name, negatives, chosen)(x, y, negatives=explicit)
            results.append((value, *torch.autograd.grad(value, (x, y))))
        for seen, true in zip(*results, strict=True):
            torch.testing.assert_close(seen, true, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("name", ["kl", "infonce", "align_uniform", "spectral"])
    def test_double_backward_falls_back_to_the_reference(self, name: str) -> None:
        x, y = rows(5, 3, 0, F64).requires_grad_(), rows(5, 3, 1, F64).requires_grad_()
        assert torch.autograd.gradgradcheck(make(name), (x, y))

    def test_backward_twice_through_one_graph(self) -> None:
        x, y = rows(5, 3, 0, F64).requires_grad_(), rows(5, 3, 1, F64)
        value = fmicl.FMICLLoss("kl")(x, y)
        first = torch.autograd.grad(value, x, retain_graph=True)[0]
        second = torch.autograd.grad(3 * value, x)[0]
        torch.testing.assert_close(second, 3 * first)

    def test_a_divergence_of_ones_own_runs_tiled(self) -> None:
        mine = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="mine")
        critic = fmicl.Gaussian().critic(mine, 3)
        assert lower(critic) is None
        assert lower(ShiftedCritic(fmicl.Gaussian().critic(fmicl.divergence("js"), 3), 0.1)) is None
        x, y = rows(9, 3), rows(9, 3, 1)
        torch.testing.assert_close(fmicl.FMICLLoss(mine)(x, y), fmicl.FMICLLoss("kl")(x, y))
        with pytest.raises(ValueError, match=r"no program for .*; kernel='auto' or 'tiled'"):
            TritonBackend(False).pair_symmetric(x, critic, True)

    @pytest.mark.parametrize("kind", [HalfPenalty, HalfWithSlope, HalfInPublic])
    def test_a_subclass_is_a_divergence_of_ones_own(self, kind: type[fmicl.Divergence]) -> None:
        """It has neither the kernel of the known one nor the slope of its penalty."""
        for mine in (kind(), kind().weighted(2.0)):
            critic = fmicl.Gaussian().critic(mine, 3)
            assert lower(critic) is None
            with pytest.raises(ValueError, match="no program for"):
                TritonBackend(True).pair_symmetric(rows(9, 3), critic, True)
        x, y = rows(9, 3), rows(9, 3, 1)
        results = []
        for kernel in ("reference", "tiled", "auto"):
            leaf = x.clone().requires_grad_()
            value = fmicl.FMICLLoss(kind(), kernel=kernel)(leaf, y)
            value.backward()
            assert leaf.grad is not None
            results.append((value.detach(), leaf.grad))
        terms = fmicl.functional.fmicl_terms(x, y, "kl")
        torch.testing.assert_close(results[0][0], terms.alignment + terms.uniformity / 2)
        for other in results[1:]:
            torch.testing.assert_close(other, results[0])

    def test_the_shift_of_a_subclass_is_solved_for(self) -> None:
        class Steeper(KL):
            """2 u log u, by its derivative and its conjugate."""

            def _derivative(self, u: Tensor) -> Tensor:
                return 2 * super()._derivative(u)

            def _score(self, r: Tensor) -> Tensor:
                return 2 * super()._score(r)

            def _conjugate(self, t: Tensor) -> Tensor:
                return 2 * super()._conjugate(t / 2)

            def _conjugate_derivative(self, t: Tensor) -> Tensor:
                return super()._conjugate_derivative(t / 2)

        x, y = rows(9, 3, 0, F64), rows(9, 3, 1, F64)
        same = fmicl.Divergence.from_generator(lambda u: 2 * u * u.log(), name="same")
        seen, wanted = (fmicl.FMICLLoss(kind, shift="optimal")(x, y) for kind in (Steeper(), same))
        torch.testing.assert_close(seen, wanted)

    def test_without_gradients(self) -> None:
        x, y = rows(9, 3), rows(9, 3, 1)
        with torch.no_grad():
            value = fmicl.FMICLLoss("kl")(x, y)
        torch.testing.assert_close(value, fmicl.FMICLLoss("kl", kernel="reference")(x, y))

    def test_only_one_side_wants_a_gradient(self) -> None:
        x, y = rows(9, 3), rows(9, 3, 1).requires_grad_()
        for name in ("kl", "infonce"):
            grads = [torch.autograd.grad(make(name, "cross", kernel)(x, y), y)[0] for kernel in ("tiled", "reference")]
            torch.testing.assert_close(grads[0], grads[1], rtol=1e-4, atol=1e-6)

    def test_the_sum_of_half_precision_rows_is_float32(self) -> None:
        x = rows(40, 8).bfloat16()
        total = kernels.pair_sum(x, None, FUNCTIONS["kl"], 0)
        assert total.dtype == torch.float32

    @pytest.mark.parametrize(
        ("kernel", "precision", "n", "d"),
        [
            ("tiled", "auto", 900, 16),
            *(
                pytest.param("triton", precision, 150, d, marks=needs_triton)
                for precision, d in (("fast", 16), ("fast", 520), ("high", 130))
            ),
        ],
    )
    @pytest.mark.parametrize("name", ["kl", "infonce"])
    def test_the_same_input_gives_the_same_bits(
        self, name: str, kernel: Kernel, precision: Precision, n: int, d: int
    ) -> None:
        """As they are, and where torch is told to be deterministic: it then fills memory that nobody wrote with NaN."""
        loss = make(name, "both", kernel, precision)
        results = []
        for told in (False, False, True):
            torch.use_deterministic_algorithms(told)
            try:
                x, y = (3 * rows(n, d)).requires_grad_(), rows(n, d, 1).requires_grad_()
                value = loss(x, y)
                results.append((value.detach(), *torch.autograd.grad(value, (x, y))))
            finally:
                torch.use_deterministic_algorithms(False)
        for seen in zip(*results, strict=True):
            assert torch.equal(seen[0], seen[1])
            assert torch.equal(seen[0], seen[2])

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"kernel": "cuda"}, "kernel is 'auto', 'reference', 'tiled' or 'triton', got 'cuda'"),
            ({"precision": "low"}, "precision is 'auto', 'fast' or 'high', got 'low'"),
            ({"gather": 1}, "gather is True or False"),
        ],
    )
    def test_refuses(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fmicl.FMICLLoss("kl", **options)  # type: ignore[arg-type]

    def test_triton_says_what_it_needs(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(ValueError, match="needs a CUDA device, but the embeddings are on cpu"):
            fmicl.FMICLLoss("kl", kernel="triton")(rows(4, 3), rows(4, 3, 1))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(ValueError, match="computes in float32"):
            fmicl.FMICLLoss("kl", kernel="triton")(rows(4, 3, 0, F64), rows(4, 3, 1, F64))


def test_world() -> None:
    world = World(1, (3, 4, 5))
    assert (world.size, world.first, world.total) == (3, 3, 12)


def test_the_kernels_import_from_the_rooms_below_them_alone() -> None:
    below = {"checks", "divergences", "kernels", "numerics", "similarities", "special", "theory"}
    for path in Path(kernels.__file__).parent.glob("*.py"):
        imported = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)]
        ours = [node.module for node in imported if node.module is not None and node.module.startswith("fmicl")]
        assert {module.split(".")[1] for module in ours} <= below, path.name
