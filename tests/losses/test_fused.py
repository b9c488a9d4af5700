"""Whole losses as one autograd function, on a CPU and by Triton."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import fmicl
from devices import TRITON_DEVICE
from fmicl.kernels import Kernel
from fmicl.kernels.lowering import lower_score
from fmicl.losses import fused
from fmicl.utils.triton import CachedLaunch
from two_views import NAMES, batch
from unit_rows import needs_triton

KERNELS = ["tiled", pytest.param("triton", marks=needs_triton)]
MODES = ["anchor", "both", "cross"]
NINE = [name for name in NAMES if lower_score(fmicl.divergence(name)) is not None]


def make(name: str, mode: str, kernel: str, precision: str = "auto") -> torch.nn.Module:
    options = {"kernel": kernel, "precision": precision}
    if name in ("infonce", "dcl"):
        return fmicl.InfoNCELoss(0.5, mode, decoupled=name == "dcl", **options)  # type: ignore[arg-type]
    return fmicl.FMICLLoss(name, negatives=mode, gamma=1.3, **options)  # type: ignore[arg-type]


def views(n: int, d: int, kernel: str, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x, y = batch(n, d, dtype=dtype)
    device = TRITON_DEVICE if kernel == "triton" else torch.device("cpu")
    return (3 * x).to(device), y.to(device)


def value_and_gradients(loss: torch.nn.Module, x: Tensor, y: Tensor, *wanted: bool) -> list[Tensor]:
    leaves = [
        v.detach().clone().requires_grad_(needed) for v, needed in zip((x, y), wanted or (True, True), strict=True)
    ]
    value = loss(*leaves)
    return [value.detach(), *torch.autograd.grad(value, [leaf for leaf in leaves if leaf.requires_grad])]


@pytest.fixture
def only_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where a loss is composed of its parts."""

    def composed(*_: object, **__: object) -> None:
        raise AssertionError("this loss was not evaluated as a whole")

    monkeypatch.setattr("fmicl.losses.functional.Pairs.prepare", composed)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize(
    ("name", "mode"), [*((name, "anchor") for name in NINE), *itertools.product(("kl", "infonce", "dcl"), MODES)]
)
def test_a_loss_equals_the_dense_one(name: str, mode: str, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = views(7, 5, kernel)
    wanted = value_and_gradients(make(name, mode, "reference"), x, y)
    monkeypatch.setattr("fmicl.losses.functional.Pairs.prepare", None)  # nothing is composed
    seen = value_and_gradients(make(name, mode, kernel), x, y)
    torch.testing.assert_close(seen, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kernel", "n", "d"), [("tiled", 23, 5), *(("triton", n, d) for n, d in ((35, 9), (20, 140)))])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["js", "infonce"])
def test_batches_of_several_tiles(
    name: str, mode: str, kernel: Kernel, n: int, d: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmicl.kernels.tiled._CPU_TILE", 4)
    x, y = views(n, d, kernel)
    for wanted in itertools.product((True, False), repeat=2):
        if any(wanted):
            results = [value_and_gradients(make(name, mode, k), x, y, *wanted) for k in (kernel, "reference")]
            torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


@needs_triton
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["vlc", "infonce"])
@pytest.mark.parametrize(("precision", "tolerance"), [("high", 1e-5), ("fast", 1e-2)])
def test_large_batches(name: str, mode: str, precision: str, tolerance: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which take the kernels of the pairwise sums."""
    monkeypatch.setattr("fmicl.kernels.views._LARGEST_SMALL", {True: 0, False: 0})
    fused._fmicl.cache_clear()
    fused._infonce.cache_clear()
    x, y = views(20, 9, "triton")
    seen, wanted = (value_and_gradients(make(name, mode, k, precision), x, y) for k in ("triton", "reference"))
    torch.testing.assert_close(seen, wanted, rtol=tolerance, atol=tolerance)
    fused._fmicl.cache_clear()
    fused._infonce.cache_clear()


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.usefixtures("only_fused")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(kernel: Kernel, dtype: torch.dtype) -> None:
    x, y = views(12, 6, kernel, dtype)
    for name in ("kl", "infonce"):
        seen = value_and_gradients(make(name, "both", kernel), x, y)
        wanted = value_and_gradients(make(name, "both", "tiled"), x.float().cpu(), y.float().cpu())
        assert [value.dtype for value in seen] == [torch.float32, dtype, dtype]
        torch.testing.assert_close([v.float().cpu() for v in seen], wanted, rtol=2e-2, atol=2e-3)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30])
def test_rows_of_extreme_lengths(kernel: Kernel, factor: float) -> None:
    """A zero row counts as orthogonal to all; squares of the others leave float32's range."""
    x, y = views(6, 5, kernel)
    x[2] *= factor
    for name in ("kl", "infonce"):
        results = [value_and_gradients(make(name, "both", k), x, y) for k in (kernel, "reference")]
        for found in results:  # the gradient of this row is as long as the row is short
            found[1][2] *= factor or 1.0
        torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["js", "infonce"])
def test_passes_through_one_graph(name: str, kernel: Kernel) -> None:
    x, y = (v.requires_grad_() for v in views(6, 5, kernel))
    value = make(name, "both", kernel)(x, y)
    first = torch.autograd.grad(value, (x, y), retain_graph=True)
    batched = torch.autograd.grad(
        value, (x, y), torch.tensor([1.0, 3.0], device=x.device), retain_graph=True, is_grads_batched=True
    )
    torch.testing.assert_close(batched, tuple(torch.stack([v, 3 * v]) for v in first))
    differentiable = torch.autograd.grad(value, (x, y), retain_graph=True, create_graph=True)
    torch.testing.assert_close(differentiable, first, rtol=1e-4, atol=1e-5)
    assert all(v.requires_grad for v in differentiable)
    torch.testing.assert_close(torch.autograd.grad(3 * value, (x, y)), tuple(3 * v for v in first))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", ["js", "infonce", "siglip"])  # the last is composed of its parts
def test_differentiable_gradients_of_dependent_views(name: str, kernel: Kernel) -> None:
    def results(kernel: Kernel, second: Callable[[Tensor], Tensor]) -> list[Tensor]:
        x = views(6, 5, kernel)[0].requires_grad_()
        loss = fmicl.SigLIPLoss(kernel=kernel) if name == "siglip" else make(name, "cross", kernel)
        (gradient,) = torch.autograd.grad(loss(x, second(x)), x, create_graph=True)
        return [value.cpu() for value in (gradient, *torch.autograd.grad(gradient.square().sum(), x))]

    for second in (lambda x: x.flip(1) + 0.3 * x.square(), lambda x: x):
        torch.testing.assert_close(results(kernel, second), results("reference", second), rtol=1e-3, atol=1e-4)


@pytest.mark.usefixtures("only_fused")
@pytest.mark.parametrize("kernel", KERNELS)
def test_strided_rows_and_autocast(kernel: Kernel) -> None:
    x, y = views(6, 5, kernel)
    wide = torch.stack([x, y], dim=-1)
    loss = make("infonce", "both", kernel)
    expected = value_and_gradients(loss, x, y)
    with torch.autocast(x.device.type, torch.bfloat16):
        seen = value_and_gradients(loss, wide[..., 0], wide[..., 1])
    torch.testing.assert_close(seen, expected)


@pytest.mark.parametrize(
    "loss",
    [
        fmicl.FMICLLoss("kl", gamma=torch.tensor(2.0, requires_grad=True)),
        fmicl.FMICLLoss("tsallis", similarity="cosine"),
        fmicl.FMICLLoss(fmicl.Divergence.from_generator(lambda u: u * u.log(), name="own")),
        fmicl.InfoNCELoss(normalised=True),
        fmicl.InfoNCELoss(0.001),
    ],
    ids=str,
)
def test_other_losses_are_composed(loss: torch.nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    composed = fmicl.losses.pairing.Pairs.prepare
    seen: list[object] = []

    def prepare(*args: Any, **named: Any) -> object:
        seen.append(args)
        return composed(*args, **named)

    monkeypatch.setattr("fmicl.losses.functional.Pairs.prepare", prepare)
    assert loss(*(torch.nn.functional.normalize(v) for v in views(6, 5, "tiled"))).isfinite()
    assert seen


def test_a_launch_is_repeated_without_inspection() -> None:
    calls: list[object] = []

    class Compiled:
        packed_metadata = ()

        def __getitem__(self, grid: tuple[int, ...]) -> object:
            return lambda *arguments: calls.append(("again", grid, arguments))

    class Kernel:
        arg_names = ("x", "SIZE", "FLAG")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., Compiled]:
            def first(*arguments: object, **settings: object) -> Compiled:
                calls.append(("first", grid, arguments, settings))
                return Compiled()

            return first

    launch = CachedLaunch(Kernel(), (2, 1, 1), num_warps=4, FLAG=True, SIZE=16)
    launch("one")
    launch("two")
    assert calls == [
        ("first", (2, 1, 1), ("one",), {"num_warps": 4, "FLAG": True, "SIZE": 16}),
        ("again", (2, 1, 1), ("two", 16, True)),
    ]
