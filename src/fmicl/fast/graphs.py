"""CUDA graphs: a network's kernels are recorded once and then started all at once.

A step of a small network has hundreds of kernels of some microseconds each, and Python takes longer to ask for one than
the GPU to run it. A recorded graph needs no Python.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

__all__ = ["Recorded", "record"]


class Recorded:
    """A network that has been recorded for one shape of input; others run as they always do.

    Args:
        run: the recorded network.
        usual: the network as it is.
        shape: of the input that it was recorded for.
        dtype: of that input.
    """

    def __init__(
        self, run: Callable[[Tensor], Tensor], usual: Callable[[Tensor], Tensor], shape: torch.Size, dtype: torch.dtype
    ) -> None:
        self.run, self.usual, self.shape, self.dtype = run, usual, shape, dtype

    def __call__(self, x: Tensor) -> Tensor:
        """The network's output, which the next call overwrites."""
        same = x.shape == self.shape and x.dtype == self.dtype
        return self.run(x) if same else self.usual(x)


def record(modules: list[nn.Module], x: Tensor) -> Recorded:
    """Record modules that are called one after the other, forward and backward, for inputs like x.

    What the modules hold (running statistics, say) is put back to what it was before. Gradients of parameters are in
    memory that belongs to the graph and is overwritten by its next run: whoever adds up gradients of several batches
    must not record. The same holds for a network that is run twice before its backward pass.

    Args:
        modules: in training mode, on a CUDA device.
        x: an input; its values don't matter.
    """
    chain = nn.Sequential(*modules).train()
    before = [buffer.clone() for buffer in chain.buffers()]
    dtype = torch.get_autocast_dtype("cuda")
    # Inside a graph a weight that was converted once and kept would be one from the time of recording.
    with torch.autocast("cuda", dtype, enabled=torch.is_autocast_enabled("cuda"), cache_enabled=False):
        usual = chain.forward
        run = torch.cuda.make_graphed_callables(chain, (x.detach().clone(memory_format=torch.preserve_format),))
    with torch.no_grad():
        for buffer, value in zip(chain.buffers(), before, strict=True):
            buffer.copy_(value)
    return Recorded(run, usual, x.shape, x.dtype)
