"""The cache of decoded images: what it holds, when it is used, and what is written anew."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fmicl.data import (
    ArraySamples,
    FileSamples,
    MappedSamples,
    Splits,
    ViewStream,
    evaluation_batches,
    fingerprint,
    load_images,
)
from fmicl.data.augmentations.views import Views
from fmicl.data.images import listing
from fmicl.data.images.decoding import map_in_processes, map_in_threads
from image_sets import damage_inside, labels_of, make_classes, truncate, write_image

LIMIT = 2**28
SMALL = Views(size=28)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of images in two classes, large enough to be cached."""
    monkeypatch.setattr("fmicl.data.images.cache.CACHED_IMAGES", 10)
    make_classes(tmp_path / "data", {"a": 9, "b": 7})
    for i in range(2):
        write_image(tmp_path / "data" / f"{i}.png", 70 + i)
    return tmp_path / "data"


def load(folder: Path, **options: Any) -> Splits:
    return load_images(
        "images", folder, **{"size": 28, "cache_limit": LIMIT, "cache": folder.parent / "cache", **options}
    )


def entries(folder: Path) -> list[Path]:
    return [place for place in (folder.parent / "cache" / "images").iterdir() if place.is_dir()]


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many images each decoding of a folder was of."""
    counts: list[int] = []
    real = listing._decode_all

    def counted(paths: Any, *arguments: Any) -> Any:
        counts.append(len(paths))
        return real(paths, *arguments)

    monkeypatch.setattr(listing, "_decode_all", counted)
    return counts


def same(one: Splits, other: Splits) -> bool:
    """Whether two loads are alike, up to where their images are."""
    assert one.train is not None
    assert other.train is not None
    assert fingerprint(one) == fingerprint(other)
    assert (one.names, one.test_names, one.skipped) == (other.names, other.test_names, other.skipped)
    assert labels_of(one.train) == labels_of(other.train)
    return all(
        torch.equal(a, b)
        for a, b in zip(views_of(one), views_of(other), strict=True)
    )  # fmt: skip


def views_of(splits: Splits) -> list[torch.Tensor]:
    stream = ViewStream(splits.pretrain, (SMALL, SMALL), 4, seed=0, device="cpu")
    made = [part for _ in range(2) for batch in stream for part in (batch.first, batch.second, batch.index)]
    assert splits.test is not None
    plain = evaluation_batches(splits.test, size=28, mean=SMALL.mean, std=SMALL.std, batch_size=3, device="cpu")
    return [*made, *(x for batch in plain for x in batch if x is not None)]


@pytest.mark.parametrize("memory_limit", [LIMIT, 0])
def test_the_second_load_reads_what_the_first_decoded(folder: Path, decoded: list[int], memory_limit: int) -> None:
    expected = load(folder, cache_limit=0)
    first, second = (load(folder, memory_limit=memory_limit) for _ in range(2))
    assert decoded == [18, 18]  # without the cache, and with it
    for splits in (first, second):
        assert isinstance(splits.pretrain, ArraySamples if memory_limit else MappedSamples)
        assert same(splits, expected)
    assert same(load(folder, memory_limit=memory_limit, validation=0.3), load(folder, cache_limit=0, validation=0.3))
    (entry,) = entries(folder)
    assert (entry / "pixels.bin").stat().st_size == 18 * 3 * 32 * 32


def test_a_mapped_stream_resumes_exactly(folder: Path) -> None:
    samples = load(folder, memory_limit=0).pretrain
    local = (Views(size=8), 2)
    whole = list(ViewStream(samples, (SMALL, SMALL), 4, seed=0, device="cpu", local=local))
    again = ViewStream(samples, (SMALL, SMALL), 4, seed=0, device="cpu", local=local)
    again.set_position(0, 2)
    rest = list(again)
    assert len(rest) == len(whole) - 2
    for a, b in zip(rest, whole[2:], strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True) if x is not None and y is not None)
    assert next(iter(again)).first.shape == (4, 3, 28, 28)  # a pass may be left early


def test_a_changed_folder_replaces_its_entry(folder: Path, decoded: list[int]) -> None:
    load(folder)
    image = folder / "a" / "003.png"
    before = os.stat(image)
    write_image(image, 1234)
    os.utime(image, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    changed = load(folder)
    assert len(decoded) == 2
    assert same(changed, load(folder, cache_limit=0))
    assert len(entries(folder)) == 1
    load(folder, size=56)  # other images: another entry
    assert len(entries(folder)) == 2


@pytest.mark.parametrize("damage", ["shorter", "no manifest", "no JSON", "another shape", "from another version"])
def test_a_damaged_entry_is_written_again(folder: Path, decoded: list[int], damage: str) -> None:
    expected = load(folder)
    (entry,) = entries(folder)
    manifest = entry / "manifest.json"
    found = json.loads(manifest.read_text())
    if damage == "shorter":
        truncate(entry / "pixels.bin")
    elif damage == "no manifest":
        manifest.unlink()
    else:
        changes = {"another shape": {"shape": [17, 3, 32, 32]}, "from another version": {"format": 0}}
        manifest.write_text("{" if damage == "no JSON" else json.dumps(found | changes[damage]))
    (entry.parent / f".{entry.name}.left.tmp").mkdir()  # by a process that was killed
    assert same(load(folder), expected)
    assert len(decoded) == 2
    assert entries(folder) == [entry]
    assert json.loads(manifest.read_text()) == found


@pytest.mark.filterwarnings("ignore:.*and are skipped")
def test_damaged_images_are_remembered(folder: Path, decoded: list[int]) -> None:
    truncate(folder / "a" / "004.png")
    damage_inside(folder / "b" / "002.png")
    expected, first, second = load(folder, cache_limit=0), load(folder), load(folder)
    assert len(decoded) == 2
    assert [x.path.name for x in expected.skipped] == ["004.png", "002.png"]
    assert same(first, expected)
    assert same(second, expected)


def test_images_cannot_be_changed_through_the_cache(folder: Path) -> None:
    for _ in range(2):
        samples = load(folder).pretrain
        assert isinstance(samples, ArraySamples)
        before = samples.images.clone()
        samples.images.zero_()
        again = load(folder).pretrain
        assert isinstance(again, ArraySamples)
        assert torch.equal(again.images, before)


def test_images_beyond_the_limits_stay_files(folder: Path) -> None:
    assert isinstance(load(folder, memory_limit=0, cache_limit=1000).pretrain, FileSamples)
    assert isinstance(load(folder, memory_limit=0, cache_limit=0).pretrain, FileSamples)
    assert isinstance(load(folder, cache_limit=1000).pretrain, ArraySamples)
    assert entries(folder) == []


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder.parent / "file").touch()
    place = folder.parent / "file"
    assert same(load(folder, cache=place), load(folder, cache_limit=0))
    assert str(place) in caplog.text


def test_a_full_disk_is_done_without(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("fmicl.data.images.cache._reserve", full)
    assert same(load(folder), load(folder, cache_limit=0))
    assert isinstance(load(folder, memory_limit=0).pretrain, FileSamples)  # and not an array in memory
    assert entries(folder) == []


def test_folders_of_few_small_images_are_not_cached(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.images.cache.CACHED_IMAGES", 19)
    load(folder)
    assert not (folder.parent / "cache").exists()
    monkeypatch.setattr("fmicl.data.images.cache.CACHED_BYTES", 1000)  # or few large ones
    load(folder)
    assert len(entries(folder)) == 1


def test_one_of_several_decodes_while_the_others_wait(folder: Path, decoded: list[int]) -> None:
    found: list[Splits] = []
    threads = [threading.Thread(target=lambda: found.append(load(folder))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert decoded == [18]
    assert same(found[0], found[2])


def test_processes_return_results_in_order_and_share_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.images.decoding.available_cpus", lambda: 2)
    shared, parent = torch.zeros(1000, dtype=torch.int64).share_memory_(), os.getpid()

    def square(x: int) -> int:
        shared[x] = os.getpid()
        return x * x

    assert list(map_in_processes(square, range(1000))) == [x * x for x in range(1000)]
    assert parent not in shared.tolist()
    assert list(map_in_processes(square, range(100))) == [x * x for x in range(100)]  # too few: threads
    assert set(shared[:100].tolist()) == {parent}


def test_a_killed_process_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.images.decoding.available_cpus", lambda: 2)

    def end(x: int) -> None:
        if x == 300:
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(OSError, match="killed"):
        list(map_in_processes(end, range(1000)))


def test_errors_of_processes_are_those_of_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.images.decoding.available_cpus", lambda: 2)

    def invert(x: int) -> float:
        return 1 / x

    for mapped in (map_in_processes, map_in_threads):
        with pytest.raises(ZeroDivisionError):
            list(mapped(invert, range(1000)))
