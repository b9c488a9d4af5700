"""The term of turned images against plain derivations, and in runs of every method."""

from __future__ import annotations

import copy
import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fmicl.training.building import build_method, build_recipe_encoder
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from fmicl.cli import main as cli
from fmicl.config import recipe
from fmicl.data import Batch
from fmicl.methods import METHODS, Method, MoCo, Optimisation, Rotation, method_class
from fmicl.methods.rotation import turned
from fmicl.models.fast import optimise_head, optimise_resnet
from fmicl.models.vision import SmallConv, build_encoder
from fmicl.runs.folder import load_checkpoint
from fmicl.sweep.checks import check_cells
from fmicl.sweep.grid import Cell
from fmicl.training import pipeline as training
from fmicl.training.memory import BatchTooLargeError, explained, need_of
from fmicl.training.pipeline import describe, report_unused, train
from fmicl.utils.errors import Stopped
from small_settings import digits, small

CIFAR10 = recipe("cifar10")
FINITE = ["kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc"]


def rotated(name: str, objective: nn.Module | None = None, divergence: str = "kl", **options: Any) -> Method:
    torch.manual_seed(0)
    if name == "moco":
        options.setdefault("queue", 16)
    encoder = SmallConv(1, 4)
    method = method_class(name)(
        encoder, objective or fmicl.FMICLLoss("kl"), Optimisation(total_steps=4), dim=8, hidden=16, **options
    )
    method.rotation = Rotation(encoder.num_features, divergence, weight=0.4, size=4, hidden=16)
    return method


def views(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, n, 1, 8, 8, generator=generator)
    return first, second


def test_images_are_turned_as_torch_turns_them() -> None:
    images = torch.randn(3, 2, 5, 5)
    one, two, three, four = turned(images).split(3)
    assert torch.equal(one, images)
    for turns, found in enumerate((two, three, four), start=1):
        assert torch.equal(found, torch.rot90(images, turns, (2, 3)))
    last = turned(images.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, turned(images))


def test_whoever_knows_the_corner_knows_the_turn() -> None:
    """A bright corner goes round with the image: a head that looks where it is has all of log 4 to tell."""
    rotation = Rotation(16, "kl", weight=0.5, size=4, hidden=8)
    corners = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        corners.weight.zero_()
        for turns, place in enumerate((0, 12, 15, 3)):  # top left; a quarter turn counter-clockwise takes it down
            corners.weight[turns, place] = 100.0
    rotation.head = corners  # type: ignore[assignment]
    images = torch.zeros(5, 1, 8, 8)
    images[:, :, :2, :2] = 1.0
    encoder = nn.Flatten()
    assert rotation(encoder, images).item() == pytest.approx(-0.5 * math.log(4))
    assert rotation(encoder, images.flip(3)).item() > 10, "mirrored, each is taken for another"


@pytest.mark.parametrize("name", METHODS)
def test_with_kl_it_is_the_cross_entropy_beside_the_pairs(name: str) -> None:
    method = rotated(name)
    assert method.rotation is not None
    first, second = views()
    twin = copy.deepcopy(method)
    images = torch.cat([F.avg_pool2d(first, 2).rot90(turns, (2, 3)) for turns in range(4)])
    labels = torch.arange(4).repeat_interleave(6)
    pairs = twin.pairs(first, second).loss
    entropy = F.cross_entropy(twin.rotation.head(twin.encoder(images)), labels)  # type: ignore[union-attr]
    found = method.total(first, second)
    torch.testing.assert_close(found.loss, pairs + 0.4 * (entropy - math.log(4)))
    assert found.rotation is not None
    torch.testing.assert_close(found.rotation, 0.4 * (entropy - math.log(4)).detach())
    found.loss.backward()
    for part in (method.encoder, method.rotation.head):
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in part.parameters())


@pytest.mark.parametrize("divergence", FINITE)
def test_turns_that_are_easily_told_have_nearly_all_the_information_there_is(divergence: str) -> None:
    """On images whose top is bright: f(4) / 4 + 3 f(0) / 4, that of a turn which is told for certain."""
    torch.manual_seed(0)
    encoder = SmallConv(1, 4)
    rotation = Rotation(encoder.num_features, divergence, weight=1.0, size=8, hidden=16)
    images = torch.randn(16, 1, 8, 8)
    images[:, :, :3] += 4.0
    optimizer = torch.optim.SGD([*encoder.parameters(), *rotation.parameters()], lr=0.1, momentum=0.9)
    for _ in range(80):
        optimizer.zero_grad()
        loss = rotation(encoder, images)
        loss.backward()
        optimizer.step()
    most = float(fmicl.divergence(divergence).f(torch.tensor([4.0, 0.0, 0.0, 0.0])).mean())
    assert 0.9 * most < -loss.item() <= most * (1 + 1e-5)


