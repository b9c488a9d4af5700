"""Memory check before training: does a batch fit into the memory of the machine?

On a CPU, running out of memory gives no message: the kernel kills the process. So the memory of a step is estimated
from what two small batches save for the backward pass, and compared with what is free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.methods import Method
from fmicl.training.processes import Processes
from fmicl.utils.errors import BatchTooLargeError
from fmicl.utils.machine import free_memory

GRADIENTS = 1.1
"""What is saved for the backward pass, plus the gradients of the layer that it is in."""


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a step of one process needs beyond the network: a constant part and a part per sample."""

    constant: float
    sample: float

    def of(self, samples: int) -> float:
        """Bytes for this many samples."""
        return self.constant + self.sample * samples

    def largest_batch(self, free: float) -> int:
        """The largest power of 2 of samples that fits; 0 if not even two do.

        Example:
            >>> need = MemoryNeed(constant=10, sample=2)
            >>> need.largest_batch(100), need.largest_batch(13)
            (32, 0)
        """
        most = (free - self.constant) / self.sample
        return 2 ** math.floor(math.log2(most)) if most >= 2 else 0


@dataclass(frozen=True)
class BatchDescription:
    """What messages about memory say of a batch: samples, views, local crops, and advice on what needs less."""

    batch_size: int
    views: int
    advice: str
    local_crops: int = 0
    local_size: int = 0

    def __str__(self) -> str:
        crops = f" and {self.local_crops} local crops" if self.local_crops else ""
        return f"a batch of {self.batch_size} ({self.views} views{crops} each)"


def check_memory(
    batch: BatchDescription,
    method: Method,
    views: Callable[[int], Tensor],
    processes: Processes,
    *,
    optimizer: str = "sgd",
    bf16: bool = False,
) -> None:
    """Refuse a batch that does not fit into the memory of this machine, whose processes train on the CPU.

    Args:
        batch: the batch of all processes together.
        method: about to be trained; it is left unchanged, and so are torch's random numbers.
        views: makes this many views as the encoder takes them, of any content.
        processes: which share the batch.
        optimizer: its name; they differ in their state.
        bf16: whether training is in bfloat16.

    Raises:
        BatchTooLargeError: it doesn't fit; the message has a batch size that does.
    """
    free = free_memory()
    if free is None:
        return
    need = measure_need(batch, method, views, optimizer=optimizer, bf16=bf16)
    local = processes.devices
    whole = local * need.of(batch.batch_size // processes.world_size)
    if whole <= free:
        return
    share = f" over {processes.world_size} processes" if processes.world_size > 1 else ""
    machine = " on this machine" if processes.nodes > 1 else ""
    fits = need.largest_batch(0.9 * free / local) * processes.world_size  # a little less may be free the next time
    raise BatchTooLargeError(
        f"{batch}{share} needs about {_gib(whole)}{machine}, and {_gib(free)} are free: "
        f"{f'--batch-size {fits} fits' if fits else 'no --batch-size fits'}; {batch.advice}"
    )


@contextlib.contextmanager
def explain_out_of_memory(batch: BatchDescription, hint: str = "") -> Iterator[None]:
    """Replace torch's out-of-memory errors by one that says what to do.

    Raises:
        BatchTooLargeError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        messages = ("out of memory", "can't allocate memory")  # of a GPU, and of the CPU
        if not (isinstance(error, torch.OutOfMemoryError) or any(message in str(error) for message in messages)):
            raise
        reason = str(error).strip().splitlines()[0]
        raise BatchTooLargeError(
            f"the memory is too small for {batch}: take a smaller --batch-size; {batch.advice}{hint}. torch says: "
            f"{reason}"
        ) from error


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def measure_need(
    batch: BatchDescription,
    method: Method,
    views: Callable[[int], Tensor],
    *,
    optimizer: str = "sgd",
    bf16: bool = False,
) -> MemoryNeed:
    """Memory of a step beyond the network: saved tensors, gradients, and the optimiser's state.

    Two small batches tell what grows with the batch and what, like weights, doesn't.

    Args:
        batch: the views and local crops of a sample.
        method: in training mode; the others are as in :func:`check_memory`.
        views: makes views.
        optimizer: its name.
        bf16: whether training is in bfloat16.
    """

    def small_batch(n: int) -> list[Tensor]:
        found = [views(n), views((batch.views - 1) * n)]
        if batch.local_crops:
            found.append(torch.rand(batch.local_crops * n, found[0].shape[1], batch.local_size, batch.local_size))
        return found

    with _unchanged(method), torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        two, three = (_saved_bytes(method, small_batch(n)) for n in (2, 3))
    weights = sum(parameter.nbytes for parameter in method.parameters() if parameter.requires_grad)
    copies = 3 if optimizer == "adamw" else 2  # the gradient, and one moment or two
    return MemoryNeed(constant=copies * weights, sample=GRADIENTS * (three - two))


class _Sum(nn.Module):
    """Stands in for the objective, which needs little more than the embeddings."""

    def forward(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return x.sum() + y.sum()


@contextlib.contextmanager
def _unchanged(method: Method) -> Iterator[None]:
    """Replace the objective; afterwards restore it, the batch statistics and torch's random state."""
    objective, buffers = method.objective, [buffer.clone() for buffer in method.buffers()]
    try:
        method.objective = _Sum()
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        method.objective = objective
        with torch.no_grad():
            for buffer, value in zip(method.buffers(), buffers, strict=True):
                buffer.copy_(value)


def _saved_bytes(method: Method, views: list[Tensor]) -> int:
    """Bytes that one forward pass saves for the backward pass; tensors that share memory count once."""
    saved: list[Tensor] = []  # while they are held, no two of them have the same address by chance

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        method.loss(*views)
    storages = [tensor.untyped_storage() for tensor in saved]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
