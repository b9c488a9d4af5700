"""CUDA graphs: the kernels of a step are recorded once and then started all at once.

A step of a small network has hundreds of kernels of some microseconds each, and Python takes longer to ask for one than
the GPU to run it. A recorded graph needs no Python.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.utils.triton import compile_in_parallel

__all__ = ["Recorded", "record"]

Function = Callable[..., tuple[Tensor, ...]]


class Recorded:
    """A function that has been recorded for inputs of one kind; others go through the function itself.

    Args:
        run: what was recorded.
        usual: the function as it is.
        inputs: such as it was recorded for.
    """

    def __init__(self, run: Function, usual: Function, inputs: Sequence[Tensor]) -> None:
        self.run, self.usual = run, usual
        self.kind = [(value.shape, value.dtype) for value in inputs]

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results, which the next call overwrites."""
        same = self.kind == [(value.shape, value.dtype) for value in inputs]
        return self.run(*inputs) if same else self.usual(*inputs)


class _Whole(nn.Module):
    """A function together with the modules whose parameters it uses."""

    def __init__(self, function: Function, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*inputs)


def record(function: Function, modules: Sequence[nn.Module], *inputs: Tensor) -> Recorded:
    """Record a function of tensors, forward and backward, for inputs like these.

    What the modules hold (running statistics, say) is put back to what it was before. Gradients of parameters are in
    memory that belongs to the graph and is overwritten by its next run: whoever adds up the gradients of several
    batches must not record.

    Args:
        function: gives a tuple of tensors; it may look at no values on the CPU.
        modules: those whose parameters and buffers it uses, in training mode on a CUDA device.
        inputs: their values don't matter.
    """
    whole = _Whole(function, modules)  # in training mode itself; parts that are frozen stay so
    before = [buffer.clone() for buffer in whole.buffers()]
    random = torch.cuda.get_rng_state(inputs[0].device)
    dtype = torch.get_autocast_dtype("cuda")
    samples = tuple(value.detach().clone(memory_format=torch.preserve_format) for value in inputs)
    # Recording is on a stream of its own, and so are the gradients' nodes; it says so at the first step after it, too.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    # Inside a graph a weight that was converted once and kept would be one from the time of recording.
    try:
        with torch.autocast("cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            _compile(whole, samples)
            with uncollected():
                run: Any = torch.cuda.make_graphed_callables(whole, samples, allow_unused_input=True)
    finally:  # also where it fails and training goes on without
        # The first step draws the same random numbers, whether it was recorded before it or not.
        torch.cuda.set_rng_state(random, inputs[0].device)
        with torch.no_grad():
            for buffer, value in zip(whole.buffers(), before, strict=True):
                buffer.copy_(value)
    return Recorded(run, function, inputs)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Garbage is collected before, not within: a graph that is freed while another one is recorded spoils it."""
    was = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def _compile(whole: nn.Module, samples: tuple[Tensor, ...]) -> None:
    """Compile the step's programs by a trial. Nothing of it may be left: a node of autograd belongs to one stream."""
    with contextlib.suppress(Exception), compile_in_parallel():  # what is wrong with the step, recording will tell
        trained = [parameter for parameter in whole.parameters() if parameter.requires_grad]
        torch.autograd.grad(whole(*samples)[0], trained, allow_unused=True)
