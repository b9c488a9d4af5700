"""Rotation prediction against plain derivations, and in runs."""

from __future__ import annotations

import copy
import csv
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fmicl
from fmicl.cli import main as cli
from fmicl.config import Settings, recipe
from fmicl.data import Batch
from fmicl.methods import METHODS, Method, MoCo, Rotation
from fmicl.methods.rotation import RotationOptions, rotate
from fmicl.models.fast import optimise_head, optimise_resnet
from fmicl.models.vision import SmallConv, build_encoder
from fmicl.training.checkpoints import load_checkpoint
from fmicl.training.memory import BatchDescription, measure_need
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation, build_optimizer
from fmicl.training.pipeline import settings_warnings
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from fmicl.training.tasks.images import ImageTask
from fmicl.utils.errors import Stopped
from small_settings import digits, small
from train_run import train

FINITE = ["kl", "js", "pearson", "squared_hellinger", "tsallis", "vlc"]


def rotated(name: str, objective: nn.Module | None = None, divergence: str = "kl", **options: Any) -> Method:
    torch.manual_seed(0)
    if name == "moco":
        options.setdefault("queue", 16)
    encoder = SmallConv(1, 4)
    if name == "dim":
        options.setdefault("local_width", 16)
    if name in ("simclr", "moco", "mocov3"):  # others have a loss of their own
        objective = objective or fmicl.FMICLLoss("kl")
    kind: Any = METHODS[name].value.method
    method: Method = kind(encoder, objective, dim=8, hidden=16, **options)
    method.rotation = Rotation(encoder.num_features, divergence, weight=0.4, size=4, hidden=16)
    return method


def views(n: int = 6) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    first, second = torch.randn(2, n, 1, 8, 8, generator=generator)
    return first, second


def test_rotate_against_rot90() -> None:
    images = torch.randn(3, 2, 5, 5)
    one, two, three, four = rotate(images).split(3)
    assert torch.equal(one, images)
    for turns, found in enumerate((two, three, four), start=1):
        assert torch.equal(found, torch.rot90(images, turns, (2, 3)))
    last = rotate(images.contiguous(memory_format=torch.channels_last))
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, rotate(images))


def test_a_head_that_knows_the_rotation_has_all_the_information() -> None:
    """A head that finds the bright corner of the image: its information is log 4."""
    rotation = Rotation(16, "kl", weight=0.5, size=4, hidden=8)
    corners = nn.Linear(16, 4, bias=False)
    with torch.no_grad():
        corners.weight.zero_()
        for turns, place in enumerate(
            (0, 12, 15, 3)
        ):  # top left; a rotation by 90 degrees counter-clockwise takes it down
            corners.weight[turns, place] = 100.0
    rotation.head = corners  # type: ignore[assignment]
    images = torch.zeros(5, 1, 8, 8)
    images[:, :, :2, :2] = 1.0
    encoder = nn.Flatten()
    assert rotation(encoder, images).item() == pytest.approx(-0.5 * math.log(4))
    assert rotation(encoder, images.flip(3)).item() > 10, "of a mirrored image every answer is wrong"


@pytest.mark.parametrize("name", METHODS.names())
def test_with_kl_it_is_the_cross_entropy_added_to_the_objective(name: str) -> None:
    method = rotated(name)
    assert method.rotation is not None
    first, second = views()
    twin = copy.deepcopy(method)
    images = torch.cat([F.avg_pool2d(first, 2).rot90(turns, (2, 3)) for turns in range(4)])
    labels = torch.arange(4).repeat_interleave(6)
    pairs = twin.compare_views(first, second).loss
    entropy = F.cross_entropy(twin.rotation.head(twin.encoder(images)), labels)  # type: ignore[union-attr]
    found = method.loss(first, second)
    torch.testing.assert_close(found.loss, pairs + 0.4 * (entropy - math.log(4)))
    assert found.rotation is not None
    torch.testing.assert_close(found.rotation, 0.4 * (entropy - math.log(4)).detach())
    found.loss.backward()
    for part in (method.encoder, method.rotation.head):
        assert all(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in part.parameters())


