"""Columns from all processes: rows stay where they are, only embeddings travel.

Conventions of every loss here when W processes run, each with rows of its own:

- a process returns its own rows' share of the global loss, times W, so that the mean over processes is that loss;
- the gradient that reaches its embeddings is that of the *sum* over processes of what they return. Averaged over
  processes, as DistributedDataParallel does with the gradients of parameters, this is the gradient of one process
  on the joined batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["World", "all_logsumexp", "all_sum", "gather_rows", "require_first_order", "travel", "world_of"]

# Gathered columns above this size (in bytes) go round in a ring instead of being held all at once.
RING_ABOVE = 256 * 2**20
_WORDS = 64  # characters that a process tells the others of its input


class World(NamedTuple):
    """How many rows each process has; one process has them all where none is to be asked."""

    rank: int
    sizes: tuple[int, ...]

    @property
    def size(self) -> int:
        """Number of processes."""
        return len(self.sizes)

    @property
    def first(self) -> int:
        """Global index of this process's first row."""
        return sum(self.sizes[: self.rank])

    @property
    def total(self) -> int:
        """Rows of all processes."""
        return sum(self.sizes)


def world_of(x: Tensor, gather: bool = True, wrong: ValueError | None = None, same: str = "") -> World:
    """Ask every process for its number of rows; a single one, or `gather=False`, asks nobody.

    Args:
        x: rows of this process.
        gather: whether to ask at all.
        wrong: what is wrong with this process's input, so that all of them stop together.
        same: what must be the same everywhere beside the dimension and type of x, in a few words.

    Raises:
        ValueError: on all processes alike, if the input of one is wrong, or theirs differ in what must be the same.
    """
    if not (gather and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if wrong is not None:
            raise wrong
        return World(0, (len(x),))
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    if dist.get_backend() == "nccl" and device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    facts = (0, 0, 0) if wrong is not None else (1, *x.shape)
    words = "" if wrong is not None else f"x {x.dtype}{same}".replace("torch.", "")
    mine = torch.tensor([*facts, *words.encode().ljust(_WORDS)[:_WORDS]], device=device)
    answers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(answers, mine)
    if wrong is not None:
        raise wrong
    told = torch.stack(answers).tolist()
    valid, rows, widths = zip(*(answer[:3] for answer in told), strict=True)
    if not all(valid):
        refused = ", ".join(str(rank) for rank, fine in enumerate(valid) if not fine)
        raise ValueError(f"the input of rank {refused} was refused: see the error there. This process stops with it")
    if len(set(widths)) > 1:
        raise ValueError(
            "every process needs embeddings of the same dimension; by rank the shapes are "
            f"{list(zip(rows, widths, strict=True))}. gather=False keeps to one's own process"
        )
    if any(answer[3:] != told[0][3:] for answer in told):
        raise ValueError(
            "every process needs the same kind of input; by rank there is "
            f"{[bytes(answer[3:]).decode().rstrip() for answer in told]}. gather=False keeps to one's own process"
        )
    return World(dist.get_rank(), tuple(rows))


def gather_rows(x: Tensor, world: World) -> Tensor:
    """The rows of all processes, in the order of their ranks: (total, ...). Not differentiable."""
    if world.size == 1:
        return x
    longest = max(world.sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in world.sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, world.sizes, strict=True)])


def travel(x: Tensor, world: World) -> Iterator[tuple[Tensor, int]]:
    """The rows of all processes as columns, in one or more parts, each with the global index of its first.

    Small ones come all at once. Large ones go round in a ring: while a process works on the part that it holds, that
    part is already on its way to the next one.
    """
    if world.size == 1:
        yield x, 0
        return
    longest = max(world.sizes)
    if world.size * longest * x[0].numel() * x.element_size() <= RING_ABOVE:
        yield gather_rows(x, world), 0
        return
    held = x.new_zeros(longest, *x.shape[1:])
    held[: len(x)] = x
    arriving = torch.empty_like(held)
    for step in range(world.size):
        owner = (world.rank - step) % world.size
        requests = []
        if step < world.size - 1:
            to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            requests = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, held, to), dist.P2POp(dist.irecv, arriving, source)]
            )
        yield held[: world.sizes[owner]], sum(world.sizes[:owner])
        for request in requests:
            request.wait()
        held, arriving = arriving, held


def require_first_order(world: World) -> None:
    """Refuse a gradient that would have to be differentiated again: sums over processes are not.

    Raises:
        RuntimeError: if several processes run and the gradient is being recorded.
    """
    if world.size > 1 and torch.is_grad_enabled():
        raise RuntimeError(
            f"a loss over {world.size} processes can't be differentiated twice; gather=False keeps to one's own"
        )


class _GatherRows(torch.autograd.Function):
    """`gather_rows` whose gradient is the sum over processes: what the dense reference needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, world: World) -> Tensor:
        ctx.world = world
        return gather_rows(x, world)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first_order(ctx.world)
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        world: World = ctx.world
        return grad[world.first : world.first + world.sizes[world.rank]], None


def gather_differentiably(x: Tensor, world: World) -> Tensor:
    """The rows of all processes, differentiable."""
    if world.size == 1:
        return x
    rows: Tensor = _GatherRows.apply(x, world)
    return rows


class _AllSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, world: World) -> Tensor:
        ctx.world = world
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        require_first_order(ctx.world)
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad, None


def all_sum(value: Tensor, world: World) -> Tensor:
    """Sum over processes."""
    if world.size == 1:
        return value
    total: Tensor = _AllSum.apply(value, world)
    return total


def all_logsumexp(value: Tensor, world: World) -> Tensor:
    """Logarithm of the sum over processes of the exponentials of scalars."""
    if world.size == 1:
        return value
    largest = value.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest + all_sum(torch.exp(value - largest), world).log()
