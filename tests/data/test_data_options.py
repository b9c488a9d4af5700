"""Options of data and models: defaults, ranges and roles."""

from __future__ import annotations

from typing import Any

import pytest

from fmicl.data.augmentations.views import SecondViewOptions, Views
from fmicl.data.images.options import ImageDataOptions
from fmicl.data.text.options import TextDataOptions
from fmicl.models.text import SentenceEncoderOptions
from fmicl.models.vision import EncoderOptions, ImageHeadOptions
from fmicl.utils.options import options_of

KINDS = (
    Views, SecondViewOptions, ImageDataOptions, TextDataOptions, EncoderOptions, ImageHeadOptions,
    SentenceEncoderOptions,
)  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_an_option_with_a_help_text(kind: Any) -> None:
    assert [option.name for option in options_of(kind)] == list(vars(kind()))
    assert all(option.help.endswith(".") for option in options_of(kind))


def test_roles() -> None:
    roles = {option.name: option.role for kind in KINDS for option in options_of(kind) if option.role != "compute"}
    assert roles == {
        "data_dir": "location", "data": "location", "sts": "location", "memory_gib": "machine", "cache_gib": "machine",
        "download": "machine", "checksum": "machine", "workers": "machine", "cache_dir": "machine",
        "weights": "location",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SecondViewOptions, "second_blur", 1.5),
        (SecondViewOptions, "second_solarise", -0.5),
        (ImageDataOptions, "memory_gib", -1.0),
        (ImageDataOptions, "workers", -1),
        (ImageDataOptions, "validation", 1.0),
        (ImageDataOptions, "multiplicity", 1),
        (ImageDataOptions, "download", "yes"),
        (TextDataOptions, "sts_every", 0),
        (EncoderOptions, "stem", "large"),
        (EncoderOptions, "depth", 0),
        (ImageHeadOptions, "hidden", 0),
        (ImageHeadOptions, "dim", 1.5),
        (SentenceEncoderOptions, "pooling", "max"),
        (SentenceEncoderOptions, "length", 2),
        (SentenceEncoderOptions, "encode_length", 0),
        (SentenceEncoderOptions, "hidden", 0),
    ],
)
def test_values_out_of_range_are_refused_by_name(kind: Any, name: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{name}.*{value}"):
        kind(**{name: value})
