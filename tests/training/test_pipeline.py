"""Runs from settings to report: every image recipe, every method with every objective, and the files of a run."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fmicl.config import RECIPES, recipe
from fmicl.data import Batch
from fmicl.losses import OBJECTIVES
from fmicl.methods import METHODS, Comparison, Method, MoCo, SimCLR
from fmicl.models.norms import RunningStatisticsNorm
from fmicl.runs.export import load_encoder
from fmicl.runs.folder import Run
from fmicl.runs.settings import read_settings
from fmicl.training import pipeline, processes
from fmicl.training.checkpoints import load_checkpoint
from fmicl.training.module import TrainingModule
from fmicl.training.tasks.image_evaluation import evaluate_run
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method
from image_sets import make
from small_settings import SMALL, digits, small
from train_run import train


@pytest.mark.parametrize("name", SMALL)
def test_every_recipe_runs_on_data_in_its_real_form(name: str, tmp_path: Path) -> None:
    folder = None if name == "digits" else make(name, tmp_path, n=6 if name == "cifar10" else 12)
    run = train(small(name, folder, monitor_every=1), out=tmp_path / "run")
    results = json.loads(run.results.read_text())
    assert 0 <= results["knn"] <= 100
    assert 0 <= results["linear"] <= 100
    assert results["epoch"] == 2
    assert results["split"] in {"test", "val", "held-out"}
    assert ("raw_pixels" in results) == ("untrained" in results) == (name == "digits")
    rows = list(csv.DictReader(run.metrics.open()))
    assert [row["epoch"] for row in rows] == ["1", "2"]
    assert all(float(row["knn"]) >= 0 and float(row["effective_rank"]) >= 1 for row in rows)
    assert {path.name for path in (run.path / "figures").iterdir()} >= {"loss.png", "distances.png", "neighbours.png"}
    assert run.report.stat().st_size > 1000
    assert any(run.tensorboard.iterdir())
    settings = read_settings(run)
    assert settings.recipe == name
    assert settings.encoder == SMALL[name].get("encoder", recipe(name).encoder)


def test_every_image_recipe_is_run_here() -> None:
    assert set(SMALL) == {entry.name for entry in RECIPES if entry.value.task == "images"}


OWN_LOSS = ("byol", "swav")
"""Methods for which no objective has an effect."""
CRITICS = ("cpc", "dim")
"""Methods with a learned critic, for bounds of the mutual information alone."""
PAIRS = [
    *((method, "fmicl") for method in OWN_LOSS),
    *((method, objective) for method in CRITICS for objective in ("fmicl", "infonce")),
    *(
        (method, objective)
        for method in METHODS.names()
        if method not in (*OWN_LOSS, *CRITICS)
        for objective in OBJECTIVES.names()
    ),
]


@pytest.mark.parametrize(("method", "objective"), PAIRS)
@pytest.mark.usefixtures("only_training")
def test_each_method_trains_two_steps_with_each_objective(method: str, objective: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"labels": objective == "cross_entropy", "learning_rate": 0.01}
    settings = digits(
        method=method, objective=objective, divergence="js", epochs=1, batch_size=512, queue=600, **changes
    )
    if method == "moco" and objective in ("barlow_twins", "cross_entropy", "rpc", "vicreg"):
        with pytest.raises(ValueError, match=rf"(?s)(?=.*{objective})(?=.*moco)"):  # they have no use for its queue
            train(settings, out=tmp_path / "run")
        return
    before = build_image_encoder(settings)
    run = train(settings, out=tmp_path / "run")
    (row,) = csv.DictReader(run.metrics.open())
    assert row["step"] == "2"
    assert math.isfinite(float(row["loss"]))
    assert (row["loss_alignment"] != "") == (objective == "fmicl" and method not in (*OWN_LOSS, *CRITICS))
    after = load_encoder(run.path)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.parametrize("method", CRITICS)
@pytest.mark.parametrize("objective", sorted({*OBJECTIVES.names()} - {"fmicl", "infonce", "cross_entropy"}))
def test_critics_refuse_losses_that_are_no_bound(method: str, objective: str) -> None:
    with pytest.raises(ValueError, match="--objective fmicl"):
        digits(method=method, objective=objective)


@pytest.mark.parametrize("method", OWN_LOSS)
def test_methods_with_a_loss_of_their_own_refuse_labels(method: str) -> None:
    with pytest.raises(ValueError, match=f"{method}.*labels"):
        digits(method=method, labels=True)


@pytest.mark.usefixtures("only_training")
def test_multiplicity_is_the_number_of_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, usual = [], SimCLR.compare_views

    def compare_views(self: SimCLR, first: Tensor, second: Tensor) -> Comparison:
        sizes.append((len(first), len(second)))
        return usual(self, first, second)

    monkeypatch.setattr(pipeline, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(SimCLR, "compare_views", compare_views)
    train(digits(epochs=1, batch_size=512, multiplicity=4), out=tmp_path / "run")
    assert sizes == [(512, 3 * 512)] * 2


def test_the_exported_encoder_has_the_weights_of_the_checkpoint(tmp_path: Path) -> None:
    run = train(digits(epochs=1, validation=0.75), out=tmp_path / "run")
    state = load_checkpoint(run.checkpoint)["method"]
    encoder = load_encoder(run.path)
    assert not encoder.training
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"encoder.{name}"])
    assert encoder(torch.zeros(3, 1, 8, 8)).shape == (3, json.loads(run.encoder_config.read_text())["features"])
    again = evaluate_run(run, device="cpu")
    assert again == json.loads(run.results.read_text())
    assert not (run.path / "results-1.json").exists()


@pytest.mark.usefixtures("only_training")
def test_an_encoder_with_shared_weights_is_exported(tmp_path: Path) -> None:
    """Those of CoaT are shared between layers, and safetensors refuses to write shared tensors."""
    folder = make("images", tmp_path)
    run = train(small("images", folder, encoder="coat_tiny", size=32, epochs=1, monitor_every=0), out=tmp_path / "run")
    encoder = load_encoder(run.path)
    state = load_checkpoint(run.checkpoint)["method"]
    places = [value.data_ptr() for value in encoder.state_dict().values()]
    assert len(set(places)) < len(places)  # shared again
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"encoder.{name}"]), name


@pytest.mark.usefixtures("only_training")
def test_training_starts_from_the_weights_of_the_seed(tmp_path: Path) -> None:
    run = train(digits(epochs=1, learning_rate=1e-30, weight_decay=0.0), out=tmp_path / "run")
    torch.manual_seed(0)
    start = build_image_encoder(digits())
    for old, new in zip(start.parameters(), load_encoder(run.path).parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=1e-25)


def test_a_folder_without_labels_has_geometry_and_neighbours_but_no_accuracy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("images", tmp_path)
    for path in sorted(folder.glob("*/*.png")):
        path.rename(folder / f"{path.parent.name}-{path.name}")
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
    run = train(small("images", folder, monitor_every=1, probe_views=2, baselines=True), out=tmp_path / "run")
    assert "no effect without labels: probe_views, baselines\n" in capsys.readouterr().out
    results = json.loads(run.results.read_text())
    assert results["knn"] is results["linear"] is results["split"] is None
    assert results["effective_rank"] >= 1
    assert load_file(run.arrays)["neighbour_images"].shape == (6, 9, 3, 32, 32)
    assert run.report.exists()


@pytest.mark.usefixtures("only_training")
def test_accumulated_gradients_make_one_step(tmp_path: Path) -> None:
    run = train(digits(epochs=2, batch_size=256, accumulate=5), out=tmp_path / "run")
    rows = list(csv.DictReader(run.metrics.open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    # the logged loss is the mean over batches, not divided by the accumulated ones
    other = train(digits(epochs=2, batch_size=256, learning_rate=1e-30), out=tmp_path / "other")
    reference = list(csv.DictReader(other.metrics.open()))
    assert float(rows[0]["loss"]) == pytest.approx(float(reference[0]["loss"]), rel=1e-5)


@pytest.mark.parametrize(("symmetric", "statistics"), [(False, "batch"), (True, "past")])
def test_two_processes_train_as_one(symmetric: bool, statistics: str, tmp_path: Path) -> None:
    """By Lightning's launcher; the report is written once, and the weights follow from the seed."""
    command = [sys.executable, "-m", "fmicl", "train", "digits", "--device", "cpu", "--devices", "2"]
    command += ["--method", "moco", "--epochs", "1", "--hidden", "32", "--no-baselines", "--out", str(tmp_path / "run")]
    command += ["--key-statistics", statistics, *(["--symmetric"] if symmetric else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = Run(tmp_path / "run")
    assert run.finished
    queue = load_checkpoint(run.checkpoint)["method"]["queue"]
    torch.testing.assert_close(queue.norm(dim=1), torch.ones(len(queue)))
    assert int(load_checkpoint(run.checkpoint)["method"]["queue_position"]) == 5 * (512 if symmetric else 256)
    assert done.stdout.count("run folder") == 1


def test_the_number_of_processes_comes_from_torchrun_or_slurm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.find_processes(1) == processes.Processes(1, 1, 0)
    with monkeypatch.context() as patch:
        launched = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}
        for key, value in launched.items():
            patch.setenv(key, value)
        found = processes.find_processes(1)
        assert (found.devices, found.nodes, found.rank, found.world_size) == (4, 2, 5, 8)
    for key, value in {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "4", "SLURM_JOB_NAME": "x"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="--ntasks-per-node"):
        processes.find_processes(1)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    found = processes.find_processes(1)
    assert (found.devices, found.nodes, found.rank) == (2, 3, 4)
    assert [plugin.auto_requeue for plugin in found.plugins] == [False]
    with pytest.raises(ValueError, match="batch_size is 256 over 6"):
        train(digits(batch_size=256), out=Path("never"))


def test_precision_is_resolved_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for has in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert pipeline.resolve_precision(digits(), cpu) == "32-true"
        assert pipeline.resolve_precision(digits(), cuda) == ("bf16-mixed" if has else "32-true")
        for device in (cpu, cuda):
            assert pipeline.resolve_precision(digits(precision="32"), device) == "32-true"
            assert pipeline.resolve_precision(digits(precision="bf16"), device) == "bf16-mixed"


@pytest.mark.parametrize(("precision", "dtype"), [("32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.usefixtures("only_training")
def test_the_encoder_computes_in_the_precision(
    precision: str, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    original = Method.embed

    def embed(self: Method, images: torch.Tensor) -> torch.Tensor:
        embeddings = original(self, images)
        seen.add(embeddings.dtype)
        return embeddings

    monkeypatch.setattr(Method, "embed", embed)
    run = train(digits(precision=precision, epochs=1, batch_size=1024), out=tmp_path / "run")
    assert seen == {dtype}
    assert all(value.dtype != torch.bfloat16 for value in load_file(run.encoder).values())  # the weights stay 32 bit


def test_momentum_and_statistics_reach_the_method() -> None:
    made = []
    symmetric: dict[str, Any] = {"symmetric": True, "encoder_momentum": 0.9, "encoder_momentum_end": 0.95}
    for changes in ({}, symmetric):
        settings = digits(method="moco", **changes)
        method = build_image_method(settings, build_image_encoder(settings))
        assert isinstance(method, MoCo)
        past = any(isinstance(module, RunningStatisticsNorm) for module in method.target_encoder.modules())
        made.append((method.initial_momentum, method.final_momentum, method.symmetric, past))
    assert made == [(0.99, 0.99, False, False), (0.9, 0.95, True, True)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_a_folder_that_is_deleted_during_training_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: TrainingModule, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if self.batches == 7:
            shutil.rmtree(tmp_path / "run")
        return original(self, batch, batch_idx)

    original = TrainingModule.training_step
    monkeypatch.setattr(TrainingModule, "training_step", step)
    with pytest.raises(FileNotFoundError, match="run was moved or deleted"):
        train(digits(epochs=3), out=tmp_path / "run")


@pytest.mark.usefixtures("only_training")
def test_compile_on_trains_compiled_networks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        pytest.skip("there is no compiler")
    compiled: list[str] = []
    original = TrainingModule.accelerate

    def accelerate(self: TrainingModule, device: torch.device, *, one_process: bool = True) -> None:
        original(self, device, one_process=one_process)
        compiled.extend(name for name, part in self.method.named_children() if part._compiled_call_impl is not None)

    monkeypatch.setattr(TrainingModule, "accelerate", accelerate)
    changes = {"epochs": 1, "batch_size": 1024, "learning_rate": 0.01}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one = train(digits(**changes, compile="on"), out=tmp_path / "compiled")
    assert sorted(compiled) == ["encoder", "projection"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    other = train(digits(**changes, compile="off"), out=tmp_path / "plain")
    rows = [float(next(csv.DictReader(run.metrics.open()))["loss"]) for run in (one, other)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-3)
    for name, value in load_file(one.encoder).items():
        torch.testing.assert_close(value, load_file(other.encoder)[name], rtol=1e-2, atol=1e-3)


@pytest.mark.slow
def test_the_digits_recipe_beats_its_baselines(tmp_path: Path) -> None:
    run = train(recipe("digits", device="cpu"), out=tmp_path / "run")
    results = json.loads(run.results.read_text())
    assert results["knn"] > results["untrained"]["knn"]
    assert results["linear"] > results["untrained"]["linear"]
    assert results["linear"] > results["raw_pixels"]["linear"]
