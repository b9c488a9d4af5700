"""Distributed training processes: world size, rank, and launcher (torchrun, SLURM, Lightning)."""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING

from fmicl.config import Settings

if TYPE_CHECKING:
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment


@dataclasses.dataclass(frozen=True)
class Processes:
    """Number of processes, rank of this one, and Lightning plugins of their launcher."""

    devices: int
    nodes: int
    rank: int
    plugins: tuple[SLURMEnvironment, ...] = ()

    @property
    def world_size(self) -> int:
        """All processes."""
        return self.devices * self.nodes


def find_processes(devices: int) -> Processes:
    """From torchrun or SLURM if one of them started this process, else this many on this machine.

    Raises:
        ValueError: SLURM was not told the number of tasks per node.
    """
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

    if TorchElasticEnvironment.detect():
        world, local = int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"])
        return Processes(local, world // local, int(os.environ["RANK"]))
    if SLURMEnvironment.detect():
        try:
            # Runs continue by --resume from their own checkpoints; Lightning's requeueing would write others.
            slurm = SLURMEnvironment(auto_requeue=False)
        except RuntimeError as error:
            raise ValueError(str(error)) from error
        local, nodes = (int(os.environ.get(f"SLURM_{name}", 1)) for name in ("NTASKS_PER_NODE", "NNODES"))
        return Processes(local, nodes, slurm.global_rank(), (slurm,))
    # If Lightning starts the other processes, it tells them their rank in this way.
    return Processes(devices, 1, int(os.environ.get("LOCAL_RANK", 0)) if devices > 1 else 0)


def check_batch(settings: Settings, world_size: int) -> None:
    """Refuse batches that the processes can't share, or that the method can't work with.

    Raises:
        ValueError: unequal or too small shares, or moco's queue doesn't hold a batch.
    """
    if "batch_size" in settings.unresolved:  # of a sweep, before its runs see their data
        return
    if settings.batch_size % world_size or settings.batch_size < 2 * world_size:
        raise ValueError(
            f"batch_size is {settings.batch_size} over {world_size} process(es): each needs the same share, of at "
            "least 2"
        )
    settings.method_options.check_batch(settings.batch_size)
