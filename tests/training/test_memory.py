"""The memory check: whether a batch fits is known before the first step, and the check changes nothing."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fmicl.cli import main as cli
from fmicl.cli.train import parse
from fmicl.config import Settings, recipe
from fmicl.config.image_defaults import ImageFacts, choose_defaults
from fmicl.methods import METHODS, Method, MoCo, SimCLR
from fmicl.training import memory, pipeline
from fmicl.training.memory import BatchDescription, MemoryNeed, check_memory, explain_out_of_memory, measure_need
from fmicl.training.processes import Processes
from fmicl.training.tasks.base import Context
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from fmicl.training.tasks.images import ImageTask
from fmicl.utils.errors import BatchTooLargeError
from image_sets import make
from small_settings import digits, small
from train_run import train

GIB = 2**30
ALONE = Processes(devices=1, nodes=1, rank=0)
BATCH = BatchDescription(256, 2, "some advice")


def build(settings: Settings) -> Method:
    return build_image_method(settings, build_image_encoder(settings))


def need_of_settings(settings: Settings) -> MemoryNeed:
    return measure_need(
        BATCH, build(settings), lambda n: torch.rand(n, len(settings.mean), settings.size, settings.size)
    )


def task_of(settings: Settings) -> ImageTask:
    return ImageTask(settings, Context(torch.device("cpu"), ALONE, say=lambda _: None))


def images(n: int) -> Tensor:
    return torch.rand(n, 1, 8, 8)


class Scaled(nn.Module):
    """For the backward pass of x * w, x and w are saved: 16 bytes a view, and 16 for all."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scaled(kind: type[Method] = SimCLR, **options: Any) -> Method:
    return kind(Scaled(), nn.Identity(), dim=4, projection=nn.Identity(), **options)


def test_need_is_saved_tensors_gradients_and_optimiser_state() -> None:
    def views(n: int) -> Tensor:
        return torch.rand(n, 4)

    assert measure_need(BATCH, scaled(), views) == MemoryNeed(constant=2 * 16, sample=1.1 * 2 * 16)
    assert measure_need(replace(BATCH, views=5), scaled(), views) == MemoryNeed(constant=2 * 16, sample=1.1 * 5 * 16)
    assert measure_need(BATCH, scaled(), views, optimizer="adamw").constant == 3 * 16
    # The keys of a momentum encoder save nothing, and its weights have no gradient; the queue doesn't grow.
    assert measure_need(BATCH, scaled(MoCo, queue=512), views) == MemoryNeed(constant=2 * 16, sample=1.1 * 16)


def test_bfloat16_needs_less() -> None:
    method = build(digits())
    assert measure_need(BATCH, method, images, bf16=True).sample < 0.8 * measure_need(BATCH, method, images).sample


@pytest.mark.parametrize("name", METHODS.names())
def test_measuring_leaves_the_method_unchanged(name: str) -> None:
    method = build(digits(method=name, queue=256, shift="optimal", divergence="js"))
    before = {key: value.clone() for key, value in method.state_dict().items()}
    objective, random = method.objective, torch.random.get_rng_state()
    measure_need(BATCH, method, images)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert method.objective is objective
    assert all(parameter.grad is None for parameter in method.parameters())
    after = method.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


@pytest.mark.usefixtures("only_training")
def test_a_run_ends_with_the_same_bits_with_and_without_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = train(digits(epochs=1), out=tmp_path / "checked")
    monkeypatch.setattr(pipeline, "check_memory", lambda *_, **__: None)
    unchecked = train(digits(epochs=1), out=tmp_path / "unchecked")
    assert checked.encoder.read_bytes() == unchecked.encoder.read_bytes()
    assert checked.projection.read_bytes() == unchecked.projection.read_bytes()