@pytest.mark.parametrize("divergence", sorted(set(fmicl.list_divergences()) - set(FINITE)))
def test_a_divergence_by_which_that_is_infinite_is_refused(divergence: str, tmp_path: Path) -> None:
    said = f"infinite information about it by {divergence}, whose f.0. is infinite"
    with pytest.raises(ValueError, match=said):
        Rotation(8, divergence)
    recipe = digits(divergence=divergence, rotation_weight=0.4)
    with pytest.raises(ValueError, match=said):
        train(recipe, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match=said):
        check_cells([Cell("run", recipe=recipe, changes={})])
    other = dataclasses.replace(recipe, objective="infonce")
    assert build_method(other, build_recipe_encoder(other), 10).rotation is not None, "its divergence has no part"


@pytest.mark.parametrize("name", METHODS)
def test_running_statistics_are_those_of_the_views(name: str) -> None:
    with_it = rotated(name)
    without = copy.deepcopy(with_it)
    without.rotation = None
    for method in (with_it, without):
        method.total(*views())
    for (key, one), other in zip(
        with_it.encoder.named_buffers(), [value for _, value in without.encoder.named_buffers()], strict=True
    ):
        assert "num_batches" in key or torch.equal(one, other), key


@pytest.mark.parametrize("objective", [fmicl.InfoNCELoss(0.2), fmicl.FMICLLoss("js")], ids=["infonce", "fmicl"])
def test_a_step_says_what_each_number_is(objective: nn.Module) -> None:
    """Also where the objective doesn't tell its summands apart, and so one name between others is missing."""
    method = rotated("simclr", objective)
    method.optimizers = lambda *_, **__: method.configure_optimizers()  # type: ignore[assignment,method-assign]
    found = method.training_step(Batch(*views(), torch.arange(6)), 0)
    terms = {"terms"} if isinstance(objective, fmicl.FMICLLoss) else set()
    assert found.keys() == {"loss", "first", "second", "rotation"} | terms
    assert found["first"].shape == (6, 8)
    assert found["rotation"].shape == ()
    if terms:
        torch.testing.assert_close(found["terms"].sum() + found["rotation"], found["loss"].detach())


def test_the_head_is_among_what_runs_and_is_trained() -> None:
    for name in METHODS:
        method = rotated(name)
        assert method.rotation is not None
        assert any(network is method.rotation.head for network in method.networks())
        optimizer = method.configure_optimizers()
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in method.rotation.parameters()} <= trained


@pytest.mark.parametrize("settings", [{"weight": 0.0}, {"weight": -1.0}, {"size": 0}, {"size": 1.5}])
def test_what_it_refuses(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))} must be"):
        Rotation(8, "kl", hidden=4, **settings)


def test_images_are_made_smaller_and_never_larger() -> None:
    with pytest.raises(ValueError, match="images of 16 pixels are turned, but these have 8"):
        Rotation(256, "kl", size=16, hidden=4)(SmallConv(), torch.zeros(2, 1, 8, 8))


