"""Stream of random image views for training."""

from __future__ import annotations

import contextlib
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain, islice

import torch
from PIL import Image
from torch import Tensor

from fmicl.data.augmentations.fused import can_fuse_views, fused_views
from fmicl.data.augmentations.maker import CROP_UNIFORMS, ViewMaker, crop_boxes
from fmicl.data.augmentations.views import Views
from fmicl.data.images.decoding import ImageFiles, load_batches, to_tensor, why_undecodable
from fmicl.data.images.samples import ArraySamples, FileSamples, MappedSamples, Samples, Skipped, summarise_skipped
from fmicl.data.stream import Batch, Stream, seeded_generator

_READ_AHEAD = 4  # batches of mapped images that are read while others are trained on
_REPLACEMENTS = 16  # files that are tried in place of a damaged one: if all fail, the disk is gone


class ViewStream(Stream):
    """Random views of all samples in random order; see :class:`fmicl.data.Stream` for order and resumption.

    The random numbers of a view are a function of (seed, epoch, batch, rank) and, for the crop of a file in a worker,
    of (seed, epoch, sample).

    Arrays are moved to the device once, and views are made there; mapped images are moved batch by batch. Files are
    decoded, cropped, resized and flipped in worker processes, and colours are changed on the device. A file that can't
    be decoded is replaced by the next readable one that is not in the batch, always the same; each such file is
    reported once, with the last batch of the epoch.

    Args:
        samples: what to train on.
        views: options of the first and of the second view.
        batch_size: samples in a batch of one process, not of all together.
        seed: source of all randomness.
        device: where the batches are put.
        rank: number of this process.
        world_size: number of processes.
        workers: processes that decode files; 0 decodes in this one. Arrays need none.
        labels: (N,) of all samples, which batches then carry; None without labels.
        multiplicity: views of each sample in a batch; more than two have the same options.
        local: options of local crops, and how many of each sample there are; None for none.
        compile: compile the augmentations, which pays on a GPU: small images by one kernel
            (`fmicl.data.augmentations.fused`), others by torch.compile.
        report: called with the files that an epoch was the first to find undecodable; None warns of them.

    Raises:
        ValueError: there are too few samples for one batch in each process, or an argument is out of range.
        OSError: while iterating, if the replacements of an undecodable file can't be decoded either.

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
        labels: Tensor | None = None,
        multiplicity: int = 2,
        local: tuple[Views, int] | None = None,
        compile: bool = False,
        report: Callable[[Sequence[Skipped]], None] | None = None,
    ) -> None:
        super().__init__(len(samples), batch_size, seed=seed, device=device, rank=rank, world_size=world_size)
        if workers < 0 or multiplicity < 2:
            raise ValueError(
                f"workers must not be negative and multiplicity at least 2; got {workers} and {multiplicity}"
            )
        if multiplicity > 2 and views[0] != views[1]:
            raise ValueError(f"multiplicity {multiplicity} needs the same options for all views, but these differ")
        self.samples = samples.to(self.device) if isinstance(samples, ArraySamples) else samples
        if labels is not None and labels.shape != (len(samples),):
            raise ValueError(f"{len(samples)} samples have as many labels, but there are {tuple(labels.shape)}")
        self.labels = None if labels is None else labels.to(self.device)
        self.views, self.workers, self.multiplicity = views, workers, multiplicity
        self.undecodable: set[int] = set()
        self._report = report or _warn
        self._makers = [ViewMaker(options) for options in (*views, *views[:1] * (multiplicity - 2))]
        self._local = None if local is None or not local[1] else (ViewMaker(local[0]), local[1])
        self._views: Callable[..., Tensor] = _array_views
        self._colours: Callable[..., Tensor] = _colour_views
        if compile:
            families = views if self._local is None else (*views, self._local[0].views)
            one_kernel = False
            if not isinstance(self.samples, FileSamples):
                image = self.samples.images[:1].to(self.device)
                one_kernel = all(can_fuse_views(options, image) for options in families)
            self._views = _kernel_views if one_kernel else torch.compile(_array_views)
            self._colours = torch.compile(_colour_views)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        files = isinstance(self.samples, FileSamples)
        return self._file_batches(epoch, start) if files else self._array_batches(epoch, start)

    def _resident(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """For each batch: images on the device, which of them are in it, and their positions in the dataset."""
        assert isinstance(self.samples, ArraySamples)
        for index in self._on_device(self._order(epoch))[start:]:
            yield self.samples.images, index, index

    def _mapped(self, epoch: int, start: int) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As `_resident`, from images that threads read ahead of time."""
        assert isinstance(self.samples, MappedSamples)
        order = self._order(epoch)[start:]
        positions, every = self._on_device(order), torch.arange(self.batch_size, device=self.device)
        with ThreadPoolExecutor(_READ_AHEAD) as pool:
            source = iter(order)
            waiting = deque(pool.submit(self.samples.read, index) for index in islice(source, _READ_AHEAD))
            try:
                for index in positions:
                    images = self._on_device(waiting.popleft().result())
                    waiting.extend(pool.submit(self.samples.read, later) for later in islice(source, 1))
                    yield images, every, index
            finally:
                for read in waiting:
                    read.cancel()

    def _on_device(self, values: Tensor) -> Tensor:
        if self.device.type == "cuda":  # an asynchronous copy needs pinned memory
            values = values.pin_memory()
        return values.to(self.device, non_blocking=True)

    def _array_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        first, same_options = self._makers[0], self.views[0] == self.views[1]
        source = self._mapped if isinstance(self.samples, MappedSamples) else self._resident
        for batch, (images, index, positions) in enumerate(source(epoch, start), start):
            generator = seeded_generator(self.seed, epoch, batch, self.rank)
            if same_options:  # all views at once: fewer kernels
                uniforms = first.uniforms(self.multiplicity * self.batch_size, generator, self.device)
                made = self._views(first, images, index.repeat(self.multiplicity), uniforms)
                parts = [made[: self.batch_size], made[self.batch_size :]]
            else:
                drawn = [first.uniforms(self.batch_size, generator, self.device) for _ in self._makers]
                parts = [self._views(maker, images, index, u) for maker, u in zip(self._makers, drawn, strict=True)]
            local = None
            if self._local is not None:
                crop, number = self._local
                uniforms = crop.uniforms(number * self.batch_size, generator, self.device)
                local = self._views(crop, images, index.repeat(number), uniforms)
            yield self._batch_of(parts, positions, local)

    def _file_batches(self, epoch: int, start: int) -> Iterator[Batch]:
        assert isinstance(self.samples, FileSamples)
        order = self._order(epoch)
        crop, number = (self._makers[0], 0) if self._local is None else self._local
        families = [*(maker.views for maker in self._makers), *[crop.views] * number]
        dataset = _FileViews(self.samples, families, self.seed, epoch)
        loader = load_batches(dataset, order[start:].tolist(), self.workers, self.device)
        found: set[int] = set()
        for batch, (index, broken, *crops) in enumerate(loader, start):
            found.update(broken[broken >= 0].tolist())
            if batch == len(self) - 1 and found - self.undecodable:
                self._report([why_undecodable(self.samples.paths[i]) for i in sorted(found - self.undecodable)])
                self.undecodable |= found
            generator = seeded_generator(self.seed, epoch, batch, self.rank)
            makers, crops = list(self._makers), [cropped.to(self.device, non_blocking=True) for cropped in crops]
            if number:  # all local crops at once
                makers, crops = [*makers, crop], [*crops[:-number], torch.cat(crops[-number:])]
            made = []
            for maker, cropped in zip(makers, crops, strict=True):
                uniforms = maker.uniforms(len(cropped), generator, self.device)
                made.append(self._colours(maker, cropped, uniforms))
            local = made.pop() if number else None
            yield self._batch_of(made, index.to(self.device, non_blocking=True), local)

    def _batch_of(self, views: list[Tensor], index: Tensor, local: Tensor | None) -> Batch:
        first, *others = views
        labels = None if self.labels is None else self.labels[index]
        return Batch(first, others[0] if len(others) == 1 else torch.cat(others), index, local, labels)


