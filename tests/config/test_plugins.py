"""Plugins: a method and an objective of another package are trained, resumed, documented and swept by name."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from command_line import fmicl

PLUGIN = '''
"""A method with a narrow second head, and an objective that pulls pairs together and everything else apart."""

import os
import signal
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

import fmicl
from fmicl.losses.registry import ObjectiveOptions
from fmicl.methods import Comparison, Method, MethodOptions
from fmicl.utils.options import option


class Toy(Method):
    def __init__(self, encoder, objective, *, toy_width, dim=512, **heads):
        super().__init__(encoder, objective, dim=dim, **heads)
        self.narrow = nn.Linear(dim, toy_width)
        self.register_buffer("batches", torch.zeros((), dtype=torch.long))

    def compare_views(self, first, second):
        if int(self.batches) == int(os.environ.get("TOY_KILLED_AT", -1)):
            os.kill(os.getpid(), signal.SIGKILL)
        x, y = self.narrow(self.embed(first)), self.narrow(self.embed(second))
        return self.compare(x * (1 + 0.1 * self.batches), y)  # the result depends on all of the state

    def after_backward(self, second):
        self.batches += 1


@fmicl.register_method("toy", summary="A second head, narrower than the first.")
@dataclass(frozen=True)
class ToyOptions(MethodOptions):
    method: ClassVar[type[Method]] = Toy
    toy_width: int = option(8, "Width of the second head.")


class ToyLoss(nn.Module):
    def __init__(self, pull):
        super().__init__()
        self.pull = pull

    def forward(self, x, y, negatives=None):
        return self.pull * (x - y).square().mean() - x.var(0).clamp(max=1).mean()


@fmicl.register_objective("toy_objective", summary="Pull pairs together, keep the variance.")
@dataclass(frozen=True)
class ToyObjectiveOptions(ObjectiveOptions):
    toy_pull: float = option(1.0, "Weight of the pairs.")

    def build(self, context):
        return ToyLoss(self.toy_pull)


fmicl.register_recipe(
    "toy_digits", summary="The toy on digits.", dataset="digits", encoder="small_conv", size=8, mean=(0.3,), std=(0.4,),
    method="toy", objective="toy_objective", epochs=1,
)
'''

QUICK = ["--hidden", "16", "--dim", "8", "--no-baselines", "--monitor-every", "0", "--device", "cpu"]
TOY = [
    "train",
    "digits",
    "--method",
    "toy",
    "--objective",
    "toy_objective",
    "--toy-width",
    "3",
    "--epochs",
    "2",
    *QUICK,
]


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a process that has the plugin installed."""
    site = tmp_path_factory.mktemp("site")
    (site / "toy_plugin").mkdir()
    (site / "toy_plugin" / "__init__.py").write_text("")
    (site / "toy_plugin" / "methods.py").write_text(PLUGIN)
    info = site / "toy_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fmicl.plugins]\ntoy = toy_plugin.methods\n")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}


def ok(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_plugin_is_trained_by_name_and_resumed_to_the_same_weights(plugin: dict[str, str], tmp_path: Path) -> None:
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    shown = ok(fmicl(*TOY, "--out", str(whole), env=plugin))
    assert "warning" not in shown
    saved = json.loads((whole / "settings.json").read_text())
    assert {key: saved["settings"][key] for key in ("method", "objective", "toy_width", "toy_pull")} == {
        "method": "toy", "objective": "toy_objective", "toy_width": 3, "toy_pull": 1.0,
    }  # fmt: skip
    assert "alpha" not in saved["settings"]
    options = ["--checkpoint-steps", "2", "--out", str(resumed)]
    killed = fmicl(*TOY, *options, env={**plugin, "TOY_KILLED_AT": "7"})
    assert killed.returncode == -signal.SIGKILL
    assert not (resumed / "encoder.safetensors").exists()
    assert "continuing in" in ok(fmicl(*TOY, *options, "--resume", env=plugin))
    for name in ("encoder.safetensors", "projection.safetensors"):
        expected, found = load_file(whole / name), load_file(resumed / name)
        assert expected.keys() == found.keys()
        assert all(torch.equal(expected[key], found[key]) for key in expected)
    expected, found = (
        torch.load(run / "checkpoints" / "last.ckpt", weights_only=True)["method"] for run in (whole, resumed)
    )
    assert all(torch.equal(expected[key], found[key]) for key in expected)
    assert int(found["batches"]) == 10
    assert json.loads((resumed / "settings.json").read_text())["hash"] == saved["hash"]
    other = fmicl(*TOY, *options, "--resume", "--toy-width", "4", env=plugin)
    assert other.returncode == 2
    assert "toy_width was 3, is now 4" in other.stderr


def test_a_plugin_s_options_are_in_the_help_under_their_owner(plugin: dict[str, str]) -> None:
    shown = ok(fmicl("train", "digits", "--help", env={**plugin, "COLUMNS": "80"}))  # groups below each other
    method, objective = (" ".join(shown.split(f"{owner} options")[1].split()) for owner in (
        "method toy", "objective toy-objective"
    ))  # fmt: skip
    assert "--toy-width INT Width of the second head. (default: 8)" in method[:300]
    assert "--toy-pull FLOAT Weight of the pairs. (default: 1.0)" in objective[:300]
    assert "toy_objective" in shown
    assert "toy_digits" in ok(fmicl("train", "--help", env=plugin))
    assert "--toy-width" not in ok(fmicl("train", "digits", "--help"))


def test_a_plugin_s_option_without_effect_is_warned_about(plugin: dict[str, str], tmp_path: Path) -> None:
    out = str(tmp_path / "run")
    shown = ok(fmicl("train", "digits", "--toy-width", "3", "--epochs", "1", *QUICK, "--out", out, env=plugin))
    assert "warning: toy_width has no effect: it is an option of method toy" in shown


def test_a_run_of_a_plugin_says_what_is_missing_without_it(tmp_path: Path) -> None:
    done = fmicl(*TOY, "--out", str(tmp_path / "run"))
    assert done.returncode == 2
    assert "toy" in done.stderr


def test_a_plugin_is_swept(plugin: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "sweep"
    words = ["sweep", "digits", "--method", "simclr", "toy", "--epochs", "1", *QUICK, "--out", str(out)]
    ok(fmicl(*words, env=plugin))
    found = [json.loads(path.read_text())["settings"]["method"] for path in out.rglob("settings.json")]
    assert sorted(found) == ["simclr", "toy"]
    assert len(list(out.rglob("results.json"))) == 2
