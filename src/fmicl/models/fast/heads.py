"""Projection heads on a GPU: fused batch normalisation and ReLU, and weights cast to half precision all at once."""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.models.fast.low_precision import cast_weights
from fmicl.models.fast.support import is_supported_norm
from fmicl.utils.triton import can_launch


def optimise_head(head: nn.Module) -> bool:
    """Replace the forward pass of an nn.Sequential by a fused one, in place; other modules are left unchanged.

    Returns:
        Whether the head has a batch normalisation followed by a ReLU, which can be fused.

    Example:
        >>> from fmicl.models.vision import projection_head
        >>> optimise_head(projection_head(8, 16, 4)), optimise_head(nn.Linear(8, 4))
        (True, False)
    """
    if type(head) is not nn.Sequential or not any(_is_norm_relu(head, place) for place in range(len(head))):
        return False
    head.forward = functools.partial(_forward, head, head.forward)  # type: ignore[method-assign]
    return True


def _is_norm_relu(head: nn.Sequential, place: int) -> bool:
    """Whether the layer is a supported batch normalisation and the next one a ReLU."""
    return is_supported_norm(head[place]) and place + 1 < len(head) and type(head[place + 1]) is nn.ReLU


def _forward(head: nn.Sequential, original: Any, x: Tensor) -> Tensor:
    if not (head.training and can_launch(x.device)):
        result: Tensor = original(x)
        return result
    from fmicl.models.fast.norm import fused_batch_norm

    linear = [layer for layer in head if type(layer) is nn.Linear]
    parameters = [parameter for layer in linear for parameter in layer.parameters()]
    weights: dict[Tensor, Tensor] = dict(zip(parameters, cast_weights(parameters, x.device), strict=True))
    place = 0
    while place < len(head):
        layer = head[place]
        # Not in evaluation mode, which uses running statistics; nor for (N, C, L), whose last axis isn't the channels.
        if _is_norm_relu(head, place) and layer.training and x.ndim == 2:
            x, _ = fused_batch_norm(layer, x)
            place += 1
        elif type(layer) is nn.Linear:
            x = F.linear(x, weights[layer.weight], None if layer.bias is None else weights[layer.bias])
        else:
            x = layer(x)
        place += 1
    return x
