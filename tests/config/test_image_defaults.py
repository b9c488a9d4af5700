"""Defaults by the data: the function from facts to values, and settings that are "auto" until then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fmicl.config import recipe
from fmicl.config.image_defaults import ImageFacts, choose_defaults

FACTS = st.builds(ImageFacts, st.integers(2, 10**7), st.integers(1, 5000), gpu=st.booleans(), trained=st.booleans())


@given(FACTS)
def test_defaults_are_valid_settings_for_any_folder(facts: ImageFacts) -> None:
    found = choose_defaults(facts)
    settings = recipe("images", **found)
    assert settings.unresolved == ()
    assert settings.batch_size >= 2
    assert settings.batch_size * 2 <= max(4, facts.count)
    assert settings.epochs >= 10


@given(FACTS, st.integers(1, 10**6))
def test_more_images_never_mean_more_epochs_or_smaller_batches(facts: ImageFacts, more: int) -> None:
    few = choose_defaults(facts)
    many = choose_defaults(ImageFacts(facts.count + more, facts.side, facts.gpu, facts.trained))
    assert many["epochs"] <= few["epochs"]
    assert many["batch_size"] >= few["batch_size"]


def test_a_gpu_loses_no_resolution_up_to_224_pixels() -> None:
    sizes = [choose_defaults(ImageFacts(1000, side, gpu=True))["size"] for side in (8, 64, 65, 224, 4000)]
    assert sizes == [64, 64, 96, 224, 224]


def test_auto_stays_until_the_data_is_seen() -> None:
    settings = recipe("images", epochs=5)
    assert set(settings.unresolved) == set(settings.task.from_data) - {"epochs"}
    assert recipe("cifar10").unresolved == ()
    resolved = settings.replace(**choose_defaults(ImageFacts(50, 90)))
    assert resolved.unresolved == ()
    assert settings.differences(resolved.replace(epochs=5)) == ""  # auto agrees with what was chosen
    assert "epochs was 6" in settings.differences(resolved.replace(epochs=6))
    assert type(settings).from_json("images", resolved.to_json()) == resolved


@pytest.mark.parametrize("name", ["epochs", "batch_size", "size", "learning_rate"])
def test_numbers_are_still_checked(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        recipe("images", **{name: "automatic"})
    with pytest.raises(ValueError, match=name):
        recipe("images", **{name: -1})
    with pytest.raises(ValueError, match="epochs"):
        recipe("wikipedia", epochs="auto")
