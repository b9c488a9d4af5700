"""Programs that are compiled before they are started; stand-ins for Triton's, as nothing is compiled on a CPU."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from fmicl.utils.triton import compile_in_parallel, launch


class Program:
    """Counts how often it is started and compiled, and in which threads."""

    def __init__(self, takes: float = 0.0, error: Exception | None = None) -> None:
        self.takes, self.error = takes, error
        self.started: list[tuple[Any, ...]] = []
        self.compiled: list[tuple[Any, ...]] = []
        self.threads: set[int] = set()
        self.loaded = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *arguments, **options: self.started.append((grid, arguments, options))

    def warmup(self, *arguments: Any, grid: tuple[int, ...], **options: Any) -> Program:
        time.sleep(self.takes)
        if self.error is not None:
            raise self.error
        self.compiled.append((grid, arguments, options))
        self.threads.add(threading.get_ident())
        return self

    def _init_handles(self) -> None:
        self.loaded += 1


def test_a_program_is_started_or_compiled() -> None:
    program, x = Program(), torch.zeros(32)
    launch(program, (3,))(x, 5, BLOCK=16)
    assert program.started == [((3,), (x, 5), {"BLOCK": 16})]
    with compile_in_parallel():
        launch(program, (4,))(x, 5, BLOCK=16)
    assert program.compiled == [((4,), (x, 5), {"BLOCK": 16})]
    assert (len(program.started), program.loaded) == (1, 1)
    launch(program, (3,))(x)
    assert len(program.started) == 2


def test_each_kind_is_compiled_once() -> None:
    program = Program()
    aligned, other, half = torch.zeros(32), torch.zeros(32)[1:], torch.zeros(32, dtype=torch.float16)
    with compile_in_parallel():
        for tensor in (aligned, torch.zeros(48), other, half):
            for number in (1, 16, 32, 5, 7):
                for block in (16, 32):
                    launch(program, (number,))(tensor, number, 0.5, BLOCK=block)
    assert len(program.compiled) == 3 * 3 * 2  # kinds of tensors, of numbers, and of blocks
    assert len(program.threads) == 1


def test_programs_are_compiled_side_by_side() -> None:
    programs = [Program(takes=0.3) for _ in range(5)]
    began = time.monotonic()
    with compile_in_parallel():
        for program in programs:
            launch(program, (1,))(torch.zeros(4))
    assert [len(program.compiled) for program in programs] == [1] * 5
    assert time.monotonic() - began < 1.2


def test_what_can_not_be_compiled_says_so_when_it_is_started() -> None:
    broken, sound = Program(error=ValueError("too many registers")), Program()
    with compile_in_parallel():
        launch(broken, (1,))(1)
        launch(sound, (1,))(1)
    assert len(sound.compiled) == 1
    launch(broken, (1,))(1)
    assert len(broken.started) == 1, "its own start is where an error of Triton's comes from"


def test_an_error_in_the_trial_leaves_programs_to_be_started() -> None:
    program = Program()

    def trial() -> None:
        with compile_in_parallel():
            launch(program, (1,))(1)
            raise RuntimeError("of the trial")

    with pytest.raises(RuntimeError, match="of the trial"):
        trial()
    launch(program, (1,))(1)
    assert (len(program.compiled), len(program.started)) == (1, 1)
