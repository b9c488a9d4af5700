"""Streams of image views and evaluation batches: order, randomness, exact resumption, ranks, files and arrays."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.v2 import functional as tv

from fmicl.data import (
    ArraySamples,
    Batch,
    FileSamples,
    Samples,
    Skipped,
    ViewStream,
    display_images,
    evaluation_batches,
    find_images,
    load_images,
)
from fmicl.data.augmentations.maker import CROP_UNIFORMS, ViewMaker, crop_boxes
from fmicl.data.augmentations.views import Views
from fmicl.data.images.decoding import decode, to_tensor
from fmicl.data.stream import seeded_generator

SMALL = Views(size=12)
OTHER = Views(size=12, blur=0.5, solarise=0.5)
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)


def array_samples(n: int = 23, side: int = 16) -> ArraySamples:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(256, (n, 3, side, side), generator=generator, dtype=torch.uint8)
    return ArraySamples(images, torch.arange(n) % 3)


@pytest.fixture(scope="module")
def file_samples(tmp_path_factory: pytest.TempPathFactory) -> FileSamples:
    folder = tmp_path_factory.mktemp("files")
    rng = np.random.default_rng(0)
    for i in range(11):
        pixels = rng.integers(0, 256, (6, 7, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize((40 + i, 30)).save(folder / f"{i:02d}é.png")
    return FileSamples(tuple(sorted(folder.iterdir())), torch.arange(11))


def stream(
    samples: Samples, batch_size: int = 4, views: tuple[Views, Views] = (SMALL, SMALL), **rest: Any
) -> ViewStream:
    return ViewStream(samples, views, batch_size, device="cpu", **{"seed": 0, **rest})


def same(first: list[Batch], second: list[Batch]) -> bool:
    return len(first) == len(second) and all(
        x is y if x is None or y is None else torch.equal(x, y)
        for a, b in zip(first, second, strict=True)
        for x, y in zip(a, b, strict=True)
    )


@pytest.fixture(params=["arrays", "files"])
def samples(request: pytest.FixtureRequest, file_samples: FileSamples) -> Samples:
    return array_samples() if request.param == "arrays" else file_samples


def test_an_epoch_has_full_batches_and_every_sample_at_most_once(samples: Samples) -> None:
    one = stream(samples)
    epochs = [torch.cat([batch.index for batch in one]) for _ in range(3)]
    for epoch in epochs:
        assert len(epoch) == len(one) * 4 == len(samples) // 4 * 4
        assert len(set(epoch.tolist())) == len(epoch)
    assert not torch.equal(epochs[0], epochs[1])
    for batch in one:
        assert batch.first.shape == batch.second.shape == (4, 3, 12, 12)
        assert batch.first.dtype == torch.float32
        assert not torch.equal(batch.first, batch.second)


@pytest.mark.parametrize("views", [(SMALL, SMALL), (SMALL, OTHER)])
def test_a_pass_resumes_exactly(samples: Samples, views: tuple[Views, Views]) -> None:
    whole = stream(samples, views=views)
    first, second = list(whole), list(whole)
    again = stream(samples, views=views)
    again.set_position(0, 1)
    torch.rand(7)  # nothing depends on the global generator
    assert same(list(again), first[1:])
    assert same(list(again), second)
    again.set_position(1, 0)
    assert same(list(again), second)
    again.set_position(0, len(again))  # the end of an epoch is the start of the next
    assert same(list(again), second)


def test_three_views_differ_and_resume_exactly(samples: Samples) -> None:
    whole = list(stream(samples, multiplicity=3))
    for batch in whole:
        assert batch.first.shape == (4, 3, 12, 12)
        assert batch.second.shape == (8, 3, 12, 12)
        one, two = batch.second.chunk(2)
        assert not torch.equal(one, two)
        assert not torch.equal(batch.first, two)
    again = stream(samples, multiplicity=3)
    again.set_position(0, 1)
    assert same(list(again), whole[1:])


LOCAL = Views(size=6, crop_scale=(0.05, 0.14))


@pytest.mark.parametrize("views", [(SMALL, SMALL), (SMALL, OTHER)])
def test_local_crops_are_further_views_and_resume_exactly(samples: Samples, views: tuple[Views, Views]) -> None:
    plain, whole = stream(samples, views=views), list(stream(samples, views=views, local=(LOCAL, 3)))
    for without, batch in zip(plain, whole, strict=True):
        assert same([without], [batch._replace(local=None)])  # the views are the same with and without
        assert batch.local is not None
        assert batch.local.shape == (12, 3, 6, 6)
        assert len({crop.sum().item() for crop in batch.local}) == 12
    again = stream(samples, views=views, local=(LOCAL, 3))
    again.set_position(0, 1)
    assert same(list(again), whole[1:])
    assert all(batch.local is None for batch in stream(samples, views=views, local=(LOCAL, 0)))


def test_local_crops_of_arrays_are_the_view_makers() -> None:
    samples = array_samples()
    for number, batch in enumerate(stream(samples, views=(SMALL, OTHER), local=(LOCAL, 2))):
        generator = seeded_generator(0, 0, number, 0)
        images = samples.images[batch.index]
        ViewMaker(SMALL)(images, generator), ViewMaker(OTHER)(images, generator)
        assert batch.local is not None
        assert torch.equal(batch.local, ViewMaker(LOCAL)(images.repeat(2, 1, 1, 1), generator))


def test_local_crops_of_files_are_small_parts_of_their_images(tmp_path: Path) -> None:
    """On a ramp of brightness from left to right, a crop of a twentieth of the area has little contrast."""
    for i in range(4):
        Image.fromarray(np.tile(np.linspace(0, 255, 64, dtype=np.uint8), (64, 1))).save(tmp_path / f"{i}.png")
    ramp = FileSamples(tuple(sorted(tmp_path.iterdir())), torch.arange(4))
    zero, one = (0.0,) * 3, (1.0,) * 3
    plain = Views(size=12, jitter=0.0, grey=0.0, crop_scale=(1.0, 1.0), crop_ratio=(1.0, 1.0), mean=zero, std=one)
    local = replace(plain, size=6, crop_scale=(0.05, 0.05))
    (batch,) = stream(ramp, views=(plain, plain), local=(local, 4))
    assert batch.local is not None
    spread = batch.local.amax((1, 2, 3)) - batch.local.amin((1, 2, 3))
    assert float(spread.max()) < 0.3 < float(batch.first.amax() - batch.first.amin())


def test_invalid_multiplicities_are_refused(samples: Samples) -> None:
    with pytest.raises(ValueError, match=r"multiplicity.*1"):
        stream(samples, multiplicity=1)
    with pytest.raises(ValueError, match="multiplicity 3"):
        stream(samples, views=(SMALL, OTHER), multiplicity=3)


def test_batches_are_a_function_of_the_seed(samples: Samples) -> None:
    assert same(list(stream(samples)), list(stream(samples)))
    assert not same(list(stream(samples)), list(stream(samples, seed=1)))


def test_the_global_generator_is_not_used(samples: Samples) -> None:
    torch.manual_seed(3)
    state = torch.get_rng_state()
    list(stream(samples))
    list(evaluation_batches(samples, size=12, mean=MEAN, std=STD, batch_size=4, device="cpu"))
    assert torch.equal(torch.get_rng_state(), state)


def test_ranks_share_an_epoch_without_overlap(samples: Samples) -> None:
    ranks = [stream(samples, batch_size=2, rank=r, world_size=2) for r in range(2)]
    assert len({len(r) for r in ranks}) == 1
    passes = [list(r) for r in ranks]
    index = torch.cat([batch.index for one in passes for batch in one])
    assert len(set(index.tolist())) == len(index) == len(samples) // 4 * 4
    # Together, batch for batch, they see what one process with the whole batch sees.
    for batch, (a, b) in zip(stream(samples), zip(*passes, strict=True), strict=True):
        assert torch.equal(batch.index, torch.cat([a.index, b.index]))
    assert not torch.equal(passes[0][0].first, passes[1][0].first)


def test_array_views_are_the_view_makers() -> None:
    samples = array_samples()
    for number, batch in enumerate(stream(samples, views=(SMALL, OTHER))):
        generator = seeded_generator(0, 0, number, 0)
        images = samples.images[batch.index]
        assert torch.equal(batch.first, ViewMaker(SMALL)(images, generator))
        assert torch.equal(batch.second, ViewMaker(OTHER)(images, generator))


def test_file_views_are_torchvisions_crops(file_samples: FileSamples) -> None:
    views = Views(size=12, jitter=0.0, grey=0.0, mean=(0.0,) * 3, std=(1.0,) * 3)
    for batch in stream(file_samples, views=(views, views)):
        for row, index in enumerate(batch.index.tolist()):
            image = to_tensor(decode(file_samples.paths[index]))
            uniforms = torch.rand(2, CROP_UNIFORMS, generator=seeded_generator(0, 0, index))
            for made, u in zip((batch.first[row], batch.second[row]), uniforms, strict=True):
                box = [int(x) for x in crop_boxes(u[None], image.shape[1], image.shape[2], views)]
                theirs = tv.resized_crop(image, *box, [12, 12], antialias=True)
                theirs = tv.horizontal_flip(theirs) if float(u[-1]) < 0.5 else theirs
                assert float((made * 255 - theirs.float()).abs().max()) <= 1.001


def test_worker_processes_change_nothing(file_samples: FileSamples) -> None:
    alone = stream(file_samples, views=(SMALL, OTHER))
    helped = stream(file_samples, views=(SMALL, OTHER), workers=2)
    helped.set_position(0, 1)
    assert same(list(helped), list(alone)[1:])
    plain = [
        list(evaluation_batches(file_samples, size=12, mean=MEAN, std=STD, batch_size=4, device="cpu", workers=w))
        for w in (0, 2)
    ]
    for (a, _), (b, _) in zip(*plain, strict=True):
        assert torch.equal(a, b)


@pytest.fixture
def one_broken(file_samples: FileSamples, tmp_path: Path) -> FileSamples:
    """One file without its middle; header and end are intact."""
    broken, data = tmp_path / "broken.png", file_samples.paths[0].read_bytes()
    broken.write_bytes(data[: len(data) // 3] + data[-12:])
    return FileSamples((*file_samples.paths[:4], broken, *file_samples.paths[4:]), torch.arange(12))


@pytest.mark.parametrize("workers", [0, 1])
def test_an_undecodable_file_is_replaced_and_reported_once(one_broken: FileSamples, workers: int) -> None:
    reported: list[Skipped] = []
    one = ViewStream(one_broken, (SMALL, OTHER), 4, seed=0, device="cpu", workers=workers, report=reported.extend)
    twin = ViewStream(one_broken.select([*range(4), *range(5, 12), 0]), (SMALL, OTHER), 4, seed=0, device="cpu")
    first = list(one)
    assert one.undecodable == {4}
    assert [skipped.path.name for skipped in reported] == ["broken.png"]
    assert reported[0].reason
    drawn, used = one._order(0), torch.stack([batch.index for batch in first])
    (place,) = (drawn == 4).nonzero().tolist()
    row = drawn[place[0]].tolist()
    expected = next(i for i in range(5, 12) if i not in row)  # the next one that is not in the batch
    assert used[place[0], place[1]] == expected
    assert torch.equal(used[drawn != 4], drawn[drawn != 4])
    assert bool(first[place[0]].first.isfinite().all())
    second = list(one)
    assert len(reported) == 1  # once, not each epoch
    one.set_position(0, place[0])
    assert same(list(one), first[place[0] :])  # a resumed run takes the same one in its place
    assert same(list(one), second)
    assert len(twin) == len(one)


def test_an_undecodable_file_is_replaced_in_a_batch_of_all_samples(one_broken: FileSamples) -> None:
    with pytest.warns(UserWarning, match=r"broken\.png"):
        (batch,) = stream(one_broken, batch_size=12)
    assert sorted(batch.index.tolist()) != list(range(12))
    assert 4 not in batch.index.tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_files_that_are_all_missing_are_an_error(tmp_path: Path, workers: int) -> None:
    gone = FileSamples(tuple(tmp_path / f"{i}.png" for i in range(4)))
    with pytest.raises(OSError, match=r"^\S*\d\.png.*no such file"):
        list(stream(gone, workers=workers))


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_batches_skip_undecodable_files(one_broken: FileSamples, workers: int) -> None:
    skipped: list[Skipped] = []
    settings = {"size": 12, "mean": MEAN, "std": STD, "batch_size": 5, "device": "cpu", "workers": workers}
    batches = list(evaluation_batches(one_broken, **settings, skipped=skipped))  # type: ignore[arg-type]
    assert torch.cat([y for _, y in batches if y is not None]).tolist() == [0, 1, 2, 3, *range(5, 12)]
    whole = one_broken.select([0, 1, 2, 3, *range(5, 12)])
    expected = torch.cat([x for x, _ in evaluation_batches(whole, **settings)])  # type: ignore[arg-type]
    assert torch.equal(torch.cat([x for x, _ in batches]), expected)
    assert [x.path.name for x in skipped] == ["broken.png"]
    with pytest.raises(OSError, match=r"^\S*broken\.png"):
        list(evaluation_batches(one_broken, **settings))  # type: ignore[arg-type]
    alone: list[Skipped] = []
    assert list(evaluation_batches(one_broken.select([4]), **settings, skipped=alone)) == []  # type: ignore[arg-type]
    assert len(alone) == 1


def test_evaluation_batches_convert_colour_to_grey(file_samples: FileSamples) -> None:
    grey = torch.cat(
        [x for x, _ in evaluation_batches(file_samples, size=12, mean=(0.5,), std=(0.5,), batch_size=4, device="cpu")]
    )
    theirs = tv.rgb_to_grayscale(unnormalised(file_samples, 12) / 255)
    torch.testing.assert_close(grey, (theirs - 0.5) / 0.5, atol=1e-5, rtol=1e-5)


def test_evaluation_batches_have_all_samples_in_order() -> None:
    samples = array_samples()
    batches = list(evaluation_batches(samples, size=16, mean=MEAN, std=STD, batch_size=10, device="cpu"))
    images = torch.cat([x for x, _ in batches])
    theirs = tv.normalize(samples.images.float() / 255, list(MEAN), list(STD))
    torch.testing.assert_close(images, theirs, atol=1e-5, rtol=1e-5)
    assert samples.labels is not None
    assert torch.equal(torch.cat([y for _, y in batches if y is not None]), samples.labels)
    unlabelled = ArraySamples(samples.images)
    assert all(
        y is None for _, y in evaluation_batches(unlabelled, size=16, mean=MEAN, std=STD, batch_size=10, device="cpu")
    )


def unnormalised(samples: Samples, size: int) -> Tensor:
    batches = evaluation_batches(samples, size=size, mean=(0.0,) * 3, std=(1.0,) * 3, batch_size=5, device="cpu")
    return torch.cat([x for x, _ in batches]) * 255


def test_evaluation_arrays_are_resized_or_cropped() -> None:
    samples = array_samples(side=32)
    torch.testing.assert_close(unnormalised(samples, 28), samples.images[..., 2:-2, 2:-2].float(), atol=1e-3, rtol=0)
    for size in (24, 40):
        theirs = tv.resize(samples.images.float(), [size, size], antialias=True)
        torch.testing.assert_close(unnormalised(samples, size), theirs, atol=1e-2, rtol=0)
    oblong = ArraySamples(samples.images[..., :20])
    theirs = tv.resize(tv.center_crop(oblong.images.float(), [20, 20]), [24, 24], antialias=True)
    torch.testing.assert_close(unnormalised(oblong, 24), theirs, atol=1e-2, rtol=0)


def test_evaluation_files_are_torchvisions(file_samples: FileSamples) -> None:
    ours = unnormalised(file_samples, 14)
    for image, path in zip(ours, file_samples.paths, strict=True):
        theirs = tv.center_crop(tv.resize(decode(path), [16], antialias=True), [14])
        assert float((image - to_tensor(theirs).float()).abs().max()) <= 1.001


@pytest.mark.parametrize("size", [12, 14, 16, 24])
@pytest.mark.parametrize("shape", [(16, 16), (14, 10), (60, 45)])
def test_files_and_arrays_of_one_folder_agree(tmp_path: Path, shape: tuple[int, int], size: int) -> None:
    for i in range(3):
        pixels = np.random.default_rng(i).integers(0, 256, (4, 4, 3), dtype=np.uint8)
        Image.fromarray(pixels).resize(shape).save(tmp_path / f"{i}.png")
    kept = load_images("images", tmp_path, size=size).pretrain
    assert isinstance(kept, ArraySamples)
    difference = (unnormalised(kept, size) - unnormalised(find_images(tmp_path)[0], size)).abs()
    assert float(difference.max()) <= 1.001


def test_display_images_are_evaluation_images(samples: Samples) -> None:
    index = [3, 0, 7]
    expected = unnormalised(samples, 14)[index].round()
    assert torch.equal(display_images(samples, index, 14).float(), expected)


def test_grey_images_can_be_repeated_to_three_channels() -> None:
    samples = ArraySamples(torch.randint(256, (8, 1, 8, 8), dtype=torch.uint8))
    three = Views(size=8)
    batch = next(iter(stream(samples, views=(three, three))))
    assert batch.first.shape == (4, 3, 8, 8)


def test_invalid_arguments_are_refused(samples: Samples) -> None:
    with pytest.raises(ValueError, match=r"batch of 100.*--batch-size"):
        stream(samples, batch_size=100)
    with pytest.raises(ValueError, match="3 processes"):
        stream(samples, batch_size=8, world_size=3)
    with pytest.raises(ValueError, match="rank"):
        stream(samples, rank=2, world_size=2)
    one = stream(samples)
    with pytest.raises(ValueError, match="batch"):
        one.set_position(0, len(one) + 1)
    with pytest.raises(ValueError, match="uint8"):
        ArraySamples(torch.zeros(3, 3, 8, 8))
    with pytest.raises(ValueError, match="labels"):
        FileSamples((Path("x"),), torch.zeros(2, dtype=torch.int64))


def test_orders_of_an_epoch_are_uniform() -> None:
    samples = ArraySamples(torch.zeros(4, 3, 2, 2, dtype=torch.uint8))
    one = stream(samples, batch_size=4)
    n = 2400
    orders = torch.stack([one._order(epoch)[0] for epoch in range(n)])
    counts = (orders * torch.tensor([64, 16, 4, 1])).sum(dim=1).bincount()
    counts = counts[counts > 0]
    assert len(counts) == math.factorial(4)
    assert float((counts - n / 24).square().sum() / (n / 24)) < 60  # chi-square with 23 degrees of freedom


def test_the_stream_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.augmentations.maker.is_eager_cpu", lambda _: False)
    samples = array_samples(8)
    torch._dynamo.reset()
    eager = stream(samples, views=(SMALL, OTHER))
    compiled = stream(samples, views=(SMALL, OTHER))
    from fmicl.data.images.view_stream import _array_views

    compiled._views = torch.compile(_array_views, fullgraph=True, backend="eager")
    for a, b in zip(eager, compiled, strict=True):
        torch.testing.assert_close(a.first, b.first)
        torch.testing.assert_close(a.second, b.second)
