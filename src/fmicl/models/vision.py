"""Image encoders and projection heads.

An encoder maps images (N, C, H, W) to features (N, ``num_features``); a run exports it. A head maps features to the
embeddings that the objective sees; it is discarded after training, since features are better than embeddings for other
tasks (Chen et al., "A Simple Framework for Contrastive Learning of Visual Representations", 2020).
"""

from __future__ import annotations

import difflib
import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn

from fmicl.models.norms import evaluation_mode
from fmicl.utils.options import Options, option

SMALL_IMAGE = 32
"""Largest side, in pixels, of images for which a ResNet gets the CIFAR stem by default."""


@dataclass(frozen=True)
class EncoderOptions(Options):
    """Which image encoder to train."""

    encoder: str = option("resnet18", "Any timm model, such as resnet50 or vit_small_patch16_224, or small_conv.")
    stem: Literal["auto", "small", "standard"] = option(
        "auto",
        "Stem of a ResNet: small is a 3x3 convolution with stride 1 and no max-pooling (CIFAR), which auto takes for "
        "images of up to 32 pixels. It makes an encoder about ten times slower.",
    )
    depth: int | None = option(None, "Blocks of a vision transformer (None: as its name says).", above=0)
    stable_vit: bool = option(
        True, "Stabilise a vision transformer as MoCo v3 does: frozen patch projection, fixed sine-cosine positions."
    )

    weights: str | None = option(
        None,
        "Trained weights to start from: timm (those that timm has for the encoder), a run folder, or a safetensors "
        "file with timm's names (None: random ones).",
        role="location",
    )
    freeze: int = option(
        0,
        "Blocks of the encoder whose trained weights stay as they are, from the stem on, which is the first.",
        at_least=0,
    )

    def why_unused(self) -> dict[str, str]:
        """Nothing is frozen at random."""
        return {"freeze": "it is for trained weights (--weights)"} if self.weights is None else {}


@dataclass(frozen=True)
class ImageHeadOptions(Options):
    """Widths of the projection head."""

    hidden: int = option(2048, "Width of the hidden layers of the projection, prediction and rotation heads.", above=0)
    dim: int = option(512, "Dimension d of the embeddings.", above=0)


class SmallConv(nn.Module):
    """A small convolutional network for images of about 8 x 8 pixels.

    Three 3x3 convolutions at full, full and half resolution, then global average and maximum pooling, concatenated.

    Args:
        channels: channels of the images.
        width: channels of the first convolution; the features have ``8 * width`` entries.

    Example:
        >>> SmallConv(channels=1)(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 256])
    """

    def __init__(self, channels: int = 1, width: int = 32) -> None:
        super().__init__()
        self.num_features = 8 * width
        self.body = nn.Sequential(
            *_convolution(channels, width),
            *_convolution(width, 2 * width),
            nn.MaxPool2d(2),
            *_convolution(2 * width, 4 * width),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, 8 * width) of images (N, C, H, W)."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """The feature map (N, 4 * width, H / 2, W / 2), as timm's models name it."""
        maps: Tensor = self.body(images)
        return maps

    def forward_head(self, maps: Tensor) -> Tensor:
        """Features (N, 8 * width) of a feature map."""
        return torch.cat([maps.mean((2, 3)), maps.amax((2, 3))], dim=1)


def _convolution(inputs: int, outputs: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    return (
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False),
        nn.BatchNorm2d(outputs),
        nn.ReLU(inplace=True),
    )


def list_encoders(pattern: str = "") -> list[str]:
    """Names that :func:`build_encoder` takes; the pattern may have wildcards.

    Example:
        >>> "resnet18" in list_encoders("resnet1*")
        True
    """
    import fnmatch

    import timm

    own = [name for name in ("small_conv",) if not pattern or fnmatch.fnmatch(name, pattern)]
    return [*own, *timm.list_models(pattern)]


