"""GPU-optimised networks against the original ones, on a GPU or in Triton's interpreter."""

from __future__ import annotations

import copy
import gc
import operator
import statistics
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from devices import TRITON_DEVICE
from fmicl.models.fast import capture_graph, is_supported, optimise_head, optimise_resnet
from fmicl.models.fast.graphs import no_garbage_collection
from fmicl.models.fast.low_precision import cast_weights
from fmicl.models.fast.norm import _counters, fused_batch_norm
from fmicl.models.fast.stem import convolve_stem, is_supported_stem
from fmicl.models.norms import RunningStatisticsNorm, use_running_statistics
from fmicl.models.vision import build_encoder, projection_head


@pytest.fixture(autouse=True)
def _full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


def norm_of(c: int, kind: Any = nn.BatchNorm2d) -> nn.Module:
    norm: nn.Module = kind(c).to(TRITON_DEVICE).train()
    generator = torch.Generator().manual_seed(c)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(c, generator=generator) + 0.5)
    return norm


def close(seen: Tensor | None, expected: Tensor | None) -> None:
    assert seen is not None
    assert expected is not None
    torch.testing.assert_close(seen, expected, atol=2e-5 * float(expected.detach().abs().max()), rtol=1e-4)


def subsample(maps: Tensor, stride: int) -> Tensor:
    return maps[:, :, ::stride, ::stride] if maps.ndim == 4 else maps


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize(
    ("shape", "stride"),
    [((4, 64, 8, 16), 1), ((4, 64, 8, 16), 2), ((3, 20, 5, 7), 1), ((3, 20, 5, 7), 2), ((3, 20, 5, 7), 3),
     ((6, 100, 1, 2), 2), ((256, 16), 1)],
)  # fmt: skip
def test_fused_batch_norm(shape: tuple[int, ...], stride: int, relu: bool, residual: bool) -> None:
    """Results, gradients of both results, running statistics and parameter gradients equal those of torch."""
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    ours, theirs = norm_of(shape[1], kind), norm_of(shape[1], kind)
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator).to(TRITON_DEVICE) for _ in range(4)]
    values[0] += 30  # a mean far from 0 must not cost precision of the variance
    x, skip = (value.clone().requires_grad_() for value in values[:2])
    a, b = (value.clone().requires_grad_() for value in values[:2])
    one, two = fused_batch_norm(ours, x, skip if residual else None, relu=relu, stride=stride)
    expected = theirs(a) + b if residual else theirs(a)
    expected = F.relu(expected) if relu else expected
    close(one, expected)
    close(two, subsample(expected, stride))
    factor = subsample(values[3], stride)
    ((one * values[2]).sum() + (two * factor).sum()).backward()
    ((expected * values[2]).sum() + (subsample(expected, stride) * factor).sum()).backward()
    close(x.grad, a.grad)
    if residual:
        close(skip.grad, b.grad)
    for mine, original in zip(ours.parameters(), theirs.parameters(), strict=True):
        close(mine.grad, original.grad)
    for seen_buffer, expected_buffer in zip(ours.buffers(), theirs.buffers(), strict=True):
        torch.testing.assert_close(seen_buffer, expected_buffer, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("used", [0, 1])
@pytest.mark.parametrize("stride", [1, 2])
def test_gradient_of_one_result_only(used: int, stride: int) -> None:
    norm = norm_of(16)
    x, a = (torch.randn(4, 16, 3, 4, generator=torch.Generator().manual_seed(0)).to(TRITON_DEVICE) for _ in range(2))
    result = fused_batch_norm(norm, x.requires_grad_(), stride=stride)[used]
    result.square().sum().backward()
    expected = F.relu(norm_of(16)(a.requires_grad_()))
    (expected[:, :, ::stride, ::stride] if used else expected).square().sum().backward()
    close(x.grad, a.grad)


def test_relu_does_not_hide_nan() -> None:
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0)).to(TRITON_DEVICE)
    x[3, 2] = float("nan")
    for skip in (None, torch.zeros_like(x)):
        one, _ = fused_batch_norm(norm_of(16, nn.BatchNorm1d), x, skip)
        assert bool(one[:, 2].isnan().all())
        assert int(one.isnan().sum()) == 40


