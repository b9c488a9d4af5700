"""Decoding of image files: formats, orientation, resizing, threads."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torchvision.transforms.v2 import functional as tv

from fmicl.data.images import decoding
from fmicl.data.images.decoding import check_image, decode, resize_centre


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "I;16", "I"])
def test_every_mode_is_converted_to_rgb(tmp_path: Path, mode: str) -> None:
    path = tmp_path / ("x.tif" if mode in ("CMYK", "I;16", "I") else "x.png")
    if mode.startswith("I"):
        values = np.linspace(0, 65535, 64).reshape(8, 8)
        Image.fromarray(values.astype(np.uint16 if mode == "I;16" else np.int32)).save(path)
        assert np.array_equal(np.asarray(decode(path))[..., 0], (values.astype(np.int64) >> 8).astype(np.uint8))
    else:
        Image.new("RGB", (8, 8), (200, 100, 50)).convert(mode).save(path)
    assert decode(path).mode == "RGB"
    assert check_image(path) == (8, 8)


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees to the right
    image.save(tmp_path / "x.jpg", exif=exif)
    upright = decode(tmp_path / "x.jpg")
    assert upright.size == (20, 40)
    assert check_image(tmp_path / "x.jpg") == (40, 20)
    assert np.asarray(upright)[5].mean() > 250


@pytest.mark.parametrize("size", [(50, 37), (37, 50), (300, 64), (64, 64), (20, 21)])
def test_resize_centre_is_torchvisions(size: tuple[int, int]) -> None:
    coarse = np.random.default_rng(0).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    image = Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)
    resized = tv.resize(image, [32], antialias=True)
    ours, theirs = (np.asarray(x).astype(int) for x in (resize_centre(image, 32, 28), tv.center_crop(resized, [28])))
    assert np.abs(ours - theirs).max() <= 1


def test_no_more_threads_than_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "available_cpus", lambda: 2)
    names = set(decoding.map_in_threads(lambda _: threading.current_thread().name, list(range(100))))
    assert 1 <= len(names) <= 2
