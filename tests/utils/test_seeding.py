"""Seeds: the random numbers of a run, which must not change between versions, machines or processes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fmicl.utils.seeding import mix_seed, seed_device

EXPECTED: dict[tuple[int, ...], int] = {
    (0,): 893442142816765029,
    (0, 0, 0): 1445694884619442965,
    (0, 1, 0): 4273803895383222415,
    (1, 0, 0): 3115298510175463368,
    (0, 0, 1): 5783053468948169963,
    (2**63 - 1, 1000000, 255): 3188648972381177413,
}


@pytest.mark.parametrize("numbers", EXPECTED)
def test_mix_seed_has_the_values_that_runs_were_started_with(numbers: tuple[int, ...]) -> None:
    """With others, a run that is resumed by a new version would end with other bits."""
    assert mix_seed(*numbers) == EXPECTED[numbers]


def test_mix_seed_does_not_depend_on_the_hash_seed() -> None:
    program = "from fmicl.utils.seeding import mix_seed; print(mix_seed(3, 1, 4))"
    found = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "12345")
    ]
    assert found == [f"{mix_seed(3, 1, 4)}\n"] * 2


def test_seeds_of_neighbouring_batches_and_ranks_differ() -> None:
    seeds = {mix_seed(seed, batch, rank) for seed in range(4) for batch in range(64) for rank in range(4)}
    assert len(seeds) == 4 * 64 * 4
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]
)
def test_seed_device_gives_the_random_numbers_of_manual_seed(device: str) -> None:
    def drawn() -> list[Tensor]:
        return [torch.rand(5), torch.rand(5, device=device).cpu(), F.dropout(torch.ones(64, device=device)).cpu()]

    torch.manual_seed(2**62 + 7)
    expected = drawn()
    seed_device(2**62 + 7, torch.device(device))
    assert all(torch.equal(a, b) for a, b in zip(drawn(), expected, strict=True))
