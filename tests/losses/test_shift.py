"""The optimal Donsker-Varadhan shift: optimality, gradient, float32, number of passes, and CUDA graphs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fmicl
from devices import TRITON_DEVICE
from fmicl import kernels
from fmicl.divergences.shifted import ShiftedCritic
from fmicl.kernels import Kernel, Precision, tiled
from fmicl.kernels.backend import PairFunction
from fmicl.losses import shift
from fmicl.losses.shift import optimal_shift
from fmicl.losses.similarities import make_similarity
from fmicl.utils.triton import compile_in_parallel
from two_views import CERTIFIED, F64, MODES, NAMES, batch, queue, unit
from unit_rows import needs_triton, rows


@pytest.mark.parametrize("similarity", ["gaussian", "cosine"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("alpha", [1.0, 40.0])
def test_no_shift_does_better(name: str, alpha: float, similarity: str) -> None:
    x, y = batch()
    kind = fmicl.divergence(name)
    critic = make_similarity(similarity).critic(kind, 4)
    off = ~torch.eye(len(x), dtype=torch.bool)
    t_positive = critic.score(critic.pairs(unit(x), unit(y)))
    t_negative = critic.score(critic.z(unit(x) @ unit(x).T)[off])
    best = -float(fmicl.FMICLLoss(name, alpha=alpha, similarity=similarity, shift="optimal")(x, y))

    def bound(v: Tensor) -> Tensor:
        return t_positive.mean() - v - alpha * kind.conjugate(t_negative - v[:, None]).mean(dim=1)

    centre, span = 0.0, 10.0 + float(t_negative.abs().max()) + abs(float(kind.derivative(1 / alpha)))
    for _ in range(4):  # a concave function: zoom in on the best point of a grid
        grid = centre + torch.linspace(-span, span, 1001, dtype=F64)
        centre, span = float(grid[bound(grid).argmax()]), span / 100
    found = float(bound(grid).max())
    assert best >= found - 1e-9 * (1 + abs(found))
    assert best == pytest.approx(found, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CERTIFIED)
def test_gradient_by_the_envelope_theorem(name: str, mode: str) -> None:
    x, y = (v.requires_grad_() for v in batch(4, 3))
    explicit = [queue(3, 3).requires_grad_()] if mode == "explicit" else []
    negatives = "anchor" if mode == "explicit" else mode
    loss = fmicl.FMICLLoss(name, alpha=2.0, shift="optimal", negatives=negatives)  # type: ignore[arg-type]
    assert torch.autograd.gradcheck(loss, (x, y, *explicit), atol=1e-5)


def test_closed_form_and_solve_agree_for_kl() -> None:
    x, y = batch()
    solved = fmicl.Divergence.from_generator(lambda u: u * u.log(), name="kl by hand")
    for similarity in ("gaussian", "cosine"):
        closed = fmicl.FMICLLoss("kl", similarity=similarity, shift="optimal")(x, y)
        torch.testing.assert_close(fmicl.FMICLLoss(solved, similarity=similarity, shift="optimal")(x, y), closed)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 20.0])
@pytest.mark.parametrize("alpha", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("name", NAMES)
def test_finite_in_float32_where_it_is_in_float64(name: str, alpha: float, gamma: float) -> None:
    """Just below the optimum a pair may lie above the domain of f*: v comes from the other side."""
    x, y = (torch.randn(64, 16, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    loss = fmicl.FMICLLoss(name, alpha=alpha, gamma=gamma, shift="optimal")
    true = loss(x.double(), y.double())
    if abs(float(true)) > torch.finfo(torch.float32).max:
        pytest.skip("the loss itself is no float32")
    x.requires_grad_()
    seen = loss(x, y)
    assert bool(true.isfinite())
    torch.testing.assert_close(seen.double(), true, rtol=1e-3, atol=1e-3)
    seen.backward()
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


def test_within_torch_func_only_kl() -> None:
    x, y = batch()
    torch.func.grad(lambda x: fmicl.FMICLLoss("kl", shift="optimal")(x, y))(x)
    with pytest.raises(ValueError, match="got js"):
        torch.func.grad(lambda x: fmicl.FMICLLoss("js", shift="optimal")(x, y))(x)


def test_never_below_the_unshifted_bound() -> None:
    x, y = batch()
    for name in NAMES:
        shifted = fmicl.FMICLLoss(name, alpha=5.0, shift="optimal")(x, y)
        assert float(shifted) <= float(fmicl.FMICLLoss(name, alpha=5.0)(x, y)) + 1e-12


def test_second_derivatives_are_refused_where_they_would_be_wrong() -> None:
    x, y = (v.requires_grad_() for v in batch(4, 3))
    with pytest.raises(RuntimeError, match=r"twice.*shift='optimal'"):
        torch.autograd.grad(fmicl.FMICLLoss("js", shift="optimal")(x, y), x, create_graph=True)
    assert torch.autograd.gradgradcheck(fmicl.FMICLLoss("kl", shift="optimal"), (x, y))


@pytest.mark.parametrize(("tile", "most"), [(768, 0), (32, 8)])
def test_the_search_takes_few_passes_without_gradients(tile: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None at all if the batch is one tile, whose pairs are kept."""
    gradients: list[bool] = []
    whole = tiled.pair_symmetric

    def spy(x: Tensor, function: object, gradient: bool) -> tuple[Tensor, Tensor | None]:
        gradients.append(gradient)
        return whole(x, function, gradient)  # type: ignore[arg-type]

    monkeypatch.setattr(tiled, "pair_symmetric", spy)
    for d in (8, 128, 256):
        x, y = (v.requires_grad_() for v in batch(64, d, dtype=torch.float32))
        for name in CERTIFIED:
            exact = fmicl.FMICLLoss(name, shift="optimal")(x, y)
            gradients.clear()
            with monkeypatch.context() as smaller:
                smaller.setattr(tiled, "_CPU_TILE", tile)
                torch.testing.assert_close(fmicl.FMICLLoss(name, shift="optimal")(x, y), exact, rtol=2e-6, atol=2e-6)
            assert gradients.count(True) == 1
            assert len(gradients) - 1 <= (0 if name == "kl" else most)


