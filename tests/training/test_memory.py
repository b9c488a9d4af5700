"""Whether a batch fits is known before the first step, and nothing is changed by finding out."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from fmicl.training.building import build_method, build_recipe_encoder
from torch import Tensor, nn

from fmicl.cli import main as cli
from fmicl.config import RECIPES, recipe
from fmicl.methods import METHODS, Method, MoCo, Optimisation, SimCLR
from fmicl.training import memory
from fmicl.training import pipeline as training
from fmicl.training.memory import BatchTooLargeError, Need, check_memory, explained, free_memory, need_of
from fmicl.training.pipeline import train
from fmicl.training.processes import Processes

GIB = 2**30
DIGITS = dataclasses.replace(recipe("digits"), device="cpu", epochs=1, baselines=False, monitor_every=0)
ALONE = Processes(devices=1, nodes=1, rank=0)


def need_of_recipe(recipe: Recipe) -> Need:
    size = recipe.views.size
    method = build_method(recipe, build_recipe_encoder(recipe), 10)
    return need_of(method, lambda n: torch.rand(n, len(recipe.views.mean), size, size))


def digits(n: int) -> Tensor:
    return torch.rand(n, 1, 8, 8)


class Scaled(nn.Module):
    """For the backward pass of x * w, x and w are kept: 16 bytes a view, and 16 for all."""

    num_features = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def scaled(kind: type[Method] = SimCLR, optimizer: Any = "sgd", **options: Any) -> Method:
    optimisation = Optimisation(optimizer=optimizer)
    return kind(Scaled(), nn.Identity(), optimisation, dim=4, projection=nn.Identity(), **options)


def test_need_is_what_is_kept_for_the_backward_pass_and_what_goes_with_each_weight() -> None:
    def views(n: int) -> Tensor:
        return torch.rand(n, 4)

    assert need_of(scaled(), views) == Need(constant=2 * 16, sample=1.1 * 2 * 16)
    assert need_of(scaled(), views, multiplicity=5) == Need(constant=2 * 16, sample=1.1 * 5 * 16)
    assert need_of(scaled(optimizer="adamw"), views).constant == 3 * 16
    # The keys of a momentum encoder keep nothing, and its weights have no gradient; the queue doesn't grow.
    assert need_of(scaled(MoCo, queue=512), views) == Need(constant=2 * 16, sample=1.1 * 16)


def test_half_precision_needs_less() -> None:
    method = build_method(DIGITS, build_recipe_encoder(DIGITS), 10)
    assert need_of(method, digits, half=True).sample < 0.8 * need_of(method, digits).sample


@pytest.mark.parametrize("name", METHODS)
def test_a_look_at_the_need_leaves_no_trace(name: Any) -> None:
    recipe = dataclasses.replace(DIGITS, method=name, queue=256, shift="optimal", divergence="js")
    method = build_method(recipe, build_recipe_encoder(recipe), 10)
    before = {key: value.clone() for key, value in method.state_dict().items()}
    objective, random = method.objective, torch.random.get_rng_state()
    need_of(method, digits)
    assert torch.equal(torch.random.get_rng_state(), random)
    assert method.objective is objective
    assert all(parameter.grad is None for parameter in method.parameters())
    after = method.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[key], value) for key, value in before.items())


def test_a_run_ends_with_the_same_bits_with_and_without_the_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "evaluate_run", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)
    looked = train(DIGITS, out=tmp_path / "looked")
    monkeypatch.setattr(training, "check_memory", lambda *_, **__: None)
    blind = train(DIGITS, out=tmp_path / "blind")
    assert looked is not None
    assert blind is not None
    assert looked.encoder.read_bytes() == blind.encoder.read_bytes()
    assert looked.projection.read_bytes() == blind.projection.read_bytes()


@pytest.mark.parametrize(
    ("processes", "free", "expected"),
    [
        (ALONE, 42, None),
        (
            ALONE,
            19,
            "a batch of 256 (2 views each) needs about 41.0 GiB, and 19.0 GiB are free: --batch-size 64 fits; a "
            "smaller --encoder or --size needs less as well",
        ),
        (ALONE, 1, "no --batch-size fits"),
        (Processes(4, 1, 0), 43, "over 4 processes needs about 44.0 GiB, and 43.0 GiB are free: --batch-size 128 fits"),
        (Processes(2, 2, 3), 23, None),
        (
            Processes(2, 2, 0),
            21,
            "over 4 processes needs about 22.0 GiB on this machine, and 21.0 GiB are free: --batch-size 128 fits",
        ),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(
    processes: Processes, free: int, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: free * GIB)
    monkeypatch.setattr(memory, "need_of", lambda *_, **__: Need(constant=1 * GIB, sample=GIB * 40 / 256))
    recipe = recipe("images")
    if expected is None:
        check_memory(recipe, scaled(), digits, processes)
        return
    with pytest.raises(BatchTooLargeError, match=re.escape(expected)) as refused:
        check_memory(recipe, scaled(), digits, processes)
    if fitting := re.search(r"--batch-size (\d+) fits", str(refused.value)):
        check_memory(dataclasses.replace(recipe, batch_size=int(fitting[1])), scaled(), digits, processes)


def test_more_views_need_more_and_fewer_are_advised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: 0)
    monkeypatch.setattr(memory, "need_of", lambda *_, multiplicity, **__: Need(constant=0, sample=multiplicity * GIB))
    four = dataclasses.replace(DIGITS, multiplicity=4)
    expected = r"\(4 views each\) needs about 1024.0 GiB.*, or a --multiplicity of 2, needs less as well"
    with pytest.raises(BatchTooLargeError, match=expected):
        check_memory(four, scaled(), digits, ALONE)
    with pytest.raises(BatchTooLargeError, match=r"4 views each.*multiplicity of 2"), explained(four):
        raise torch.OutOfMemoryError("CUDA out of memory.")


def test_where_nobody_tells_what_is_free_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda: None)
    check_memory(recipe("images"), scaled(), digits, ALONE)


def test_it_is_refused_before_there_is_a_folder(
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
def test_memory_that_runs_out_in_training_is_told_in_words(
    error: RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pairs(*_: Any) -> None:
        raise error

    monkeypatch.setattr(training, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(SimCLR, "pairs", pairs)
    with pytest.raises(BatchTooLargeError, match=r"take a smaller --batch-size; .* torch says: .*memory") as told:
        train(DIGITS, out=tmp_path / "run")
    assert "more" not in str(told.value).split("torch says")[1]


def test_other_errors_stay_what_they_are() -> None:
    with pytest.raises(RuntimeError, match="shapes") as seen, explained(DIGITS):
        raise RuntimeError("shapes differ")
    assert type(seen.value) is RuntimeError


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   20000000 kB\n"


def test_free_memory_is_what_the_kernel_says(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert free_memory(write(tmp_path, proc__meminfo=MEMINFO)) == 20_000_000 * 1024


def test_free_memory_is_what_the_control_groups_leave(tmp_path: Path) -> None:
    """Of the group and of those above it; what is cached of files makes room when it is needed."""
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "job/step", **{"memory.max": "max\n", "memory.current": "900\n"})
    stat = "anon 600\nactive_file 100\ninactive_file 250\n"
    write(groups / "job", **{"memory.max": "5000\n", "memory.current": "1000\n", "memory.stat": stat})
    assert free_memory(tmp_path) == 5000 - 1000 + 350
    write(groups / "job/step", **{"memory.max": "500\n"})
    assert free_memory(tmp_path) == 0


def test_free_memory_knows_the_older_control_groups_too(tmp_path: Path) -> None:
    """In a container the group's own path may not be there to see, but its root is."""
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    stat = "active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n"
    write(
        tmp_path / "sys/fs/cgroup/memory",
        **{"memory.limit_in_bytes": "4000\n", "memory.usage_in_bytes": "1500\n", "memory.stat": stat},
    )
    assert free_memory(tmp_path) == 4000 - 1500 + 50


def test_images_that_are_held_in_memory_may_stay_on_the_disk() -> None:
    for name, held, said in (("images", 4.0, True), ("images", 0.0, False), ("cifar10", 4.0, False)):
        with (
            pytest.raises(BatchTooLargeError) as seen,
            explained(dataclasses.replace(RECIPES[name].recipe, memory_gib=held)),
        ):
            raise torch.OutOfMemoryError("CUDA out of memory")
        assert ("with --memory-gib 0 the images stay on the disk" in str(seen.value)) is said


def test_the_recipe_for_images_fits_a_machine_of_16_gib() -> None:
    recipe = recipe("images")
    assert need_of_recipe(recipe).of(recipe.batch_size) < 12 * GIB


def test_the_command_for_photos_in_the_readme_needs_no_gpu() -> None:
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (line,) = re.findall(r"^ +fmicl (train images .*?)(?: +#.*)?$", readme, re.MULTILINE)
    recipe = cli._parse(shlex.split(line)).recipe
    assert need_of_recipe(recipe).of(recipe.batch_size) < 4 * GIB
