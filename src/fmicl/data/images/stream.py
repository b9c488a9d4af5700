"""From samples to batches for training: random views of each."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice
from typing import NamedTuple, Protocol

import torch
from PIL import Image
from torch import Tensor

from fmicl.data.augmentations.fused import can_fuse_views, fused_views
from fmicl.data.augmentations.maker import CROP_UNIFORMS, ViewMaker, crop_boxes
from fmicl.data.augmentations.views import Views
from fmicl.data.images.decode import to_tensor
from fmicl.data.images.reading import Files, load, why
from fmicl.data.images.samples import ArraySamples, FileSamples, Samples, Skipped, listed

__all__ = ["Batch", "Stream", "ViewStream", "generator_of"]

_TRIES = 16  # files that are tried in the place of a broken one: if none of them can be read, the disk is gone


class Batch(NamedTuple):
    """Two views of each sample of a batch, or more.

    Attributes:
        first: (B, C, S, S) float32, normalised, on the device; of sentences, (B, L) token ids, -1 after the end.
        second: As first; another random view of the same samples in the same order. Where a sample has K views, the
            K - 1 others, ((K - 1) B, ...): all of the second, then all of the third, ...
        index: (B,) int64 on the device, which samples they are.
    """

    first: Tensor
    second: Tensor
    index: Tensor  # type: ignore[assignment]  # shadows tuple.index, which nobody needs here


class Stream(Protocol):
    """Batches of a whole epoch, from anywhere in it on."""

    def __len__(self) -> int:
        """Batches in an epoch."""

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Where the next pass starts; it ends with the epoch."""

    def __iter__(self) -> Iterator[Batch]:
        """The rest of the epoch; the next pass is the next epoch."""


