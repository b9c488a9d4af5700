"""timm ResNets on a GPU with fused batch normalisation, residual sum and ReLU (`fmicl.models.fast.norm`)."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmicl.models.fast.low_precision import cast_weights
from fmicl.models.fast.support import is_supported_norm
from fmicl.utils.triton import can_launch


def is_supported(model: nn.Module) -> bool:
    """Whether `optimise_resnet` supports the network: a plain timm ResNet with batch normalisation and ReLU only.

    Example:
        >>> from fmicl.models.vision import build_encoder
        >>> is_supported(build_encoder("resnet18", size=32)), is_supported(build_encoder("seresnet18", size=32))
        (True, False)
    """
    from timm.models.resnet import BasicBlock, Bottleneck, ResNet

    if type(model) is not ResNet or not isinstance(model.conv1, nn.Conv2d):
        return False
    if not (is_supported_norm(model.bn1) and type(model.act1) is nn.ReLU) or model.grad_checkpointing:
        return False
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    if any(type(conv) is not nn.Conv2d for conv in convs):
        return False  # a subclass may do more than convolve with its weight
    blocks = _blocks(model)
    return bool(blocks) and all(
        type(block) in (BasicBlock, Bottleneck) and _is_supported_block(block) for block in blocks
    )


def optimise_resnet(model: nn.Module) -> None:
    """Replace the network's forward pass by a fused one, in place; it runs in training on a CUDA device only.

    It doesn't call the forward methods of the layers, and so no hooks on them. Networks of one process must not run on
    two streams of a device at the same time: they share counters.

    Raises:
        ValueError: the network isn't supported (`is_supported`).
    """
    if not is_supported(model):
        raise ValueError(f"optimise_resnet needs a plain timm ResNet, got {type(model).__name__}")
    model.forward = functools.partial(_forward, model, model.forward)


def _forward(model: Any, original: Any, images: Tensor) -> Tensor:
    # A layer in evaluation mode, such as a frozen normalisation, uses its running statistics.
    if not (can_launch(images.device) and all(module.training for module in model.modules())):
        result: Tensor = original(images)
        return result
    from fmicl.models.fast.norm import fused_batch_norm
    from fmicl.models.fast.stem import convolve_stem, is_supported_stem

    stem = is_supported_stem(model.conv1, images)
    convs = [
        module for module in model.modules() if isinstance(module, nn.Conv2d) and not (stem and module is model.conv1)
    ]
    convolve = _Convolutions(convs, images.device)
    blocks = _blocks(model)
    strides = [_shortcut_stride(block) for block in blocks] + [1]
    maps = convolve_stem(model.conv1, images) if stem else convolve(model.conv1, images)
    if isinstance(model.maxpool, nn.Identity):
        pair = fused_batch_norm(model.bn1, maps, stride=strides[0])
    else:
        pooled = model.maxpool(fused_batch_norm(model.bn1, maps)[0])
        pair = (pooled, pooled[:, :, :: strides[0], :: strides[0]])
    for block, next_stride in zip(blocks, strides[1:], strict=True):
        pair = _block(block, convolve, *pair, next_stride)
    features: Tensor = model.forward_head(pair[0])
    return features


class _Convolutions:
    """Convolutions whose weights are cast to autocast's dtype all at once."""

    def __init__(self, convs: list[nn.Conv2d], device: torch.device) -> None:
        self.weights = dict(zip(convs, cast_weights([conv.weight for conv in convs], device), strict=True))

    def __call__(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        result: Tensor = conv._conv_forward(x, self.weights[conv], conv.bias)
        return result

    def strided_1x1(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """A strided 1x1 convolution, of the pixels that it reads."""
        return F.conv2d(x, self.weights[conv], conv.bias)


def _block(block: Any, convolve: _Convolutions, x: Tensor, residual: Tensor, next_stride: int) -> tuple[Tensor, Tensor]:
    """One residual block, with separate inputs for its two branches so that their gradients arrive separately.

    Args:
        block: timm's BasicBlock or Bottleneck.
        convolve: the convolutions.
        x: the activation.
        residual: the same, or only those pixels that the shortcut reads, see `_shortcut_stride`.
        next_stride: `_shortcut_stride` of the next block.
    """
    from fmicl.models.fast.norm import fused_batch_norm

    y, _ = fused_batch_norm(block.bn1, convolve(block.conv1, x))
    if hasattr(block, "conv3"):
        y, _ = fused_batch_norm(block.bn2, convolve(block.conv2, y))
        last, norm = block.conv3, block.bn3
    else:
        last, norm = block.conv2, block.bn2
    if block.downsample is not None:
        conv = block.downsample[0]
        shortcut = convolve.strided_1x1(conv, residual) if _shortcut_stride(block) > 1 else convolve(conv, residual)
        residual, _ = fused_batch_norm(block.downsample[1], shortcut, relu=False)
    return fused_batch_norm(norm, convolve(last, y), residual, stride=next_stride)


def _shortcut_stride(block: Any) -> int:
    """Stride of the pixels that a block's shortcut reads: that of its 1x1 convolution, otherwise 1."""
    if block.downsample is None:
        return 1
    conv = block.downsample[0]
    plain = conv.kernel_size == (1, 1) and conv.padding == (0, 0) and conv.groups == 1
    return int(conv.stride[0]) if plain and conv.stride[0] == conv.stride[1] else 1


def _blocks(model: Any) -> list[nn.Module]:
    return [block for stage in (model.layer1, model.layer2, model.layer3, model.layer4) for block in stage]


def _is_supported_block(block: Any) -> bool:
    norms = [module for name, module in block.named_children() if name.startswith("bn")]
    acts = [module for name, module in block.named_children() if name.startswith("act")]
    extras = (block.se, block.drop_path, getattr(block, "aa", None), getattr(block, "drop_block", None))
    if not all(map(is_supported_norm, norms)) or any(type(act) is not nn.ReLU for act in acts):
        return False
    if any(extra is not None and not isinstance(extra, nn.Identity) for extra in extras):
        return False
    down = block.downsample
    if down is None:
        return True
    return len(down) == 2 and type(down[0]) is nn.Conv2d and down[0].bias is None and is_supported_norm(down[1])
