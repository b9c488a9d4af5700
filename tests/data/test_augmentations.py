"""Views against torchvision: each operation, the composition, and the distribution of the parameters."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from fmicl.data.augmentations.cpu import colour_in_groups, crop_resize_each
from fmicl.data.augmentations.maker import ViewMaker, ViewParameters, _colour_at_once, crop_boxes
from fmicl.data.augmentations.operations import (
    CropBoxes,
    colour_jitter,
    crop_resize,
    gaussian_blur,
    normalise,
    shift_hue,
    solarise,
    to_grey,
)
from fmicl.data.augmentations.views import Views

ONE_LEVEL = 1.0 + 1e-3
N = 24


def pictures(n: int, channels: int, height: int, width: int, seed: int = 0) -> Tensor:
    """Images with smooth regions, hard edges, noise, black, white, and pure colours."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(n, channels, 4, 4, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    noise = torch.rand(n, channels, height, width, generator=generator)
    mix = torch.rand(n, 1, 1, 1, generator=generator)
    images = ((1 - mix) * smooth + mix * noise).mul(255).round().to(torch.uint8)
    images[0] = 0
    images[1] = 255
    images[2] = (noise[2] > 0.5).to(torch.uint8) * 255
    images[3] = images[3, :1]  # grey: no hue
    return images


