"""Fused augmentations against separate operations, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from devices import TRITON_DEVICE
from fmicl.data import ArraySamples
from fmicl.data.augmentations.fused import can_fuse_views, fused_views
from fmicl.data.augmentations.maker import ViewMaker
from fmicl.data.augmentations.views import Views

GREY = Views(size=8, grey=0.0, mean=(0.3,), std=(0.4,))
FAMILIES = {
    "CIFAR-10": (Views(size=32), 3, 32, 32),
    "all operations": (Views(size=24, blur=0.7, solarise=0.6, grey=0.5), 3, 32, 32),
    "another size and shape": (Views(size=20, crop_scale=(0.05, 0.4)), 3, 17, 40),
    "larger than the image": (Views(size=48, hue=0.0), 3, 20, 20),
    "no jitter": (Views(size=32, jitter=0.0, grey=0.0), 3, 32, 32),
    "one channel": (GREY, 1, 8, 8),
    "one channel as three": (Views(size=16, blur=0.5), 1, 16, 16),
    "no crop fits": (Views(size=16, crop_scale=(0.9, 1.0), crop_ratio=(3.0, 4.0)), 3, 16, 32),
}


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_views_equal_separate_operations(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.augmentations.maker.is_eager_cpu", lambda _: False)  # those of a GPU
    views, channels, height, width = FAMILIES[name]
    generator = torch.Generator().manual_seed(5)
    images = torch.randint(256, (7, channels, height, width), generator=generator, dtype=torch.uint8).to(TRITON_DEVICE)
    index = torch.tensor([0, 3, 3, 6, 1, 5], device=TRITON_DEVICE)
    maker = ViewMaker(views)
    uniforms = maker.uniforms(len(index), generator, TRITON_DEVICE)
    expected = maker.apply(images[index], maker.parameters(uniforms, height, width))
    made = fused_views(views, images, index, uniforms)
    assert made.shape == expected.shape
    # Grey levels are rounded down, so that rounding errors can change them by one.
    assert (made - expected).abs().max() < 0.05
    assert (made - expected).abs().mean() < 1e-4
    assert made.stride(1) == 1, "channels last"


def test_wrong_number_of_uniforms() -> None:
    images, index = torch.zeros(2, 3, 8, 8, dtype=torch.uint8), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"\(2, 36\).*\(2, 35\)"):
        fused_views(Views(size=8), images, index, torch.rand(2, 35))


def test_images_must_be_contiguous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike a permuted (N, H, W, C) array, of which the kernel would read other pixels."""
    monkeypatch.setattr("fmicl.data.augmentations.fused.triton_runs_on", lambda _: True)
    images = torch.zeros(2, 8, 8, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    assert can_fuse_views(Views(size=8), images.contiguous())
    assert not can_fuse_views(Views(size=8), images)
    with pytest.raises(ValueError, match=r"\(192, 1, 24, 3\)"):
        fused_views(Views(size=8), images, torch.zeros(2, dtype=torch.int64), torch.rand(2, 36))
    assert ArraySamples(images).to("meta").images.is_contiguous()
    assert ArraySamples(images).to("cpu").images.data_ptr() == images.data_ptr()  # no copy on the CPU


def test_single_operations() -> None:
    """With one probability at 1 and the others at 0."""
    still = Views(size=16, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), flip=0.0, jitter=0.0, grey=0.0)
    still = dataclasses.replace(still, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (1, 3, 16, 16), generator=generator, dtype=torch.uint8).to(TRITON_DEVICE)
    index = torch.zeros(1, dtype=torch.int64, device=TRITON_DEVICE)
    uniforms = torch.full((1, 36), 0.5, device=TRITON_DEVICE)

    def made(**changes: Any) -> torch.Tensor:
        return fused_views(dataclasses.replace(still, **changes), images, index, uniforms)

    plain = images.float()
    torch.testing.assert_close(made(), plain, atol=1e-3, rtol=0)
    torch.testing.assert_close(made(flip=1.0), plain.flip(3), atol=1e-3, rtol=0)
    torch.testing.assert_close(made(solarise=1.0), torch.minimum(plain, 255 - plain), atol=1e-3, rtol=0)
    luma = (plain * torch.tensor([0.2989, 0.587, 0.114], device=TRITON_DEVICE).view(3, 1, 1)).sum(1, keepdim=True)
    torch.testing.assert_close(made(grey=1.0), luma.expand_as(plain), atol=1e-2, rtol=0)
