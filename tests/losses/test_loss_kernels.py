"""Losses with every kernel: equal values, exact products, torch.compile, gradients of any order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fmicl
from devices import TRITON_DEVICE
from fmicl import kernels
from fmicl.divergences import KL
from fmicl.divergences.shifted import ShiftedCritic
from fmicl.kernels import Kernel, Precision
from fmicl.kernels.lowering import lower
from fmicl.kernels.triton import TritonBackend
from fmicl.utils.numerics import EXACT, PER_DEVICE, exact_matmul, matmul_precision
from pair_functions import FUNCTIONS
from two_views import F64, NAMES
from unit_rows import needs_triton, rows


def device_of(kernel: str) -> torch.device:
    return TRITON_DEVICE if kernel == "triton" else torch.device("cpu")


class HalfPenalty(KL):
    """KL with half of its penalty."""

    def _penalty(self, r: Tensor) -> Tensor:
        return r.exp() / 2


class HalfWithSlope(HalfPenalty):
    def _penalty_slope(self, r: Tensor) -> Tensor:
        return r.exp() / 2


class HalfInPublic(KL):
    def penalty(self, r: Tensor | float) -> Tensor:
        return super().penalty(r) / 2


@pytest.mark.parametrize("kernel", ["tiled", pytest.param("triton", marks=needs_triton)])
@pytest.mark.parametrize("name", ["kl", "infonce", "align_uniform", "spectral"])
def test_no_number_is_copied_to_the_device(name: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which a step that is captured as a CUDA graph can't do: constants are created on the device."""
    monkeypatch.setattr("fmicl.kernels.triton._SIDE", 128)

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            assert func.overloadpacket.__name__ != "lift_fresh", "torch.tensor or new_tensor of a number"
            return func(*args, **(kwargs or {}))

    x, y = (rows(130, 520, seed).bfloat16().to(device_of(kernel)).requires_grad_() for seed in (0, 1))
    with Watch():  # type: ignore[no-untyped-call]
        make(name, None if name == "kl" else "both", kernel)(x, y).backward()


@pytest.mark.skipif(not PER_DEVICE, reason="torch has one setting for all devices")
def test_exact_matmul_leaves_a_more_general_setting_in_charge() -> None:
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


def test_exact_matmul_is_left_by_the_last_thread() -> None:
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with exact_matmul(torch.device("cpu")):
            inside.set()
            assert leave.wait(10)

    thread = threading.Thread(target=other)
    try:
        torch.set_float32_matmul_precision("medium")
        with exact_matmul(torch.device("cpu")):
            thread.start()
            assert inside.wait(10)
        assert matmul_precision("cpu") == EXACT  # the other thread needs it
        leave.set()
        thread.join()
        assert matmul_precision("cpu") == ("bf16" if PER_DEVICE else "medium")
    finally:
        leave.set()
        torch.set_float32_matmul_precision("highest")


class TestTF32:
    """Losses compute exact products even if training lets torch round them (to TF32 on a GPU, to bfloat16 on CPUs)."""

    @pytest.fixture(autouse=True)
    def rounding(self) -> Iterator[None]:
        torch.set_float32_matmul_precision("medium" if PER_DEVICE else "high")  # torch.compile of 2.8 makes it "high"
        yield
        assert self.setting() == ("bf16" if PER_DEVICE else "high")
        torch.set_float32_matmul_precision("highest")

    def setting(self) -> str:
        return matmul_precision("cpu")

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
        if kernel == "reference":  # the others compute the gradient in the forward pass
            assert len(seen) > forward
        assert set(seen) == {EXACT}

    def test_exact_matmul_on_a_gpu(self) -> None:
        before = "tf32" if PER_DEVICE else "high"
        assert matmul_precision("cuda") == before
        with exact_matmul(torch.device("cuda", 0)):
            assert matmul_precision("cuda") == EXACT
        assert matmul_precision("cuda") == before

    def test_derivatives_of_the_reference(self) -> None:
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
    """A loss by name, by default with its own negatives."""
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
    @pytest.mark.parametrize("kernel", ["tiled", "auto", pytest.param("triton", marks=needs_triton)])
    @pytest.mark.parametrize("mode", ["anchor", "both", "cross", "explicit"])
    @pytest.mark.parametrize("name", LOSSES)
    def test_kernels_agree(self, name: str, mode: str, kernel: Kernel) -> None:
        device = device_of(kernel)
        explicit = rows(11, 7, 5).to(device) if mode == "explicit" else None
        negatives = "anchor" if mode == "explicit" else mode
        results = []
        for chosen in (kernel, "reference"):
            x, y = (rows(20, 7, seed).to(device).requires_grad_() for seed in (0, 1))
            value = make(name, negatives, chosen)(x, y, negatives=explicit)
            results.append((value, *torch.autograd.grad(value, (x, y))))
        atol = 5e-5 if device.type == "cuda" else 1e-5  # there a product is the sum of three in TF32
        for seen, true in zip(*results, strict=True):
            torch.testing.assert_close(seen, true, rtol=1e-4, atol=atol * max(1.0, float(true.detach().abs().max())))

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

    def test_a_user_defined_divergence_runs_tiled(self) -> None:
        mine = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="mine")
        critic = fmicl.Gaussian().critic(mine, 3)
        assert lower(critic) is None
        nearest = torch.zeros(())
        assert lower(ShiftedCritic(critic, nearest, nearest)) is None
        x, y = rows(9, 3), rows(9, 3, 1)
        torch.testing.assert_close(fmicl.FMICLLoss(mine)(x, y), fmicl.FMICLLoss("kl")(x, y))
        with pytest.raises(ValueError, match="mine"):
            TritonBackend(False).pair_symmetric(x, critic, True)

    @pytest.mark.parametrize("kind", [HalfPenalty, HalfWithSlope, HalfInPublic])
    def test_a_subclass_uses_no_closed_form_of_its_parent(self, kind: type[fmicl.Divergence]) -> None:
        """Neither the GPU kernel nor the slope of the penalty."""
        for mine in (kind(), kind().weighted(2.0)):
            critic = fmicl.Gaussian().critic(mine, 3)
            assert lower(critic) is None
            with pytest.raises(ValueError, match=kind.__name__):
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
        """Also with torch's deterministic algorithms, which fill uninitialised memory with NaN."""
        loss, device = make(name, "both", kernel, precision), device_of(kernel)
        results = []
        for deterministic in (False, False, True):
            # on a GPU torch refuses matrix products unless CUBLAS_WORKSPACE_CONFIG is set
            torch.use_deterministic_algorithms(deterministic, warn_only=device.type == "cuda")
            try:
                x, y = (scale * rows(n, d, seed).to(device) for scale, seed in ((3, 0), (1, 1)))
                x, y = x.requires_grad_(), y.requires_grad_()
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
            ({"kernel": "cuda"}, "kernel .*'cuda'"),
            ({"precision": "low"}, "precision .*'low'"),
            ({"gather": 1}, "gather=1"),
        ],
    )
    def test_refuses(self, options: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            fmicl.FMICLLoss("kl", **options)  # type: ignore[arg-type]

    def test_triton_refuses_cpu_and_float64(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", "0")
        with pytest.raises(ValueError, match="cpu"):
            fmicl.FMICLLoss("kl", kernel="triton")(rows(4, 3), rows(4, 3, 1))
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        with pytest.raises(ValueError, match="float64"):
            fmicl.FMICLLoss("kl", kernel="triton")(rows(4, 3, 0, F64), rows(4, 3, 1, F64))
