"""The sentence-transformers loss over several processes, without a model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fmicl.integrations.sentence_transformers import FMICLLoss
from process_groups import free_port, process_group, spawn

MODES = ("anchor", "cross", "both")
SOFT: dict[str, Any] = {"alpha": 3.0, "gamma": 1.0}


def joined(sizes: tuple[int, ...]) -> Tensor:
    return torch.randn(4, sum(sizes), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def share(rank: int, sizes: tuple[int, ...], port: int, truth: dict[str, tuple[Tensor, Tensor]]) -> None:
    """In each process: loss and gradient of its rows, against those of the joined batch."""
    with process_group(rank, len(sizes), port):
        mine = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
        for mode, (value, gradient) in truth.items():
            rows = [row[mine].clone().requires_grad_() for row in joined(sizes)]
            loss = FMICLLoss(torch.nn.Identity(), "js", negatives=mode, **SOFT)  # type: ignore[arg-type]
            ours = loss.compute_loss_from_embeddings(rows)
            ours.backward()
            torch.distributed.all_reduce(total := ours.detach().clone())
            torch.testing.assert_close(total / len(sizes), value)
            grads = torch.stack([row.grad for row in rows if row.grad is not None])
            torch.testing.assert_close(grads / len(sizes), gradient[:, mine])


def test_several_processes_share_the_negatives_columns_too() -> None:
    sizes = (3, 2)
    truth = {}
    for mode in MODES:
        rows = list(joined(sizes).clone().requires_grad_().unbind())
        for row in rows:
            row.retain_grad()
        loss = FMICLLoss(torch.nn.Identity(), "js", negatives=mode, **SOFT)  # type: ignore[arg-type]
        value = loss.compute_loss_from_embeddings(rows)
        value.backward()
        truth[mode] = value.detach(), torch.stack([row.grad for row in rows if row.grad is not None])
    spawn(share, len(sizes), sizes, free_port(), truth)


def refuse(rank: int, world: int, port: int) -> None:
    """In each process: invalid input of rank 1 alone is an error on both."""
    with process_group(rank, world, port):
        loss = FMICLLoss(torch.nn.Identity(), "js", **SOFT)  # type: ignore[arg-type]
        x, y, n = torch.randn(3, 4, 5)
        cases: list[tuple[list[Tensor], str]] = [
            ([x, y, n[:3]], r"\(3, 5\).*\(4, 5\)"),
            ([x, y, n, n[:, :4]], r"\(4, 4\)"),
            ([x, y, n.long()], r"column 1 .*torch\.int64"),
            ([x], "1 columns"),
            ([], "0 columns"),
        ]
        for columns, words in cases:
            good = [x, y, n, n][: max(2, len(columns))]
            with pytest.raises(ValueError, match=words if rank == 1 else "rank 1"):
                loss.compute_loss_from_embeddings(columns if rank == 1 else good)
        for one, other in ([x, y], [x, y, n]), ([x, y, n], [x, y, n, n]):
            with pytest.raises(ValueError, match=f" {len(one) - 2} columns.* {len(other) - 2} columns"):
                loss.compute_loss_from_embeddings(other if rank == 1 else one)


def test_columns_that_do_not_fit_are_refused_on_all_processes() -> None:
    spawn(refuse, 2, 2, free_port())