def test_a_recipe_without_it_has_the_weights_that_it_had() -> None:
    recipe = dataclasses.replace(digits(), rotation_weight=0.4)
    states = []
    for one in (recipe, dataclasses.replace(recipe, rotation_weight=0.0)):
        torch.manual_seed(0)
        method = build_method(one, build_recipe_encoder(one), 10)
        states.append({k: v for k, v in method.state_dict().items() if not k.startswith("rotation.")})
    torch.testing.assert_close(states[0], states[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("changes", "divergence"),
    [
        ({"divergence": "js"}, fmicl.divergence("js")),
        ({"divergence": "tsallis", "order": 2.0}, fmicl.divergence("tsallis", order=2.0)),
        ({"objective": "infonce", "divergence": "js"}, fmicl.divergence("kl")),
    ],
)
def test_a_recipes_settings_reach_it(changes: dict[str, Any], divergence: fmicl.Divergence) -> None:
    recipe = digits(rotation_weight=0.7, **changes)
    method = build_method(recipe, build_recipe_encoder(recipe), 10)
    assert method.rotation is not None
    assert (method.rotation.divergence, method.rotation.weight, method.rotation.size) == (divergence, 0.7, 8)
    assert method.rotation.head[0].out_features == recipe.hidden
    assert describe(method).endswith("weight=0.7, size=8)")
    assert " and " not in describe(build_method(digits(), build_recipe_encoder(digits()), 10))


def test_sizes() -> None:
    for size, expected in ((8, 8), (31, 31), (32, 16), (96, 48), (224, 112)):
        recipe = dataclasses.replace(CIFAR10, views=dataclasses.replace(CIFAR10.views, size=size))
        assert recipe.turned_size == expected
    assert dataclasses.replace(CIFAR10, rotation_size=20).turned_size == 20
    for wrong in (0, 33, -4):
        with pytest.raises(ValueError, match=r"rotation_size must lie between 1 and the side of the views \(32\)"):
            dataclasses.replace(CIFAR10, rotation_size=wrong)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="rotation_weight must not be negative"):
            dataclasses.replace(CIFAR10, rotation_weight=weight)


def test_a_size_without_a_weight_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    report_unused(dataclasses.replace(CIFAR10, rotation_size=20, temperature=0.1), CIFAR10)
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "warning: rotation_size has no part without --rotation-weight"
    assert said[1].startswith("warning: temperature has no part in objective fmicl")
    report_unused(dataclasses.replace(CIFAR10, rotation_size=20, rotation_weight=0.4), CIFAR10)
    assert not capsys.readouterr().out


def test_a_size_that_is_chosen_by_itself_is_no_difference() -> None:
    usual = dataclasses.replace(CIFAR10, rotation_weight=0.4)
    said = dataclasses.replace(usual, rotation_size=16)
    assert (said.differences(usual), usual.differences(said)) == ("", "")
    assert dataclasses.replace(usual, rotation_size=20).differences(usual) == "rotation_size was 16, is now 20"
    assert usual.differences(CIFAR10) == "rotation_weight was 0.0, is now 0.4; rotation_size was None, is now 16"
    larger = dataclasses.replace(CIFAR10, views=dataclasses.replace(CIFAR10.views, size=48))
    assert larger.differences(CIFAR10) == "size was 32, is now 48", "turned images have no part in it"


def test_settings_from_before_it_was_there_are_without_it() -> None:
    old = {name: value for name, value in CIFAR10.to_json().items() if not name.startswith("rotation")}
    assert Recipe.from_json(old) == CIFAR10


def test_an_encoder_of_one_size_says_what_to_take(tmp_path: Path) -> None:
    recipe = small("imagenet", tmp_path, rotation_weight=0.4)
    said = r"does not take images of 16 x 16 .*[^.]; these are the images that are turned .* take --rotation-size 32$"
    with pytest.raises(ValueError, match=said):
        build_recipe_encoder(recipe)
    build_recipe_encoder(dataclasses.replace(recipe, rotation_size=32))
    # A sweep says so before its first run, also where that is one without the term.
    cells = [Cell("run", recipe=dataclasses.replace(recipe, rotation_weight=w), changes={}) for w in (0.0, 0.4)]
    with pytest.raises(ValueError, match=said):
        check_cells(cells)