def levels(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference, in grey levels."""
    return float((ours - theirs.float()).abs().max())


def uniform(n: int, low: float, high: float, seed: int = 1) -> Tensor:
    return low + (high - low) * torch.rand(n, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("height", "width", "size"),
    [(32, 32, 32), (8, 8, 8), (96, 96, 64), (73, 50, 24), (30, 40, 56), (64, 64, 5)],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_crop_and_flip_is_torchvisions_resized_crop(channels: int, height: int, width: int, size: int) -> None:
    images = pictures(N, channels, height, width)
    views = Views(size=size, crop_scale=(0.05, 1.0))
    boxes = crop_boxes(torch.rand(N, 22, generator=torch.Generator().manual_seed(2)), height, width, views)
    flip = torch.arange(N) % 2 == 0
    ours = crop_resize(images, boxes, flip, size)
    for i in range(N):
        box = [int(x[i]) for x in boxes]
        for source, allowed in ((images[i], ONE_LEVEL), (images[i].float(), 0.01)):
            theirs = tv.resized_crop(source, *box, [size, size], antialias=True)
            theirs = tv.horizontal_flip(theirs) if flip[i] else theirs
            assert levels(ours[i], theirs) <= allowed


def test_a_full_crop_at_full_size_is_the_identity() -> None:
    images = pictures(N, 3, 32, 32)
    zero, side = torch.zeros(N), torch.full((N,), 32.0)
    whole = CropBoxes(zero, zero, side, side)
    assert torch.equal(crop_resize(images, whole, torch.zeros(N, dtype=torch.bool), 32), images.float())
    assert torch.equal(crop_resize(images, whole, torch.ones(N, dtype=torch.bool), 32), images.flip(3).float())


OPERATIONS = {0: tv.adjust_brightness, 1: tv.adjust_contrast, 2: tv.adjust_saturation, 3: tv.adjust_hue}


@pytest.mark.parametrize("operation", [0, 1, 2, 3])
@pytest.mark.parametrize("channels", [1, 3])
def test_each_colour_operation_is_torchvisions(operation: int, channels: int) -> None:
    images = pictures(N, channels, 20, 17)
    factors = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(N, 1)
    factors[:, operation] = uniform(N, -0.5, 0.5) if operation == 3 else uniform(N, 0.0, 2.5)
    order = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i)) for i in range(N)])
    ours = colour_jitter(images.float(), factors, order)
    for i in range(N):
        theirs = OPERATIONS[operation](images[i], float(factors[i, operation]))
        assert levels(ours[i], theirs) <= ONE_LEVEL


@pytest.mark.parametrize("channels", [1, 3])
def test_every_order_of_the_colour_operations_is_applied_as_given(channels: int) -> None:
    orders = torch.stack([torch.randperm(4, generator=torch.Generator().manual_seed(i)) for i in range(200)])
    assert len({tuple(o.tolist()) for o in orders}) == 24
    images = pictures(200, channels, 9, 9)
    factors = torch.stack([uniform(200, 0.6, 1.4, seed) for seed in range(3)] + [uniform(200, -0.5, 0.5)], dim=1)
    ours = colour_jitter(images.float(), factors, orders)
    for i, order in enumerate(orders.tolist()):
        theirs = images[i].float() / 255  # torchvision's floating-point path: no rounding between operations
        for operation in order:
            theirs = OPERATIONS[operation](theirs, float(factors[i, operation]))
        assert levels(ours[i], theirs * 255) < ONE_LEVEL
    if channels == 3:  # and the order matters, so the comparison above could have failed
        turned = colour_jitter(images.float(), factors, orders.roll(2, dims=1))
        assert float(((turned - ours).abs().amax(dim=(1, 2, 3)) > 3).float().mean()) > 0.8


def test_neutral_jitter_is_the_identity() -> None:
    images = pictures(N, 3, 12, 12).float()
    neutral, order = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(N, 1), torch.arange(4).repeat(N, 1)
    assert torch.equal(colour_jitter(images, neutral, order, hue=False), images)
    assert levels(colour_jitter(images, neutral, order), images) < 1e-3


def test_hue_is_periodic_and_does_not_change_grey() -> None:
    images = pictures(N, 3, 12, 12).float()
    assert levels(shift_hue(images, torch.ones(N)), images) < 1e-3
    grey = to_grey(images).expand(-1, 3, -1, -1)
    assert torch.equal(shift_hue(grey, uniform(N, -0.5, 0.5)), grey)


def test_grey_is_torchvisions() -> None:
    images = pictures(N, 3, 16, 16)
    assert levels(to_grey(images.float()), tv.rgb_to_grayscale(images)) <= ONE_LEVEL


@pytest.mark.parametrize(("side", "kernel"), [((32, 32), 3), ((40, 24), 9), ((8, 8), 15), ((5, 60), 5)])
def test_blur_is_torchvisions(side: tuple[int, int], kernel: int) -> None:
    images, sigma = pictures(N, 3, *side), uniform(N, 0.1, 3.0)
    ours = gaussian_blur(images.float(), sigma, kernel)
    for i in range(N):
        theirs = tv.gaussian_blur(images[i], [kernel, kernel], [float(sigma[i])])
        assert levels(ours[i], theirs) <= ONE_LEVEL


@pytest.mark.parametrize("kernel", [4, 9])
def test_blur_refuses_an_invalid_kernel_size(kernel: int) -> None:
    with pytest.raises(ValueError, match="must be odd and at most 7"):
        gaussian_blur(torch.zeros(1, 1, 4, 4), torch.ones(1), kernel)


def test_solarise_is_torchvisions() -> None:
    every = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(solarise(every.float()), tv.solarize(every, 128).float())


@pytest.mark.parametrize("channels", [1, 3])
def test_normalise_is_torchvisions(channels: int) -> None:
    images = pictures(N, channels, 6, 7)
    mean, std = (0.4, 0.5, 0.6), (0.2, 0.3, 0.1)
    theirs = tv.normalize(images.expand(-1, 3, -1, -1).float() / 255, list(mean), list(std))
    torch.testing.assert_close(normalise(images, mean, std), theirs, atol=1e-5, rtol=1e-5)


def test_normalise_refuses_a_mean_of_the_wrong_length() -> None:
    with pytest.raises(ValueError, match="3 channels and mean has 1"):
        normalise(torch.zeros(1, 3, 2, 2), (0.5,), (0.5,))


EVERYTHING = Views(
    size=24, crop_scale=(0.1, 1.0), hue=0.3, grey=0.3, blur=0.5, solarise=0.3, mean=(0.0,) * 3, std=(1.0,) * 3
)


def compose(image: Tensor, views: Views, parameters: ViewParameters, i: int) -> Tensor:
    """The same view by torchvision, floating-point after a crop of the image's type."""
    p = parameters
    box = [int(x[i]) for x in p.boxes]
    out = tv.resized_crop(image, *box, [views.size] * 2, antialias=True).float() / 255
    out = tv.horizontal_flip(out) if p.flip[i] else out
    for operation in p.order[i].tolist():
        out = OPERATIONS[operation](out, float(p.factors[i, operation]))
    out = tv.rgb_to_grayscale(out, out.shape[0]) if p.grey[i] else out
    out = tv.gaussian_blur(out, [views.kernel_size] * 2, [float(p.sigma[i])]) if p.blur[i] else out
    return torch.where(out >= 127.5 / 255, 1 - out, out) if p.solarise[i] else out


@pytest.mark.parametrize("in_groups", [True, False])
@pytest.mark.parametrize("channels", [1, 3])
def test_the_whole_view_is_torchvisions_composition(
    channels: int, in_groups: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in groups of samples, elsewhere all at once."""
    n = 120
    images, maker = pictures(n, channels, 40, 30), ViewMaker(EVERYTHING)
    monkeypatch.setattr("fmicl.data.augmentations.maker.is_eager_cpu", lambda _: in_groups)
    monkeypatch.setattr("fmicl.data.augmentations.cpu._GROUP_PIXELS", 2 * 24 * 24)  # two samples
    parameters = maker.sample(n, 40, 30, torch.Generator().manual_seed(3))
    assert 0 < int(parameters.blur.sum()) < n
    assert 0 < int(parameters.solarise.sum()) < n
    ours = maker.apply(images, parameters) * 255
    for i in range(n):
        image = images[i] if in_groups else images[i].float()
        assert levels(ours[i], compose(image, EVERYTHING, parameters, i) * 255) < ONE_LEVEL


@pytest.mark.parametrize(
    "changes", [{"hue": 0.5}, {"jitter": 0.0}, {"hue": 0.0, "contrast": 0.0}, {"mean": (0.1,), "std": (2.0,)}]
)
@pytest.mark.parametrize("channels", [1, 3])
def test_colours_in_groups_are_those_of_the_whole_batch(channels: int, changes: dict[str, Any]) -> None:
    if len(changes.get("mean", EVERYTHING.mean)) < channels:
        pytest.skip("colour images need a mean for each channel")
    views = replace(EVERYTHING, **changes)
    images = pictures(300, channels, 24, 24)
    parameters = ViewMaker(views).sample(300, 24, 24, torch.Generator().manual_seed(5))
    ours, expected = colour_in_groups(images, parameters, views), _colour_at_once(images.float(), parameters, views)
    difference = (ours - expected).abs() * 255 * views.std[0]
    assert float(difference.max()) < ONE_LEVEL  # a grey level is rounded down before it is blended with
    assert float((difference > 0.01).float().mean()) < 1e-3


def test_crops_one_by_one_are_those_of_the_whole_batch() -> None:
    images, views = pictures(N, 3, 40, 30), Views(size=24)
    parameters = ViewMaker(views).sample(N, 40, 30, torch.Generator().manual_seed(6))
    ours = crop_resize_each(images, parameters.boxes, parameters.flip, 24)
    assert ours.dtype == torch.uint8
    assert levels(ours, crop_resize(images, parameters.boxes, parameters.flip, 24)) <= ONE_LEVEL


def ks(ours: Tensor, theirs: Tensor) -> float:
    """Two-sample Kolmogorov-Smirnov distance."""
    grid = torch.cat([ours, theirs]).double()
    a = torch.searchsorted(ours.double().sort().values, grid, right=True) / len(ours)
    b = torch.searchsorted(theirs.double().sort().values, grid, right=True) / len(theirs)
    return float((a - b).abs().max())


@pytest.mark.parametrize(
    ("height", "width", "scale"), [(32, 32, (0.2, 1.0)), (20, 60, (0.5, 1.0)), (60, 20, (0.9, 1.0))]
)
def test_crops_are_distributed_as_torchvisions(height: int, width: int, scale: tuple[float, float]) -> None:
    torch.manual_seed(0)
    n = 3000
    transform = v2.RandomResizedCrop(8, scale=scale)
    image = [torch.zeros(3, height, width)]
    draw = getattr(transform, "make_params", None) or transform._get_params  # the older name
    theirs = [draw(image) for _ in range(n)]
    uniforms = torch.rand(3 * n, 22, generator=torch.Generator().manual_seed(0))
    ours = crop_boxes(uniforms, height, width, Views(crop_scale=scale))
    for name in ("top", "left", "height", "width"):
        theirs_n = torch.tensor([float(t[name]) for t in theirs])
        assert ks(getattr(ours, name), theirs_n) < 1.95 * math.sqrt(1 / n + 1 / (3 * n)), name
    assert bool((ours.height * ours.width > 0).all())
    assert bool((ours.top >= 0).all() and (ours.top + ours.height <= height).all())
    assert bool((ours.left >= 0).all() and (ours.left + ours.width <= width).all())


def test_impossible_crops_fall_back_to_the_centre() -> None:
    # Half of a 10 x 100 image at a ratio of about 1 never fits.
    boxes = crop_boxes(torch.rand(50, 22), 10, 100, Views(crop_scale=(0.9, 1.0)))
    expected = {"top": 0.0, "left": 43.0, "height": 10.0, "width": 13.0}
    for name, value in expected.items():
        assert bool((getattr(boxes, name) == value).all()), name


def test_parameters_are_independent_and_in_range() -> None:
    views = Views(blur=0.5, solarise=0.2)
    n = 20_000
    p = ViewMaker(views).sample(n, 32, 32, torch.Generator().manual_seed(0))
    for name in ("flip", "grey", "blur", "solarise"):
        assert getattr(p, name).float().mean().item() == pytest.approx(getattr(views, name), abs=0.015), name
    jittered = p.factors[:, 0] != 1
    assert jittered.float().mean().item() == pytest.approx(0.8, abs=0.015)
    assert torch.equal(p.factors[~jittered], torch.tensor([1.0, 1.0, 1.0, 0.0]).expand(int((~jittered).sum()), 4))
    low, high = p.factors.amin(0), p.factors.amax(0)
    torch.testing.assert_close(low, torch.tensor([0.6, 0.6, 0.6, -0.1]), atol=2e-3, rtol=0)
    torch.testing.assert_close(high, torch.tensor([1.4, 1.4, 1.4, 0.1]), atol=2e-3, rtol=0)
    codes = (p.order * torch.tensor([64, 16, 4, 1])).sum(dim=1).bincount()
    counts = codes[codes > 0]
    assert len(counts) == 24
    assert float((counts - n / 24).square().sum() / (n / 24)) < 60  # chi-square with 23 degrees of freedom
    assert 0.1 <= float(p.sigma.min()) < 0.12
    assert 1.98 < float(p.sigma.max()) <= 2.0
    numbers = torch.stack([p.flip, p.grey, p.blur, p.solarise, p.sigma, p.boxes.top, p.factors[:, 0]]).float()
    assert float((torch.corrcoef(numbers) - torch.eye(len(numbers))).abs().max()) < 0.04


def test_views_are_a_function_of_the_generator() -> None:
    images, maker = pictures(N, 3, 32, 32), ViewMaker(Views())
    first = maker(images, torch.Generator().manual_seed(5))
    torch.rand(3)
    assert torch.equal(first, maker(images, torch.Generator().manual_seed(5)))
    assert not torch.equal(first, maker(images, torch.Generator().manual_seed(6)))


def test_switched_off_operations_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object, **__: object) -> Tensor:
        raise AssertionError("an operation with probability 0 was run")

    for name in ("colour_jitter", "to_grey", "gaussian_blur", "solarise"):
        monkeypatch.setattr(f"fmicl.data.augmentations.maker.{name}", explode)
    quiet = ViewMaker(Views(jitter=0, grey=0))
    assert quiet(pictures(N, 3, 32, 32), torch.Generator().manual_seed(0)).shape == (N, 3, 32, 32)


@pytest.mark.parametrize("size", [8, 12])
def test_digits_keep_one_channel(size: int) -> None:
    maker = ViewMaker(Views(size=size, mean=(0.3,), std=(0.4,), blur=0.5))
    assert maker(pictures(N, 1, 8, 8), torch.Generator().manual_seed(0)).shape == (N, 1, size, size)


def test_autocast_does_not_change_views() -> None:
    images, maker = pictures(N, 3, 32, 32), ViewMaker(EVERYTHING)
    plain = maker(images, torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(maker(images, torch.Generator().manual_seed(0)), plain)


def test_views_compile_as_one_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    images, maker = pictures(N, 3, 32, 32), ViewMaker(EVERYTHING)
    monkeypatch.setattr("fmicl.data.augmentations.maker.is_eager_cpu", lambda _: False)

    def both(images: Tensor, uniforms: Tensor) -> Tensor:
        return maker.apply(images, maker.parameters(uniforms, *images.shape[2:]))

    uniforms = torch.rand(N, 36, generator=torch.Generator().manual_seed(0))
    # The eager backend traces without a C compiler; a break in the graph is an error.
    compiled = torch.compile(both, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(images, uniforms), both(images, uniforms))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("size", 1),
        ("size", 8.5),
        ("flip", -0.1),
        ("brightness", -1.0),
        ("hue", 0.6),
        ("crop_scale", (0.5, 1.5)),
        ("crop_ratio", (2.0, 1.0)),
        ("blur_sigma", (0.0, 1.0)),
        ("mean", (0.5,)),
        ("std", (1.0, 0.0, 1.0)),
    ],
)
def test_options_out_of_range_are_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Views(**{name: value})  # type: ignore[arg-type]
