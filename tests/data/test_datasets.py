"""CIFAR-10, STL-10 and digits in their real file formats, complete and damaged; the registry of datasets."""

from __future__ import annotations

import hashlib
import pickle
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torchvision.datasets import CIFAR10, STL10

import fmicl
from fmicl.data import DATASETS, ArraySamples, LoadRequest, Splits, list_datasets, load_images
from fmicl.utils.options import option
from image_sets import arrays, labels_of
from small_settings import small
from train_run import train

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]


# --- CIFAR-10 -------------------------------------------------------------------------------------------------


def make_cifar10(root: Path, records: int = 20) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    folder = root / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    made = {}
    for name in BATCHES:
        images = rng.integers(0, 256, (records, 3, 32, 32), dtype=np.uint8)
        labels = rng.permutation(np.arange(records) % 10).astype(np.uint8)
        made[name] = images, labels
        rows = np.concatenate([labels[:, None], images.reshape(records, -1)], axis=1)
        (folder / f"{name}.bin").write_bytes(rows.tobytes())
    return made


@pytest.mark.parametrize("below", ["", "cifar-10-batches-bin"])
def test_cifar10_binary(tmp_path: Path, below: str) -> None:
    made = make_cifar10(tmp_path)
    splits = load_images("cifar10", tmp_path / below, size=32, checksum=False)
    pretrain, train, test = arrays(splits)
    assert pretrain is train
    assert splits.classes[3] == "cat"
    assert splits.split == "test"
    assert np.array_equal(train.images.numpy(), np.concatenate([made[b][0] for b in BATCHES[:5]]))
    assert labels_of(train) == np.concatenate([made[b][1] for b in BATCHES[:5]]).tolist()
    assert np.array_equal(test.images.numpy(), made["test_batch"][0])


def test_cifar10_checksums_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_cifar10(tmp_path)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin.*61,460 of 30,730,000 bytes"):
        load_images("cifar10", tmp_path)
    monkeypatch.setattr("fmicl.data.images.cifar10.FILE_SIZE", 20 * 3073)
    with pytest.raises(ValueError, match=r"data_batch_1\.bin.*5dd7e06a14cb22eb"):
        load_images("cifar10", tmp_path)
    folder = tmp_path / "cifar-10-batches-bin"
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    monkeypatch.setattr("fmicl.data.images.cifar10.MD5", {f"{b}.bin": sums[f"{b}.bin"] for b in BATCHES})
    assert len(load_images("cifar10", tmp_path).pretrain) == 100
    data = bytearray((folder / "data_batch_4.bin").read_bytes())
    data[5000] ^= 1
    (folder / "data_batch_4.bin").write_bytes(data)
    with pytest.raises(ValueError, match=r"data_batch_4\.bin.*MD5"):
        load_images("cifar10", tmp_path)


def test_cifar10_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    make_cifar10(tmp_path)
    third = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    whole = third.read_bytes()
    cases: list[tuple[bytes, str]] = [
        (whole[:-1], r"data_batch_3\.bin.*61,459 bytes"),
        (b"", r"data_batch_3\.bin is empty"),
        (b"\x0b" + whole[1:], r"data_batch_3\.bin.*label 11"),
    ]
    for content, message in cases:
        third.write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_images("cifar10", tmp_path, checksum=False)
    third.unlink()
    with pytest.raises(FileNotFoundError, match=r"data_batch_3\.bin is missing"):
        load_images("cifar10", tmp_path, checksum=False)


def test_cifar10_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"cifar-10-batches-bin.*--download"):
        load_images("cifar10", tmp_path)
    (tmp_path / "cifar-10-binary.tar.gz").touch()
    with pytest.raises(FileNotFoundError, match=r"tar xf .*cifar-10-binary\.tar\.gz"):
        load_images("cifar10", tmp_path)