@pytest.mark.parametrize("spread", [0.06, 0.4])
@pytest.mark.parametrize("alpha", [0.5, 40.0, 4096.0])
@pytest.mark.parametrize("gamma", [0.5, 10.0])
@pytest.mark.parametrize("name", CERTIFIED)
def test_the_search_ends_at_the_root(name: str, gamma: float, alpha: float, spread: float) -> None:
    """alpha E_neg[(f*)'(T - v)] is 1 there."""
    kind = fmicl.divergence(name)
    critic = make_similarity("gaussian", gamma).critic(kind, 256)
    cosines = spread * torch.randn(20_000, generator=torch.Generator().manual_seed(0), dtype=F64)
    z = critic.z(cosines.clamp(-1, 1))
    passes = 0

    def mean(function: PairFunction) -> Tensor:
        nonlocal passes
        passes += 1
        return function.penalty(z).mean()

    start = ShiftedCritic(critic, z.max(), z.max())
    found = optimal_shift(start, alpha, mean, torch.tensor(20_000.0))
    assert passes < 40
    shares = kind.conjugate_derivative(found.shifted_score(z))
    assert alpha * float(shares.mean()) == pytest.approx(1, rel=1e-8)
    torch.testing.assert_close(found.shifted_score(z), critic.score(z) - found.shift(), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("alpha", [40.0, 409600.0])
@pytest.mark.parametrize("name", NAMES)
def test_float32_at_the_text_recipes_gamma(name: str, alpha: float, mode: str) -> None:
    """T is as large as e^160 there, and T - v of the order of f'(1 / alpha): loss and gradient against float64."""
    found = []
    for dtype, kernel in ((torch.float32, "tiled"), (F64, "reference")):
        x, y = (view.requires_grad_() for view in batch(48, 16, dtype=dtype))
        explicit = [queue(30, 16).to(dtype)] if mode == "explicit" else []
        negatives = "anchor" if mode == "explicit" else mode
        loss = fmicl.FMICLLoss(name, alpha=alpha, gamma=20.0, negatives=negatives, shift="optimal", kernel=kernel)  # type: ignore[arg-type]
        value = loss(x, y, *explicit)
        (slope,) = torch.autograd.grad(value, x)
        found.append((value.detach().double(), slope.double()))
    (seen, slope), (true, wanted) = found
    torch.testing.assert_close(seen, true, rtol=1e-3, atol=1e-3)
    assert float((slope - wanted).norm()) < 1e-3 * float(wanted.norm())


def test_rounding_that_hides_the_shift_is_refused() -> None:
    """An f given as code has no closed form of the difference of two scores."""
    mine = fmicl.Divergence.from_generator(lambda u: (1 - u) ** 2 / u, name="neyman by hand")
    x, y = batch(48, 16)
    torch.testing.assert_close(
        fmicl.FMICLLoss(mine, shift="optimal")(x, y), fmicl.FMICLLoss("neyman", shift="optimal")(x, y)
    )
    with pytest.raises(ValueError, match=r"rounding hides .*neyman by hand"):
        fmicl.FMICLLoss(mine, gamma=20.0, shift="optimal")(x, y)


def test_in_float32() -> None:
    x, y = batch(dtype=torch.float32)
    assert fmicl.FMICLLoss("squared_hellinger", gamma=50.0, shift="optimal")(x, y).isfinite()
    for name in NAMES:
        loss = fmicl.FMICLLoss(name, shift="optimal")
        torch.testing.assert_close(loss(x, y).double(), loss(x.double(), y.double()), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [name for name in CERTIFIED if name != "kl"])
def test_during_capture_of_a_cuda_graph(name: str, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_CPU_TILE", 8)  # so that a sample isn't all pairs, as on a GPU
    x, y = batch(32, 16, dtype=torch.float32)
    explicit = [queue(24, 16).float()] if mode == "explicit" else []
    negatives = "anchor" if mode == "explicit" else mode
    loss = fmicl.FMICLLoss(name, shift="optimal", negatives=negatives)  # type: ignore[arg-type]

    def both() -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        value = loss(leaf, y, *explicit)
        (slope,) = torch.autograd.grad(value, leaf)
        return value.detach(), slope

    exact, wanted = both()
    monkeypatch.setattr(shift, "is_capturing", lambda _: True)
    monkeypatch.setattr(shift, "_require_finite", lambda *_: pytest.fail("reads values on the host"))
    seen, found = both()
    torch.testing.assert_close(seen, exact, rtol=1e-5, atol=1e-5)
    assert float((found - wanted).norm()) < 1e-4 * float(wanted.norm())


@pytest.mark.parametrize("kernel", ["tiled", "triton"])
@pytest.mark.parametrize("d", [3, 200])
@pytest.mark.parametrize("skip", [None, 0, 2, -3])
def test_largest_cosine_tile_by_tile(skip: int | None, d: int, kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiled, "_CPU_TILE", 4)
    x, y = (unit(value).float().to(TRITON_DEVICE) for value in batch(70, d))
    products = x @ y.T
    if skip is not None:
        row, column = torch.meshgrid(torch.arange(70), torch.arange(70), indexing="ij")
        products = products[(column != row + skip).to(TRITON_DEVICE)]
    critic = make_similarity("gaussian").critic(fmicl.divergence("js"), d)
    torch.testing.assert_close(kernels.largest_cosine(x, y, critic, skip, kernel=kernel), products.max())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("name", "precision", "bound"), [
    ("js", "high", 1e-5), ("tsallis", "high", 1e-5), ("vlc", "high", 1e-5), ("js", "fast", 2e-2),
])  # fmt: skip
def test_by_triton(name: str, precision: Precision, bound: float, mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes that are no multiple of a tile; all passes over the pairs are launches."""
    monkeypatch.setattr(tiled, "accumulate_pairs", lambda *_: pytest.fail("a pass by tiles"))
    found = []
    for dtype, kernel in ((torch.float32, "triton"), (F64, "reference")):
        x, y = (view.to(TRITON_DEVICE).requires_grad_() for view in batch(70, 16, dtype=dtype))
        explicit = [queue(45, 16).to(x)] if mode == "explicit" else []
        negatives = "anchor" if mode == "explicit" else mode
        options = {"negatives": negatives, "kernel": kernel, "precision": precision}
        loss = fmicl.FMICLLoss(name, gamma=2.0, shift="optimal", **options)  # type: ignore[arg-type]
        value = loss(x, y, *explicit)
        found.append((value.detach().double(), *(v.double() for v in torch.autograd.grad(value, (x, y)))))
    for seen, true in zip(*found, strict=True):
        assert float((seen - true).norm()) < bound * float(true.norm())


def test_in_a_trial_run_that_only_compiles() -> None:
    """Values mean nothing there, so none is checked."""
    x, y = batch(8, 4)
    with compile_in_parallel():
        fmicl.FMICLLoss("js", shift="optimal")(x * torch.nan, y)
    with pytest.raises(ValueError, match="no finite shift"):
        fmicl.FMICLLoss("js", shift="optimal")(x * torch.nan, y)


@needs_triton
def test_half_precision_input_is_not_rounded_further() -> None:
    x, y = (rows(30, 8, seed).to(TRITON_DEVICE, torch.bfloat16) for seed in (0, 1))
    loss = fmicl.FMICLLoss("js", gamma=5.0, shift="optimal", kernel="triton")
    torch.testing.assert_close(loss(x, y), loss(x.float(), y.float()), rtol=1e-6, atol=1e-6)
