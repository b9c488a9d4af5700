"""Learned scalars and parametrised divergences: equal gradients in every kernel, several steps, registration."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from devices import TRITON_DEVICE
from fmicl.divergences import KL
from two_views import F64, MODES, batch, queue
from unit_rows import needs_triton, rows

Made = tuple[nn.Module, list[Tensor]]


def leaf(value: float, dtype: torch.dtype = F64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=dtype))


def parametrised_f(**options: Any) -> Made:
    p = leaf(1.5)
    return fmicl.FMICLLoss(fmicl.Divergence.from_generator(lambda u: (u**p - 1) / (p - 1)), **options), [p]


def expression_inside(**options: Any) -> Made:
    raw = leaf(0.3)
    mine = fmicl.Divergence.from_generator(lambda u: (u ** (1 + F.softplus(raw)) - 1) / F.softplus(raw))
    return fmicl.FMICLLoss(mine, **options), [raw]


def module_as_f(**options: Any) -> Made:
    class Mixture(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.tensor([0.2, -0.4], dtype=F64))

        def forward(self, u: Tensor) -> Tensor:
            kl, pearson = self.weights.exp()
            value: Tensor = kl * u * u.log() + pearson * (u - 1) ** 2
            return value

    mixture = Mixture()
    return fmicl.FMICLLoss(fmicl.Divergence.from_generator(mixture), **options), list(mixture.parameters())


def tsallis_order(**options: Any) -> Made:
    order = leaf(1.5)
    return fmicl.FMICLLoss(fmicl.divergence("tsallis", order=order), **options), [order]


def weighted(**options: Any) -> Made:
    alpha, order = leaf(3.0), leaf(1.5)
    return fmicl.FMICLLoss(fmicl.divergence("tsallis", order=order).weighted(alpha), **options), [alpha, order]


class Tilted(KL):
    """KL with a learned factor of its penalty."""

    def __init__(self, factor: Tensor) -> None:
        object.__setattr__(self, "factor", factor)

    def _penalty(self, r: Tensor) -> Tensor:
        factor: Tensor = self.factor  # type: ignore[attr-defined]
        return factor.square() * r.exp()


def subclass(**options: Any) -> Made:
    factor = leaf(1.3)
    return fmicl.FMICLLoss(Tilted(factor), **options), [factor]


def scalars(name: str = "js", **options: Any) -> Made:
    alpha, gamma, mu = leaf(3.0), leaf(1.3), leaf(1.2)
    return fmicl.FMICLLoss(name, alpha=alpha, gamma=gamma, mu=mu, **options), [alpha, gamma, mu]


def normalised_mu(**options: Any) -> Made:
    gamma = leaf(1.3)
    return fmicl.FMICLLoss("kl", gamma=gamma, mu="normalised", **options), [gamma]


def cosine(**options: Any) -> Made:
    temperature = leaf(0.4)
    return fmicl.FMICLLoss("pearson", similarity=fmicl.Cosine(temperature), **options), [temperature]


def cosine_of_parametrised_f(**options: Any) -> Made:
    """f'(inf) is infinite, so the critic goes through f* itself."""
    p, gamma = leaf(1.5), leaf(1.1)
    mine = fmicl.Divergence.from_generator(lambda u: (u**p - 1) / (p - 1))
    return fmicl.FMICLLoss(mine, gamma=gamma, similarity="cosine", **options), [p, gamma]


def all_at_once(**options: Any) -> Made:
    loss, found = tsallis_order(alpha=leaf(3.0), gamma=leaf(1.3), mu=leaf(1.2), **options)
    return loss, [*found, loss.alpha, loss.gamma, loss.mu]  # type: ignore[list-item]


def infonce(**options: Any) -> Made:
    temperature = leaf(0.3)
    return fmicl.InfoNCELoss(temperature, **options), [temperature]


def sharp_infonce(**options: Any) -> Made:
    temperature = leaf(0.002)
    return fmicl.InfoNCELoss(temperature, **options), [temperature]


def align_uniform(**options: Any) -> Made:
    gamma, weight = leaf(2.0), leaf(0.7)
    return fmicl.AlignUniformLoss(gamma=gamma, weight=weight, **options), [gamma, weight]


def spectral(**options: Any) -> Made:
    mu = leaf(1.4)
    return fmicl.SpectralContrastiveLoss(mu, **options), [mu]


