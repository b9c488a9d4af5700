"""Batch normalisation by running statistics of past batches, and frozen running statistics, against torch's."""

from __future__ import annotations

import contextlib
import copy
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.layers.norm_act import BatchNormAct2d
from torch import nn

from fmicl.models.norms import RunningStatisticsNorm, frozen_running_statistics, use_running_statistics
from fmicl.models.vision import build_encoder
from two_processes import of_two_processes


@given(shape=st.sampled_from([(5, 3), (2, 3, 4), (4, 3, 2, 5)]), batches=st.integers(1, 15), seed=st.integers(0, 99))
@settings(deadline=None)
def test_running_statistics_norm_follows_its_formula(shape: tuple[int, ...], batches: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    plain = nn.BatchNorm2d(3) if len(shape) == 4 else nn.BatchNorm1d(3)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, generator=generator)
    norm, means, variances = RunningStatisticsNorm(plain), [], []
    for t in range(batches):
        x = torch.randn(shape, generator=generator) * (t + 1) + t
        rows = x.movedim(1, -1).reshape(-1, 3).double()
        mean, variance = rows.mean(0), rows.var(0)
        if t == 0:
            running = (mean, variance)
        assert norm.weight is not None
        assert norm.bias is not None
        expected = (rows - running[0]) / (running[1] + 1e-5).sqrt() * norm.weight + norm.bias
        torch.testing.assert_close(norm(x).movedim(1, -1).reshape(-1, 3).double(), expected, rtol=1e-4, atol=1e-4)
        means.append(mean)
        variances.append(variance)
        share = max(0.1, 1 / (t + 1))
        running = (running[0] + share * (mean - running[0]), running[1] + share * (variance - running[1]))
        if t < 10:  # until then it is the mean of all
            torch.testing.assert_close(running[0], torch.stack(means).mean(0))
            torch.testing.assert_close(running[1], torch.stack(variances).mean(0))
        torch.testing.assert_close(norm.running_mean.double(), running[0], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(norm.running_var.double(), running[1], rtol=1e-4, atol=1e-4)
    assert int(norm.num_batches_tracked) == batches


def test_evaluation_is_torchs_and_updates_nothing() -> None:
    plain = nn.BatchNorm1d(4).eval()
    plain.running_mean, plain.running_var = torch.randn(4), torch.rand(4) + 0.1
    norm, x = RunningStatisticsNorm(copy.deepcopy(plain)), torch.randn(3, 4)
    assert torch.equal(norm(x), plain(x))
    assert torch.equal(norm(x[:1]), plain(x[:1])), "one row is enough"
    torch.testing.assert_close(norm.state_dict(), plain.state_dict())


def test_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"\(1, 4\)"):
        RunningStatisticsNorm(nn.BatchNorm1d(4))(torch.zeros(1, 4))


@pytest.mark.parametrize("norm", [nn.BatchNorm1d(4, track_running_stats=False), nn.BatchNorm1d(4, momentum=None)])
def test_norms_without_running_statistics_are_refused(norm: nn.BatchNorm1d) -> None:
    with pytest.raises(ValueError, match="running statistics"):
        RunningStatisticsNorm(norm)


def test_every_batch_normalisation_is_replaced() -> None:
    network = use_running_statistics(build_encoder("resnet18", size=32))
    assert not [m for m in network.modules() if isinstance(m, nn.BatchNorm2d)]
    assert len([m for m in network.modules() if isinstance(m, RunningStatisticsNorm)]) == 20


def test_activations_of_timms_norms_are_kept() -> None:
    network = build_encoder("efficientnet_b0", size=32)
    past, x = use_running_statistics(copy.deepcopy(network)), torch.randn(4, 3, 32, 32)
    assert not [m for m in past.modules() if isinstance(m, nn.BatchNorm2d)]
    torch.testing.assert_close(past.eval()(x), network.eval()(x))
    assert {k: v.shape for k, v in past.state_dict().items()} == {k: v.shape for k, v in network.state_dict().items()}
    norm, x = BatchNormAct2d(3, act_layer=nn.SiLU), torch.randn(32, 3, 8, 8)
    torch.testing.assert_close(
        use_running_statistics(copy.deepcopy(norm))(x), norm(x), rtol=1e-3, atol=1e-3
    )  # the first, by its own


def test_other_norms_are_refused() -> None:
    with pytest.raises(ValueError, match=r"BatchNorm3d.*--key-statistics batch"):
        use_running_statistics(nn.Sequential(nn.BatchNorm3d(2)))


def test_two_processes_share_their_statistics(tmp_path: Path) -> None:
    script = """
        from fmicl.models.norms import RunningStatisticsNorm
        norm = RunningStatisticsNorm(nn.BatchNorm1d(3))
        generator = torch.Generator().manual_seed(0)
        for _ in range(3):
            x = torch.randn(10, 3, generator=generator) * 2 + torch.arange(10)[:, None]
            norm(x[5 * rank : 5 * rank + 5])
        result = norm.state_dict()
    """
    one, generator = RunningStatisticsNorm(nn.BatchNorm1d(3)), torch.Generator().manual_seed(0)
    for _ in range(3):
        one(torch.randn(10, 3, generator=generator) * 2 + torch.arange(10)[:, None])
    for seen in of_two_processes(script, tmp_path):
        torch.testing.assert_close(dict(seen), dict(one.state_dict()))


@pytest.mark.parametrize("momentum", [0.1, None])
def test_frozen_running_statistics(momentum: float | None) -> None:
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(3, momentum=momentum)
    norm(torch.randn(4, 3, 2, 2) + 1)
    twin, x, later = copy.deepcopy(norm), torch.randn(4, 3, 2, 2) + 9, torch.randn(4, 3, 2, 2)
    with frozen_running_statistics(nn.Sequential(norm)):
        inside = norm(x)
    torch.testing.assert_close(inside, copy.deepcopy(twin)(x), rtol=0, atol=0)
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(norm, name), getattr(twin, name))
    norm(later), twin(later)
    for name in ("running_mean", "running_var"):
        assert torch.equal(getattr(norm, name), getattr(twin, name)), "and are updated afterwards as usual"


def test_an_error_restores_the_momentum() -> None:
    norm = nn.BatchNorm1d(3, momentum=0.3)
    with pytest.raises(ValueError, match="1 value"), frozen_running_statistics(norm):
        norm(torch.zeros(1, 3))
    assert norm.momentum == 0.3
    assert list(norm.state_dict()) == list(nn.BatchNorm1d(3).state_dict())


def test_frozen_running_statistics_of_a_compiled_network() -> None:
    torch.manual_seed(0)
    usual = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4))
    compiled = copy.deepcopy(usual)
    compiled.compile(backend="aot_eager")
    for batch, (n, side) in enumerate([(8, 8), (16, 4), (6, 8), (10, 4), (12, 8)]):
        x = torch.randn(n, 1, side, side) + batch
        for network in (usual, compiled):
            with frozen_running_statistics(network) if batch % 2 else contextlib.nullcontext():
                network(x).sum().backward()
    torch.testing.assert_close(compiled.state_dict(), usual.state_dict())
