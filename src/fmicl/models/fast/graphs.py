"""CUDA graph capture of a training step.

A step of a small network launches hundreds of kernels of a few microseconds each, and Python takes longer to launch a
kernel than the GPU to run it. A captured graph launches all of them at once.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fmicl.utils.triton import compile_in_parallel

Function = Callable[..., tuple[Tensor, ...]]


class CapturedStep:
    """A function captured as a CUDA graph; inputs of other shapes or dtypes run the function itself.

    Args:
        graphed: the captured function.
        eager: the function itself.
        inputs: inputs like those that it was captured with.
    """

    def __init__(self, graphed: Function, eager: Function, inputs: Sequence[Tensor]) -> None:
        self.graphed, self.eager = graphed, eager
        self.signature = _signature(inputs)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """The function's results, which the next call overwrites."""
        return self.graphed(*inputs) if _signature(inputs) == self.signature else self.eager(*inputs)


def _signature(inputs: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    return [(value.shape, value.dtype) for value in inputs]


class _Step(nn.Module):
    """A function together with the modules whose parameters it uses."""

    def __init__(self, function: Function, modules: Sequence[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self.function = function

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        return self.function(*inputs)


def capture_graph(function: Function, modules: Sequence[nn.Module], *inputs: Tensor) -> CapturedStep:
    """Capture the forward and backward pass of a function as CUDA graphs, for inputs like these.

    Buffers of the modules (running statistics) and the random state are restored afterwards. Gradients of parameters
    are in memory of the graph, which its next run overwrites: don't capture a step whose gradients are accumulated.

    Args:
        function: returns a tuple of tensors, and reads no values on the CPU.
        modules: those whose parameters and buffers it uses, in training mode on a CUDA device.
        inputs: of the right shapes and dtypes; their values don't matter.
    """
    step = _Step(function, modules)  # itself in training mode; frozen parts stay frozen
    buffers = [buffer.clone() for buffer in step.buffers()]
    random_state = torch.cuda.get_rng_state(inputs[0].device)
    dtype = torch.get_autocast_dtype("cuda")
    samples = tuple(value.detach().clone(memory_format=torch.preserve_format) for value in inputs)
    # The capture has its own stream, and so have its gradients: torch would warn at the first step afterwards.
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        # Without autocast's cache, which would freeze converted weights in the graph.
        with torch.autocast("cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
            _compile_kernels(step, samples)
            with no_garbage_collection():
                graphed: Any = torch.cuda.make_graphed_callables(step, samples, allow_unused_input=True)
    finally:  # also after a failure, where training continues without the graph
        torch.cuda.set_rng_state(random_state, inputs[0].device)
        with torch.no_grad():
            for buffer, value in zip(step.buffers(), buffers, strict=True):
                buffer.copy_(value)
    return CapturedStep(graphed, function, inputs)


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Collect garbage first and not inside: freeing a CUDA graph invalidates the capture of another one."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _compile_kernels(step: nn.Module, samples: tuple[Tensor, ...]) -> None:
    """Compile the step's Triton kernels by a trial run that leaves no autograd nodes, which are bound to a stream."""
    with contextlib.suppress(Exception), compile_in_parallel():  # errors of the step are raised by the capture
        trained = [parameter for parameter in step.parameters() if parameter.requires_grad]
        torch.autograd.grad(step(*samples)[0], trained, allow_unused=True)
