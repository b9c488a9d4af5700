"""Launch and parallel compilation of Triton kernels, with fake kernels, as the interpreter compiles nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fmicl.utils.triton import compile_in_parallel, launch


class Kernel:
    """A fake kernel that records its launches and compilations."""

    def __init__(self, seconds: float = 0.0, error: Exception | None = None) -> None:
        self.seconds, self.error = seconds, error
        self.launched: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.loaded = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.launched.append((grid, arguments, options))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Kernel:
        time.sleep(self.seconds)
        if self.error is not None:
            raise self.error
        self.compiled.append((grid, arguments, options))
        self.threads.add(threading.get_ident())
        return self

    def _init_handles(self) -> None:
        self.loaded += 1


def test_launch_runs_or_compiles() -> None:
    kernel, x = Kernel(), torch.zeros(32)
    launch(kernel, (3,))(x, 5, BLOCK=16)
    assert kernel.launched == [((3, 1, 1), (x, 5), {"BLOCK": 16})]
    with compile_in_parallel():
        launch(kernel, (4,))(x, 5, BLOCK=16)
    assert kernel.compiled == [((4,), (x, 5), {"BLOCK": 16})]
    assert (len(kernel.launched), kernel.loaded) == (1, 1)
    launch(kernel, (3,))(x)
    assert len(kernel.launched) == 2


def test_each_specialisation_is_compiled_once() -> None:
    kernel = Kernel()
    aligned, other, half = torch.zeros(32), torch.zeros(32)[1:], torch.zeros(32, dtype=torch.float16)
    with compile_in_parallel():
        for tensor in (aligned, torch.zeros(48), other, half):
            for number in (1, 16, 32, 5, 7):
                for block in (16, 32):
                    launch(kernel, (number,))(tensor, number, 0.5, BLOCK=block)
    assert len(kernel.compiled) == 3 * 3 * 2  # tensors, numbers and blocks
    assert len(kernel.threads) == 1


def test_kernels_are_compiled_in_parallel() -> None:
    kernels = [Kernel(seconds=0.3) for _ in range(5)]
    began = time.monotonic()
    with compile_in_parallel():
        for kernel in kernels:
            launch(kernel, (1,))(torch.zeros(4))
    assert [len(kernel.compiled) for kernel in kernels] == [1] * 5
    assert time.monotonic() - began < 1.2


def test_compilation_errors_are_left_to_the_launch() -> None:
    broken, sound = Kernel(error=ValueError("too many registers")), Kernel()
    with compile_in_parallel():
        launch(broken, (1,))(1)
        launch(sound, (1,))(1)
    assert len(sound.compiled) == 1
    launch(broken, (1,))(1)
    assert len(broken.launched) == 1


def test_launches_resume_after_an_error() -> None:
    kernel = Kernel()

    def trial() -> None:
        with compile_in_parallel():
            launch(kernel, (1,))(1)
            raise RuntimeError("of the trial")

    with pytest.raises(RuntimeError, match="of the trial"):
        trial()
    launch(kernel, (1,))(1)
    assert (len(kernel.compiled), len(kernel.launched)) == (1, 1)
