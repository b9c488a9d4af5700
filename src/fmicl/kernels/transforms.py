"""Detection of the autograd context: torch.func transforms, batched gradients, retained graphs, CUDA graph capture."""

from __future__ import annotations

import torch
from torch import Tensor


def in_transforms() -> bool:
    """Whether the caller runs inside torch.func's grad, vmap and the like (torch has no public query for it).

    Example:
        >>> in_transforms(), float(torch.func.grad(lambda x: x if in_transforms() else -x)(torch.ones(())))
        (False, 1.0)
    """
    return bool(torch._C._are_functorch_transforms_active())


def is_batched(gradient: Tensor) -> bool:
    """Whether a tensor is a batch of gradients (is_grads_batched=True, vmap) that passes through the graph at once.

    Example:
        >>> is_batched(torch.ones(2)), bool(torch.func.vmap(lambda x: x + is_batched(x))(torch.zeros(2)).all())
        (False, True)
    """
    if torch.compiler.is_compiling():
        return False
    # torch has two kinds of batched tensors and no public query for either
    keys, parse = torch._C._dispatch_keys(gradient), torch._C._parse_dispatch_key
    return any(keys.has(kind) for kind in (parse("Batched"), parse("FuncTorchBatched")) if kind is not None)


def frees_graph(gradient: Tensor) -> bool:
    """Whether the current backward pass frees the graph, so that saved and incoming tensors may be changed in place.

    Args:
        gradient: the incoming gradient. A batch of gradients counts as several passes.
    """
    if torch.compiler.is_compiling() or is_batched(gradient):
        return False
    keeps_graph = getattr(torch._C._autograd, "_get_current_graph_task_keep_graph", None)
    return keeps_graph is not None and not keeps_graph()


def is_capturing(x: Tensor) -> bool:
    """Whether operations on x are being captured in a CUDA graph, so that no value can be read on the CPU.

    Example:
        >>> is_capturing(torch.zeros(1))
        False
    """
    return x.is_cuda and torch.cuda.is_current_stream_capturing()