def _array_views(maker: ViewMaker, images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    height, width = images.shape[2:]
    return maker.apply(images[index], maker.parameters(uniforms, height, width))


def _kernel_views(maker: ViewMaker, images: Tensor, index: Tensor, uniforms: Tensor) -> Tensor:
    return fused_views(maker.views, images, index, uniforms)


def _colour_views(maker: ViewMaker, crops: Tensor, uniforms: Tensor) -> Tensor:
    size = maker.views.size
    return maker.colour(crops, maker.parameters(uniforms, size, size))


class _FileViews(ImageFiles):
    def __init__(self, samples: FileSamples, views: Sequence[Views], seed: int, epoch: int) -> None:
        super().__init__(samples)
        self.views, self.seed, self.epoch = views, seed, epoch

    def __getitems__(self, batch: list[int]) -> list[tuple[Tensor, ...]]:
        """A whole batch, since the replacement of a damaged file must not be in it already."""
        taken, made = set(batch), []
        for index in batch:
            used, image = self._readable(index, taken)
            taken.add(used)
            broken = -1 if used == index else index
            made.append((torch.tensor(used), torch.tensor(broken), *self._views(used, image)))
        return made

    def _readable(self, index: int, taken: set[int]) -> tuple[int, Image.Image]:
        """The image, or the next one that is readable and not in the batch."""
        try:
            return index, self.decode(index)
        except OSError as error:
            others = [(index + step) % len(self) for step in range(1, len(self))]
            # A sample that is twice in a batch would be its own negative: only if there is no other.
            free, repeated = (i for i in others if i not in taken), (i for i in others if i in taken)
            for other in islice(chain(free, repeated), _REPLACEMENTS):
                with contextlib.suppress(OSError):
                    return other, self.decode(other)
            raise OSError(f"{error} No other image could be read instead.") from error

    def _views(self, index: int, image: Image.Image) -> list[Tensor]:
        # Three numbers, where a batch has four and an epoch two: no random stream is used twice.
        uniforms = torch.rand(len(self.views), CROP_UNIFORMS, generator=seeded_generator(self.seed, self.epoch, index))
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
        f"{len(broken)} image(s) can't be decoded and were replaced by others: {summarise_skipped(broken)}",
        stacklevel=3,
    )
