"""Losses with labels and soft targets against plain loops and published losses."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl.kernels import rows
from fmicl.losses.targets import make_targets
from two_views import CERTIFIED, F64, NAMES, batch, queue, unit

MODES = ["anchor", "both", "cross", "explicit"]
LABELS = torch.tensor([0, 1, 0, -1, 1, 0, -1])
N = len(LABELS)


def weights_of(labels: Tensor) -> list[list[float]]:
    """T by loops: one class, or the sample itself."""
    return [[float(i == j or (a == b and a >= 0)) for j, b in enumerate(labels)] for i, a in enumerate(labels)]


def anchors_of(
    x: Tensor, y: Tensor, mode: str, explicit: Tensor | None, t: list[list[float]], other_classes: bool
) -> list[tuple[Tensor, list[tuple[float, Tensor]], list[Tensor]]]:
    """Each anchor with its weighted positives and its negatives, spelled out with loops."""
    found = []
    for anchors, seconds, firsts in [(x, y, x), (y, x, y)] if mode == "both" else [(x, y, x)]:
        for i in range(len(x)):
            total = sum(t[i])
            positives = [(t[i][j], seconds[j]) for j in range(len(x)) if t[i][j]]
            others = [j for j in range(len(x)) if j != i and not (other_classes and t[i][j])]
            if mode == "both":
                positives += [(t[i][j], firsts[j]) for j in range(len(x)) if t[i][j] and j != i]
                negatives = [v[j] for v in (firsts, seconds) for j in others]
                total = sum(weight for weight, _ in positives)
            elif explicit is not None:
                negatives = list(explicit)
            else:
                negatives = [{"anchor": firsts, "cross": seconds}[mode][j] for j in others]
            found.append((anchors[i], [(weight / total, p) for weight, p in positives], negatives))
    return found


def pick(mode: str, m: int = 5) -> tuple[Any, Tensor | None]:
    """The argument `negatives` of a loss, and explicit ones for its call."""
    return ("anchor", queue(m)) if mode == "explicit" else (mode, None)


def plain_fmicl(name: str, anchors: Any, alpha: float, gamma: float) -> Tensor:
    kind = fmicl.divergence(name)

    def u(a: Tensor, b: Tensor) -> Tensor:
        return torch.exp(-gamma * ((a - b) ** 2).sum())

    earned = [sum(w * kind.derivative(u(a, p)) for w, p in positives) for a, positives, _ in anchors]
    cost = [kind.conjugate(kind.derivative(u(a, n))) for a, _, negatives in anchors for n in negatives]
    return alpha * torch.stack(cost).mean() - torch.stack(earned).mean()


def plain_infonce(anchors: Any, other_classes: bool, decoupled: bool) -> Tensor:
    total = []
    for a, positives, negatives in anchors:
        for w, p in positives:
            logits = [a @ n / 0.3 for n in negatives]
            if not decoupled and other_classes:
                logits.append(a @ p / 0.3)
            elif not decoupled:  # negatives and positives, each once
                logits += [a @ b / 0.3 for _, b in positives if not any(torch.equal(b, n) for n in negatives)]
            total.append(w * (torch.stack(logits).logsumexp(0) - a @ p / 0.3))
    return torch.stack(total).sum() / len(anchors)


@pytest.mark.parametrize("kernel", ["tiled", "reference"])
@pytest.mark.parametrize("choice", ["all", "other_classes"])
@pytest.mark.parametrize("mode", MODES)
class TestPlainLoops:
    @pytest.mark.parametrize("name", NAMES)
    def test_fmicl(self, name: str, mode: str, choice: Any, kernel: Any) -> None:
        if mode == "explicit" and choice == "other_classes":
            return
        x, y = batch(N)
        negatives, explicit = pick(mode)
        loss = fmicl.FMICLLoss(name, 3.0, 0.7, negatives=negatives, label_negatives=choice, kernel=kernel)
        unit_explicit = None if explicit is None else unit(explicit)
        anchors = anchors_of(unit(x), unit(y), mode, unit_explicit, weights_of(LABELS), choice == "other_classes")
        value = loss(x, y, negatives=explicit, labels=LABELS)
        torch.testing.assert_close(value, plain_fmicl(name, anchors, 3.0, 0.7), rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("decoupled", [False, True])
    def test_infonce(self, decoupled: bool, mode: str, choice: Any, kernel: Any) -> None:
        if mode == "explicit" and choice == "other_classes":
            return
        x, y = batch(N)
        negatives, explicit = pick(mode)
        loss = fmicl.InfoNCELoss(0.3, negatives, decoupled=decoupled, label_negatives=choice, kernel=kernel)
        unit_explicit = None if explicit is None else unit(explicit)
        other = choice == "other_classes"
        anchors = anchors_of(unit(x), unit(y), mode, unit_explicit, weights_of(LABELS), other)
        value = loss(x, y, negatives=explicit, labels=LABELS)
        torch.testing.assert_close(value, plain_infonce(anchors, other, decoupled))

    def test_unique_labels_change_nothing(self, mode: str, choice: Any, kernel: Any) -> None:
        if mode == "explicit" and choice == "other_classes":
            return
        x, y = batch(N)
        negatives, explicit = pick(mode)
        common = {"negatives": negatives, "label_negatives": choice, "kernel": kernel}
        losses: list[Callable[..., Tensor]] = [
            fmicl.FMICLLoss("js", **common),
            fmicl.FMICLLoss("kl", shift="optimal", **common),
            fmicl.FMICLLoss("js", alpha=2.0, shift="optimal", **common),
            fmicl.InfoNCELoss(0.3, **common),
            fmicl.DCLLoss(0.3, **common),
            fmicl.IConLoss("js", 0.3, **common),
        ]
        for loss in losses:
            expected = loss(x, y, negatives=explicit)
            for labels in (torch.arange(N), torch.full((N,), -1)):
                torch.testing.assert_close(loss(x, y, negatives=explicit, labels=labels), expected)
            torch.testing.assert_close(loss(x, y, negatives=explicit, targets=torch.eye(N)), expected)


@pytest.mark.parametrize("choice", ["all", "other_classes"])
@pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
@pytest.mark.parametrize(
    "make",
    [
        lambda **options: fmicl.FMICLLoss("vlc", alpha=2.0, **options),
        lambda **options: fmicl.FMICLLoss("js", alpha=2.0, similarity="cosine", **options),
        lambda **options: fmicl.FMICLLoss("kl", shift="optimal", **options),
        lambda **options: fmicl.InfoNCELoss(0.3, **options),
        lambda **options: fmicl.DCLLoss(0.3, **options),
        lambda **options: fmicl.IConLoss("js", 0.3, **options),
    ],
    ids=["vlc", "js, cosine", "kl, shift", "infonce", "dcl", "icon"],
)
def test_gradients(make: Callable[..., Callable[..., Tensor]], mode: str, choice: str) -> None:
    x, y = (v.requires_grad_() for v in batch(5, 3))
    labels = torch.tensor([0, 1, 0, -1, 1])
    loss = make(negatives=mode, label_negatives=choice)
    assert torch.autograd.gradcheck(lambda a, b: loss(a, b, labels=labels), (x, y))


def test_second_derivatives() -> None:
    x, y = (v.requires_grad_() for v in batch(4, 3))
    loss = fmicl.InfoNCELoss(0.5)
    assert torch.autograd.gradgradcheck(lambda a, b: loss(a, b, labels=torch.tensor([0, 1, 0, 1])), (x, y))


class TestPublished:
    def test_supcon(self) -> None:
        """L_out of Khosla et al., as a cross entropy over the other 2N - 1 views."""
        x, y = batch(8)
        labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
        z, all_labels = unit(torch.cat([x, y])), labels.repeat(2)
        itself = torch.eye(16, dtype=torch.bool)
        log_q = (z @ z.T / 0.1).masked_fill(itself, -math.inf).log_softmax(1)
        positive = (all_labels[:, None] == all_labels) & ~itself
        expected = -(log_q.masked_fill(~positive, 0.0).sum(1) / positive.sum(1)).mean()
        torch.testing.assert_close(fmicl.InfoNCELoss(0.1)(x, y, labels=labels), expected)

    def test_supcon_of_pytorch_metric_learning(self) -> None:
        theirs = pytest.importorskip("pytorch_metric_learning.losses").SupConLoss(temperature=0.1)
        x, y = batch(8)
        labels = torch.tensor([0, 1, 2, 0, 1, 2, 0, 0])
        expected = theirs(torch.cat([x, y]), labels.repeat(2))
        torch.testing.assert_close(fmicl.InfoNCELoss(0.1)(x, y, labels=labels), expected)

    @pytest.mark.parametrize("choice", ["all", "other_classes"])
    def test_icon_with_kl_is_supcon_minus_the_entropy_of_positives(self, choice: Any) -> None:
        x, y = batch(6)
        labels = torch.tensor([0, 0, 0, 1, 1, 1])  # five positives of each view
        icon = fmicl.IConLoss("kl", 0.2, label_negatives="all")(x, y, labels=labels)
        torch.testing.assert_close(icon, fmicl.InfoNCELoss(0.2)(x, y, labels=labels) - math.log(5))
        value = fmicl.IConLoss("kl", 0.2, label_negatives=choice)(x, y, labels=labels)
        torch.testing.assert_close(value, icon)  # positives are part of q in any case

    @pytest.mark.parametrize("name", ["kl", "js", "vlc"])
    def test_icon_by_loops(self, name: str) -> None:
        x, y = (unit(v) for v in batch(N))
        kind, t = fmicl.divergence(name), torch.tensor(weights_of(LABELS), dtype=F64)
        q = (x @ y.T / 0.3).softmax(1)
        p = t / t.sum(1, keepdim=True)
        expected = (q * kind.f(p / q)).sum(1).mean()
        torch.testing.assert_close(fmicl.IConLoss(name, 0.3, "cross")(x, y, labels=LABELS), expected)


class TestTargets:
    @pytest.mark.parametrize("mode", ["anchor", "both", "cross"])
    @pytest.mark.parametrize("choice", ["all", "other_classes"])
    @given(seed=st.integers(0, 1000))
    @settings(max_examples=5, deadline=None)
    def test_graded_targets_by_loops_dense_and_sparse(self, mode: Any, choice: Any, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        t = torch.rand(N, N, generator=generator, dtype=F64) * (torch.rand(N, N, generator=generator) < 0.4)
        t.fill_diagonal_(1.0)
        x, y = batch(N, seed=seed)
        loss = fmicl.FMICLLoss("js", 3.0, 0.7, negatives=mode, label_negatives=choice)
        anchors = anchors_of(unit(x), unit(y), mode, None, t.tolist(), choice == "other_classes")
        expected = plain_fmicl("js", anchors, 3.0, 0.7)
        for targets in (t, t.to_sparse(), t.to_sparse_csr()):
            torch.testing.assert_close(loss(x, y, targets=targets), expected)

    def test_labels_are_the_matrix_of_equal_labels(self) -> None:
        x, y = batch(N)
        for loss in (fmicl.FMICLLoss("kl"), fmicl.InfoNCELoss(0.2), fmicl.IConLoss("kl", 0.2)):
            expected = loss(x, y, labels=LABELS)
            torch.testing.assert_close(loss(x, y, targets=torch.tensor(weights_of(LABELS))), expected)

    def test_multi_labels_weigh_positives_by_shared_labels(self) -> None:
        multi = torch.tensor([[1, 1, 0], [1, 0, 0], [0, 0, 1], [1, 1, 1], [0, 0, 0]])
        t = (multi @ multi.T).clamp(min=torch.eye(5, dtype=torch.long))
        x, y = batch(5)
        for loss in (fmicl.FMICLLoss("js"), fmicl.InfoNCELoss(0.2, label_negatives="other_classes")):
            torch.testing.assert_close(loss(x, y, labels=multi), loss(x, y, targets=t))

    def test_probabilities_of_classes(self) -> None:
        """One-hot rows are labels."""
        x, y = batch(4)
        labels = torch.tensor([0, 1, 0, 1])
        loss = fmicl.FMICLLoss("kl")
        one_hot = torch.nn.functional.one_hot(labels).double()
        torch.testing.assert_close(loss(x, y, labels=one_hot), loss(x, y, labels=labels))

    def test_a_row_without_positives_has_no_alignment(self) -> None:
        x, y = batch(4)
        t = torch.eye(4, dtype=F64)
        t[2] = 0
        r = -((unit(x) - unit(y)) ** 2).sum(1)
        loss = fmicl.FMICLLoss("kl")
        expected = -(fmicl.divergence("kl").score(r) * t.diagonal()).mean()
        torch.testing.assert_close(loss.terms(x, y, targets=t).alignment, expected)
        assert bool(fmicl.InfoNCELoss(0.1)(x, y, targets=torch.zeros(4, 4)) == 0)

    def test_one_class_has_no_negatives_of_other_classes(self) -> None:
        x, y = (v.requires_grad_() for v in batch(4))
        one = torch.zeros(4, dtype=torch.long)
        for loss in (
            fmicl.FMICLLoss("js", label_negatives="other_classes"),
            fmicl.InfoNCELoss(0.1, label_negatives="other_classes"),
        ):
            value = loss(x, y, labels=one)
            grads = torch.autograd.grad(value, (x, y))
            assert bool(value.isfinite())
            assert all(bool(grad.isfinite().all()) for grad in grads)
        terms = fmicl.FMICLLoss("js", label_negatives="other_classes").terms(x, y, labels=one)
        assert bool(terms.uniformity == 0)


@pytest.mark.parametrize("name", CERTIFIED)
def test_memory_is_a_chunk_at_a_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same value and gradient in chunks of one row, and never a larger matrix than a chunk."""
    x, y = (v.requires_grad_() for v in batch(N))
    loss = fmicl.FMICLLoss(name, label_negatives="other_classes")
    expected = [
        v.detach() for v in (loss(x, y, labels=LABELS), *torch.autograd.grad(loss(x, y, labels=LABELS), (x, y)))
    ]
    seen = []
    monkeypatch.setattr(rows, "_CPU_CHUNK", 2 * N)
    divide = rows.chunks_of_rows
    monkeypatch.setattr(rows, "chunks_of_rows", lambda *a: [seen.append(r.stop - r.start) or r for r in divide(*a)])  # type: ignore[func-returns-value]
    value = loss(x, y, labels=LABELS)
    torch.testing.assert_close([value, *torch.autograd.grad(value, (x, y))], expected)
    assert set(seen) <= {1, 2}


