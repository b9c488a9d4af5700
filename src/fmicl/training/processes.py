"""How many processes train a run together, who started them, and whether a batch can be shared out among them."""

from __future__ import annotations

import dataclasses
import os

from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from fmicl.config.settings import Settings

__all__ = ["Processes", "check_batch", "resolve_processes"]


@dataclasses.dataclass(frozen=True)
class Processes:
    """How many processes train together, and who launched them."""

    devices: int
    nodes: int
    rank: int
    plugins: tuple[SLURMEnvironment, ...] = ()

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.devices * self.nodes


def resolve_processes(recipe: Settings) -> Processes:
    """From torchrun or SLURM where one of them started this process, else from the recipe.

    Raises:
        ValueError: SLURM was not told the number of tasks for each node.
    """
    if TorchElasticEnvironment.detect():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Processes(local, world // local, int(os.environ["RANK"]))
    if SLURMEnvironment.detect():
        try:
            # Runs go on by --resume from their own checkpoints; Lightning's requeueing would write others.
            slurm = SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        local, nodes = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("NTASKS_PER_NODE", "NNODES"))
        return Processes(local, nodes, slurm.global_rank(), (slurm,))
    # Where Lightning starts the other processes itself, it tells them their number in this way.
    return Processes(recipe.devices, 1, int(os.environ.get("LOCAL_RANK", 0)) if recipe.devices > 1 else 0)


def check_batch(recipe: Settings, world_size: int) -> None:
    """Refuse batches that can't be shared out.

    Raises:
        ValueError: the processes would have unequal shares or too small ones, or moco's queue holds no batch.
    """
    if recipe.batch_size % world_size or recipe.batch_size < 2 * world_size:
        raise ValueError(
            f"batch_size is {recipe.batch_size} over {world_size} process(es): each needs the same share, of at least 2"
        )
    keys = recipe.batch_size * (2 if recipe.symmetric else 1)
    if recipe.method == "moco" and recipe.queue < keys:
        raise ValueError(f"queue ({recipe.queue}) must hold at least one batch of keys ({keys}): make it larger")