@pytest.mark.parametrize(
    ("processes", "free", "facts"),
    [
        (ALONE, 42, ()),
        (ALONE, 19, ("a batch of 256 (2 views each)", "41.0 GiB", "19.0 GiB", "--batch-size 64 fits", "some advice")),
        (ALONE, 1, ("no --batch-size fits",)),
        (Processes(4, 1, 0), 43, ("over 4 processes", "44.0 GiB", "43.0 GiB", "--batch-size 128 fits")),
        (Processes(2, 2, 3), 23, ()),
        (Processes(2, 2, 0), 21, ("over 4 processes", "22.0 GiB on this machine", "21.0 GiB", "--batch-size 128 fits")),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    processes: Processes, free: int, facts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free * GIB)
    monkeypatch.setattr(memory, "measure_need", lambda *_, **__: MemoryNeed(constant=1 * GIB, sample=GIB * 40 / 256))
    if not facts:
        check_memory(BATCH, scaled(), images, processes)
        return
    with pytest.raises(BatchTooLargeError) as refused:
        check_memory(BATCH, scaled(), images, processes)
    assert all(fact in str(refused.value) for fact in facts)
    if fitting := re.search(r"--batch-size (\d+) fits", str(refused.value)):
        check_memory(BatchDescription(int(fitting[1]), 2, ""), scaled(), images, processes)


def test_more_views_need_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    monkeypatch.setattr(memory, "measure_need", lambda batch, *_, **__: MemoryNeed(0, batch.views * GIB))
    with pytest.raises(BatchTooLargeError, match=r"4 views.* 1024\.0 GiB"):
        check_memory(BatchDescription(256, 4, ""), scaled(), images, ALONE)


@pytest.mark.parametrize(
    ("changes", "advised"),
    [
        ({}, set()),
        ({"multiplicity": 4}, {"--multiplicity"}),
        ({"rotation_weight": 0.4}, {"--rotation-size"}),
        ({"multiplicity": 3, "rotation_weight": 0.4}, {"--multiplicity", "--rotation-size"}),
    ],
)
def test_advice_names_options_that_need_less(changes: dict[str, Any], advised: set[str]) -> None:
    batch = task_of(digits(**changes)).batch_description()
    assert set(re.findall(r"--[a-z-]+", batch.advice)) == {"--encoder", "--size"} | advised
    assert batch.views == changes.get("multiplicity", 2)
    with pytest.raises(BatchTooLargeError, match=re.escape(batch.advice)), explain_out_of_memory(batch):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_nothing_is_refused_where_free_memory_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    check_memory(BatchDescription(2**40, 2, ""), scaled(), images, ALONE)


def test_a_batch_is_refused_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 30 * 2**20)
    out = tmp_path / "run"
    assert cli.main(["train", "digits", "--device", "cpu", "--out", str(out)]) == 2
    assert re.search(r"error: a batch of 256 .* --batch-size \d+ fits", capsys.readouterr().err)
    assert not out.exists()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nmore"),
        RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: 99 bytes"),
    ],
)
def test_running_out_of_memory_in_training_is_explained(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compare_views(*_: Any) -> None:
        raise error

    monkeypatch.setattr(pipeline, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(SimCLR, "compare_views", compare_views)
    with pytest.raises(BatchTooLargeError, match=r"--batch-size; .* torch says: .*memory") as explained:
        train(digits(epochs=1), out=tmp_path / "run")
    assert "more" not in str(explained.value).split("torch says")[1]


def test_other_errors_stay_as_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as seen, explain_out_of_memory(BATCH):
        raise RuntimeError("shapes differ")
    assert type(seen.value) is RuntimeError


@pytest.mark.parametrize(
    ("name", "memory_gib", "hint"), [("images", 4.0, True), ("images", 0.0, False), ("cifar10", 4.0, False)]
)
def test_images_in_memory_may_stay_on_the_disk(name: str, memory_gib: float, hint: bool, tmp_path: Path) -> None:
    task = task_of(small(name, make(name, tmp_path), memory_gib=memory_gib))
    assert ("--memory-gib 0" in task.memory_hint) is hint
    with pytest.raises(BatchTooLargeError, match="advice; hint"), explain_out_of_memory(BATCH, "; hint"):
        raise torch.OutOfMemoryError("CUDA out of memory")


def test_the_recipe_for_images_fits_a_machine_of_16_gib() -> None:
    settings = recipe("images").replace(**choose_defaults(ImageFacts(count=100_000, side=500)))
    assert need_of_settings(settings).of(settings.batch_size) < 12 * GIB


def test_the_command_for_photos_in_the_readme_needs_no_gpu() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = re.findall(r"^ +fmicl (train images .*?)(?: +#.*)?$", readme, re.MULTILINE)
    _, name, *words = shlex.split(line)
    settings, _, _ = parse(name, words)
    settings = settings.replace(**choose_defaults(ImageFacts(count=302, side=480)))
    assert need_of_settings(settings).of(settings.batch_size) < 4 * GIB
