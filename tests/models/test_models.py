"""Image encoders and heads: shapes, stems, stable vision transformers, errors."""

from __future__ import annotations

import math

import pytest
import timm
import torch
from torch import nn

from fmicl.models.vision import SmallConv, build_encoder, list_encoders, predictor, projection_head, sincos_positions


def test_the_cifar_stem_gives_a_four_by_four_map() -> None:
    encoder = build_encoder("resnet18", size=32)
    maps = encoder.forward_features(torch.zeros(1, 3, 32, 32))  # type: ignore[operator]
    assert maps.shape == (1, 512, 4, 4)
    assert isinstance(encoder.maxpool, nn.Identity)
    assert isinstance(encoder.conv1, nn.Conv2d)
    assert encoder.conv1.kernel_size == (3, 3)


def test_standard_stem_is_timms() -> None:
    torch.manual_seed(0)
    encoder = build_encoder("resnet18", size=64, stem="standard").eval()
    torch.manual_seed(0)
    oracle = timm.create_model("resnet18", num_classes=0).eval()
    x = torch.randn(2, 3, 64, 64)
    assert torch.equal(encoder(x), oracle(x))


@pytest.mark.parametrize(("size", "stride"), [(28, 1), (32, 1), (48, 2), (64, 2), (224, 2)])
def test_auto_takes_the_small_stem_for_small_images_only(size: int, stride: int) -> None:
    encoder = build_encoder("resnet18", size=size)
    conv = encoder.conv1
    assert isinstance(conv, nn.Conv2d)
    assert conv.stride == (stride, stride)


def test_one_channel_encoders() -> None:
    assert build_encoder("resnet18", size=28, channels=1)(torch.zeros(2, 1, 28, 28)).shape == (2, 512)
    assert build_encoder("small_conv", size=8, channels=1)(torch.zeros(2, 1, 8, 8)).shape == (2, 256)


def test_num_features_is_the_width_of_the_output() -> None:
    for name, size in (("resnet50", 32), ("convnext_atto", 64), ("vit_tiny_patch16_224", 32), ("small_conv", 8)):
        encoder = build_encoder(name, size=size).eval()
        assert encoder(torch.zeros(1, 3, size, size)).shape == (1, encoder.num_features)


@pytest.mark.parametrize("name", ["mobilenetv3_small_050", "ghostnet_050", "tf_mobilenetv3_small_minimal_100"])
def test_num_features_is_right_where_timms_is_not(name: str) -> None:
    torch.manual_seed(0)
    oracle = timm.create_model(name, num_classes=0).eval()
    state = torch.get_rng_state()
    torch.manual_seed(0)
    encoder = build_encoder(name, size=32)
    assert torch.equal(torch.get_rng_state(), state)  # what is drawn after the encoder is drawn as before
    assert encoder.training
    x = torch.randn(2, 3, 32, 32)
    features = encoder.eval()(x)
    assert torch.equal(features, oracle(x))
    assert features.shape == (2, encoder.num_features)
    assert encoder.num_features != oracle.num_features


@pytest.mark.parametrize(
    ("name", "size", "channels"),
    [("vit_tiny_patch16_224", 8, 1), ("small_conv", 1, 3), ("inception_v3", 16, 3)],
)
def test_images_that_a_model_cannot_take_are_refused(name: str, size: int, channels: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*images of {size}( x {size})? pixels"):
        build_encoder(name, size=size, channels=channels)


def test_stable_vit_freezes_positions_and_patch_projection() -> None:
    encoder = build_encoder("vit_tiny_patch16_224", size=64, depth=3)
    assert len(encoder.blocks) == 3  # type: ignore[arg-type]
    frozen = {name for name, parameter in encoder.named_parameters() if not parameter.requires_grad}
    assert frozen == {"pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias"}
    position = encoder.pos_embed
    assert isinstance(position, torch.Tensor)
    assert torch.equal(position[0, 1:], sincos_positions(4, 4, 192))
    assert not position[0, 0].any()  # the class token has no place
    free = build_encoder("vit_tiny_patch16_224", size=64, depth=1, stable_vit=False)
    assert all(parameter.requires_grad for parameter in free.parameters())


def test_sincos_positions_equal_a_plain_loop() -> None:
    height, width, dim = 3, 5, 12
    table = sincos_positions(height, width, dim)
    for row in range(height):
        for column in range(width):
            angles = [[place * 10_000 ** (-i / (dim / 4)) for i in range(dim // 4)] for place in (column, row)]
            expected = [f(a) for place in angles for f in (math.sin, math.cos) for a in place]
            assert table[row * width + column].tolist() == pytest.approx(expected, abs=1e-6)
    with pytest.raises(ValueError, match="multiple of 4"):
        sincos_positions(2, 2, 6)


def test_an_unknown_encoder_suggests_near_names() -> None:
    with pytest.raises(ValueError, match="resnet50"):
        build_encoder("resnet_50", size=32)


@pytest.mark.parametrize(
    ("name", "arguments", "match"),
    [
        ("resnet18", {"depth": 3}, "depth"),
        ("small_conv", {"depth": 3}, "depth"),
        ("vit_tiny_patch16_224", {"stem": "small"}, "stem"),
    ],
)
def test_options_that_a_model_cannot_take_are_refused(name: str, arguments: dict[str, object], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        build_encoder(name, size=32, **arguments)  # type: ignore[arg-type]


def test_list_encoders_takes_wildcards() -> None:
    assert list_encoders("small_*")[0] == "small_conv"
    assert set(list_encoders("resnet1*")) == set(timm.list_models("resnet1*"))


def test_heads() -> None:
    head = projection_head(512, 128, 64)
    linear = [layer for layer in head if isinstance(layer, nn.Linear)]
    assert [(layer.in_features, layer.out_features) for layer in linear] == [(512, 128), (128, 128), (128, 64)]
    assert [layer.bias is not None for layer in linear] == [False, False, True]
    assert isinstance(head[-1], nn.Linear)
    last = predictor(64, 128)[-1]
    assert isinstance(last, nn.BatchNorm1d)
    assert not last.affine


def test_small_conv_features_are_means_then_maxima() -> None:
    encoder = SmallConv(channels=1, width=4).eval()
    x = torch.randn(3, 1, 8, 8)
    maps = encoder.body(x)
    assert torch.equal(encoder(x)[:, :16], maps.mean((2, 3)))
    assert torch.equal(encoder(x)[:, 16:], maps.flatten(2).max(2).values)