@pytest.mark.parametrize("divergence", FINITE)
def test_easy_rotations_reach_nearly_the_largest_information(divergence: str) -> None:
    """On images whose top is bright: at most f(4) / 4 + 3 f(0) / 4, that of a rotation which is certain."""
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
def test_a_divergence_with_infinite_f_of_0_is_refused(divergence: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=divergence):
        Rotation(8, divergence)
    settings = digits(divergence=divergence, rotation_weight=0.4)
    with pytest.raises(ValueError, match=f"finite.*{divergence}"):
        train(settings, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    other = settings.replace(objective="infonce")  # which has no divergence
    assert build_image_method(other, build_image_encoder(other)).rotation is not None


@pytest.mark.parametrize("name", METHODS.names())
def test_rotated_images_do_not_update_running_statistics(name: str) -> None:
    with_it = rotated(name)
    without = copy.deepcopy(with_it)
    without.rotation = None
    for method in (with_it, without):
        method.loss(*views())
    for (key, one), other in zip(
        with_it.encoder.named_buffers(), [value for _, value in without.encoder.named_buffers()], strict=True
    ):
        assert "num_batches" in key or torch.equal(one, other), key


@pytest.mark.parametrize("objective", [fmicl.InfoNCELoss(0.2), fmicl.FMICLLoss("js")], ids=["infonce", "fmicl"])
def test_a_step_names_its_outputs(objective: nn.Module) -> None:
    """Also if the objective has no terms, so that a name between others is missing."""
    module = TrainingModule(rotated("simclr", objective), Optimisation(total_batches=4))
    module.optimizers = lambda *_, **__: module.configure_optimizers()  # type: ignore[assignment,method-assign]
    found = module.training_step(Batch(*views(), torch.arange(6)), 0)
    terms = {"terms"} if isinstance(objective, fmicl.FMICLLoss) else set()
    assert found.keys() == {"loss", "first", "second", "rotation"} | terms
    assert found["first"].shape == (6, 8)
    assert found["rotation"].shape == ()
    if terms:
        torch.testing.assert_close(found["terms"].sum() + found["rotation"], found["loss"].detach())


def test_the_head_is_among_the_networks_and_is_trained() -> None:
    for name in METHODS.names():
        method = rotated(name)
        assert method.rotation is not None
        assert any(network is method.rotation.head for network in method.networks())
        optimizer = build_optimizer(method, Optimisation())
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        assert {id(p) for p in method.rotation.parameters()} <= trained


@pytest.mark.parametrize("settings", [{"weight": 0.0}, {"weight": -1.0}, {"size": 0}, {"size": 1.5}])
def test_invalid_arguments_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(settings))}"):
        Rotation(8, "kl", hidden=4, **settings)


def test_images_smaller_than_the_size_are_refused() -> None:
    with pytest.raises(ValueError, match=r"16 .*8"):
        Rotation(256, "kl", size=16, hidden=4)(SmallConv(), torch.zeros(2, 1, 8, 8))


def test_rotation_leaves_the_initial_weights_of_the_rest_alone() -> None:
    states = []
    for weight in (0.4, 0.0):
        settings = digits(rotation_weight=weight)
        torch.manual_seed(0)
        method = build_image_method(settings, build_image_encoder(settings))
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
def test_settings_reach_the_module(changes: dict[str, Any], divergence: fmicl.Divergence) -> None:
    settings = digits(rotation_weight=0.7, **changes)
    method = build_image_method(settings, build_image_encoder(settings))
    assert method.rotation is not None
    assert (method.rotation.divergence, method.rotation.weight, method.rotation.size) == (divergence, 0.7, 8)
    assert method.rotation.head[0].out_features == settings.hidden
    assert TrainingModule(method, Optimisation()).describe().endswith("weight=0.7, size=8)")
    method.rotation = None
    assert " and " not in TrainingModule(method, Optimisation()).describe()


