"""A script that two real processes run together."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import torch

HEAD = """
import os, sys, torch
from torch import nn, distributed
rank, folder = int(sys.argv[1]), sys.argv[2]
distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
"""
TAIL = """
torch.save(result, f"{folder}/result{rank}.pt")
distributed.barrier()
distributed.destroy_process_group()
os._exit(0)  # how threads of the library come down with the interpreter is not what is tested
"""


def of_two_processes(script: str, folder: Path) -> list[Any]:
    """What each process has as `result` at the end; the script knows `rank`, torch, nn and distributed."""
    (folder / "two.py").write_text(HEAD + textwrap.dedent(script) + TAIL)
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(folder / "two.py")]
    runs = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(2)]
    assert [run.wait(timeout=60) for run in runs] == [0, 0]
    return [torch.load(folder / f"result{rank}.pt", weights_only=True) for rank in range(2)]
