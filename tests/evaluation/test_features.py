"""Feature extraction: order, evaluation mode, types and errors."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from fmicl.evaluation.features import extract_features


def cloud(n: int, d: int) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0))


class Toy(nn.Module):
    """An encoder with a batch norm that is frozen on purpose."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.drop = nn.Dropout(0.9)
        self.norm.eval()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.drop(self.norm(x))
        return out


def test_features_are_in_order_and_of_evaluation_mode() -> None:
    x, labels = cloud(10, 3), torch.arange(10) % 3
    encoder = Toy()
    features, kept = extract_features(encoder, [(x[:6], labels[:6]), (x[6:], labels[6:])], "cpu")
    torch.testing.assert_close(features, x / math.sqrt(1 + 1e-5))
    assert kept is not None
    assert torch.equal(kept, labels)
    assert encoder.training
    assert encoder.drop.training
    assert not encoder.norm.training


def test_modes_are_restored_after_an_error() -> None:
    encoder = Toy()

    def batches() -> Iterator[tuple[Tensor, None]]:
        yield cloud(2, 3), None
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        extract_features(encoder, batches(), "cpu")
    assert encoder.drop.training
    assert not encoder.norm.training


def test_features_are_float32_and_labels_optional() -> None:
    features, labels = extract_features(nn.Identity(), [(cloud(4, 3).bfloat16(), None)], "cpu")
    assert features.dtype == torch.float32
    assert labels is None


def test_wrong_batches_are_errors() -> None:
    x = cloud(4, 3)
    with pytest.raises(ValueError, match="no batches"):
        extract_features(nn.Identity(), [], "cpu")
    with pytest.raises(ValueError, match="1 of 2 batches"):
        extract_features(nn.Identity(), [(x, torch.arange(4)), (x, None)], "cpu")
    with pytest.raises(ValueError, match=r"\(4, 3, 1, 1\)"):
        extract_features(nn.Identity(), [(x.view(4, 3, 1, 1), None)], "cpu")