class TestRefusals:
    def refused(self, message: str, **arguments: Any) -> None:
        x, y = batch(4)
        for loss in (fmicl.FMICLLoss("kl"), fmicl.InfoNCELoss(), fmicl.IConLoss("js")):
            with pytest.raises(ValueError, match=message):
                loss(x, y, **arguments)

    def test_what_is_no_label(self) -> None:
        self.refused(r"4 samples.*\(3,\)", labels=torch.zeros(3, dtype=torch.long))
        self.refused("float32", labels=torch.zeros(4))
        self.refused("list", labels=[0, 1, 2, 3])
        self.refused(r"\(4, 1, 1\)", labels=torch.zeros(4, 1, 1, dtype=torch.long))
        self.refused("negative.*-1", labels=-torch.ones(4, 2))

    def test_what_is_no_target(self) -> None:
        self.refused(r"4 samples.*\(4, 3\)", targets=torch.zeros(4, 3))
        self.refused(r"4 samples.*\(3, 4\)", targets=torch.zeros(3, 4))
        self.refused(r"\(4,\)", targets=torch.zeros(4))
        self.refused("negative.*-1", targets=-torch.eye(4))
        self.refused("negative.*-1", targets=-torch.eye(4).to_sparse())
        self.refused("NaN.*nan", targets=torch.eye(4).log().sqrt())
        self.refused("both", labels=torch.zeros(4, dtype=torch.long), targets=torch.eye(4))

    def test_explicit_negatives_have_no_classes(self) -> None:
        x, y = batch(4)
        with pytest.raises(ValueError, match="explicit"):
            fmicl.FMICLLoss("kl", label_negatives="other_classes")(x, y, negatives=queue(), labels=torch.arange(4))
        with pytest.raises(ValueError, match="'others'"):
            fmicl.InfoNCELoss(label_negatives="others")  # type: ignore[arg-type]

    def test_nothing_is_no_target(self) -> None:
        assert make_targets(None, None) is None