def test_batch_norm_of_transposed_rows() -> None:
    x = torch.randn(16, 40, generator=torch.Generator().manual_seed(0)).to(TRITON_DEVICE).t()
    close(fused_batch_norm(norm_of(16, nn.BatchNorm1d), x)[0], F.relu(norm_of(16, nn.BatchNorm1d)(x)))
    close(fused_batch_norm(norm_of(16, nn.BatchNorm1d), x, x)[0], F.relu(norm_of(16, nn.BatchNorm1d)(x) + x))


@pytest.mark.parametrize("shape", [(1, 16), (0, 16), (1, 16, 1, 1)])
def test_one_value_has_no_variance(shape: tuple[int, ...]) -> None:
    """As in torch: the running variance would become NaN."""
    norm = norm_of(16, nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d)
    with pytest.raises(ValueError, match=r"got shape"):
        fused_batch_norm(norm, torch.randn(shape, device=TRITON_DEVICE))
    torch.testing.assert_close(norm.state_dict(), norm_of(16, type(norm)).state_dict())


def test_no_double_backward() -> None:
    x = torch.randn(8, 16, device=TRITON_DEVICE, requires_grad=True)
    one, _ = fused_batch_norm(norm_of(16, nn.BatchNorm1d), x)
    (slope,) = torch.autograd.grad(one.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (slope.square().sum() + x.sum()).backward()


def test_counters_are_never_replaced() -> None:
    """A captured graph keeps writing to the counters that it was captured with."""
    few = _counters(TRITON_DEVICE, 4)
    assert len(_counters(TRITON_DEVICE, 1000)) >= 1000
    assert _counters(TRITON_DEVICE, 4) is few


@pytest.mark.parametrize(("kernel", "stride", "padding", "channels"), [(3, 1, 1, 3), (3, 2, 1, 3), (5, 2, 0, 1)])
def test_stem_convolution(kernel: int, stride: int, padding: int, channels: int) -> None:
    conv = nn.Conv2d(channels, 24, kernel, stride=stride, padding=padding, bias=False).to(TRITON_DEVICE)
    images = torch.randn(3, channels, 9, 11, generator=torch.Generator().manual_seed(0)).to(TRITON_DEVICE)
    assert is_supported_stem(conv, images)
    expected = conv(images)
    gradient = torch.randn_like(expected)
    (wanted,) = torch.autograd.grad(expected, conv.weight, gradient)
    seen = convolve_stem(conv, images)
    close(seen, expected)
    (found,) = torch.autograd.grad(seen, conv.weight, gradient)
    close(found, wanted)


@pytest.mark.parametrize(
    "part",
    [(slice(None), slice(3), slice(9), slice(9)), (slice(None), slice(3)), (slice(None), slice(3), slice(0, None, 2))],
)
def test_stem_convolution_of_a_slice(part: tuple[slice, ...]) -> None:
    """Channels are last in memory, but with gaps between pixels."""
    conv = nn.Conv2d(3, 24, 3, padding=1, bias=False).to(TRITON_DEVICE)
    whole = torch.randn(3, 4, 12, 12, generator=torch.Generator().manual_seed(0)).to(TRITON_DEVICE)
    images = whole.contiguous(memory_format=torch.channels_last)[part]
    close(convolve_stem(conv, images), conv(images.contiguous()))


def test_unsupported_stems() -> None:
    images = torch.zeros(1, 16, 8, 8)
    assert not is_supported_stem(nn.Conv2d(16, 8, 3, bias=False), images)
    assert not is_supported_stem(nn.Conv2d(3, 8, 3), images[:, :3])
    assert not is_supported_stem(nn.Conv2d(3, 8, 3, bias=False), images[:, :3].clone().requires_grad_())


@pytest.mark.parametrize("name", ["resnet10t", "vit_tiny_patch16_224", "seresnet18", "resnetblur18"])
def test_unsupported_networks(name: str) -> None:
    model = build_encoder(name, size=224)
    assert not is_supported(model)
    with pytest.raises(ValueError, match="plain timm ResNet"):
        optimise_resnet(model)


def test_gradient_checkpointing_is_unsupported() -> None:
    model: Any = build_encoder("resnet18", size=32)
    assert is_supported(model)
    model.set_grad_checkpointing()
    assert not is_supported(model)


def test_subclasses_of_conv2d_are_unsupported() -> None:
    """They may do more than convolve with their weight."""

    class Standardised(nn.Conv2d):
        pass

    model = build_encoder("resnet18", size=32)
    model.layer2[0].conv1 = Standardised(64, 128, 3, stride=2, padding=1, bias=False)  # type: ignore[index, union-attr]
    assert not is_supported(model)


@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet26", marks=pytest.mark.slow)])
def test_optimised_resnet(name: str) -> None:
    torch.manual_seed(0)
    original = build_encoder(name, size=8, stem="small").to(TRITON_DEVICE).train()
    optimised = copy.deepcopy(original)
    optimise_resnet(optimised)
    images = torch.randn(4, 3, 8, 8, device=TRITON_DEVICE)
    expected, seen = original(images), optimised(images)
    close(seen, expected)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    seen.backward(gradient)
    for (key, mine), theirs in zip(optimised.named_parameters(), original.parameters(), strict=True):
        assert mine.grad is not None, key
        assert theirs.grad is not None
        assert float((mine.grad - theirs.grad).norm()) <= 2e-3 * float(theirs.grad.norm()), key
    for seen_buffer, expected_buffer in zip(optimised.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(seen_buffer, expected_buffer, rtol=1e-4, atol=1e-5)
    assert list(optimised.state_dict()) == list(original.state_dict())
    torch.testing.assert_close(optimised.eval()(images), original.eval()(images), rtol=1e-3, atol=1e-3)


def test_frozen_batch_norm_uses_running_statistics() -> None:
    original = nn.Sequential(build_encoder("resnet18", size=8, stem="small"), projection_head(512, 40, 6))
    original.to(TRITON_DEVICE)
    frozen = [module for module in original.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]
    for norm in (frozen[1], frozen[-1]):
        norm.eval().running_mean.fill_(3)  # type: ignore[union-attr]
    optimised = copy.deepcopy(original)
    optimise_resnet(optimised[0])
    assert optimise_head(optimised[1])
    images = torch.randn(4, 3, 8, 8, device=TRITON_DEVICE)
    close(optimised(images), original(images))
    for seen_buffer, expected_buffer in zip(optimised.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(seen_buffer, expected_buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(
    ("shape", "stride"), [((4, 64, 8, 16), 2), ((3, 20, 5, 7), 1), ((6, 200, 1, 2), 1), ((256, 16), 1)]
)
def test_fused_past_norm(shape: tuple[int, ...], stride: int, residual: bool) -> None:
    original = RunningStatisticsNorm(norm_of(shape[1], nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d))  # type: ignore[arg-type]
    optimised = copy.deepcopy(original)
    for batch in range(14):  # while all batches count equally, and some more
        x = torch.randn(shape, device=TRITON_DEVICE) * 2 + batch
        skip = torch.randn(shape, device=TRITON_DEVICE) if residual else None
        one, two = fused_batch_norm(optimised, x, skip, stride=stride)
        expected = F.relu(original(x) + (0 if skip is None else skip))
        assert not one.requires_grad
        close(one, expected)
        close(two, subsample(expected, stride))
        for seen_buffer, expected_buffer in zip(optimised.buffers(), original.buffers(), strict=True):
            torch.testing.assert_close(seen_buffer, expected_buffer, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_optimised_momentum_encoder_with_past_norm(half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if TRITON_DEVICE.type == "cpu" and half:  # Triton's interpreter can't multiply bfloat16 matrices
        monkeypatch.setattr("fmicl.models.fast.stem.is_supported_stem", lambda *_: False)
    torch.manual_seed(0)
    original = nn.Sequential(build_encoder("resnet18", size=8, stem="small"), projection_head(512, 40, 6))
    original.to(TRITON_DEVICE)
    use_running_statistics(original)
    optimised = copy.deepcopy(original)
    optimise_resnet(optimised[0])
    assert optimise_head(optimised[1])
    called: list[nn.Module] = []
    for norm in optimised.modules():
        if isinstance(norm, RunningStatisticsNorm):
            norm.register_forward_hook(lambda norm, *_: called.append(norm))
    tolerance: dict[str, Any] = {"rtol": 0.1, "atol": 0.1} if half else {"rtol": 1e-3, "atol": 1e-4}
    for _ in range(2):
        images = torch.randn(6, 3, 8, 8, device=TRITON_DEVICE)
        with torch.no_grad(), torch.autocast(TRITON_DEVICE.type, torch.bfloat16, enabled=half):
            torch.testing.assert_close(optimised(images), original(images), **tolerance)
    assert not called, "all ran fused"
    for name, expected in original.state_dict().items():
        torch.testing.assert_close(optimised.state_dict()[name], expected, **tolerance, msg=name)


def test_head_over_sequences_is_not_fused() -> None:
    """Their channels are not the last axis."""
    original = nn.Sequential(nn.Conv1d(4, 20, 1), nn.BatchNorm1d(20), nn.ReLU()).to(TRITON_DEVICE).train()
    optimised = copy.deepcopy(original)
    assert optimise_head(optimised)
    x = torch.randn(6, 4, 5, device=TRITON_DEVICE)
    close(optimised(x), original(x))


def test_optimised_resnet_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """As close to float32 as the original in half precision."""
    if TRITON_DEVICE.type == "cpu":  # Triton's interpreter can't multiply bfloat16 matrices
        monkeypatch.setattr("fmicl.models.fast.stem.is_supported_stem", lambda *_: False)
    torch.manual_seed(0)
    original = build_encoder("resnet18", size=8, stem="small").to(TRITON_DEVICE).train()
    for module in original.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)  # timm initialises the last of a branch with 0, and so its gradients
    optimised, exact = copy.deepcopy(original), copy.deepcopy(original)
    optimise_resnet(optimised)
    images = torch.randn(8, 3, 8, 8, device=TRITON_DEVICE)
    gradient = torch.randn(8, 512, device=TRITON_DEVICE)
    exact(images).backward(gradient)
    with torch.autocast(TRITON_DEVICE.type, torch.bfloat16):
        original(images).backward(gradient)
        optimised(images).backward(gradient)

    def errors(network: nn.Module) -> list[float]:
        pairs = zip(network.parameters(), exact.parameters(), strict=True)
        return [float((mine.grad - theirs.grad).norm() / theirs.grad.norm()) for mine, theirs in pairs]  # type: ignore[union-attr, operator]

    assert {parameter.grad.dtype for parameter in optimised.parameters()} == {torch.float32}  # type: ignore[union-attr]
    assert statistics.median(errors(optimised)) <= 1.2 * statistics.median(errors(original))


def test_cast_weights_keep_strides_and_gradients() -> None:
    weights = [torch.randn(4, 3, 2, 2).contiguous(memory_format=torch.channels_last), torch.randn(5, 4, 1, 1)]
    leaves = [weight.to(TRITON_DEVICE).requires_grad_() for weight in weights]
    assert all(map(operator.is_, cast_weights(leaves, TRITON_DEVICE), leaves)), "unchanged without autocast"
    doubles = [leaf.detach().double() for leaf in leaves]
    with torch.autocast(TRITON_DEVICE.type, torch.bfloat16):
        assert all(map(operator.is_, cast_weights(doubles, TRITON_DEVICE), doubles)), "autocast doesn't cast float64"
    with torch.autocast(TRITON_DEVICE.type, torch.bfloat16):
        halves = cast_weights(leaves, TRITON_DEVICE)
    for half, leaf in zip(halves, leaves, strict=True):
        assert half.stride() == leaf.stride()
        torch.testing.assert_close(half, leaf.bfloat16(), rtol=0, atol=0)
    (halves[0] * 3).sum().backward()
    torch.testing.assert_close(leaves[0].grad, torch.full_like(leaves[0], 3))
    assert leaves[1].grad is None


def test_no_garbage_collection() -> None:
    class Node:
        """Part of a cycle, so that only a collection frees it."""

    def cycle() -> weakref.ref[Node]:
        node = Node()
        node.itself = node  # type: ignore[attr-defined]
        return weakref.ref(node)

    before = cycle()
    with no_garbage_collection():
        assert before() is None
        within = cycle()
        junk: list[object] = [[] for _ in range(10 * gc.get_threshold()[0])]  # enough to start a collection
        assert within() is not None
    assert gc.isenabled()
    with pytest.raises(KeyError), no_garbage_collection():
        raise KeyError(len(junk))
    assert gc.isenabled()


@pytest.mark.skipif(TRITON_DEVICE.type != "cuda", reason="CUDA graphs need a GPU")
def test_captured_step() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)).to(TRITON_DEVICE)
    other = copy.deepcopy(network)

    def loss(module: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        out = module(x)
        return (out - y).square().mean(), out.detach()

    inputs = [(torch.randn(32, 8, device=TRITON_DEVICE), torch.randn(32, 4, device=TRITON_DEVICE)) for _ in range(3)]
    captured = capture_graph(lambda x, y: loss(network, x, y), [network], *inputs[0])
    torch.testing.assert_close(network.state_dict(), other.state_dict())
    for x, y in inputs:
        seen, expected = captured(x, y), loss(other, x, y)
        for a, b in zip(seen, expected, strict=True):
            torch.testing.assert_close(a, b)
        for module, value in ((network, seen[0]), (other, expected[0])):
            module.zero_grad()
            value.backward()
        for mine, theirs in zip(network.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    torch.testing.assert_close(network.state_dict(), other.state_dict())
    shorter = captured(inputs[0][0][:5], inputs[0][1][:5])
    assert shorter[1].shape == (5, 4), "other shapes run without the graph"


@pytest.mark.parametrize("last_norm", [False, True])
def test_optimised_head(last_norm: bool) -> None:
    torch.manual_seed(0)
    original = projection_head(12, 40, 6, last_norm=last_norm).to(TRITON_DEVICE).train()
    optimised = copy.deepcopy(original)
    assert optimise_head(optimised)
    x = torch.randn(16, 12, device=TRITON_DEVICE)
    expected, seen = original(x), optimised(x)
    close(seen, expected)
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    seen.backward(gradient)
    for mine, theirs in zip(optimised.parameters(), original.parameters(), strict=True):
        close(mine.grad, theirs.grad)
    for seen_buffer, expected_buffer in zip(optimised.buffers(), original.buffers(), strict=True):
        torch.testing.assert_close(seen_buffer, expected_buffer)
    close(optimised.eval()(x), original.eval()(x))
    assert list(optimised.state_dict()) == list(original.state_dict())


def test_optimised_head_in_half_precision() -> None:
    torch.manual_seed(0)
    original = projection_head(12, 40, 6).to(TRITON_DEVICE).train()
    optimised = copy.deepcopy(original)
    optimise_head(optimised)
    x = torch.randn(16, 12, device=TRITON_DEVICE)
    with torch.autocast(TRITON_DEVICE.type, torch.bfloat16):
        expected, seen = original(x), optimised(x)
    assert seen.dtype == expected.dtype == torch.bfloat16
    gradient = torch.randn_like(expected)
    expected.backward(gradient)
    seen.backward(gradient)
    torch.testing.assert_close(seen, expected, rtol=0.05, atol=0.05)
    for mine, theirs in zip(optimised.parameters(), original.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert mine.grad.dtype == torch.float32
        assert float((mine.grad - theirs.grad).norm()) <= 0.05 * float(theirs.grad.norm()) + 1e-2
