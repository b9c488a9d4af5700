"""Pairing of embeddings: which ones are positive and negative pairs, on one process or several."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor

from fmicl import kernels
from fmicl.divergences import KL
from fmicl.divergences.critic import Critic
from fmicl.kernels import Kernel, PairFunction, Precision, World
from fmicl.kernels.reference import exact_products
from fmicl.kernels.tiled import is_one_tile
from fmicl.kernels.transforms import in_transforms
from fmicl.losses.targets import (
    Chunk,
    LabelledPairs,
    LabelNegatives,
    Targets,
    masked_logsumexp,
    require_label_negatives,
)
from fmicl.utils.learnable import Scalar, host_value
from fmicl.utils.numerics import normalise, to_float32, unit_rows
from fmicl.utils.validation import Negatives, require_negatives

# exp(-x) for x up to this is an ordinary number of the type
_EXPONENT_RANGE = {torch.float32: 80.0, torch.float64: 700.0}
_SAMPLED = 512  # rows, and columns, of a sample of the negatives
_TYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ComputeOptions(TypedDict, total=False):
    """How sums over pairs are computed; all objectives take these options."""

    normalised: bool
    """True if the embeddings have unit length already (default False: the loss normalises them). Not checked: rows of
    another length give wrong values."""
    kernel: Kernel
    """"auto" (default), "reference", "tiled" or "triton": see `fmicl.kernels`."""
    precision: Precision
    """Precision of the Triton kernel: "fast" rounds to bfloat16, "high" is float32; "auto" (default) is fast for
    half-precision input, but for the optimal shift of a divergence other than KL, and high otherwise. The other kernels
    always compute in float32 or wider, without TF32."""
    gather: bool
    """With several processes, take negatives from all of them (default), or with False from the same process only.
    Explicit negatives are used as given on each process."""


_DEFAULTS: ComputeOptions = {"normalised": False, "kernel": "auto", "precision": "auto", "gather": True}


def check_options(**options: Unpack[ComputeOptions]) -> None:
    """Raise TypeError for an unknown option, and ValueError for an invalid value."""
    unknown = sorted(set(options) - set(ComputeOptions.__annotations__))
    if unknown:
        raise TypeError(
            f"unknown option {', '.join(unknown)}; besides its own arguments a loss takes "
            f"{', '.join(ComputeOptions.__annotations__)}. Parameters of a divergence go to the divergence: "
            "fmicl.divergence('tsallis', order=2.0)"
        )
    options = _DEFAULTS | options
    for name in ("normalised", "gather"):
        value = options.get(name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} must be True or False, got {name}={value!r}")
    kernels.require_kernel(options["kernel"], options["precision"])


def describe_options(**options: Unpack[ComputeOptions]) -> str:
    """The options that differ from the defaults, for the end of a loss's repr.

    Example:
        >>> describe_options(kernel="tiled", precision="auto", gather=False)
        ', kernel=tiled, gather=False'
    """
    return "".join(f", {name}={value}" for name, value in options.items() if value != _DEFAULTS.get(name))


class Block(NamedTuple):
    """A block of negative pairs: all rows against all columns, without those where j = i + skip.

    Attributes:
        rows: rows of this process.
        columns: columns of this process, None for the rows themselves; the kernels exchange those of other processes.
        skip: see `fmicl.kernels.backend`.
        weight: how often each pair counts; 2 if the block stands for its mirror image too.
        number: number of pairs in all processes, with this weight.
        world: the processes that have columns.
    """

    rows: Tensor
    columns: Tensor | None
    skip: int | None
    weight: int
    number: int
    world: World


@dataclass(frozen=True)
class Sample:
    """Some of the negative pairs, whose z are kept.

    Attributes:
        z: of the pairs of each block.
        shares: of each block in the mean over all negatives.
        world: the processes, each of which has its own sample.
        complete: whether these are all negatives.
    """

    z: tuple[Tensor, ...]
    shares: tuple[float, ...]
    world: World
    complete: bool

    def mean(self, function: Callable[[Tensor], Tensor]) -> Tensor:
        """The mean of a function of z over the sample, the same on each process."""
        means = [share * function(z).mean() for z, share in zip(self.z, self.shares, strict=True)]
        return kernels.all_sum(torch.stack(means).sum(), self.world) / len(self.world.sizes)


@dataclass(frozen=True)
class Pairs:
    """Two views on the unit sphere, and their negatives.

    Attributes:
        x: first view, (N, d), of unit length: float32 or float64, or bfloat16 if the input is and `fast` is set.
        y: second view, likewise.
        blocks: the negative pairs.
        world: the processes that share the batch.
        kernel: implementation of the sums over pairs.
        fast: whether products may be rounded to bfloat16.
        distances: |x_i - y_i|^2, (N,), if known already.
        zero_rows: number of zero rows among x_i and y_i, (N,), if the distances don't count them yet.
        labelled: the pairs with labels or soft targets, if there are any.
    """

    x: Tensor
    y: Tensor
    blocks: tuple[Block, ...]
    world: World
    kernel: Kernel
    fast: bool
    distances: Tensor | None = None
    zero_rows: Tensor | None = None
    labelled: LabelledPairs | None = None

    @classmethod
    def prepare(
        cls,
        x: Tensor,
        y: Tensor,
        negatives: Negatives | Tensor,
        columns: Sequence[Tensor] = (),
        targets: Targets | None = None,
        label_negatives: LabelNegatives = "all",
        **options: Unpack[ComputeOptions],
    ) -> Pairs:
        """Check the input, normalise it to unit length and lay out the negatives.

        Half precision is converted to float32, unless it is normalised already and `fast` is set: then no copy is made.

        Args:
            x: first view, (N, d).
            y: second view, (N, d).
            negatives: as in `fmicl.functional`.
            columns: further negatives, (N, d) each, that the caller adds; this only checks them, on all processes.
            targets: labels or soft targets.
            label_negatives: which samples are negatives if there are targets.
            options: how sums are computed.

        Raises:
            ValueError: the input isn't a batch of two views; the message says what was seen.
        """
        check_options(**options)
        require_label_negatives(label_negatives)
        options = _DEFAULTS | options
        explicit = negatives if isinstance(negatives, Tensor) else None
        wrong: ValueError | None = None
        description = ""
        try:
            check_views(x, y, negatives, columns)
            kind = negatives if explicit is None else explicit.dtype
            description = f", y {y.dtype}, negatives {kind}, {len(columns)} columns"
            if targets is not None:
                targets.check(x)
                description += f", {targets.kind}"
            if label_negatives == "other_classes" and explicit is not None and targets is not None:
                raise ValueError("explicit negatives have no labels, so label_negatives must be 'all' with them")
        except ValueError as error:
            wrong = error  # other processes must learn of it before this one raises, or they would hang
        world = kernels.world_of(x, options["gather"], wrong, description)
        if targets is not None and targets.kind == "matrix":
            _check_columns(targets, x, world)
        if explicit is None and world.total < 2:
            raise ValueError(
                f"negatives={negatives!r} needs at least two samples in a batch, got shape {tuple(x.shape)}; if this "
                "is the last batch of an epoch, DataLoader(..., drop_last=True) leaves it out"
            )
        named = [x, y] if explicit is None else [x, y, explicit]
        kernel, precision = _within_transforms(options["kernel"], world), options["precision"]
        half = all(value.dtype in (torch.bfloat16, torch.float16) for value in (x, y))
        fast = precision == "fast" or (precision == "auto" and half)
        unchanged = fast and options["normalised"] and all(v.dtype == torch.bfloat16 for v in named)
        widest = functools.reduce(torch.promote_types, (value.dtype for value in named), torch.float32)
        distances = zero_rows = None
        if unchanged:
            ready = named
        elif options["normalised"]:
            ready = [value.to(widest) for value in named]
        elif kernels.can_fuse_positives(x, y, kernel) and widest == torch.float32:
            *ready, distances = kernels.normalise_pairs(x, y)
            ready += [normalise(value.to(widest)) for value in named[2:]]
        else:
            (x_unit, x_zero), (y_unit, y_zero) = (unit_rows(value.to(widest)) for value in named[:2])
            ready = [x_unit, y_unit, *(normalise(value.to(widest)) for value in named[2:])]
            zero_rows = x_zero.to(widest) + y_zero
        if distances is None and kernel != "reference":
            *views, distances = kernels.pair_distances(
                ready[0], ready[1], kernels.can_fuse_positives(ready[0], ready[1], kernel)
            )
            ready = [*views, *ready[2:]]
        unit = ready[2] if explicit is not None else None
        blocks = _blocks(ready[0], ready[1], negatives, unit, world)
        labelled = None
        if targets is not None:
            mode = "explicit" if isinstance(negatives, Tensor) else negatives
            dense = kernel == "reference"
            labelled = LabelledPairs.of(ready[0], ready[1], unit, mode, targets, label_negatives, world, dense)
        return cls(ready[0], ready[1], blocks, world, kernel, fast, distances, zero_rows, labelled)

    @property
    def dtype(self) -> torch.dtype:
        """The type of everything but the products."""
        return torch.promote_types(self.x.dtype, torch.float32)

    def squared_distances(self) -> Tensor:
        """|x_i - y_i|^2 = 2 - 2 x_i.y_i of the two views of each sample, (N,).

        A zero row is orthogonal to every row, as among the negatives: its squared distance is 2.
        """
        distances = self.distances
        if distances is None:
            distances = (self.x.to(self.dtype) - self.y.to(self.dtype)).square().sum(dim=-1)
        return distances if self.zero_rows is None else distances + self.zero_rows

    def lengths(self) -> Tensor:
        """|x_i - y_i|, (N,), with a finite gradient where the views coincide; a zero row is at sqrt(2)."""
        length: Tensor = torch.linalg.vector_norm(self.x.to(self.dtype) - self.y.to(self.dtype), dim=-1)
        if self.zero_rows is None:
            return length
        missing = self.zero_rows > 0
        return torch.where(missing, torch.where(missing, self.squared_distances(), 1.0).sqrt(), length)

    def products(self) -> Tensor:
        """x_i.y_i of the two views of each sample, (N,)."""
        return (self.x.to(self.dtype) * self.y.to(self.dtype)).sum(dim=-1)

    def of_second_views(self) -> Pairs:
        """The same batch with the second views as anchors, and as each other's negatives."""
        return replace(self, x=self.y, y=self.x, blocks=_blocks(self.y, self.x, "anchor", None, self.world))

    def detached(self) -> Pairs:
        """The same batch without gradients."""
        blocks = tuple(
            block._replace(rows=block.rows.detach(), columns=None if block.columns is None else block.columns.detach())
            for block in self.blocks
        )
        distances = None if self.distances is None else self.distances.detach()
        labelled = None if self.labelled is None else self.labelled.detached()
        return replace(
            self, x=self.x.detach(), y=self.y.detach(), blocks=blocks, distances=distances, labelled=labelled
        )

    def scores(self, critic: Critic) -> Tensor:
        """Score of each anchor's positive, or the mean over its positives: (N,), or (2 N,) for "both" with labels."""
        if self.labelled is None:
            return critic.score(critic.at_distance(self.squared_distances()))
        return self.labelled.map(lambda products, chunk: (chunk.positives * critic.score(critic.z(products))).sum(1))

    def mean_of_rows(self, values: Tensor) -> Tensor:
        """This process's share of the mean over all rows: the average over processes is that mean."""
        return values.sum() * (self.world.size / (self.world.total * (len(values) // len(self.x))))

    def mean(self, function: PairFunction) -> Tensor:
        """This process's share of the mean of a function over all negatives, likewise."""
        if self._excludes is not None:
            rows = self._excludes.map(lambda products, chunk: _sum_of_negatives(function, products, chunk))
            return rows.sum() * (self.world.size / self._excludes.negative_count())
        totals = [
            block.weight
            * kernels.pair_sum(
                block.rows, block.columns, function, block.skip,
                kernel=self.kernel, fast=self.fast, world=block.world,
            )
            for block in self.blocks
        ]  # fmt: skip
        return torch.stack(totals).sum() * (self.world.size / self.count())

    def global_mean(self, function: PairFunction) -> Tensor:
        """The mean of a function over all negatives of all processes, the same on each."""
        return kernels.all_sum(self.mean(function), self.world) / len(self.world.sizes)

    def largest_cosine(self, function: PairFunction) -> Tensor:
        """The largest inner product of a negative pair of all processes, a scalar, rounded as in sums of a function."""
        if self._excludes is not None:
            rows = self._excludes.detached().map(lambda c, chunk: c.masked_fill(~chunk.negatives, -1.0).amax(dim=1))
            return kernels.all_max(rows.max(), self.world)
        found = [
            kernels.largest_cosine(
                block.rows, block.columns, function, block.skip,
                kernel=self.kernel, fast=self.fast, world=block.world,
            )
            for block in self.blocks
        ]  # fmt: skip
        return kernels.all_max(torch.stack(found).max(), self.world)

    def sample(self, critic: Critic) -> Sample | None:
        """Z of some of the negatives, or of all if these are few and on a CPU; None where labels leave out negatives.

        Not differentiable.
        """
        if self._excludes is not None or min(self.world.sizes) < 2:
            return None
        complete = (
            self.x.is_cpu
            and self.kernel != "triton"
            and self.world.size == 1
            and all(is_one_tile(b.rows, b.rows if b.columns is None else b.columns) for b in self.blocks)
        )
        kept = [_cosines(block, complete) for block in self.blocks]
        shares = tuple(block.number / self.count() for block in self.blocks)
        return Sample(tuple(critic.z(cosines) for cosines in kept), shares, self.world, complete)

    def log_mean_exp(self, scale: Scalar) -> Tensor:
        """log mean exp(scale * c) over all negatives of all processes, the same on each.

        All rows weigh the same, also if processes have different numbers of explicit negatives.
        """
        if self._excludes is not None:
            rows = self._excludes.map(lambda products, chunk: masked_logsumexp(scale * products, chunk.negatives))
            return kernels.all_logsumexp(rows.logsumexp(dim=0), self.world) - self._excludes.negative_count().log()
        known = host_value(scale)  # unknown on a GPU: then by rows, which any scale allows
        if known is not None and 2 * known <= _EXPONENT_RANGE[self.dtype]:
            # no term underflows, so one pass gives value and gradient
            return scale + self.global_mean(Critic(KL(), -scale, scale, free=False)).log()
        share = -math.log(self.count())
        totals = [
            math.log(block.weight)
            + kernels.all_logsumexp(self._rows(block, scale).logsumexp(dim=0) + share, self.world)
            for block in self.blocks
        ]
        return torch.stack(totals).logsumexp(dim=0)

    def log_mean_exp_of_rows(self, values: Tensor) -> Tensor:
        """log mean exp(values) over the rows of all processes, the same on each."""
        total = kernels.all_logsumexp(values.logsumexp(dim=0), self.world)
        return total - math.log(self.world.total * (len(values) // len(self.x)))

    def row_logsumexp(self, scale: Scalar) -> Tensor:
        """log sum_j exp(scale * c_ij) of each row over its negatives: (N,), or x_0 y_0 x_1 ..., (2 N,), for "both"."""
        if len(self.blocks) == 1:
            return self._rows(self.blocks[0], scale)
        views = torch.stack([self.x, self.y], dim=1).flatten(0, 1)
        world = World(self.world.rank, tuple(2 * size for size in self.world.sizes))
        # one symmetric sum over all views costs less than the blocks one by one
        return kernels.row_logsumexp(
            views, None, scale, 0, kernel=self.kernel, fast=self.fast, world=world, paired=True
        )

    @property
    def _excludes(self) -> LabelledPairs | None:
        """The pairs with labels, if these leave out negatives."""
        return self.labelled if self.labelled is not None and self.labelled.other_classes else None

    def count(self) -> int:
        """Number of negatives of all processes."""
        return sum(block.number for block in self.blocks)

    def _rows(self, block: Block, scale: Scalar) -> Tensor:
        return kernels.row_logsumexp(
            block.rows, block.columns, scale, block.skip, kernel=self.kernel, fast=self.fast, world=block.world
        )


def _check_columns(targets: Targets, x: Tensor, world: World) -> None:
    """Raise ValueError, on all processes, unless the targets have a column for each sample of all."""
    wrong = None
    if targets.given.shape[1] != world.total:
        seen = f"got shape {tuple(targets.given.shape)}"
        wrong = ValueError(f"targets must have a column for each of the {world.total} samples of the batch, {seen}")
    kernels.world_of(x, world.size > 1, wrong)


def _sum_of_negatives(function: PairFunction, products: Tensor, chunk: Chunk) -> Tensor:
    """The sum of a function over the negatives of each anchor: (n,)."""
    # Mask before the function too: that of a positive may overflow, and its gradient be NaN.
    z = function.offset + function.scale * products.masked_fill(~chunk.negatives, 0.0)
    return function.penalty(z).masked_fill(~chunk.negatives, 0.0).sum(dim=1)


def _cosines(block: Block, complete: bool) -> Tensor:
    """Inner products of the negative pairs of a block, all of them or those of some rows with other columns."""
    rows, columns = (to_float32(v) for v in (block.rows, block.rows if block.columns is None else block.columns))
    if complete:
        products = exact_products(rows, columns)
        if block.skip is None:
            return products
        n = len(products)
        return products.flatten()[1:].view(n - 1, n + 1)[:, :-1]  # without the diagonal
    size = min(len(rows) // 2, _SAMPLED)
    return exact_products(rows[:size], columns[-size:])


def check_views(x: Tensor, y: Tensor, negatives: str | Tensor = "anchor", columns: Sequence[Tensor] = ()) -> None:
    """Raise ValueError for input that isn't a batch of two views with their negatives."""
    named = {"x": x, "y": y} | {f"negatives column {k}": column for k, column in enumerate(columns, 1)}
    if isinstance(negatives, Tensor):
        named["negatives"] = negatives
    else:
        require_negatives(negatives)
    for name, value in named.items():
        if not isinstance(value, Tensor):
            raise ValueError(f"{name} must be a tensor of embeddings (N, d), got {type(value).__name__}")
        if value.dim() != 2:
            raise ValueError(f"{name} must have two dimensions (N, d), got shape {tuple(value.shape)}")
        if value.dtype not in _TYPES:
            raise ValueError(f"{name} must be float16, bfloat16, float32 or float64, got {value.dtype}")
        if value.device != x.device:
            raise ValueError(f"{name} is on {value.device} but x is on {x.device}")
    if x.shape != y.shape:
        raise ValueError(
            f"x and y must have the same shape, one row for each sample; got {tuple(x.shape)} and {tuple(y.shape)}"
        )
    if x.numel() == 0:
        raise ValueError(f"embeddings need at least one row and one dimension, got shape {tuple(x.shape)}")
    if isinstance(negatives, Tensor) and (negatives.shape[1] != x.shape[1] or len(negatives) == 0):
        raise ValueError(
            f"explicit negatives must be (M, d) with M > 0 and x's d; got {tuple(negatives.shape)} "
            f"for x of shape {tuple(x.shape)}"
        )
    for column in columns:
        if column.shape != x.shape:
            raise ValueError(f"a negatives column has shape {tuple(column.shape)}, the anchors {tuple(x.shape)}")


def _within_transforms(kernel: Kernel, world: World) -> Kernel:
    """Within torch.func's transforms (grad, vmap, ...), the reference: it is plain autograd, which they support.

    Raises:
        ValueError: another kernel is set, or several processes share the batch.
    """
    if not in_transforms():
        return kernel
    if kernel not in ("auto", "reference"):
        raise ValueError(f"within torch.func kernel must be 'auto' or 'reference', got kernel={kernel!r}")
    if world.size > 1:
        raise ValueError(
            f"torch.func doesn't support a loss over {world.size} processes; gather=False takes negatives of this one"
        )
    return "reference"


def _blocks(x: Tensor, y: Tensor, negatives: str | Tensor, explicit: Tensor | None, world: World) -> tuple[Block, ...]:
    n = world.total
    if explicit is not None:
        # the columns are here already: no exchange between processes
        return (Block(x, explicit, None, 1, n * len(explicit), World(0, (len(x),))),)
    others = n * (n - 1)
    if negatives == "anchor":
        return (Block(x, None, 0, 1, others, world),)
    if negatives == "cross":
        return (Block(x, y, 0, 1, others, world),)
    return (
        Block(x, None, 0, 1, others, world),
        Block(y, None, 0, 1, others, world),
        Block(x, y, 0, 2, 2 * others, world),
    )