class ViewStream:
    """Random views of all samples in random order; one pass is one epoch, and the next pass is the next epoch.

    Every random number is a function of (seed, epoch, batch, rank) or, for what is done to a file in a worker, of
    (seed, epoch, sample). So a pass can start anywhere, and goes on as if it had never stopped; nothing is drawn
    from torch's global generator. Samples that don't fill a last batch are left out of an epoch, others each time.

    Arrays are moved to the device once and all work is done there. Files are decoded, cropped, resized and
    flipped in worker processes, and the colours are done on the device. In the place of a file that can't be decoded
    comes the next readable one that is not in the batch, always the same; each such file is reported once, with the
    last batch of the epoch.

    Args:
        samples: What to train on.
        views: The families of the first and of the second view.
        batch_size: Number of samples in a batch of one process, not of all together.
        seed: Where all randomness comes from.
        device: Where the batches are wanted.
        rank: Number of this process; each has its own part of an epoch.
        world_size: How many processes there are.
        workers: Processes that decode files; 0 does it in this one. Arrays need none.
        multiplicity: Views of each sample in a batch; more than two are of one family.
        compile: Compile the making of views, which pays on a GPU: small images are made by one kernel of our own
            (`fmicl.data.augmentations.fused`), others by torch.compile.
        report: Called with the files that an epoch was the first to find undecodable; None warns of them.

    Raises:
        ValueError: If there are too few samples for one batch in each process, or a setting is out of its range.
        OSError: While iterating, if files in the place of an undecodable one can't be decoded either.

    Example:
        >>> samples = ArraySamples(torch.randint(256, (10, 3, 8, 8), dtype=torch.uint8))
        >>> stream = ViewStream(samples, (Views(size=8), Views(size=8)), 4, seed=0, device="cpu")
        >>> whole = [batch.index.tolist() for batch in stream]
        >>> stream.set_position(epoch=0, batch=1)
        >>> [batch.index.tolist() for batch in stream] == whole[1:]
        True
    """

    def __init__(
        self,
        samples: Samples,
        views: tuple[Views, Views],
        batch_size: int,
        *,
        seed: int,
        device: torch.device | str,
        rank: int = 0,
        world_size: int = 1,
        workers: int = 0,
        multiplicity: int = 2,
        compile: bool = False,
        report: Callable[[Sequence[Skipped]], None] | None = None,
    ) -> None:
        if batch_size < 1 or not 0 <= rank < world_size or workers < 0 or multiplicity < 2:
            raise ValueError(
                f"batch_size must be positive, rank in [0, world_size), workers not negative and multiplicity at "
                f"least 2; got {batch_size}, {rank} of {world_size}, {workers}, {multiplicity}"
            )
        if multiplicity > 2 and views[0] != views[1]:
            raise ValueError(f"{multiplicity} views of a sample must be of one family, but two differ: {views}")
        if len(samples) < batch_size * world_size:
            raise ValueError(
                f"{len(samples)} samples don't fill one batch of {batch_size}"
                + (f" in each of {world_size} processes" if world_size > 1 else "")
                + ": use a smaller --batch-size, or more images"
            )
        self.device = torch.device(device)
        self.samples = samples.to(self.device)
        self.views = views
        self.batch_size, self.seed, self.rank, self.world_size = batch_size, seed, rank, world_size
        self.workers, self.multiplicity = workers, multiplicity
        self.epoch, self.batch = 0, 0
        self.undecodable: set[int] = set()
        self._report = report or _warn
        self._makers = [ViewMaker(family) for family in (*views, *views[:1] * (multiplicity - 2))]
        self._views: Callable[..., Tensor] = _array_views
        self._colours: Callable[..., Tensor] = _colour_views
        if compile:
            arrays = isinstance(self.samples, ArraySamples)
            one_kernel = arrays and all(can_fuse_views(family, self.samples.images) for family in views)  # type: ignore[union-attr]
            self._views = _kernel_views if one_kernel else torch.compile(_array_views)
            self._colours = torch.compile(_colour_views)

    def __len__(self) -> int:
        """Batches in an epoch, the same number in every process."""
        return len(self.samples) // (self.batch_size * self.world_size)

    def set_position(self, epoch: int, batch: int = 0) -> None:
        """Where the next pass starts; it ends with the epoch.

        Raises:
            ValueError: If there is no such batch in an epoch.
        """
        if epoch < 0 or not 0 <= batch <= len(self):
            raise ValueError(f"an epoch has the batches 0 to {len(self) - 1}; got epoch {epoch}, batch {batch}")
        self.epoch, self.batch = (epoch + 1, 0) if batch == len(self) else (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, batch = self.epoch, self.batch
        self.epoch, self.batch = epoch + 1, 0
        return self._arrays(epoch, batch) if isinstance(self.samples, ArraySamples) else self._files(epoch, batch)

    def _order(self, epoch: int) -> Tensor:
        """(batches, batch_size) samples of this process."""
        order = torch.randperm(len(self.samples), generator=generator_of(self.seed, epoch))
        used = order[: len(self) * self.world_size * self.batch_size]
        return used.view(len(self), self.world_size, self.batch_size)[:, self.rank]

    def _arrays(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self.samples, ArraySamples)
        order = self._order(epoch)
        if self.device.type == "cuda":  # from other memory a copy waits for all that the GPU still has to do
            order = order.pin_memory()
        order = order.to(self.device, non_blocking=True)
        first, one_family = self._makers[0], self.views[0] == self.views[1]
        for batch in range(start, len(self)):
            generator = generator_of(self.seed, epoch, batch, self.rank)
            index, images = order[batch], self.samples.images
            if one_family:  # all views at once, which is fewer kernels
                uniforms = first.uniforms(self.multiplicity * self.batch_size, generator, self.device)
                made = self._views(first, images, index.repeat(self.multiplicity), uniforms)
                yield Batch(made[: self.batch_size], made[self.batch_size :], index)
            else:
                drawn = [first.uniforms(self.batch_size, generator, self.device) for _ in self._makers]
                parts = [self._views(maker, images, index, u) for maker, u in zip(self._makers, drawn, strict=True)]
                yield _batch(parts, index)

    def _files(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self.samples, FileSamples)
        order = self._order(epoch)
        dataset = _FileViews(self.samples, [maker.views for maker in self._makers], self.seed, epoch)
        loader = load(dataset, order[start:].tolist(), self.workers, self.device)
        found: set[int] = set()
        for batch, (index, broken, *crops) in enumerate(loader, start):
            found.update(broken[broken >= 0].tolist())
            if batch == len(self) - 1 and found - self.undecodable:
                self._report([why(self.samples.paths[i]) for i in sorted(found - self.undecodable)])
                self.undecodable |= found
            generator = generator_of(self.seed, epoch, batch, self.rank)
            made = []
            for maker, crop in zip(self._makers, crops, strict=True):
                uniforms = maker.uniforms(self.batch_size, generator, self.device)
                made.append(self._colours(maker, crop.to(self.device, non_blocking=True), uniforms))
            yield _batch(made, index.to(self.device, non_blocking=True))


def _batch(views: list[Tensor], index: Tensor) -> Batch:
    first, *others = views
    return Batch(first, others[0] if len(others) == 1 else torch.cat(others), index)


def _array_views(maker: ViewMaker, images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    height, width = images.shape[2:]
    return maker.apply(images[index], maker.parameters(uniforms, height, width))


def _kernel_views(maker: ViewMaker, images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    return fused_views(maker.views, images, index, uniforms)


def _colour_views(maker: ViewMaker, crops: Tensor, uniforms: Tensor) -> Tensor:
    size = maker.views.size
    return maker.colour(crops, maker.parameters(uniforms, size, size))


class _FileViews(Files):
    def __init__(self, samples: FileSamples, views: Sequence[Views], seed: int, epoch: int) -> None:
        super().__init__(samples)
        self.views, self.seed, self.epoch = views, seed, epoch

    def __getitems__(self, batch: list[int]) -> list[tuple[Tensor, ...]]:
        """A whole batch, since what comes in the place of a broken file must not be in it already."""
        taken, made = set(batch), []
        for index in batch:
            used, image = self._readable(index, taken)
            taken.add(used)
            broken = -1 if used == index else index
            made.append((torch.tensor(used), torch.tensor(broken), *self._views(used, image)))
        return made

    def _readable(self, index: int, taken: set[int]) -> tuple[int, Image.Image]:
        """The image, or else the next one that is readable and not taken."""
        try:
            return index, self.decode(index)
        except OSError as error:
            others = [(index + step) % len(self) for step in range(1, len(self))]
            # One that is in the batch already would be its own negative: only where there is no other.
            free, twice = (i for i in others if i not in taken), (i for i in others if i in taken)
            for other in islice(chain(free, twice), _TRIES):
                with contextlib.suppress(OSError):
                    return other, self.decode(other)
            raise OSError(f"{error} No other image could be read in its place.") from error

    def _views(self, index: int, image: Image.Image) -> list[Tensor]:
        # Three numbers, where a batch has four and an epoch two: no stream is used twice.
        uniforms = torch.rand(len(self.views), CROP_UNIFORMS, generator=generator_of(self.seed, self.epoch, index))
        return [_crop(image, views, u) for views, u in zip(self.views, uniforms, strict=True)]


def _crop(image: Image.Image, views: Views, uniforms: Tensor) -> Tensor:
    """Crop, resize and flip one decoded image."""
    boxes = crop_boxes(uniforms.unsqueeze(0), image.height, image.width, views)
    top, left, height, width = (int(x) for x in boxes)
    crop = image.crop((left, top, left + width, top + height))
    crop = crop.resize((views.size, views.size), Image.Resampling.BILINEAR)
    if float(uniforms[-1]) < views.flip:
        crop = crop.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return to_tensor(crop)


def _warn(broken: Sequence[Skipped]) -> None:
    warnings.warn(
        f"{len(broken)} image(s) can't be decoded, and others were taken in their place: {listed(broken)}",
        stacklevel=3,
    )


def generator_of(*numbers: int) -> torch.Generator:
    """A generator for these numbers alone: near ones give streams that have nothing to do with each other."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
