"""Exchange of embeddings between processes: gathered columns, a ring exchange, and differentiable reductions.

Conventions of every loss when W processes run, each with its own rows:

- a process returns W times its rows' share of the global loss, so that the mean over processes is the global loss;
- the gradient of its embeddings is that of the *sum* over processes of the returned values. Averaged over processes,
  as DistributedDataParallel averages the gradients of parameters, it is the gradient of one process on the joint batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

# Columns of more bytes than this in all are passed around a ring instead of being gathered at once.
RING_ABOVE = 256 * 2**20
_DESCRIPTION = 64  # characters of the description of a process's input, which all processes compare


class World(NamedTuple):
    """Rank of this process and the number of rows of each process; one process alone is World(0, (n,))."""

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
        """Number of rows of all processes."""
        return sum(self.sizes)


def world_of(x: Tensor, gather: bool = True, error: ValueError | None = None, description: str = "") -> World:
    """Gather every process's number of rows; without communication for a single process or `gather=False`.

    Args:
        x: rows of this process.
        gather: whether to communicate at all.
        error: an error in this process's input; it is raised here, and the other processes raise too.
        description: what must be equal on all processes beside the dimension and dtype of x, in a few words.

    Raises:
        ValueError: on all processes, if the input of one is invalid or their inputs don't match.
    """
    if not (gather and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        if error is not None:
            raise error
        return World(0, (len(x),))
    device = x.device if isinstance(x, Tensor) else torch.device("cpu")
    if dist.get_backend() == "nccl" and device.type != "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
    header = (0, 0, 0) if error is not None else (1, *x.shape)
    text = "" if error is not None else f"x {x.dtype}{description}".replace("torch.", "")
    own = torch.tensor([*header, *text.encode().ljust(_DESCRIPTION)[:_DESCRIPTION]], device=device)
    gathered = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, own)
    if error is not None:
        raise error
    messages = torch.stack(gathered).tolist()
    valid, rows, widths = zip(*(message[:3] for message in messages), strict=True)
    if not all(valid):
        failed = ", ".join(str(rank) for rank, fine in enumerate(valid) if not fine)
        raise ValueError(f"the input of rank {failed} was refused (see its error), so this process stops too")
    if len(set(widths)) > 1:
        raise ValueError(
            "embeddings must have the same dimension on all processes; by rank the shapes are "
            f"{list(zip(rows, widths, strict=True))}. gather=False computes each process's loss alone"
        )
    if any(message[3:] != messages[0][3:] for message in messages):
        raise ValueError(
            "inputs must be of the same kind on all processes; by rank: "
            f"{[bytes(message[3:]).decode().rstrip() for message in messages]}. "
            "gather=False computes each process's loss alone"
        )
    return World(dist.get_rank(), tuple(rows))


def gather_rows(x: Tensor, world: World) -> Tensor:
    """Rows of all processes in the order of their ranks, (total, ...). Not differentiable."""
    if world.size == 1:
        return x
    longest = max(world.sizes)
    padded = x.new_zeros(longest, *x.shape[1:])
    padded[: len(x)] = x
    parts = [torch.empty_like(padded) for _ in world.sizes]
    dist.all_gather(parts, padded)
    return torch.cat([part[:size] for part, size in zip(parts, world.sizes, strict=True)])


def ring_exchange(x: Tensor, world: World) -> Iterator[tuple[Tensor, int]]:
    """Rows of all processes, in one or more parts, each with the global index of its first row.

    Up to `RING_ABOVE` bytes they are gathered at once. More are passed around a ring: while a process works on one
    part, that part is already being sent to the next process.
    """
    if world.size == 1:
        yield x, 0
        return
    longest = max(world.sizes)
    if world.size * longest * x[0].numel() * x.element_size() <= RING_ABOVE:
        yield gather_rows(x, world), 0
        return
    current = x.new_zeros(longest, *x.shape[1:])
    current[: len(x)] = x
    incoming = torch.empty_like(current)
    for step in range(world.size):
        owner = (world.rank - step) % world.size
        requests = []
        if step < world.size - 1:
            to, source = (world.rank + 1) % world.size, (world.rank - 1) % world.size
            requests = dist.batch_isend_irecv(
                [dist.P2POp(dist.isend, current, to), dist.P2POp(dist.irecv, incoming, source)]
            )
        yield current[: world.sizes[owner]], sum(world.sizes[:owner])
        for request in requests:
            request.wait()
        current, incoming = incoming, current


def require_first_order(world: World) -> None:
    """Raise RuntimeError for a gradient with create_graph=True over several processes, which isn't differentiable."""
    if world.size > 1 and torch.is_grad_enabled():
        raise RuntimeError(
            f"a loss over {world.size} processes can't be differentiated twice; gather=False computes each alone"
        )


class _GatherRows(torch.autograd.Function):
    """`gather_rows`, whose gradient is the sum over processes."""

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


def gather_with_gradient(x: Tensor, world: World) -> Tensor:
    """Rows of all processes, differentiable."""
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


def all_max(value: Tensor, world: World) -> Tensor:
    """Largest value over processes, elementwise. Not differentiable."""
    if world.size == 1:
        return value.detach()
    largest = value.detach().clone()
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest


def all_logsumexp(value: Tensor, world: World) -> Tensor:
    """Logarithm of the sum over processes of the exponentials of scalars."""
    if world.size == 1:
        return value
    largest = all_max(value, world)
    return largest + all_sum(torch.exp(value - largest), world).log()
