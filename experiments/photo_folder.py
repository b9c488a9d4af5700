"""A folder of synthetic photos: 302 JPEG files of mixed sizes in five classes, to try `fmicl train images` on.

    python experiments/photo_folder.py photos/ --seed 0
    fmicl train images --data-dir photos/

The classes (coast, forest, city, meadow, portrait) differ in shapes and layout. Lighting, colours, scale, tilt and crop
vary within each, so that they are easy to tell apart by eye and hard by single pixels.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

Colour = tuple[int, int, int]
SIZES = ((640, 480), (480, 640), (640, 360), (512, 512), (320, 240), (240, 320))
MARGIN = 1.5
"""Scenes are painted larger than the photo by this factor, tilted, and cropped."""


def colour(random: np.random.Generator, base: Colour, spread: float = 40.0) -> Colour:
    """A colour near another one."""
    red, green, blue = np.clip(random.normal(base, spread), 0, 255).astype(int).tolist()
    return red, green, blue


def gradient(random: np.random.Generator, width: int, height: int, top: Colour, bottom: Colour) -> Image.Image:
    """A vertical gradient with film grain."""
    share = np.linspace(0, 1, height)[:, None, None]
    pixels = np.asarray(top) * (1 - share) + np.asarray(bottom) * share + np.zeros((height, width, 3))
    grain = random.normal(0, random.uniform(2, 10), (height, width, 1))
    return Image.fromarray(np.clip(pixels + grain, 0, 255).astype(np.uint8))


def coast(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Sky over water with waves."""
    image = gradient(random, width, height, colour(random, (130, 160, 200)), colour(random, (200, 190, 170)))
    draw = ImageDraw.Draw(image)
    horizon = random.uniform(0.35, 0.65) * height
    sea = colour(random, (60, 100, 130))
    draw.rectangle((0, horizon, width, height), fill=sea)
    y = horizon
    while y < height:
        y += random.uniform(4, 10) + 0.06 * (y - horizon)
        crest = colour(random, (190, 200, 205), 20)
        x, length = random.uniform(0, width), random.uniform(0.2, 0.9) * width
        draw.line(
            (x - length / 2, y, x + length / 2, y + random.normal(0, 2)), fill=crest, width=int(random.integers(1, 5))
        )
    return image


def forest(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Vertical trunks before undergrowth."""
    image = gradient(random, width, height, colour(random, (150, 170, 130)), colour(random, (80, 80, 50)))
    draw = ImageDraw.Draw(image)
    for _ in range(random.integers(9, 24)):
        x, thick, lean = random.uniform(0, width), random.uniform(0.01, 0.05) * width, random.normal(0, 8)
        shade = colour(random, (80, 65, 50), 25)
        draw.polygon([(x, 0), (x + thick, 0), (x + 1.3 * thick + lean, height), (x + lean, height)], fill=shade)
    return image


def city(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Buildings with rows of windows."""
    image = gradient(random, width, height, colour(random, (140, 150, 180)), colour(random, (200, 190, 180)))
    draw = ImageDraw.Draw(image)
    x = -random.uniform(0, 40)
    while x < width:
        wide, top = random.uniform(0.12, 0.3) * width, random.uniform(0.15, 0.5) * height
        draw.rectangle((x, top, x + wide, height), fill=colour(random, (120, 110, 110)))
        window, step = colour(random, (190, 180, 130), 50), random.uniform(0.035, 0.06) * height
        for row in np.arange(top + step, height, 2 * step):
            for column in np.arange(x + step, x + wide - step, 1.8 * step):
                draw.rectangle((column, row, column + step, row + step), fill=window)
        x += wide + random.uniform(0, 10)
    return image


def meadow(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Many small flowers."""
    image = gradient(random, width, height, colour(random, (120, 150, 90)), colour(random, (90, 120, 60)))
    draw = ImageDraw.Draw(image)
    petals = [colour(random, (200, 150, 130), 60) for _ in range(3)]
    for _ in range(random.integers(120, 400)):
        x, y = random.uniform(0, width), random.uniform(0, height)
        radius = random.uniform(0.005, 0.02) * width
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=petals[random.integers(3)])
    return image


def portrait(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """One large, soft shape before a plain background."""
    image = gradient(random, width, height, colour(random, (150, 150, 150), 55), colour(random, (130, 130, 130), 55))
    draw = ImageDraw.Draw(image)
    x, y = random.uniform(0.38, 0.62) * width, random.uniform(0.38, 0.5) * height
    radius = random.uniform(0.14, 0.24) * min(width, height)
    skin = colour(random, (180, 150, 130), 40)
    draw.ellipse((x - 2.2 * radius, y + 1.1 * radius, x + 2.2 * radius, y + 6 * radius), fill=colour(random, skin, 60))
    draw.ellipse((x - radius, y - 1.3 * radius, x + radius, y + 1.3 * radius), fill=skin)
    return image.filter(ImageFilter.GaussianBlur(random.uniform(1, 3)))


CLASSES: dict[str, Callable[[np.random.Generator, int, int], Image.Image]] = {
    "coast": coast, "forest": forest, "city": city, "meadow": meadow, "portrait": portrait,
}  # fmt: skip


def photo(random: np.random.Generator, scene: Callable[[np.random.Generator, int, int], Image.Image]) -> Image.Image:
    """A scene, tilted, cropped, and seen in some light."""
    width, height = SIZES[random.integers(len(SIZES))]
    image = scene(random, round(MARGIN * width), round(MARGIN * height)).rotate(random.normal(0, 5))
    zoom = random.uniform(0.65, 0.9)
    wide, high = zoom * image.width, zoom * image.height
    left = (image.width - wide) / 2 + random.uniform(-0.05, 0.05) * image.width
    top = (image.height - high) / 2 + random.uniform(-0.05, 0.05) * image.height
    image = image.resize((width, height), Image.Resampling.BILINEAR, box=(left, top, left + wide, top + high))
    light = random.uniform(0.45, 1.15) * random.normal(1, 0.12, 3)
    return Image.fromarray(np.clip(np.asarray(image) * light, 0, 255).astype(np.uint8))


def write_photos(folder: Path, count: int = 302, seed: int = 0) -> None:
    """Write the photos, a subfolder for each class.

    Raises:
        FileExistsError: the folder exists.
    """
    folder.mkdir(parents=True)
    names = list(CLASSES)
    for number in range(count):
        name = names[number % len(names)]
        random = np.random.default_rng([seed, number])
        path = folder / name / f"{number:04d}.jpg"
        path.parent.mkdir(exist_ok=True)
        photo(random, CLASSES[name]).save(path, quality=85)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--count", type=int, default=302, help="number of photos")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    write_photos(given.folder, given.count, given.seed)
    print(f"{given.count} photos in {len(CLASSES)} classes -> {given.folder}")
