"""Samples as evaluation and people see them: all of them once, in order and without randomness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fmicl.data.augmentations.operations import CropBoxes, crop_resize, normalise, to_grey
from fmicl.data.images.decode import resize_centre, resize_square, stored_side, to_tensor
from fmicl.data.images.reading import Files, load, undecodable, why
from fmicl.data.images.samples import ArraySamples, FileSamples, Samples, Skipped

__all__ = ["pictures", "plain_batches"]


def plain_batches(
    samples: Samples,
    *,
    size: int,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int,
    device: torch.device | str,
    workers: int = 0,
    skipped: list[Skipped] | None = None,
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """All samples once, in order and without randomness, as evaluation sees them; the last batch may be smaller.

    Images are resized so that the shorter side is ``size * 256 / 224``, and the centre square of ``size`` is
    taken. Small images, and arrays that were not made for a crop like that, lose nothing: their largest centre
    square is resized to ``size``, so CIFAR-10 for 32, for example, is left as it is.

    Args:
        samples: Which images.
        size: Side of the result.
        mean: One number for each channel, on the scale [0, 1]; where it is one number, colour images become grey.
        std: As many positive numbers.
        batch_size: Number of samples in a batch.
        device: Where the batches are wanted.
        workers: Processes that decode files; 0 does it in this one.
        skipped: Files that can't be decoded are left out and added to this list; without it, they are an error.

    Yields:
        (B, C, size, size) float32 images, normalised, and their (B,) labels, or None where there are none.

    Raises:
        OSError: If a file can't be decoded, and there is no list to put it on.

    Example:
        >>> samples = ArraySamples(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
        >>> batches = plain_batches(samples, size=8, mean=(0.5,), std=(0.5,), batch_size=4, device="cpu")
        >>> [len(images) for images, _ in batches]
        [4, 1]
    """
    for part, images, whole in _plain_images(
        samples, range(len(samples)), size, batch_size, torch.device(device), workers
    ):
        labels = None if samples.labels is None else samples.labels[part[0] : part[-1] + 1].to(device)
        if not bool(whole.all()):
            assert isinstance(samples, FileSamples)
            broken = [samples.paths[part[i]] for i in (~whole).nonzero()[:, 0].tolist()]
            if skipped is None:
                raise OSError(undecodable(broken[0]))
            skipped.extend(why(path) for path in broken)
            images = images[whole.to(images.device)]
            labels = None if labels is None else labels[whole.to(labels.device)]
        if len(images):
            yield normalise(to_grey(images.float()) if len(mean) == 1 else images, mean, std), labels


def pictures(samples: Samples, index: Sequence[int] | Tensor, size: int) -> Tensor:
    """Some samples as (n, C, size, size) uint8 on the CPU, in the given order, for people to look at.

    A file that can't be decoded is black.

    Example:
        >>> samples = ArraySamples(torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 8, 8))
        >>> pictures(samples, [2, 0], 12)[:, 0, 0, 0]
        tensor([2, 0], dtype=torch.uint8)
    """
    chosen = torch.as_tensor(index).tolist()
    device = samples.images.device if isinstance(samples, ArraySamples) else torch.device("cpu")
    parts = [images for _, images, _ in _plain_images(samples, chosen, size, 256, device, 0)]
    return torch.cat(parts).float().round().clamp(0, 255).to("cpu", torch.uint8)


def _plain_images(
    samples: Samples, index: Sequence[int], size: int, batch_size: int, device: torch.device, workers: int
) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """The evaluation transform before normalisation: which samples, their images, and (B,) whether there is one."""
    starts = range(0, len(index), batch_size)
    if isinstance(samples, FileSamples):
        chunks = [list(index[start : start + batch_size]) for start in starts]
        loader = load(_PlainFiles(samples, size), chunks, workers, device)
        for chunk, (images, whole) in zip(chunks, loader, strict=True):
            yield chunk, images.to(device, non_blocking=True), whole
        return
    for start in starts:
        part = index[start : start + batch_size]
        if isinstance(part, range):
            images = samples.images[part.start : part.stop].to(device)
        else:
            images = samples.images[torch.tensor(part, device=samples.images.device)].to(device)
        yield part, _centre(images, size), torch.ones(len(part), dtype=torch.bool)


def _centre(images: Tensor, size: int) -> Tensor:
    n, _, height, width = images.shape
    if height == width == size:
        return images
    short = min(height, width)
    if short == stored_side(size):
        box = [round((height - size) / 2), round((width - size) / 2), size, size]
    else:
        box = [(height - short) // 2, (width - short) // 2, short, short]
    boxes = CropBoxes(*(torch.full((n,), float(x), device=images.device) for x in box))
    return crop_resize(images, boxes, torch.zeros(n, dtype=torch.bool, device=images.device), size)


class _PlainFiles(Files):
    def __init__(self, samples: FileSamples, size: int) -> None:
        super().__init__(samples)
        self.size = size

    def __getitem__(self, index: int) -> tuple[Tensor, bool]:
        try:
            image, side = self.decode(index), stored_side(self.size)
        except OSError:
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), False
        if max(image.size) <= side and min(image.size) != side:  # kept as it is where a folder fits into memory
            return to_tensor(resize_square(image, self.size)), True
        return to_tensor(resize_centre(image, side, self.size)), True
