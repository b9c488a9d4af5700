"""timm's ResNets on a GPU, with each normalisation, residual sum and ReLU in one pass (`fmicl.models.fast.norm`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.models.fast.known import plain_norm
from fmicl.models.fast.narrow import narrow
from fmicl.utils.triton import can_launch

__all__ = ["speed_up", "suits"]


def suits(model: nn.Module) -> bool:
    """Whether `speed_up` knows the network: a plain ResNet of timm's, with batch normalisation and ReLU throughout.

    Example:
        >>> from fmicl.models.vision import build_encoder
        >>> suits(build_encoder("resnet18", size=32)), suits(build_encoder("seresnet18", size=32))
        (True, False)
    """
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet

    if type(model) is not ResNet or not isinstance(model.conv1, nn.Conv2d):
        return False
    if not (plain_norm(model.bn1) and type(model.act1) is nn.ReLU) or model.grad_checkpointing:
        return False
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if any(type(conv) is not nn.Conv2d for conv in convs):
        return False  # one that does more than convolve with its weight
    blocks = _blocks(model)
    return bool(blocks) and all(type(block) in (BasicBlock, Bottleneck) and _plain_block(block) for block in blocks)


def speed_up(model: nn.Module) -> None:
    """Give the network the faster forward pass, in place; used in training on a CUDA device, and nowhere else.

    The forward methods of its layers are not called then, and so neither are hooks on them.

    Networks of one process take turns: two that train on two streams of a device at once would count into each other.

    Raises:
        ValueError: the network is not one that `suits`.
    """
    if not suits(model):
        raise ValueError(f"{type(model).__name__} is not a plain ResNet of timm's")
    model.forward = functools.partial(_forward, model, model.forward)


def _forward(model: Any, usual: Any, images: Tensor) -> Tensor:
    # A part in evaluation mode, a frozen normalisation, say, goes by its running statistics.
    if not (can_launch(images.device) and all(module.training for module in model.modules())):
        result: Tensor = usual(images)
        return result
    from fmicl.models.fast.norm import normalise
    from fmicl.models.fast.stem import convolve_images, suits_stem

    stem = suits_stem(model.conv1, images)
    convs = [
        module for module in model.modules() if isinstance(module, nn.Conv2d) and not (stem and module is model.conv1)
    ]
    convolve = _Convolutions(convs, images.device)
    blocks = _blocks(model)
    every = [_every(block) for block in blocks] + [1]
    maps = convolve_images(model.conv1, images) if stem else convolve(model.conv1, images)
    if isinstance(model.maxpool, nn.Identity):
        pair = normalise(model.bn1, maps, every=every[0])
    else:
        pooled = model.maxpool(normalise(model.bn1, maps)[0])
        pair = (pooled, pooled[:, :, :: every[0], :: every[0]])
    for block, next_every in zip(blocks, every[1:], strict=True):
        pair = _block(block, convolve, *pair, next_every)
    features: Tensor = model.forward_head(pair[0])
    return features


class _Convolutions:
    """Convolutions with their weights in the type that autocast wants, converted all at once."""

    def __init__(self, convs: list[nn.Conv2d], device: torch.device) -> None:
        self.weights = dict(zip(convs, narrow([conv.weight for conv in convs], device), strict=True))

    def __call__(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        result: Tensor = conv._conv_forward(x, self.weights[conv], conv.bias)
        return result

    def of_pixels(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """Of 1x1 and with a stride, on the pixels that it looks at."""
        return F.conv2d(x, self.weights[conv], conv.bias)


def _block(block: Any, convolve: _Convolutions, x: Tensor, residual: Tensor, every: int) -> tuple[Tensor, Tensor]:
    """One block on an activation that comes twice, for its two branches: so that their gradients come apart.

    Args:
        block: of timm.
        convolve: what convolves.
        x: the activation.
        residual: the same; or those pixels of it that the block's shortcut looks at, see `_every`.
        every: of the next block.
    """
    from fmicl.models.fast.norm import normalise

    y, _ = normalise(block.bn1, convolve(block.conv1, x))
    if hasattr(block, "conv3"):
        y, _ = normalise(block.bn2, convolve(block.conv2, y))
        last, norm = block.conv3, block.bn3
    else:
        last, norm = block.conv2, block.bn2
    if block.downsample is not None:
        conv = block.downsample[0]
        shortcut = convolve.of_pixels(conv, residual) if _every(block) > 1 else convolve(conv, residual)
        residual, _ = normalise(block.downsample[1], shortcut, relu=False)
    return normalise(norm, convolve(last, y), residual, every=every)


def _every(block: Any) -> int:
    """Of how many pixels in a row the shortcut of a block looks at one: its stride, if it is of 1x1."""
    if block.downsample is None:
        return 1
    conv = block.downsample[0]
    plain = conv.kernel_size == (1, 1) and conv.padding == (0, 0) and conv.groups == 1
    return int(conv.stride[0]) if plain and conv.stride[0] == conv.stride[1] else 1


def _blocks(model: Any) -> list[nn.Module]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


def _plain_block(block: Any) -> bool:
    norms = [module for name, module in block.named_children() if name.startswith("bn")]
    acts = [module for name, module in block.named_children() if name.startswith("act")]
    extras = (block.se, block.drop_path, getattr(block, "aa", None), getattr(block, "drop_block", None))
    if not all(map(plain_norm, norms)) or any(type(act) is not nn.ReLU for act in acts):
        return False
    if any(extra is not None and not isinstance(extra, nn.Identity) for extra in extras):
        return False
    down = block.downsample
    if down is None:
        return True
    return len(down) == 2 and type(down[0]) is nn.Conv2d and down[0].bias is None and plain_norm(down[1])
