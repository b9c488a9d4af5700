"""Losses over several processes: DistributedDataParallel's gradient equals that of one process."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import fmicl
from fmicl.kernels import exchange
from fmicl.losses.statistics import BatchStatisticsLoss
from process_groups import free_port, process_group, spawn

F64 = torch.float64
D_IN, D = 5, 4

MODES = ("anchor", "both", "cross")


def scalar(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(value, dtype=F64))


def learned_scalars(**options: Any) -> nn.Module:
    return fmicl.FMICLLoss("js", alpha=scalar(3.0), gamma=scalar(1.4), mu=scalar(0.8), **options)


def learned_f(**options: Any) -> nn.Module:
    order = scalar(1.5)
    mine = fmicl.Divergence.from_generator(lambda u: (u**order - 1) / (order - 1))
    return fmicl.FMICLLoss(mine, gamma=scalar(1.4), **options)


def learned_infonce(**options: Any) -> nn.Module:
    return fmicl.InfoNCELoss(scalar(0.3), **options)


def learned_au(**options: Any) -> nn.Module:
    return fmicl.AlignUniformLoss(gamma=scalar(2.0), weight=scalar(0.7), **options)


CASES: dict[str, Callable[..., nn.Module]] = {
    **{f"{name}, anchor": functools.partial(fmicl.FMICLLoss, name) for name in fmicl.list_divergences()},
    **{f"js, {mode}": functools.partial(fmicl.FMICLLoss, "js", negatives=mode) for mode in MODES},  # type: ignore[arg-type]
    **{
        f"kl, shift, {mode}": functools.partial(fmicl.FMICLLoss, "kl", shift="optimal", negatives=mode)  # type: ignore[arg-type]
        for mode in MODES
    },
    "js, auto": functools.partial(fmicl.FMICLLoss, "js", alpha="auto"),
    "vlc, auto, both": functools.partial(fmicl.FMICLLoss, "vlc", alpha="auto", negatives="both"),
    "js, shift": functools.partial(fmicl.FMICLLoss, "js", alpha=2.0, shift="optimal"),
    "js, cosine": functools.partial(fmicl.FMICLLoss, "js", similarity="cosine"),
    **{f"infonce, {mode}": functools.partial(fmicl.InfoNCELoss, 0.3, mode) for mode in MODES},  # type: ignore[arg-type]
    **{f"au, {mode}": functools.partial(fmicl.AlignUniformLoss, negatives=mode) for mode in MODES},  # type: ignore[arg-type]
    "au, sharp": functools.partial(fmicl.AlignUniformLoss, gamma=400.0),
    "learned scalars": learned_scalars,
    "learned scalars, both": functools.partial(learned_scalars, negatives="both"),
    "learned scalars, shift": functools.partial(learned_scalars, shift="optimal"),
    "learned f": learned_f,
    "learned infonce": learned_infonce,
    "learned infonce, cross": functools.partial(learned_infonce, negatives="cross"),
    "learned au": learned_au,
    **{f"spectral, {mode}": functools.partial(fmicl.SpectralContrastiveLoss, negatives=mode) for mode in MODES},  # type: ignore[arg-type]
    "dcl": functools.partial(fmicl.DCLLoss, 0.3),
    "dhel": functools.partial(fmicl.DHELLoss, 0.3),
    "icon": functools.partial(fmicl.IConLoss, "js", 0.3),
    "renyi": functools.partial(fmicl.RenyiLoss, 2.0, 0.1),
    "rpc": functools.partial(fmicl.RPCLoss, temperature=2.0),
    "siglip": functools.partial(fmicl.SigLIPLoss, 3.0, -2.0),
    "barlow_twins": lambda kernel="auto": fmicl.BarlowTwinsLoss(0.1),  # noqa: ARG005 (it has no kernels)
    "vicreg": lambda kernel="auto": fmicl.VICRegLoss(),  # noqa: ARG005
}


LABELLED: dict[str, Callable[..., nn.Module]] = {
    **{
        f"js, {mode}, {choice}": functools.partial(fmicl.FMICLLoss, "js", negatives=mode, label_negatives=choice)  # type: ignore[arg-type]
        for mode in MODES
        for choice in ("all", "other_classes")
    },
    "kl, shift, other classes": functools.partial(
        fmicl.FMICLLoss, "kl", shift="optimal", label_negatives="other_classes"
    ),
    "supcon": functools.partial(fmicl.InfoNCELoss, 0.3),
    "sincere": functools.partial(fmicl.InfoNCELoss, 0.3, label_negatives="other_classes"),
    "icon": functools.partial(fmicl.IConLoss, "js", 0.3),
}


class WithTargets(nn.Module):
    """A loss whose call has labels or targets."""

    def __init__(self, loss: nn.Module, **targets: Tensor) -> None:
        super().__init__()
        self.loss, self.targets = loss, targets

    def forward(self, x: Tensor, y: Tensor, negatives: Tensor | None = None) -> Tensor:
        value: Tensor = self.loss(x, y, negatives=negatives, **self.targets)
        return value


def targets_of(sizes: tuple[int, ...], mine: slice) -> list[dict[str, Tensor]]:
    """Labels of a process's samples, and its rows of the targets: dense and sparse."""
    total = sum(sizes)
    labels = torch.arange(total) % 3 - (torch.arange(total) == 4).long() * 5  # one is unknown
    matrix = torch.rand(total, total, generator=torch.Generator().manual_seed(1), dtype=F64).fill_diagonal_(1.0)
    matrix = matrix * (matrix > 0.5)
    return [{"labels": labels[mine]}, {"targets": matrix[mine]}, {"targets": matrix[mine].to_sparse()}]


