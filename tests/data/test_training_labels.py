"""Labels to train with: their noise, samples without a class, and batches that carry them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fmicl.data import ArraySamples, Splits, ViewStream, training_labels
from fmicl.data.augmentations.views import Views
from fmicl.data.images.labels import wrong_labels


def images(n: int) -> torch.Tensor:
    return torch.randint(256, (n, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@given(n=st.integers(1, 200), classes=st.integers(2, 12), share=st.floats(0, 1), seed=st.integers(0, 100))
@settings(max_examples=30, deadline=None)
def test_a_share_of_labels_is_wrong(n: int, classes: int, share: float, seed: int) -> None:
    labels = torch.arange(n) % classes
    changed = wrong_labels(labels, classes, share, seed)
    assert int((changed != labels).sum()) == round(share * n)
    assert bool(((changed >= 0) & (changed < classes)).all())
    assert torch.equal(changed, wrong_labels(labels, classes, share, seed))


def test_each_other_class_is_as_likely() -> None:
    changed = wrong_labels(torch.zeros(30_000, dtype=torch.long), 4, 1.0, seed=1)
    shares = changed.bincount(minlength=4) / 30_000
    torch.testing.assert_close(shares, torch.tensor([0.0, 1 / 3, 1 / 3, 1 / 3]), rtol=0, atol=0.02)


def test_seeds_give_different_noise() -> None:
    labels = torch.arange(100) % 10
    assert not torch.equal(wrong_labels(labels, 10, 0.4, 0), wrong_labels(labels, 10, 0.4, 1))


def test_unlabelled_samples_have_no_label() -> None:
    train = ArraySamples(images(6), torch.arange(6) % 3)
    splits = Splits(ArraySamples(images(10)), train, train, ("a", "b", "c"))
    assert training_labels(splits, 0.0, 0).tolist() == [0, 1, 2, 0, 1, 2, -1, -1, -1, -1]
    noisy = training_labels(splits, 0.5, 0)
    assert noisy[6:].tolist() == [-1] * 4
    assert train.labels is not None
    assert int((noisy[:6] != train.labels).sum()) == 3
    assert train.labels.tolist() == [0, 1, 2, 0, 1, 2]  # evaluation has the true ones


def test_data_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="--labels"):
        training_labels(Splits(ArraySamples(images(4)), None, None), 0.0, 0)
    with pytest.raises(ValueError, match="1"):
        wrong_labels(torch.zeros(4, dtype=torch.long), 1, 0.5, 0)


@pytest.mark.parametrize("multiplicity", [2, 3])
@pytest.mark.parametrize("jitter", [0.0, 0.8])
def test_batches_carry_the_labels_of_their_samples(multiplicity: int, jitter: float) -> None:
    labels = torch.arange(12) * 10
    views = (Views(size=8, mean=(0.5,), std=(0.5,)), Views(size=8, jitter=jitter, mean=(0.5,), std=(0.5,)))
    if multiplicity > 2:
        views = (views[1], views[1])
    samples = ArraySamples(images(12))
    stream = ViewStream(samples, views, 4, seed=0, device="cpu", labels=labels, multiplicity=multiplicity)
    for batch in stream:
        assert batch.labels is not None
        assert torch.equal(batch.labels, labels[batch.index])
    without = ViewStream(samples, views, 4, seed=0, device="cpu", multiplicity=multiplicity)
    assert next(iter(without)).labels is None
    with pytest.raises(ValueError, match="12 samples"):
        ViewStream(samples, views, 4, seed=0, device="cpu", labels=labels[:5])
