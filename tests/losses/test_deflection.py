"""A learned divergence: certificate, criterion by plain sums, who gets which gradient, training, refusals."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import fmicl
from fmicl.config import recipe
from fmicl.divergences import Learned
from fmicl.losses.deflection import deflection
from two_views import F64, MODES, batch, queue, unit

COMPONENTS = {"js": "js", "kl": "kl", "tsallis 1.5": 1.5, "pearson": "pearson", "tsallis 3": 3.0}


def component(name: str) -> fmicl.Divergence:
    kind = COMPONENTS[name]
    return fmicl.divergence(kind) if isinstance(kind, str) else fmicl.divergence("tsallis", order=kind)


def learned(*logits: float) -> Learned:
    return Learned(nn.Parameter(torch.tensor(logits or (0.5, -0.2, 0.1, 0.3, -0.7), dtype=F64)))


class TestDivergence:
    @given(
        logits=st.lists(st.floats(-30, 30), min_size=5, max_size=5),
        gamma=st.floats(1e-3, 100),
        log_mu=st.floats(-50, 50),
    )
    @settings(deadline=None, max_examples=25)
    def test_the_certificate_holds_at_any_weights(self, logits: list[float], gamma: float, log_mu: float) -> None:
        kind = learned(*logits)
        assert fmicl.theory.uniformity(kind, gamma, math.exp(log_mu)).kind == "strictly convex"
        assert fmicl.theory.uniformity(kind.frozen(), gamma).kind == "strictly convex"

    @pytest.mark.parametrize("name", COMPONENTS)
    def test_one_weight_is_that_divergence_without_its_scale(self, name: str) -> None:
        """Its f-information is proportional, for any distribution; f''(1) = 1 and f'(1) = 0."""
        kind = learned(*(60.0 if other == name else 0.0 for other in COMPONENTS))
        tables = torch.rand(4, 2, 3, dtype=F64, generator=torch.Generator().manual_seed(0))
        ratio = [
            fmicl.information.f_mutual_information(table / table.sum(), kind.frozen())
            / fmicl.information.f_mutual_information(table / table.sum(), component(name))
            for table in tables
        ]
        torch.testing.assert_close(torch.stack(ratio), ratio[0].expand(4), rtol=1e-9, atol=0)
        assert float(kind.frozen().score(0.0)) == 0
        assert float(kind.frozen().score_slope(torch.zeros((), dtype=F64))) == pytest.approx(1)

    def test_weights(self) -> None:
        kind = fmicl.divergence("learned")
        assert isinstance(kind, Learned)
        assert kind.weights() == pytest.approx(dict.fromkeys(COMPONENTS, 0.2))
        assert "pearson=0.2" in repr(kind)
        assert kind.learned
        assert kind.skew(0.1).learned
        assert kind.skew(0.1).weighted(2.0).frozen().base.base.logits.requires_grad is False  # type: ignore[attr-defined]
        assert kind.logits is not fmicl.divergence("learned").logits  # type: ignore[attr-defined]
        assert "learned" not in fmicl.list_divergences()

    @pytest.mark.parametrize("shift", [None, "optimal"])
    @pytest.mark.parametrize("kernel", ["tiled", "reference"])
    def test_gradients_of_the_bound_in_the_weights(self, kernel: Any, shift: Any) -> None:
        """Of the pure function, which doesn't train them, against finite differences."""
        kind, (x, y) = learned(), batch(9, 4)

        def loss() -> Tensor:
            return fmicl.functional.fmicl_loss(x, y, kind, alpha=3.0, kernel=kernel, shift=shift)

        (seen,) = torch.autograd.grad(loss(), kind.logits)
        for place in range(5):
            ends = []
            for step in (1e-5, -1e-5):
                with torch.no_grad():
                    kind.logits[place] += step
                    ends.append(float(loss()))
                    kind.logits[place] -= step
            assert float(seen[place]) == pytest.approx((ends[0] - ends[1]) / 2e-5, rel=1e-4, abs=1e-9)