MAKERS: list[Callable[..., Made]] = [
    parametrised_f, expression_inside, module_as_f, tsallis_order, weighted, subclass, scalars, normalised_mu, cosine,
    cosine_of_parametrised_f, all_at_once, infonce, sharp_infonce, align_uniform, spectral,
]  # fmt: skip


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def results(make: Callable[..., Made], kernel: str, mode: str = "anchor", **options: Any) -> list[Tensor]:
    """The loss, and its gradients in the views, the queue and what is learned."""
    x, y = (view.requires_grad_() for view in batch(9, 4))
    explicit = [queue(5, 4).requires_grad_()] if mode == "explicit" else []
    loss, learned = make(kernel=kernel, negatives="anchor" if mode == "explicit" else mode, **options)
    value = loss(x, y, *explicit)
    return [value, *torch.autograd.grad(value, [x, y, *explicit, *learned])]


class TestKernels:
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
    def test_agree(self, make: Callable[..., Made], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fmicl.kernels.tiled._CPU_TILE", 4)
        for seen, true in zip(results(make, "tiled", mode), results(make, "reference", mode), strict=True):
            torch.testing.assert_close(seen, true, rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("make", [scalars, tsallis_order, parametrised_f, all_at_once], ids=lambda m: m.__name__)
    def test_agree_with_the_optimal_shift(self, make: Callable[..., Made]) -> None:
        for mode in MODES:
            found = (results(make, kernel, mode, shift="optimal") for kernel in ("tiled", "reference"))
            for seen, true in zip(*found, strict=True):
                torch.testing.assert_close(seen, true, rtol=1e-6, atol=1e-8)

    @pytest.mark.parametrize("shift", [None, "optimal"])
    @pytest.mark.parametrize("make", [*MAKERS[:11]], ids=lambda make: make.__name__)
    def test_gradients_are_those_of_finite_differences(self, make: Callable[..., Made], shift: str | None) -> None:
        if shift is not None and make in (subclass, weighted):
            pytest.skip("its conjugate is not that of its penalty, or a constant of the loss")
        x, y = batch(9, 4)
        loss, learned = make(shift=shift)
        gradients = torch.autograd.grad(loss(x, y), learned)
        for each, gradient in zip(learned, gradients, strict=True):
            for place in range(each.numel()):
                values = []
                for step in (1e-5, -1e-5):
                    with torch.no_grad():
                        each.view(-1)[place] += step
                        values.append(float(loss(x, y)))
                        each.view(-1)[place] -= step
                assert float(gradient.view(-1)[place]) == pytest.approx((values[0] - values[1]) / 2e-5, rel=1e-4)

    @needs_triton
    @pytest.mark.parametrize("precision", ["high", "fast"])
    @pytest.mark.parametrize("name", ["kl", "js", "spectral", "infonce", "align_uniform"])
    def test_triton(self, name: str, precision: str) -> None:
        """Scale and offset are part of the rows: the program of a number is that of a learned scalar."""

        def found(kernel: str, dtype: torch.dtype) -> list[Tensor]:
            x, y = (rows(20, 7, seed).to(TRITON_DEVICE, dtype).requires_grad_() for seed in (0, 1))
            options: dict[str, Any] = {"kernel": kernel, "precision": precision}
            made = {"spectral": spectral, "infonce": infonce, "align_uniform": align_uniform}.get(name)
            loss, learned = scalars(name, **options) if made is None else made(**options)
            loss.to(TRITON_DEVICE)
            value = loss(x, y)
            return [value, *torch.autograd.grad(value, [x, y, *learned])]

        rounding = 2e-2 if precision == "fast" else 1e-4
        for seen, true in zip(found("triton", torch.float32), found("reference", F64), strict=True):
            torch.testing.assert_close(seen.double(), true.double(), rtol=rounding, atol=rounding)

    @needs_triton
    def test_triton_refuses_a_learned_f(self) -> None:
        loss, _ = tsallis_order(kernel="triton")
        x, y = (rows(20, 7, seed).to(TRITON_DEVICE) for seed in (0, 1))
        with pytest.raises(ValueError, match=r"no program.*Tsallis"):
            loss(x, y)

    def test_a_value_that_only_the_device_knows(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """On a GPU no value is read: kernels then take the form that any scale allows."""
        expected = {make: results(make, "tiled", "both") for make in (scalars, infonce, sharp_infonce, align_uniform)}
        for module in ("kernels.parameters", "losses.pairing", "utils.learnable"):
            monkeypatch.setattr(
                f"fmicl.{module}.host_value", lambda value: None if isinstance(value, Tensor) else value
            )
        for make, true in expected.items():
            torch.testing.assert_close(results(make, "tiled", "both"), true, rtol=1e-9, atol=1e-11)

    def test_second_derivatives(self) -> None:
        x, y = (view.requires_grad_() for view in batch(4, 3))

        def loss(x: Tensor, order: Tensor, gamma: Tensor) -> Tensor:
            return fmicl.functional.fmicl_loss(x, y, fmicl.divergence("tsallis", order=order), gamma=gamma)

        inputs = (x, leaf(1.5), leaf(1.2))
        assert torch.autograd.gradcheck(loss, inputs)
        assert torch.autograd.gradgradcheck(loss, inputs)

    def test_without_gradients(self) -> None:
        x, y = batch(9, 4)
        for make in MAKERS:
            loss, _ = make()
            with torch.no_grad():
                torch.testing.assert_close(loss(x, y), make(kernel="reference")[0](x, y))


class TestTraining:
    @pytest.mark.parametrize("shift", [None, "optimal"])
    @pytest.mark.parametrize("make", [parametrised_f, expression_inside, module_as_f, all_at_once, infonce])
    def test_several_steps_equal_those_of_the_reference(self, make: Callable[..., Made], shift: str | None) -> None:
        """No graph of an earlier step is used again, and nothing computed from an old value of a parameter."""
        options = {} if make is infonce else {"shift": shift}
        ends = []
        for kernel in ("tiled", "reference"):
            x, y = batch(9, 4)
            loss, learned = make(kernel=kernel, **options)
            optimiser = torch.optim.SGD(loss.parameters(), lr=1e-3)
            for _ in range(4):
                optimiser.zero_grad()
                loss(x, y).backward()
                optimiser.step()
            ends.append([each.detach() for each in learned])
        torch.testing.assert_close(*ends, rtol=1e-7, atol=1e-9)
        assert not torch.equal(ends[0][0], make()[1][0])

    def test_limits_follow_the_parameters(self) -> None:
        """Of an alpha-divergence: f'(inf) = 1 / (1 - a) below order 1; the conjugate's table of slopes follows too."""
        order = leaf(0.5)
        mine = fmicl.Divergence.from_generator(lambda u: (u**order - 1 - order * (u - 1)) / (order * (order - 1)))
        t = torch.tensor(-0.5, dtype=F64)
        for value in (0.5, 0.25, 0.75):
            with torch.no_grad():
                order.fill_(value)
            assert mine.supremum == pytest.approx(1 / (1 - value))
            u = mine.conjugate_derivative(t)
            torch.testing.assert_close(mine.derivative(u), t)
            (slope,) = torch.autograd.grad(u, order)
            exact = torch.func.grad(lambda a: (1 + t * (a - 1)) ** (1 / (a - 1)))(order.detach())
            torch.testing.assert_close(slope, exact)


class TestRegistration:
    def test_parameters_of_the_module(self) -> None:
        for make in MAKERS:
            loss, learned = make()
            assert {id(each) for each in loss.parameters()} == {id(each) for each in learned}, make.__name__
        loss, _ = all_at_once()
        assert set(loss.state_dict()) == {"alpha", "gamma", "mu", "learned.0"}
        other, (order, *_) = all_at_once()
        with torch.no_grad():
            loss.learned[0].fill_(2.5)  # type: ignore[index]
        other.load_state_dict(loss.state_dict())
        assert float(order.detach()) == 2.5
        assert "gamma=1.3 (learned)" in repr(loss)

    def test_numbers_are_no_parameters(self) -> None:
        assert not list(fmicl.FMICLLoss("tsallis").parameters())
        assert not fmicl.FMICLLoss("kl").state_dict()

    @pytest.mark.parametrize("name", ["alpha", "gamma", "mu"])
    def test_refuses(self, name: str) -> None:
        for value in (torch.ones(2), torch.tensor(1), torch.tensor(-1.0), torch.tensor(float("nan"))):
            with pytest.raises(ValueError, match=name):
                fmicl.FMICLLoss("kl", **{name: value})  # type: ignore[arg-type]
        gamma = leaf(1.0)
        loss = fmicl.FMICLLoss("kl", gamma=gamma)
        with torch.no_grad():
            gamma.fill_(-0.5)
        with pytest.raises(ValueError, match=r"gamma=-0\.5"):
            loss(*batch())
