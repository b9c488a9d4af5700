"""Process groups of torch.distributed on this machine."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes


@contextlib.contextmanager
def process_group(rank: int, world: int, port: int) -> Iterator[None]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    try:
        yield
        dist.barrier()  # nobody leaves while another is still talking
    finally:
        gc.collect()  # modules that hold on to the group would end it at the interpreter's exit, in no good order
        dist.destroy_process_group()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def spawn(worker: Callable[..., None], world: int, *arguments: object) -> None:
    start_processes(worker, arguments, nprocs=world, join=True, start_method="spawn")