def test_what_it_needs_in_memory_is_counted() -> None:
    def need(recipe: Recipe) -> float:
        method = build_method(recipe, build_recipe_encoder(recipe), 10)
        return need_of(method, lambda n: torch.rand(n, 1, 8, 8)).sample

    without, with_it = (need(digits(rotation_weight=weight)) for weight in (0.0, 0.4))
    assert 2.5 * without < with_it < 3.5 * without, "four images beside two views"
    with (
        pytest.raises(BatchTooLargeError, match="or a smaller --rotation-size, needs less"),
        explained(digits(rotation_weight=0.4)),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
    both = digits(rotation_weight=0.4, multiplicity=3)
    with (
        pytest.raises(BatchTooLargeError, match="or a --multiplicity of 2, or a smaller --rotation-size, needs"),
        explained(both),
    ):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_was_stopped_ends_with_the_same_bits(
    method: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training, "evaluate_run", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)
    recipe = digits(method=method, rotation_weight=0.4, epochs=2, batch_size=256, queue=512, checkpoint_steps=1)
    whole = train(recipe, out=tmp_path / "whole")
    assert whole is not None
    usual, kind = method_class(method).training_step, method_class(method)

    def stop(self: Method, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if self.batches == 7:
            raise KeyboardInterrupt
        return usual(self, batch, batch_idx)

    monkeypatch.setattr(kind, "training_step", stop)
    with pytest.raises(Stopped):
        train(recipe, out=tmp_path / "cut")
    monkeypatch.setattr(kind, "training_step", usual)
    again = train(recipe, out=tmp_path / "cut", resume=True)
    assert again is not None
    assert (again.path / "encoder.safetensors").read_bytes() == (whole.path / "encoder.safetensors").read_bytes()
    one, other = (load_checkpoint(run.checkpoint)["method"] for run in (whole, again))
    assert any(key.startswith("rotation.head.") for key in one)
    torch.testing.assert_close(one, other, rtol=0, atol=0)
    with whole.metrics.open() as ours, again.metrics.open() as theirs:
        rows, twins = list(csv.DictReader(ours)), list(csv.DictReader(theirs))
    assert [row["loss_rotation"] for row in rows] == [row["loss_rotation"] for row in twins]
    assert all(-0.4 * math.log(4) < float(row["loss_rotation"]) < 0.4 for row in rows)


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rotation-weight", "0.4", "--epochs", "1", "--device", "cpu", "--no-baselines"]
    assert cli.main(["train", "digits", *options, "--out", str(tmp_path / "run")]) == 0
    assert "warning" not in capsys.readouterr().out
    assert (tmp_path / "run" / "results.json").exists()
    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "simclr fmicl kl small_conv + rotation 0.4" in page
    assert "<b>Rotation loss.</b>" in page
    with (tmp_path / "run" / "metrics.csv").open() as file:
        assert next(iter(csv.DictReader(file)))["loss_rotation"]


def test_a_momentum_encoder_does_not_see_turned_images() -> None:
    method = rotated("moco", statistics="past", symmetric=True, queue=32)
    assert isinstance(method, MoCo)
    seen: list[tuple[int, ...]] = []
    method.target_encoder.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    method.total(*views())
    assert seen == [(12, 1, 8, 8)]


def test_a_resnet_takes_the_smaller_images() -> None:
    encoder = build_encoder("resnet18", size=32)
    rotation = Rotation(512, "kl", weight=0.4, size=16, hidden=32)
    assert bool(rotation(encoder, torch.randn(2, 3, 32, 32)).isfinite())


def test_the_faster_network_computes_the_same_term() -> None:
    """In Triton's interpreter, or on a GPU: running statistics stay where they are by these programs too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    usual = build_encoder("resnet18", size=8, stem="small").to(device).train()
    rotation = Rotation(512, "js", weight=0.4, size=8, hidden=24).to(device)
    faster, twin = copy.deepcopy(usual), copy.deepcopy(rotation)
    optimise_resnet(faster)
    assert optimise_head(twin.head)
    images = torch.randn(2, 3, 16, 16, device=device)
    before = [value.clone() for name, value in usual.named_buffers() if "running" in name]
    expected, seen = rotation(usual, images), twin(faster, images)
    torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    expected.backward()
    seen.backward()
    for (name, mine), theirs in zip(faster.named_parameters(), usual.parameters(), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        assert float((mine.grad - theirs.grad).norm()) <= 5e-3 * float(theirs.grad.norm()), name
    after = [value for name, value in faster.named_buffers() if "running" in name]
    assert all(torch.equal(one, other) for one, other in zip(after, before, strict=True))


def test_processes_that_share_a_batch_have_its_gradient() -> None:
    """The term is the mean of those of its parts, so that the mean of their gradients is the whole one's."""
    torch.manual_seed(0)
    encoder = nn.Sequential(nn.Flatten(), nn.Linear(4, 4))
    rotation = Rotation(4, "js", weight=0.4, size=2, hidden=8)
    rotation.head.eval()  # on GPUs statistics span all processes (share_statistics)
    images = torch.randn(6, 1, 4, 4)
    weights = [*encoder.parameters(), *rotation.parameters()]
    whole, one, two = (torch.autograd.grad(rotation(encoder, x), weights) for x in (images, images[:3], images[3:]))
    for total, a, b in zip(whole, one, two, strict=True):
        torch.testing.assert_close((a + b) / 2, total)
