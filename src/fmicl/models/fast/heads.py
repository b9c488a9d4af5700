"""Projection heads on a GPU: a batch normalisation and its ReLU in one pass, weights in half precision all at once."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.models.fast.known import plain_norm
from fmicl.models.fast.narrow import narrow
from fmicl.utils.triton import can_launch

__all__ = ["speed_up_head"]


def speed_up_head(head: nn.Module) -> bool:
    """Give a sequence of layers the faster forward pass, in place; other modules are left alone.

    Returns:
        Whether there was something to make faster.

    Example:
        >>> from fmicl.models.vision import projection_head
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
    if not (head.training and can_launch(x.device)):
        result: Tensor = usual(x)
        return result
    from fmicl.models.fast.norm import normalise

    linear = [layer for layer in head if type(layer) is nn.Linear]
    own = [parameter for layer in linear for parameter in layer.parameters()]
    weights: dict[Tensor, Tensor] = dict(zip(own, narrow(own, x.device), strict=True))
    place = 0
    while place < len(head):
        layer = head[place]
        # In evaluation mode a normalisation goes by its running statistics; of (N, C, L) the columns aren't channels.
        if _pair(head, place) and layer.training and x.ndim == 2:
            x, _ = normalise(layer, x)
            place += 1
        elif type(layer) is nn.Linear:
            x = F.linear(x, weights[layer.weight], None if layer.bias is None else weights[layer.bias])
        else:
            x = layer(x)
        place += 1
    return x