def queues_of(loss: nn.Module, queue: Tensor) -> tuple[Tensor | None, ...]:
    """Without explicit negatives, and with them if the loss takes any."""
    return (None,) if isinstance(loss, BatchStatisticsLoss) else (None, queue)


def data(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(2, sum(sizes), D_IN, generator=generator, dtype=F64)
    return x, x + 0.3 * noise, torch.randn(7, D, generator=generator, dtype=F64)


def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Linear(D_IN, D, dtype=F64)


def gradient(module: nn.Module, loss: nn.Module, x: Tensor, y: Tensor, queue: Tensor | None) -> tuple[Tensor, ...]:
    """The loss, and the gradients of the encoder's weight and of the loss's own parameters after backward."""
    embedded = module(torch.cat([x, y]))
    value = loss(embedded[: len(x)], embedded[len(x) :], negatives=queue)
    value.backward()
    weight = next(module.parameters())
    assert weight.grad is not None
    return value.detach(), weight.grad, *(each.grad for each in loss.parameters() if each.grad is not None)


def check_all(rank: int, sizes: tuple[int, ...], port: int, truth: dict[str, tuple[Tensor, ...]]) -> None:
    """In each process: every case, with each kernel, by gathering and by ring exchange of the columns."""
    with process_group(rank, len(sizes), port):
        x, y, queue = data(sizes)
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        wrapped = DistributedDataParallel(model())
        for ring in (False, True):
            exchange.RING_ABOVE = -1 if ring else 2**28
            for kernel in ("tiled", "reference"):
                if ring and kernel == "reference":
                    continue
                for name, make in CASES.items():
                    for explicit in queues_of(make(), queue):
                        wrapped.zero_grad()
                        value, grad, *own = gradient(wrapped, make(kernel=kernel), x[mine], y[mine], explicit)
                        dist.all_reduce(value)
                        key = f"{name}, queue" if explicit is not None else name
                        true_value, true_grad, *true_own = truth[key]
                        assert len(own) == len(true_own) == sum(1 for _ in make().parameters())
                        for each, true in zip(own, true_own, strict=True):
                            dist.all_reduce(each)  # as DistributedDataParallel averages the gradients of its module
                            torch.testing.assert_close(each / len(sizes), true, rtol=1e-6, atol=1e-9, msg=key)
                        torch.testing.assert_close(value / len(sizes), true_value, rtol=1e-9, atol=1e-9, msg=key)
                        torch.testing.assert_close(grad, true_grad, rtol=1e-5, atol=1e-9, msg=f"{key} {kernel} {ring}")
        exchange.RING_ABOVE = 2**28
        for name, make in LABELLED.items():
            for number, targets in enumerate(targets_of(sizes, mine)):
                wrapped.zero_grad()
                value, grad = gradient(wrapped, WithTargets(make(), **targets), x[mine], y[mine], None)
                dist.all_reduce(value)
                true_value, true_grad = truth[f"{name} {number}"]
                torch.testing.assert_close(value / len(sizes), true_value, rtol=1e-9, atol=1e-9, msg=name)
                torch.testing.assert_close(grad, true_grad, rtol=1e-5, atol=1e-9, msg=name)
        alone = fmicl.FMICLLoss("kl", gather=False)
        if sizes[rank] == 1:
            with pytest.raises(ValueError, match="two samples"):
                alone(x[mine], y[mine])
        else:
            value, *_ = gradient(model(), alone, x[mine], y[mine], None)
            torch.testing.assert_close(value, truth[f"alone {rank}"][0])


@pytest.mark.parametrize("sizes", [(4, 4), (5, 2), (3, 4, 1, 2)], ids=str)
def test_gradient_is_that_of_one_process(sizes: tuple[int, ...]) -> None:
    """On two and four processes, with uneven batches: equal to 1e-5 for every loss, source of negatives and kernel."""
    x, y, queue = data(sizes)
    truth: dict[str, tuple[Tensor, ...]] = {}
    for name, make in CASES.items():
        for explicit in queues_of(make(), queue):
            truth[name if explicit is None else f"{name}, queue"] = gradient(model(), make(), x, y, explicit)
    for name, make in LABELLED.items():
        for number, targets in enumerate(targets_of(sizes, slice(None))):
            truth[f"{name} {number}"] = gradient(model(), WithTargets(make(), **targets), x, y, None)
    for rank in range(len(sizes)):
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        if sizes[rank] > 1:  # one sample has no negatives
            truth[f"alone {rank}"] = gradient(model(), fmicl.FMICLLoss("kl"), x[mine], y[mine], None)
    spawn(check_all, len(sizes), sizes, free_port(), truth)


def check_refusals(rank: int, world: int, port: int) -> None:
    with process_group(rank, world, port):
        width = 3 + rank
        with pytest.raises(ValueError, match=r"\(4, 3\), \(4, 4\)"):
            fmicl.FMICLLoss("kl")(torch.randn(4, width), torch.randn(4, width))
        # invalid input of one process is an error in all of them
        bad = torch.randn(4, 3) if rank == 0 else torch.randn(5, 3)
        with pytest.raises(ValueError, match="rank 1" if rank == 0 else r"\(4, 3\) and \(5, 3\)"):
            fmicl.FMICLLoss("kl")(torch.randn(4, 3), bad)
        empty = torch.randn(4 if rank == 1 else 0, 3)
        with pytest.raises(ValueError, match="rank 0" if rank == 1 else r"\(0, 3\)"):
            fmicl.InfoNCELoss()(empty, empty)
        narrow, wide = torch.randn(4, 3), torch.randn(4, 3, dtype=F64)
        mine = wide if rank == 1 else narrow
        for loss in (fmicl.FMICLLoss("kl"), fmicl.InfoNCELoss(), fmicl.AlignUniformLoss(kernel="reference")):
            with pytest.raises(ValueError, match=r"\['x float32, y float32, .*'x float64, y float64, "):
                loss(mine, mine)
            with pytest.raises(ValueError, match=r"'x float32, y float32, .*'x float32, y float64, "):
                loss(narrow, mine)
            with pytest.raises(ValueError, match=r"negatives float32, .*negatives float64, "):
                loss(narrow, narrow, negatives=mine)
            with pytest.raises(ValueError, match=r"negatives (anchor|both), .*negatives float32, "):
                loss(narrow, narrow, negatives=narrow if rank == 1 else None)
        for loss in (fmicl.FMICLLoss("kl"), fmicl.InfoNCELoss()):
            labels = torch.zeros(4 + rank, dtype=torch.long)
            with pytest.raises(ValueError, match="rank 1" if rank == 0 else r"\(5,\)"):
                loss(narrow, narrow, labels=labels)
            with pytest.raises(ValueError, match="classes"):
                loss(narrow, narrow, labels=labels[:4] if rank == 0 else None)
            targets = torch.ones(4, 8 - rank)
            with pytest.raises(ValueError, match="rank 1" if rank == 0 else r"8 samples.*\(4, 7\)"):
                loss(narrow, narrow, targets=targets)
        with pytest.raises(ValueError, match=r"\['x float32', 'x float64'\]"):
            exchange.world_of(mine)
        x = torch.randn(4, 3, requires_grad=True)
        for kernel in ("tiled", "reference"):
            for loss in (fmicl.FMICLLoss("kl", kernel=kernel), fmicl.AlignUniformLoss(kernel=kernel)):
                value = loss(x, torch.randn(4, 3))
                with pytest.raises(RuntimeError, match=r"2 processes.*twice"):
                    torch.autograd.grad(value, x, create_graph=True)


def check_numbers(rank: int, world: int, port: int) -> None:
    with process_group(rank, world, port):
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(2, 8, 4, generator=generator, dtype=F64)
        queues = [torch.randn(number, 4, generator=generator, dtype=F64) for number in (3, 30)]
        mine = slice(4 * rank, 4 * rank + 4)
        for gamma in (1.0, 25.0, 400.0):  # terms underflow for the larger ones, in one of the types or in both
            loss = fmicl.FMICLLoss("kl", gamma=gamma, shift="optimal")
            means = [
                (2 * gamma * F.normalize(x[4 * r : 4 * r + 4]) @ F.normalize(queues[r]).T).logsumexp(dim=1)
                - math.log(len(queues[r]))
                for r in range(2)
            ]
            expected = math.log(40.0) + 1 - 2 * gamma + torch.cat(means).logsumexp(dim=0) - math.log(8)
            for dtype in (F64, torch.float32):
                terms = loss.terms(x[mine].to(dtype), y[mine].to(dtype), negatives=queues[rank].to(dtype))
                torch.testing.assert_close(terms[1].double(), expected, rtol=1e-4, atol=1e-4)


def test_explicit_negatives_in_different_numbers() -> None:
    spawn(check_numbers, 2, 2, free_port())


def test_invalid_input_is_refused_on_all_processes() -> None:
    """An error everywhere, not a hang."""
    spawn(check_refusals, 2, 2, free_port())
