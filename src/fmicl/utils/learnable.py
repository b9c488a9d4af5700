"""Learnable scalars (numbers, or tensors with a gradient), and the tensors that a function captures."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from fmicl.utils.validation import require_positive

Scalar: TypeAlias = float | Tensor
"""A number, or a floating-point tensor without dimensions; such a tensor may have a gradient."""


def require_positive_scalar(name: str, value: Scalar) -> None:
    """Raise ValueError for what is neither a positive, finite number nor a floating-point tensor without dimensions.

    The value of a tensor is checked where it can be read without synchronising: on the CPU, outside of torch.func.

    Example:
        >>> require_positive_scalar("gamma", torch.tensor(2.0))
        >>> require_positive_scalar("gamma", torch.ones(2))
        Traceback (most recent call last):
        ...
        ValueError: gamma must be a positive number or a tensor without dimensions, got torch.float32 of shape (2,)
    """
    if not isinstance(value, Tensor):
        require_positive(name, value)
        return
    if value.dim() != 0 or not value.is_floating_point():
        raise ValueError(
            f"{name} must be a positive number or a tensor without dimensions, got {value.dtype} of shape "
            f"{tuple(value.shape)}"
        )
    known = host_value(value)
    if known is not None:
        require_positive(name, known)


def host_value(value: Scalar) -> float | None:
    """The value as a number; None where reading it would synchronise (a GPU) or isn't possible (torch.func).

    Example:
        >>> host_value(3.0), host_value(torch.tensor(3.0)), host_value(torch.tensor(3.0, device="meta"))
        (3.0, 3.0, None)
    """
    if not isinstance(value, Tensor):
        return value
    if value.device.type != "cpu" or torch.compiler.is_compiling():
        return None
    if torch._C._functorch.is_functorch_wrapped_tensor(value):
        return None
    return float(value.detach())


def log(value: Scalar) -> Scalar:
    """The natural logarithm; differentiable for a tensor."""
    return torch.log(value) if isinstance(value, Tensor) else math.log(value)


def format_scalar(value: object) -> str:
    """A scalar for a repr, with "learned" for a tensor that has a gradient; other settings by `str`.

    Example:
        >>> format_scalar(40.0), format_scalar(torch.tensor(2.0, requires_grad=True)), format_scalar("normalised")
        ('40', '2 (learned)', 'normalised')
    """
    if not isinstance(value, Tensor):
        number = isinstance(value, numbers.Real) and not isinstance(value, bool)
        return f"{value:g}" if number else str(value)
    return f"{float(value.detach()):g}" + " (learned)" * value.requires_grad


def leaf_tensors(function: Callable[[Tensor], Tensor], argument: Tensor) -> list[Tensor]:
    """The leaf tensors with a gradient that a function depends on beside its argument, in the order of its graph.

    They may be captured by a closure, attributes of an object or parameters of a module; expressions of them count.

    Args:
        function: made of torch operations.
        argument: any argument that it takes.

    Example:
        >>> order = torch.nn.Parameter(torch.tensor(0.5))
        >>> leaf_tensors(lambda u: u ** (1 + order.exp()), torch.ones(1))[0] is order
        True
    """
    with torch.enable_grad():
        value = function(argument.detach())
    found: dict[int, Tensor] = {}
    seen, waiting = set(), [value.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)  # the graph keeps its nodes, so they can be told apart
        leaf = getattr(node, "variable", None)  # of AccumulateGrad, the end of a graph
        if isinstance(leaf, Tensor):
            found[id(leaf)] = leaf
        waiting.extend(next_node for next_node, _ in reversed(node.next_functions))
    return list(found.values())