@pytest.fixture
def cifar10_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The Python version, small, with torchvision's own checksums changed to those of these files."""
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    rng = np.random.default_rng(1)
    for name in BATCHES:
        entry = {"data": rng.integers(0, 256, (20, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(20)]}
        (folder / name).write_bytes(pickle.dumps(entry))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [str(i) for i in range(10)]}))
    sums = {p.name: hashlib.md5(p.read_bytes()).hexdigest() for p in folder.iterdir()}
    monkeypatch.setattr(CIFAR10, "train_list", [[b, sums[b]] for b in BATCHES[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", sums["test_batch"]]])
    monkeypatch.setattr(
        CIFAR10, "meta", {"filename": "batches.meta", "key": "label_names", "md5": sums["batches.meta"]}
    )
    return folder


def test_cifar10_python(cifar10_python: Path) -> None:
    _, train, test = arrays(load_images("cifar10", cifar10_python))
    assert (len(train), len(test)) == (100, 20)
    entry = pickle.loads((cifar10_python / "data_batch_1").read_bytes())
    assert np.array_equal(train.images[:20].numpy(), entry["data"].reshape(-1, 3, 32, 32))
    assert labels_of(train)[:20] == entry["labels"]


def test_cifar10_python_opens_official_pickles_only(cifar10_python: Path) -> None:
    with pytest.raises(ValueError, match="pickles"):
        load_images("cifar10", cifar10_python.parent, checksum=False)
    with open(cifar10_python / "data_batch_2", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"data_batch_2.*MD5"):
        load_images("cifar10", cifar10_python.parent)
    (cifar10_python / "data_batch_2").unlink()
    with pytest.raises(FileNotFoundError, match="data_batch_2 is missing"):
        load_images("cifar10", cifar10_python.parent)


def test_cifar10_download(cifar10_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network: torchvision's own download is replaced."""
    target = cifar10_python.parent / "new"

    def fetch(self: CIFAR10) -> None:
        shutil.copytree(cifar10_python, Path(self.root) / CIFAR10.base_folder, dirs_exist_ok=True)

    monkeypatch.setattr(CIFAR10, "download", fetch)
    assert len(load_images("cifar10", target, download=True).pretrain) == 100
    assert (target / "cifar-10-batches-py" / "test_batch").is_file()

    def fail(_: CIFAR10) -> None:
        raise OSError("no network")

    monkeypatch.setattr(CIFAR10, "download", fail)
    with pytest.raises(OSError, match=r"no network"):
        load_images("cifar10", target / "other", download=True)


def test_concurrent_downloads_wait_for_each_other(cifar10_python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("fcntl")
    target = cifar10_python.parent / "new"
    at_work: list[int] = []
    most = 0

    def fetch(self: CIFAR10) -> None:
        nonlocal most
        at_work.append(1)
        most = max(most, len(at_work))
        time.sleep(0.05)
        shutil.copytree(cifar10_python, Path(self.root) / CIFAR10.base_folder, dirs_exist_ok=True)
        at_work.pop()

    monkeypatch.setattr(CIFAR10, "download", fetch)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda _: load_images("cifar10", target, download=True), range(3)))
    assert [len(splits.pretrain) for splits in found] == [100] * 3
    assert most == 1


# --- STL-10 ---------------------------------------------------------------------------------------------------


def make_stl10(root: Path) -> Path:
    folder = root / "stl10_binary"
    folder.mkdir()
    rng = np.random.default_rng(2)
    for part, n in {"train": 30, "test": 20, "unlabeled": 50}.items():
        rng.integers(0, 256, (n, 3, 96, 96), dtype=np.uint8).tofile(folder / f"{part}_X.bin")
        if part != "unlabeled":
            (np.arange(n) % 10 + 1).astype(np.uint8).tofile(folder / f"{part}_y.bin")
    return folder


@pytest.mark.parametrize("below", ["", "stl10_binary"])
def test_stl10_is_torchvisions(tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make_stl10(tmp_path)
    splits = load_images("stl10", tmp_path / below, size=96, checksum=False)
    pretrain, train, test = arrays(splits)
    assert pretrain.labels is None
    assert splits.classes[2] == "car"
    monkeypatch.setattr(STL10, "_check_integrity", lambda _: True)
    for samples, name in ((pretrain, "train+unlabeled"), (train, "train"), (test, "test")):
        theirs = STL10(str(tmp_path), split=name)
        assert np.array_equal(samples.images.numpy(), theirs.data)
        if samples.labels is not None:
            assert labels_of(samples) == theirs.labels.tolist()


def test_stl10_damaged_files_are_refused_by_name(tmp_path: Path) -> None:
    folder = make_stl10(tmp_path)
    with pytest.raises(ValueError, match=r"train_X\.bin.*829,440 of 138,240,000 bytes"):
        load_images("stl10", tmp_path)
    labels = folder / "test_y.bin"
    labels.write_bytes(labels.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"test_y\.bin.*19 labels.*20 images"):
        load_images("stl10", tmp_path, checksum=False)
    labels.write_bytes(bytes(20))
    with pytest.raises(ValueError, match=r"test_y\.bin.*0 to 0"):
        load_images("stl10", tmp_path, checksum=False)
    with open(folder / "unlabeled_X.bin", "ab") as file:
        file.write(b"x")
    with pytest.raises(ValueError, match=r"unlabeled_X\.bin is damaged"):
        load_images("stl10", tmp_path, checksum=False)
    (folder / "unlabeled_X.bin").unlink()
    with pytest.raises(FileNotFoundError, match=r"unlabeled_X\.bin is missing"):
        load_images("stl10", tmp_path, checksum=False)
    shutil.rmtree(folder)
    with pytest.raises(FileNotFoundError, match="stl10_binary"):
        load_images("stl10", tmp_path)


def test_stl10_validation_leaves_the_held_out_images_out_of_pretraining(tmp_path: Path) -> None:
    make_stl10(tmp_path)
    whole, _, _ = arrays(load_images("stl10", tmp_path, checksum=False))
    pretrain, train, held = arrays(load_images("stl10", tmp_path, checksum=False, validation=0.3))
    assert (len(pretrain), len(train), len(held)) == (70, 20, 10)
    assert torch.equal(pretrain.images[:20], train.images)
    assert torch.equal(pretrain.images[20:], whole.images[30:])
    seen = {image.numpy().tobytes() for image in pretrain.images}
    assert not any(image.numpy().tobytes() in seen for image in held.images)


# --- digits ---------------------------------------------------------------------------------------------------


def test_digits() -> None:
    from sklearn.datasets import load_digits

    splits = load_images("digits", None, size=8)
    _, train, test = arrays(splits)
    together = torch.cat([train.images, test.images]).flatten(1).float() * 16 / 255
    theirs = torch.from_numpy(load_digits().data).float()
    assert sorted(map(tuple, together.round().tolist())) == sorted(map(tuple, theirs.tolist()))
    assert float((together - together.round()).abs().max()) < 0.04
    assert torch.equal(arrays(load_images("digits", seed=5))[2].images, test.images)  # the test split is fixed
    shares = torch.tensor(labels_of(test)).bincount() / torch.tensor(labels_of(train) + labels_of(test)).bincount()
    assert float((shares - 0.25).abs().max()) < 0.01


# --- registry -------------------------------------------------------------------------------------------------


@pytest.fixture
def squares() -> Iterator[list[LoadRequest]]:
    """A dataset that somebody else has registered, and the requests that its loader got."""
    requests: list[LoadRequest] = []

    @dataclass(frozen=True)
    class SquareOptions:
        squares: int = option(40, "Number of squares.")

    @fmicl.register_dataset(
        "squares", summary="Squares of two brightnesses.", needs_folder=False, options=SquareOptions
    )
    def load_squares(request: LoadRequest) -> Splits:
        requests.append(request)
        labels = torch.arange(request.options.squares) % 2
        images = (100 * labels + 50).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
        samples = ArraySamples(images, labels)
        return Splits(samples, samples, samples, ("dark", "light"))

    yield requests
    DATASETS.unregister("squares")


@pytest.mark.usefixtures("only_training")
def test_a_registered_dataset_is_loaded_and_trained_on_by_name(squares: list[LoadRequest], tmp_path: Path) -> None:
    assert "squares" in list_datasets()
    splits = load_images("squares", size=8, validation=0.25)
    assert (splits.split, len(splits.pretrain), squares[0].size) == ("validation", 30, 8)
    settings = small("digits", None, epochs=1, batch_size=8, dataset="squares", squares=24)
    run = train(settings, out=tmp_path / "run")
    assert squares[1].options.squares == 24
    assert "dataset squares" in settings.replace(dataset="digits").unused()["squares"]
    assert run.checkpoint.exists()


def test_a_name_is_registered_once(squares: list[LoadRequest]) -> None:
    with pytest.raises(ValueError, match="squares"):
        fmicl.register_dataset("squares", summary="Others.")(lambda _: Splits(None, None, None))  # type: ignore[arg-type]
    assert squares == []


def test_unknown_names_and_options_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cifar100.*cifar10"):
        load_images("cifar100", tmp_path)
    with pytest.raises(ValueError, match=r"imagenet.*cifar10, stl10"):
        load_images("imagenet", tmp_path, download=True)
    with pytest.raises(ValueError, match=r"validation.*1.5"):
        load_images("digits", validation=1.5)
    assert list_datasets() == ["cifar10", "digits", "imagenet", "images", "stl10", "tinyimagenet"]