def test_sizes() -> None:
    for size, expected in ((8, 8), (31, 31), (32, 16), (96, 48), (224, 112)):
        assert RotationOptions().size(size) == expected
    assert RotationOptions(rotation_size=20).size(32) == 20
    for wrong in (0, 33, -4):
        with pytest.raises(ValueError, match=rf"rotation_size .*\(32\).* {wrong}"):
            recipe("cifar10", rotation_size=wrong)
    for weight in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="rotation_weight"):
            recipe("cifar10", rotation_weight=weight)


def test_a_size_without_a_weight_has_no_effect() -> None:
    (line,) = settings_warnings(recipe("cifar10", rotation_size=20), 512)
    assert line.startswith("warning: rotation_size")
    assert "rotation_weight" in line
    assert settings_warnings(recipe("cifar10", rotation_size=20, rotation_weight=0.4), 512) == []


def test_the_automatic_size_is_no_difference() -> None:
    without, usual = recipe("cifar10"), recipe("cifar10", rotation_weight=0.4)
    explicit = usual.replace(rotation_size=16)
    assert (explicit.differences(usual), usual.differences(explicit)) == ("", "")
    assert usual.replace(rotation_size=20).differences(usual) == "rotation_size was 16, is now 20"
    assert usual.differences(without) == "rotation_weight was 0.0, is now 0.4; rotation_size was None, is now 16"
    assert without.replace(size=48).differences(without) == "size was 32, is now 48"  # nothing is rotated


def test_an_encoder_of_one_size_is_refused_with_the_size_it_takes(tmp_path: Path) -> None:
    settings = small("imagenet", tmp_path, rotation_weight=0.4)
    for build in (build_image_encoder, ImageTask.check):
        with pytest.raises(ValueError, match=r"16 x 16 .*--rotation-size 32$"):
            build(settings)
        build(settings.replace(rotation_size=32))


def test_memory_includes_the_rotated_images() -> None:
    def need(settings: Settings) -> float:
        method = build_image_method(settings, build_image_encoder(settings))
        return measure_need(BatchDescription(8, 2, ""), method, lambda n: torch.rand(n, 1, 8, 8)).sample

    without, with_it = (need(digits(rotation_weight=weight)) for weight in (0.0, 0.4))
    assert 2.5 * without < with_it < 3.5 * without, "four rotated images and two views"


@pytest.mark.parametrize("method", ["simclr", "moco"])  # test_resume.py has all of them, without rotation
@pytest.mark.usefixtures("only_training")
def test_a_stopped_and_resumed_run_is_bit_identical(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = digits(method=method, rotation_weight=0.4, epochs=2, batch_size=256, queue=512, checkpoint_steps=1)
    whole = train(settings, out=tmp_path / "whole")
    usual = TrainingModule.training_step

    def stop(self: TrainingModule, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if self.batches == 7:
            raise KeyboardInterrupt
        return usual(self, batch, batch_idx)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingModule, "training_step", stop)
        with pytest.raises(Stopped):
            train(settings, out=tmp_path / "cut")
    again = train(settings, out=tmp_path / "cut", resume=True)
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


def test_the_momentum_encoder_sees_no_rotated_images() -> None:
    method = rotated("moco", statistics="past", symmetric=True, queue=32)
    assert isinstance(method, MoCo)
    seen: list[tuple[int, ...]] = []
    method.target_encoder.register_forward_hook(lambda _, inputs, __: seen.append(tuple(inputs[0].shape)))
    method.loss(*views())
    assert seen == [(12, 1, 8, 8)]


def test_a_resnet_takes_the_smaller_images() -> None:
    encoder = build_encoder("resnet18", size=32)
    rotation = Rotation(512, "kl", weight=0.4, size=16, hidden=32)
    assert bool(rotation(encoder, torch.randn(2, 3, 32, 32)).isfinite())


def test_the_gpu_optimised_network_computes_the_same_term(monkeypatch: pytest.MonkeyPatch) -> None:
    """In Triton's interpreter, or on a GPU: running statistics stay where they are by these programs too."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
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


def test_the_gradient_of_a_shared_batch_is_that_of_the_whole() -> None:
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