class TestDeflection:
    @pytest.mark.parametrize("mode", MODES)
    def test_equals_plain_sums(self, mode: str) -> None:
        x, y = (unit(view) for view in batch(7, 4))
        others, explicit = ~torch.eye(7, dtype=torch.bool), unit(queue(5, 4))
        cosines = {
            "anchor": (x @ x.T)[others],
            "cross": (x @ y.T)[others],
            "both": torch.cat([(a @ b.T)[others] for a in (x, y) for b in (x, y)]),
            "explicit": (x @ explicit.T).flatten(),
        }[mode]
        kind = learned()
        positive, negative = (kind.score(math.log(1.2) - 1.6 * (1 - c)) for c in ((x * y).sum(1), cosines))
        spread = positive.var(unbiased=False) + negative.var(unbiased=False)
        expected = (positive.mean() - negative.mean()) / spread.sqrt()
        gradient = torch.autograd.grad(expected, kind.logits)[0]
        for kernel in ("tiled", "reference"):
            negatives: Any = explicit if mode == "explicit" else mode
            seen = deflection(x, y, kind, gamma=0.8, mu=1.2, negatives=negatives, kernel=kernel)
            torch.testing.assert_close(seen, expected)
            torch.testing.assert_close(torch.autograd.grad(seen, kind.logits)[0], gradient)

    @pytest.mark.parametrize(("scale", "slope"), [(1e-3, 0.0), (1.0, -7.0), (50.0, 20.0)])
    def test_neither_scale_nor_a_linear_term_changes_it(self, scale: float, slope: float) -> None:
        x, y = batch(7, 4)
        other = fmicl.Divergence.from_generator(lambda u: scale * u * u.log() + slope * (u - 1), name="other")
        assert float(deflection(x, y, other)) == pytest.approx(float(deflection(x, y, "kl")), rel=1e-6)

    def test_gradient_in_the_embeddings(self) -> None:
        x, y = (view.requires_grad_() for view in batch(5, 3))
        assert torch.autograd.gradcheck(lambda x, y: deflection(x, y, "vlc"), (x, y))

    @pytest.mark.parametrize("gamma", [1.0, 20.0, 100.0])
    def test_finite_in_float32(self, gamma: float) -> None:
        x, y = (view.float() for view in batch(32, 16))
        kind = fmicl.divergence("learned")
        value = deflection(x, y, kind, gamma=gamma)
        (gradient,) = torch.autograd.grad(value, kind.logits)  # type: ignore[attr-defined]
        assert value.isfinite()
        assert gradient.isfinite().all()
        collapsed = torch.ones(8, 4)
        (gradient,) = torch.autograd.grad(deflection(collapsed, collapsed, kind), kind.logits)  # type: ignore[attr-defined]
        assert gradient.isfinite().all()


class TestTraining:
    @pytest.mark.parametrize("wrapped", [lambda kind: kind, lambda kind: kind.skew(0.1)], ids=["plain", "skewed"])
    @pytest.mark.parametrize("alpha", [3.0, "auto"])
    def test_the_encoder_gets_the_bound_and_f_the_deflection(self, alpha: Any, wrapped: Any) -> None:
        x, y = (view.requires_grad_() for view in batch(9, 4))
        gamma, kind = nn.Parameter(torch.tensor(0.8, dtype=F64)), learned()
        loss = fmicl.FMICLLoss(wrapped(kind), alpha, gamma=gamma)
        assert {id(each) for each in loss.parameters()} == {id(gamma), id(kind.logits)}
        value = loss(x, y)
        found = torch.autograd.grad(value, [x, y, gamma, kind.logits])
        fixed = fmicl.FMICLLoss(wrapped(kind).frozen(), alpha, gamma=gamma)(x, y)
        torch.testing.assert_close(value, fixed)
        torch.testing.assert_close(found[:3], torch.autograd.grad(fixed, [x, y, gamma]))
        gain = deflection(x.detach(), y.detach(), wrapped(kind), gamma=gamma.detach())
        (expected,) = torch.autograd.grad(-gain / max(1.0, float(gain.detach())), kind.logits)
        torch.testing.assert_close(found[3], expected)

    def test_it_finds_the_largest_deflection(self) -> None:
        """Quasi-concave in the weights: ascent arrives at what no component, nor a random mixture, exceeds."""
        x = torch.randn(2, 40, 8, dtype=F64, generator=torch.Generator().manual_seed(0))
        x, y = x[0], x[0] + 0.7 * x[1]
        loss = fmicl.FMICLLoss("learned", "auto")
        optimiser = torch.optim.Adam(loss.parameters(), lr=0.3)
        for _ in range(80):
            optimiser.zero_grad()
            loss(x, y).backward()
            optimiser.step()
        best = float(deflection(x, y, loss.divergence.frozen()))
        assert best >= max(float(deflection(x, y, component(name))) for name in COMPONENTS) - 1e-3
        generator = torch.Generator().manual_seed(1)
        mixtures = (Learned(3 * torch.randn(5, dtype=F64, generator=generator)) for _ in range(50))
        assert max(loss.divergence.weights().values()) < 0.999, "the example has a maximum inside"  # type: ignore[attr-defined]
        assert best >= max(float(deflection(x, y, kind)) for kind in mixtures) - 1e-3

    def test_checkpoints_have_the_weights(self) -> None:
        loss, other = fmicl.FMICLLoss("learned"), fmicl.FMICLLoss("learned")
        assert list(loss.state_dict()) == ["learned.0"]
        with torch.no_grad():
            loss.learned[0].copy_(torch.arange(5.0))
        other.load_state_dict(loss.state_dict())
        x, y = batch()
        assert other(x, y) == loss(x, y) != fmicl.FMICLLoss("learned")(x, y)
        assert copy.deepcopy(loss)(x, y) == loss(x, y)

    def test_the_option(self) -> None:
        options = recipe("digits", divergence="learned", alpha="auto", skew=0.1)
        assert "Learned(js=0.2" in repr(options.objective_options.build(options.objective_context()))

    @pytest.mark.parametrize(
        "make",
        [
            lambda: fmicl.IConLoss("learned"),
            lambda: fmicl.FMICLLoss("learned", similarity="cosine"),
            lambda: fmicl.FMICLLoss("learned", similarity=fmicl.Cosine()),
        ],
    )
    def test_refused_where_nothing_would_train_it(self, make: Any) -> None:
        with pytest.raises(ValueError, match="'learned'"):
            make()
