"""Evaluation batches: all images once, in order, resized and cropped without randomness."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fmicl.data.augmentations.operations import CropBoxes, crop_resize, normalise, to_grey
from fmicl.data.images.decoding import (
    ImageFiles,
    load_batches,
    resize_centre,
    resize_square,
    stored_side,
    to_tensor,
    why_undecodable,
)
from fmicl.data.images.samples import FileSamples, Samples, Skipped


def evaluation_batches(
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
    """All samples once, in order and without randomness; the last batch may be smaller.

    The shorter side of each image is resized to ``size * 256 / 224``, and the centre square of ``size`` is cropped.
    For small images, and for arrays that were not stored for such a crop, the largest centre square is resized to
    ``size`` instead; so CIFAR-10 at 32 stays as it is.

    Args:
        samples: the images.
        size: side of the result.
        mean: one number per channel, on the scale [0, 1]; a single one converts colour images to greyscale.
        std: as many positive numbers.
        batch_size: number of samples in a batch.
        device: where the batches are put.
        workers: processes that decode files; 0 decodes in this one.
        skipped: files that can't be decoded are left out and appended to this list; without it they are an error.

    Yields:
        (B, C, size, size) float32 images, normalised, and their (B,) labels, or None without labels.

    Raises:
        OSError: a file can't be decoded, and ``skipped`` is None.

    Example:
        >>> from fmicl.data import ArraySamples
        >>> samples = ArraySamples(torch.zeros(5, 1, 8, 8, dtype=torch.uint8))
        >>> batches = evaluation_batches(samples, size=8, mean=(0.5,), std=(0.5,), batch_size=4, device="cpu")
        >>> [len(images) for images, _ in batches]
        [4, 1]
    """
    crops = _centre_crops(samples, range(len(samples)), size, batch_size, torch.device(device), workers)
    for part, images, decoded in crops:
        labels = None if samples.labels is None else samples.labels[part[0] : part[-1] + 1].to(device)
        if not bool(decoded.all()):
            assert isinstance(samples, FileSamples)
            broken = [samples.paths[part[i]] for i in (~decoded).nonzero()[:, 0].tolist()]
            if skipped is None:
                reason = why_undecodable(broken[0]).reason
                raise OSError(f"{broken[0]} can't be decoded ({reason}). Repair or remove it.")
            skipped.extend(why_undecodable(path) for path in broken)
            images = images[decoded.to(images.device)]
            labels = None if labels is None else labels[decoded.to(labels.device)]
        if len(images):
            yield normalise(to_grey(images.float()) if len(mean) == 1 else images, mean, std), labels


def display_images(samples: Samples, index: Sequence[int] | Tensor, size: int) -> Tensor:
    """Some samples as (n, C, size, size) uint8 on the CPU, in the given order, for display.

    A file that can't be decoded is black.

    Example:
        >>> from fmicl.data import ArraySamples
        >>> samples = ArraySamples(torch.arange(3, dtype=torch.uint8).view(3, 1, 1, 1).expand(3, 1, 8, 8))
        >>> display_images(samples, [2, 0], 12)[:, 0, 0, 0]
        tensor([2, 0], dtype=torch.uint8)
    """
    chosen = torch.as_tensor(index).tolist()
    parts = [images for _, images, _ in _centre_crops(samples, chosen, size, 256, torch.device("cpu"), 0)]
    return torch.cat(parts).float().round().clamp(0, 255).to(torch.uint8)


def _centre_crops(
    samples: Samples, index: Sequence[int], size: int, batch_size: int, device: torch.device, workers: int
) -> Iterator[tuple[Sequence[int], Tensor, Tensor]]:
    """Evaluation images before normalisation: sample indices, images, and (B,) whether each could be decoded."""
    starts = range(0, len(index), batch_size)
    if isinstance(samples, FileSamples):
        chunks = [list(index[start : start + batch_size]) for start in starts]
        loader = load_batches(_CroppedFiles(samples, size), chunks, workers, device)
        for chunk, (images, decoded) in zip(chunks, loader, strict=True):
            yield chunk, images.to(device, non_blocking=True), decoded
        return
    for start in starts:
        part = index[start : start + batch_size]
        yield part, _centre(samples.read(part).to(device), size), torch.ones(len(part), dtype=torch.bool)


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


class _CroppedFiles(ImageFiles):
    def __init__(self, samples: FileSamples, size: int) -> None:
        super().__init__(samples)
        self.size = size

    def __getitem__(self, index: int) -> tuple[Tensor, bool]:
        try:
            image, side = self.decode(index), stored_side(self.size)
        except OSError:
            return torch.zeros(3, self.size, self.size, dtype=torch.uint8), False
        if max(image.size) <= side and min(image.size) != side:  # as it is stored if a folder fits into memory
            return to_tensor(resize_square(image, self.size)), True
        return to_tensor(resize_centre(image, side, self.size)), True
