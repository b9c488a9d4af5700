"""Whether a batch fits into the memory of the machine, found out before the first step.

A CPU that runs out of memory says nothing: the kernel ends the process. So what a step will need is estimated from what
two small batches leave behind for the backward pass, and compared with what is free.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.config.recipes import Recipe
from fmicl.config.settings import Settings
from fmicl.data import dataset_info
from fmicl.methods import Method
from fmicl.training.processes import Processes
from fmicl.utils.machine import control_groups, lines

__all__ = ["DoesNotFitError", "Need", "check_memory", "explained", "free_memory", "need_of"]

GRADIENTS = 1.1
"""What is saved for the backward pass, and the gradients of the layers that it is in."""


class DoesNotFitError(ValueError):
    """A step needs more memory than there is."""


@dataclass(frozen=True)
class Need:
    """Bytes that a step of one process needs beyond the network: a constant, and so many for each sample."""

    constant: float
    sample: float

    def of(self, samples: int) -> float:
        """Bytes for this many samples."""
        return self.constant + self.sample * samples

    def fitting(self, free: float) -> int:
        """The largest power of 2 whose samples fit; 0 if not even two do.

        Example:
            >>> Need(constant=10, sample=2).fitting(100), Need(constant=10, sample=2).fitting(13)
            (32, 0)
        """
        most = (free - self.constant) / self.sample
        return 2 ** math.floor(math.log2(most)) if most >= 2 else 0


def check_memory(
    recipe: Settings, method: Method, views: Callable[[int], Tensor], processes: Processes, *, half: bool = False
) -> None:
    """Refuse a batch that does not fit into the memory of this machine, whose processes train on the CPU.

    Args:
        recipe: all settings.
        method: about to be trained; it is as before afterwards, and so are torch's random numbers.
        views: this many views as the encoder takes them, of any content.
        processes: which share the batch.
        half: whether training is in bfloat16.

    Raises:
        DoesNotFitError: it doesn't; the message says which batch does.
    """
    free = free_memory()
    if free is None:
        return
    need, here = need_of(method, views, half=half, multiplicity=_multiplicity(recipe)), processes.devices
    whole = here * need.of(recipe.batch_size // processes.world_size)
    if whole <= free:
        return
    share = f" over {processes.world_size} processes" if processes.world_size > 1 else ""
    machine = " on this machine" if processes.nodes > 1 else ""
    fits = need.fitting(0.9 * free / here) * processes.world_size  # a little less may be free the next time
    raise DoesNotFitError(
        f"a batch of {recipe.batch_size} ({_multiplicity(recipe)} views each){share} needs about "
        f"{_gib(whole)}{machine}, and {_gib(free)} are free: "
        f"{f'--batch-size {fits} fits' if fits else 'no --batch-size fits'}; {_advice(recipe)}"
    )


@contextlib.contextmanager
def explained(recipe: Settings) -> Iterator[None]:
    """Say in words what to do where torch has no memory left.

    Raises:
        DoesNotFitError: in place of torch's own error.
    """
    try:
        yield
    except RuntimeError as error:
        words = ("out of memory", "can't allocate memory")  # of a GPU, and of the CPU
        if not (isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)):
            raise
        reason = str(error).strip().splitlines()[0]
        raise DoesNotFitError(
            f"the memory is too small for a batch of {recipe.batch_size} ({_multiplicity(recipe)} views each): take a "
            f"smaller --batch-size; {_advice(recipe)}{_held(recipe)}. torch says: {reason}"
        ) from error


def _advice(recipe: Settings) -> str:
    encoder = "--encoder or --size" if recipe.kind == "images" else "--model or --length"
    ways = ["a --multiplicity of 2"] if _multiplicity(recipe) > 2 else []
    ways += ["a smaller --rotation-size"] if getattr(recipe, "rotation_weight", 0.0) else []
    others = "".join(f", or {way}" for way in ways) + ("," if ways else "")
    return f"a smaller {encoder}{others} needs less as well"


def _held(recipe: Settings) -> str:
    """What frees memory that the images themselves may have."""
    if not isinstance(recipe, Recipe) or not (recipe.memory_gib and dataset_info(recipe.dataset).is_folder):
        return ""
    return "; with --memory-gib 0 the images stay on the disk"


def _multiplicity(recipe: Settings) -> int:
    """Views of each sample; of sentences there are two."""
    return int(getattr(recipe, "multiplicity", 2))


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def need_of(method: Method, views: Callable[[int], Tensor], *, half: bool = False, multiplicity: int = 2) -> Need:
    """What a step needs beyond the network: what is saved for the backward pass, gradients, and the optimiser's state.

    Two small batches tell what grows with the batch and what, as weights, doesn't.

    Args:
        method: in the mode that it will be trained in; it is as before afterwards, and so are torch's random numbers.
        views: this many views as the encoder takes them, of any content.
        half: whether training is in bfloat16.
        multiplicity: views of each sample.
    """
    with _as_before(method), torch.autocast("cpu", torch.bfloat16, enabled=half):
        two, three = (_saved(method, views(n), views((multiplicity - 1) * n)) for n in (2, 3))
    weights = sum(parameter.nbytes for parameter in method.parameters() if parameter.requires_grad)
    copies = 3 if method.optimisation.optimizer == "adamw" else 2  # the gradient, and one moment or two
    return Need(constant=copies * weights, sample=GRADIENTS * (three - two))


class _Sum(nn.Module):
    """In the objective's place, which needs little more than the embeddings."""

    def forward(self, x: Tensor, y: Tensor, **_: Any) -> Tensor:
        return x.sum() + y.sum()


@contextlib.contextmanager
def _as_before(method: Method) -> Iterator[None]:
    """Without the objective for a while; afterwards statistics of batches and random numbers are what they were."""
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


def _saved(method: Method, first: Tensor, second: Tensor) -> int:
    """Bytes that one forward pass keeps for the backward pass; tensors that share their memory count once."""
    kept: list[Tensor] = []  # while they are held, no two of them have the same address by chance

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        method.total(first, second)
    storages = [tensor.untyped_storage() for tensor in kept]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that processes can still have, by the kernel and the control groups; None where Linux isn't there to tell.

    Args:
        root: where proc and sys are.
    """
    found = dict(line.split(":", 1) for line in lines(root / "proc/meminfo"))
    if "MemAvailable" not in found:
        return None
    available = int(found["MemAvailable"].split()[0]) * 1024
    return max(0, min([available, *_left_by_groups(root)]))


def _left_by_groups(root: Path) -> Iterator[int]:
    """What each control group above this process leaves: its limit less what is used, but for cached files."""
    for group in control_groups("memory", root):
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if group.older else ("memory.max", "memory.current")
        most, now = (lines(group.path / name) for name in names)
        if most and now and most[0].isdigit():  # else it is "max", or not to be seen from a container
            stat = dict(entry.split(maxsplit=1) for entry in lines(group.path / "memory.stat"))
            total = "total_" if group.older else ""
            cached = sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            yield int(most[0]) - int(now[0]) + cached
