"""Programs of Triton: started one by one, or compiled beforehand, all at once.

Triton compiles a program when it is first started, which takes a second or so; a training step has some twenty of them.
`compile_together` finds out which by a trial of the step in which none is started, and compiles them side by side.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

__all__ = ["compile_together", "launch"]

_gathering: _Gathering | None = None  # for all threads: autograd has one of its own


def launch(program: Any, grid: tuple[int, ...]) -> Callable[..., object]:
    """What starts a program on a grid; inside `compile_together`, what has it compiled for the same arguments.

    Example:
        >>> launch({(2, 3): max}, (2, 3))(5, 7)
        7
    """
    if _gathering is None:
        started: Callable[..., object] = program[grid]
        return started
    return functools.partial(_gathering.add, program, grid)


@contextlib.contextmanager
def compile_together() -> Iterator[None]:
    """Inside, programs are not started but compiled by threads beside; afterwards they are there.

    What they should have written is whatever was in memory. One that can't be compiled says so when it is started.
    """
    global _gathering
    gathering = _gathering = _Gathering()
    try:
        yield
    finally:
        _gathering = None
        gathering.wait()


class _Gathering:
    """Programs under way to be compiled, each by a thread of its own: so none is compiled twice."""

    def __init__(self) -> None:
        self.threads: dict[int, ThreadPoolExecutor] = {}
        self.known: set[Hashable] = set()
        self.compiled: list[Future[None]] = []

    def add(self, program: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
        """Have a program compiled, unless one like it is."""
        key = (id(program), frozenset(options.items()), tuple(map(_kind, arguments)))
        if key in self.known:
            return
        self.known.add(key)
        thread = self.threads.get(id(program))
        if thread is None:
            thread = self.threads[id(program)] = ThreadPoolExecutor(max_workers=1)
        self.compiled.append(thread.submit(_compile, program, grid, arguments, options))

    def wait(self) -> None:
        """Until all is done."""
        for future in self.compiled:
            future.exception()
        for thread in self.threads.values():
            thread.shutdown()


def _compile(program: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
    tensor = next((argument for argument in arguments if isinstance(argument, Tensor)), None)
    if tensor is not None and tensor.is_cuda:
        torch.cuda.set_device(tensor.device)
    compiled = program.warmup(*arguments, grid=grid, **options)
    if hasattr(compiled, "_init_handles"):
        compiled._init_handles()  # loads it, and compiles what starts it


def _kind(argument: Any) -> Hashable:
    """What a program is compiled for: types, and whether a number is 1 or a multiple of 16."""
    if isinstance(argument, Tensor):
        return argument.dtype, argument.data_ptr() % 16 == 0
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0
    if hasattr(argument, "block_shape"):  # a descriptor
        return argument.base.dtype, tuple(argument.block_shape)
    return str(type(argument))
