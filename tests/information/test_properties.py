"""Properties of the f-mutual information: symmetry, and loss of information by processing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import fmicl
from fmicl.information import f_mutual_information


def random_table(rows: int, columns: int, seed: int) -> Tensor:
    table = torch.rand(rows, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.01
    return table / table.sum()


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(fmicl.list_divergences()), st.integers(2, 5), st.integers(2, 5), st.integers(0, 2**31))
def test_symmetry(name: str, rows: int, columns: int, seed: int) -> None:
    table = random_table(rows, columns, seed)
    information = float(f_mutual_information(table, name))
    assert information >= -1e-12
    assert float(f_mutual_information(table.T, name)) == pytest.approx(information, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(fmicl.list_divergences()), st.integers(2, 5), st.integers(2, 5), st.integers(0, 2**31))
def test_an_encoder_never_adds_information(name: str, inputs: int, features: int, seed: int) -> None:
    """Data processing: with any channel from x to features, on both sides, I_f of the features is at most I_f(X; Y)."""
    table = random_table(inputs, inputs, seed)
    channel = random_table(inputs, features, seed + 1)
    channel = channel / channel.sum(dim=1, keepdim=True)
    processed = channel.T @ table @ channel
    assert float(f_mutual_information(processed, name)) <= float(f_mutual_information(table, name)) + 1e-12
