"""Projection heads on a GPU: each batch normalisation and the ReLU after it in one pass (`fmicl.fast.norm`)."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from fmicl.fast.resnet import on_gpu, plain_norm

__all__ = ["speed_up_head"]


def speed_up_head(head: nn.Module) -> bool:
    """Give a sequence of layers the faster forward pass, in place; other modules are left alone.

    Returns:
        Whether there was something to make faster.

    Example:
        >>> from fmicl.models import projection_head
        >>> speed_up_head(projection_head(8, 16, 4)), speed_up_head(nn.Linear(8, 4))
        (True, False)
    """
    if type(head) is not nn.Sequential or not any(_pair(head, place) for place in range(len(head))):
        return False
    head.forward = functools.partial(_forward, head, head.forward)  # type: ignore[method-assign]
    return True


def _pair(head: nn.Sequential, place: int) -> bool:
    """Whether a normalisation that `normalise` knows stands here, and a ReLU after it."""
    return plain_norm(head[place]) and place + 1 < len(head) and type(head[place + 1]) is nn.ReLU


def _forward(head: nn.Sequential, usual: Any, x: Tensor) -> Tensor:
    if not (head.training and on_gpu(x)):
        result: Tensor = usual(x)
        return result
    from fmicl.fast.norm import normalise

    place = 0
    while place < len(head):
        # In evaluation mode a normalisation goes by its running statistics; of (N, C, L) the columns aren't channels.
        if _pair(head, place) and head[place].training and x.ndim == 2:
            x, _ = normalise(head[place], x)
            place += 2
        else:
            x = head[place](x)
            place += 1
    return x