def build_encoder(
    name: str,
    *,
    size: int,
    channels: int = 3,
    stem: Literal["auto", "small", "standard"] = "auto",
    depth: int | None = None,
    stable_vit: bool = True,
) -> nn.Module:
    """An untrained encoder by name: any timm model without its classifier, or ``small_conv``.

    Args:
        name: a name of :func:`list_encoders`.
        size: side of the images in pixels.
        channels: channels of the images.
        stem: of a ResNet. ``"small"`` is a 3x3 convolution with stride 1 and no max-pooling (CIFAR); ``"auto"`` is that
            for images of up to 32 pixels.
        depth: number of blocks of a vision transformer.
        stable_vit: freeze a vision transformer's patch projection and fix its positions to sines and cosines, which
            keeps training stable (Chen, Xie and He, "An Empirical Study of Training Self-Supervised Vision
            Transformers", 2021).

    Returns:
        A module with ``num_features``, which maps (N, channels, size, size) to (N, num_features).

    Raises:
        ValueError: unknown name (the message has the near ones), or an option, a size or a number of channels that the
            model can't take.

    Example:
        >>> encoder = build_encoder("resnet18", size=32)
        >>> encoder.conv1.stride, encoder(torch.zeros(2, 3, 32, 32)).shape
        ((1, 1), torch.Size([2, 512]))
    """
    if name == "small_conv":
        if depth is not None:
            raise ValueError("depth is an option of vision transformers; small_conv does not take it")
        return _set_num_features(SmallConv(channels), name, size, channels)

    import timm
    from timm.models.resnet import ResNet
    from timm.models.vision_transformer import VisionTransformer

    if not timm.is_model(name):
        near = difflib.get_close_matches(name, list_encoders(), n=4, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "timm.list_models() lists them"
        raise ValueError(f"there is no encoder {name!r}; {hint}")
    arguments: dict[str, Any] = {} if depth is None else {"depth": depth}
    try:
        # Transformers need the size of the images; convolutional networks reject the argument.
        try:
            model = timm.create_model(name, num_classes=0, in_chans=channels, img_size=size, **arguments)
        except TypeError:
            model = timm.create_model(name, num_classes=0, in_chans=channels, **arguments)
    except TypeError as error:
        raise ValueError(f"the encoder {name} does not take depth={depth}; vision transformers do") from error
    except (AssertionError, RuntimeError) as error:
        raise ValueError(f"timm can't build {name} for images of {size} pixels: {error}") from error

    if isinstance(model, ResNet):
        if resolve_stem(stem, size) == "small":
            _small_stem(model, channels)
    elif stem == "small":
        raise ValueError(f"stem='small' is for ResNets; {name} is a {type(model).__name__}")
    if stable_vit and isinstance(model, VisionTransformer):
        _stabilise(model)
    return _set_num_features(model, name, size, channels)


def resolve_stem(stem: Literal["auto", "small", "standard"], size: int) -> Literal["small", "standard"]:
    """The stem of a ResNet for images of this size.

    Example:
        >>> resolve_stem("auto", 32), resolve_stem("auto", 48)
        ('small', 'standard')
    """
    if stem == "auto":
        return "small" if size <= SMALL_IMAGE else "standard"
    return stem


def freeze_blocks(encoder: nn.Module, count: int) -> None:
    """Freeze the first blocks of a timm model, the stem being the first: no gradients.

    Batch normalisation that is frozen keeps its statistics too: :class:`fmicl.methods.Method` leaves it in eval mode.

    Raises:
        ValueError: the encoder has no more blocks than these, or no order of blocks.

    Example:
        >>> encoder = build_encoder("resnet18", size=64)
        >>> freeze_blocks(encoder, 3)
        >>> encoder.layer1[1].bn2.weight.requires_grad, encoder.layer2[0].conv1.weight.requires_grad
        (False, True)
    """
    from timm.models import group_parameters

    if not hasattr(encoder, "group_matcher"):
        raise ValueError(f"{type(encoder).__name__} can't be frozen in part: it doesn't say which blocks it has")
    groups = group_parameters(encoder, encoder.group_matcher(coarse=False), reverse=True)  # type: ignore[operator]
    order = sorted({groups[name] for name, _ in encoder.named_parameters()})
    if count >= len(order):
        raise ValueError(
            f"freeze is {count}, but the encoder has {len(order)} blocks, and at least one must be trained"
        )
    for name, parameter in encoder.named_parameters():
        if groups[name] in order[:count]:
            parameter.requires_grad_(False)


def encoder_specific_options(encoder: nn.Module) -> frozenset[str]:
    """Which of the options that only some encoders have apply to this one: ``stem`` or ``stable_vit``.

    Example:
        >>> encoder_specific_options(build_encoder("resnet18", size=32))
        frozenset({'stem'})
    """
    from timm.models.resnet import ResNet
    from timm.models.vision_transformer import VisionTransformer

    kinds = {"stem": ResNet, "stable_vit": VisionTransformer}
    return frozenset(name for name, kind in kinds.items() if isinstance(encoder, kind))


def _set_num_features(model: nn.Module, name: str, size: int, channels: int) -> nn.Module:
    """Set ``num_features`` to the width of the output; timm's number is before the last layers of some models."""
    model.num_features = check_input_size(model, name, size, channels)  # type: ignore[assignment]
    return model


def feature_map_width(encoder: nn.Module, size: int, channels: int) -> int:
    """Channels of the feature map that ``forward_features`` gives, (N, C, H, W) or tokens (N, T, C); by a trial.

    Raises:
        ValueError: the encoder has no feature map.

    Example:
        >>> feature_map_width(SmallConv(), 8, 1)
        128
    """
    if not all(hasattr(encoder, name) for name in ("forward_features", "forward_head")):
        raise ValueError(f"a {type(encoder).__name__} has no feature maps: take a timm model or small_conv")
    with evaluation_mode(encoder), torch.no_grad(), torch.random.fork_rng(devices=[]):
        maps = encoder.forward_features(torch.zeros(2, channels, size, size))  # type: ignore[operator]
    if not isinstance(maps, Tensor) or maps.ndim not in (3, 4):
        shape = tuple(maps.shape) if isinstance(maps, Tensor) else type(maps).__name__
        raise ValueError(f"a {type(encoder).__name__} gives no feature maps, but {shape}: take another --encoder")
    return int(maps.shape[1] if maps.ndim == 4 else maps.shape[2])


def check_input_size(model: nn.Module, name: str, size: int, channels: int) -> int:
    """Number of features that an encoder gives for images of a size, found by a trial; it leaves no trace.

    Raises:
        ValueError: the encoder can't take such images.

    Example:
        >>> check_input_size(SmallConv(), "small_conv", 8, channels=1)
        256
    """
    try:
        # the global random state is unchanged, since the weights of later modules depend on it
        with evaluation_mode(model), torch.no_grad(), torch.random.fork_rng(devices=[]):
            features = model(torch.zeros(2, channels, size, size))
    except Exception as error:  # models raise any type
        kind = f"{size} x {size} pixels with {channels} channel{'s' if channels > 1 else ''}"
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ValueError(f"the encoder {name} does not take images of {kind}: {reason}") from error
    if not isinstance(features, Tensor) or features.ndim != 2:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ValueError(f"the encoder {name} does not give one vector per image, but {shape} for two images")
    if not features.numel():
        raise ValueError(f"the encoder {name} gives no features for images of {size} pixels")
    return features.shape[1]


def _small_stem(model: nn.Module, channels: int) -> None:
    """Replace a ResNet's stem: 3x3, stride 1, no max-pooling, so that 32 pixels give a 4 x 4 feature map, not 1 x 1."""
    width = cast(nn.BatchNorm2d, model.bn1).num_features
    conv = nn.Conv2d(channels, width, kernel_size=3, stride=1, padding=1, bias=False)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    model.conv1 = conv
    model.maxpool = nn.Identity()


def _stabilise(model: nn.Module) -> None:
    """Freeze the patch projection and fix sine-cosine positions, as MoCo v3 does, in place."""
    patches = cast(nn.Module, model.patch_embed)
    projection = patches.proj
    if isinstance(projection, nn.Conv2d):
        fan = projection.in_channels * math.prod(projection.kernel_size) + projection.out_channels
        nn.init.uniform_(projection.weight, -math.sqrt(6 / fan), math.sqrt(6 / fan))
        if projection.bias is not None:
            nn.init.zeros_(projection.bias)
        projection.requires_grad_(False)
    position = model.pos_embed
    if isinstance(position, nn.Parameter):
        height, width = cast(tuple[int, int], patches.grid_size)
        prefix = position.shape[1] - height * width
        table = sincos_positions(height, width, position.shape[2])
        with torch.no_grad():
            position.copy_(torch.cat([torch.zeros(prefix, table.shape[1]), table]).unsqueeze(0))
        position.requires_grad_(False)


def sincos_positions(height: int, width: int, dim: int, temperature: float = 10_000.0) -> Tensor:
    """Fixed two-dimensional position embeddings: sines and cosines of row and column at dim / 4 frequencies.

    With w_i = temperature^(-i / (dim / 4)), row h and column v, a row of the result is
    [sin(v w), cos(v w), sin(h w), cos(h w)].

    Args:
        height: rows of patches.
        width: columns of patches.
        dim: width of an embedding; a multiple of 4.
        temperature: the longest wavelength over 2 pi.

    Returns:
        (height * width, dim), row by row.

    Raises:
        ValueError: dim is not a multiple of 4.

    Example:
        >>> sincos_positions(2, 3, 8).shape
        torch.Size([6, 8])
    """
    if dim % 4:
        raise ValueError(f"two-dimensional sine-cosine positions need a width that is a multiple of 4, but it is {dim}")
    frequency = temperature ** (-torch.arange(dim // 4, dtype=torch.float64) / (dim // 4))
    rows, columns = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    row, column = rows.reshape(-1, 1) * frequency, columns.reshape(-1, 1) * frequency
    return torch.cat([column.sin(), column.cos(), row.sin(), row.cos()], dim=1).float()


def mlp(sizes: tuple[int, ...], *, last_norm: bool = False) -> nn.Sequential:
    """Linear layers with batch normalisation and ReLU between them.

    Args:
        sizes: inputs, hidden widths, outputs.
        last_norm: normalise the outputs too, without scale and offset (MoCo v3).

    Example:
        >>> mlp((8, 16, 4))(torch.zeros(2, 8)).shape
        torch.Size([2, 4])
    """
    layers: list[nn.Module] = []
    for i, (inputs, outputs) in enumerate(pairwise(sizes)):
        last = i == len(sizes) - 2
        # Batch normalisation would cancel a bias before it.
        layers.append(nn.Linear(inputs, outputs, bias=last and not last_norm))
        if not last:
            layers += [nn.BatchNorm1d(outputs), nn.ReLU(inplace=True)]
        elif last_norm:
            layers.append(nn.BatchNorm1d(outputs, affine=False))
    return nn.Sequential(*layers)


def projection_head(features: int, hidden: int, dim: int, *, layers: int = 3, last_norm: bool = False) -> nn.Sequential:
    """The projection head, by default of 3 layers: features -> hidden -> hidden -> dim.

    Example:
        >>> sum(isinstance(layer, nn.Linear) for layer in projection_head(512, 2048, 512))
        3
    """
    return mlp((features, *[hidden] * (layers - 1), dim), last_norm=last_norm)


def predictor(dim: int, hidden: int, *, last_norm: bool = True) -> nn.Sequential:
    """The predictor of BYOL and, with normalised outputs, of MoCo v3: dim -> hidden -> dim, on the online branch only.

    Example:
        >>> predictor(64, 256)(torch.zeros(2, 64)).shape
        torch.Size([2, 64])
    """
    return mlp((dim, hidden, dim), last_norm=last_norm)
