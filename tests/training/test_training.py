"""Runs from recipe to page: every recipe, every method with every objective, and what comes out of a run."""

from __future__ import annotations

import ast
import csv
import dataclasses
import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from fmicl.training.building import build_method, build_recipe_encoder
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor, nn

from fmicl.config import RECIPES, recipe
from fmicl.data import Batch
from fmicl.methods import METHODS, Method, MoCo, SimCLR
from fmicl.methods.base import Compared
from fmicl.models.norms import RunningStatisticsNorm
from fmicl.models.vision import SmallConv
from fmicl.runs import folder as runs
from fmicl.runs.embedding import embed_folder
from fmicl.runs.export import load_encoder
from fmicl.training import pipeline as training
from fmicl.training import processes
from fmicl.training.pipeline import train
from fmicl.training.tasks.image_evaluation import evaluate_run
from image_sets import make
from small_settings import SMALL, digits, small


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_runs_on_data_in_its_real_form(name: str, tmp_path: Path) -> None:
    folder = make(name, tmp_path, n=6 if name == "cifar10" else 12)
    run = train(small(name, folder, monitor_every=1), name=name, out=tmp_path / "run")
    assert run is not None
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
    settings = json.loads(run.settings.read_text())
    assert settings["recipe"] == name
    assert Recipe.from_json(settings["settings"]).encoder == SMALL[name].get("encoder", RECIPES[name].recipe.encoder)


@pytest.mark.parametrize("objective", ["fmicl", "infonce", "align_uniform", "spectral"])
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.usefixtures("only_training")
def test_each_method_trains_two_steps_with_each_objective(method: Any, objective: Any, tmp_path: Path) -> None:
    recipe = digits(method=method, objective=objective, divergence="js", epochs=1, batch_size=512, queue=600)
    before = build_recipe_encoder(recipe)
    run = train(recipe, out=tmp_path / "run")
    assert run is not None
    (row,) = csv.DictReader(run.metrics.open())
    assert row["step"] == "2"
    assert math.isfinite(float(row["loss"]))
    assert (row["loss_alignment"] != "") == (objective == "fmicl")
    after = load_encoder(run.path)
    assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))


@pytest.mark.usefixtures("only_training")
def test_as_many_views_are_compared_as_were_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, usual = [], SimCLR.pairs

    def pairs(self: SimCLR, first: Tensor, second: Tensor) -> Compared:
        sizes.append((len(first), len(second)))
        return usual(self, first, second)

    monkeypatch.setattr(training, "check_memory", lambda *_, **__: None)
    monkeypatch.setattr(SimCLR, "pairs", pairs)
    train(digits(epochs=1, batch_size=512, multiplicity=4), out=tmp_path / "run")
    assert sizes == [(512, 3 * 512)] * 2


def test_the_encoder_comes_back_without_pickle(tmp_path: Path) -> None:
    run = train(digits(epochs=1), out=tmp_path / "run")
    assert run is not None
    state = runs.load_checkpoint(run.checkpoint)["method"]
    encoder = load_encoder(run.path)
    assert not encoder.training
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"encoder.{name}"])
    assert encoder(torch.zeros(3, 1, 8, 8)).shape == (3, json.loads(run.encoder_config.read_text())["features"])
    again = evaluate_run(run)
    assert again == json.loads(run.results.read_text())
    assert not (run.path / "results-1.json").exists()


@pytest.mark.usefixtures("only_training")
def test_an_encoder_with_layers_that_share_their_weights_comes_back(tmp_path: Path) -> None:
    """As CoaT's have them, which safetensors refuses to write as they are."""
    folder = make("images", tmp_path)
    recipe = small("images", folder, encoder="coat_tiny", size=32, epochs=1, monitor_every=0)
    run = train(recipe, out=tmp_path / "run")
    assert run is not None
    encoder = load_encoder(run.path)
    state = runs.load_checkpoint(run.checkpoint)["method"]
    places = [value.data_ptr() for value in encoder.state_dict().values()]
    assert len(set(places)) < len(places)  # they share them again
    for name, value in encoder.state_dict().items():
        assert torch.equal(value, state[f"encoder.{name}"]), name


@pytest.mark.usefixtures("only_training")
def test_untrained_in_the_results_is_what_training_started_from(tmp_path: Path) -> None:
    run = train(digits(epochs=1, learning_rate=1e-30, weight_decay=0.0), out=tmp_path / "run")
    assert run is not None
    torch.manual_seed(0)
    start = build_recipe_encoder(digits())
    for old, new in zip(start.parameters(), load_encoder(run.path).parameters(), strict=True):
        torch.testing.assert_close(old, new, rtol=0, atol=1e-25)


def test_a_folder_without_labels_has_geometry_and_pictures_but_no_accuracy(tmp_path: Path) -> None:
    folder = make("images", tmp_path)
    assert folder is not None
    for path in sorted(folder.glob("*/*.png")):
        path.rename(folder / f"{path.parent.name}-{path.name}")
    for path in folder.iterdir():
        if path.is_dir():
            path.rmdir()
    run = train(small("images", folder, monitor_every=1), out=tmp_path / "run")
    assert run is not None
    results = json.loads(run.results.read_text())
    assert results["knn"] is results["linear"] is results["split"] is None
    assert results["effective_rank"] >= 1
    assert load_file(run.arrays)["neighbour_images"].shape == (6, 9, 3, 32, 32)
    assert run.report.exists()


def test_validation_leaves_the_test_split_alone(tmp_path: Path) -> None:
    run = train(digits(epochs=1, validation=0.25), out=tmp_path / "run")
    assert run is not None
    results = json.loads(run.results.read_text())
    assert results["split"] == "validation"
    assert (results["train_samples"], results["test_samples"]) == (1010, 337)


@pytest.mark.usefixtures("only_training")
def test_accumulated_gradients_make_one_step(tmp_path: Path) -> None:
    run = train(digits(epochs=2, batch_size=256, accumulate=5), out=tmp_path / "run")
    assert run is not None
    rows = list(csv.DictReader(run.metrics.open()))
    assert [row["step"] for row in rows] == ["1", "2"]
    # the loss in the record is the mean over batches, not a share of it
    other = train(digits(epochs=2, batch_size=256, learning_rate=1e-30), out=tmp_path / "other")
    assert other is not None
    reference = list(csv.DictReader(other.metrics.open()))
    assert float(rows[0]["loss"]) == pytest.approx(float(reference[0]["loss"]), rel=1e-5)


@pytest.mark.parametrize(("symmetric", "statistics"), [(False, "batch"), (True, "past")])
def test_two_processes_train_as_one(symmetric: bool, statistics: str, tmp_path: Path) -> None:
    """Through Lightning's own launcher; the page is written once, and the weights follow from the seed."""
    command = [sys.executable, "-m", "fmicl", "train", "digits", "--device", "cpu", "--devices", "2"]
    command += ["--method", "moco", "--epochs", "1", "--hidden", "32", "--no-baselines", "--out", str(tmp_path / "run")]
    command += ["--key-statistics", statistics, *(["--symmetric"] if symmetric else [])]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    run = runs.Run(tmp_path / "run")
    assert run.finished
    queue = runs.load_checkpoint(run.checkpoint)["method"]["queue"]
    torch.testing.assert_close(queue.norm(dim=1), torch.ones(len(queue)))
    assert int(runs.load_checkpoint(run.checkpoint)["method"]["queue_position"]) == 5 * (512 if symmetric else 256)
    assert done.stdout.count("run folder") == 1


def test_torchrun_and_slurm_say_how_many_processes_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.find_processes(digits().devices) == processes.Processes(1, 1, 0)
    with monkeypatch.context() as patch:
        launched = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4", "RANK": "5"}
        for key, value in launched.items():
            patch.setenv(key, value)
        found = processes.find_processes(digits().devices)
        assert (found.devices, found.nodes, found.rank, found.world_size) == (4, 2, 5, 8)
    for key, value in {"SLURM_NTASKS": "6", "SLURM_NNODES": "3", "SLURM_PROCID": "4", "SLURM_JOB_NAME": "x"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ValueError, match="--ntasks-per-node"):
        processes.find_processes(digits().devices)
    monkeypatch.setenv("SLURM_NTASKS_PER_NODE", "2")
    found = processes.find_processes(digits().devices)
    assert (found.devices, found.nodes, found.rank) == (2, 3, 4)
    assert [plugin.auto_requeue for plugin in found.plugins] == [False]
    with pytest.raises(ValueError, match=r"batch_size is 256 over 6 process\(es\)"):
        train(digits(batch_size=256), out=Path("never"))


def test_precision_is_what_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    for has in (True, False):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has: has)
        assert training.resolve_precision(digits(), cpu) == "32-true"
        assert training.resolve_precision(digits(), cuda) == ("bf16-mixed" if has else "32-true")
        for device in (cpu, cuda):
            assert training.resolve_precision(digits(precision="32"), device) == "32-true"
            assert training.resolve_precision(digits(precision="bf16"), device) == "bf16-mixed"


@pytest.mark.parametrize(("precision", "dtype"), [("32", torch.float32), ("bf16", torch.bfloat16)])
@pytest.mark.usefixtures("only_training")
def test_the_encoder_computes_in_that_precision(
    precision: Any, dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set()
    original = Method.embed

    def embed(self: Method, images: torch.Tensor) -> torch.Tensor:
        embeddings = original(self, images)
        seen.add(embeddings.dtype)
        return embeddings

    monkeypatch.setattr(Method, "embed", embed)
    run = train(digits(precision=precision, epochs=1, batch_size=1024), out=tmp_path / "run")
    assert run is not None
    assert seen == {dtype}
    assert all(value.dtype != torch.bfloat16 for value in load_file(run.encoder).values())  # the weights stay 32 bit


def test_a_recipes_momentum_and_statistics_reach_its_method() -> None:
    made = []
    symmetric: dict[str, Any] = {"symmetric": True, "encoder_momentum": 0.9, "encoder_momentum_end": 0.95}
    for changes in ({}, symmetric):
        recipe = digits(method="moco", **changes)
        method = build_method(recipe, build_recipe_encoder(recipe), 1)
        assert isinstance(method, MoCo)
        past = any(isinstance(module, RunningStatisticsNorm) for module in method.target_encoder.modules())
        made.append((method.initial_momentum, method.final_momentum, method.symmetric, past))
    assert made == [(0.99, 0.99, False, False), (0.9, 0.95, True, True)]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # TensorBoard's own
def test_a_folder_that_goes_away_is_said_to_have_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(self: Method, batch: Batch, batch_idx: int) -> dict[str, Tensor]:
        if self.batches == 7:
            shutil.rmtree(tmp_path / "run")
        return original(self, batch, batch_idx)

    original = Method.training_step
    monkeypatch.setattr(Method, "training_step", step)
    with pytest.raises(FileNotFoundError, match="run was moved or deleted while the run trained in it"):
        train(digits(epochs=3), out=tmp_path / "run")


def test_channels_last_changes_the_layout_and_not_the_numbers() -> None:
    recipe = digits(encoder="resnet18")
    recipe = dataclasses.replace(recipe, views=dataclasses.replace(recipe.views, mean=(0.5,) * 3, std=(0.5,) * 3))
    torch.manual_seed(0)
    method = build_method(recipe, build_recipe_encoder(recipe), 1)
    method.optimizers = lambda: torch.optim.SGD(method.parameters())  # type: ignore[assignment]
    method._trainer = None
    layouts: list[bool] = []
    method.encoder.register_forward_pre_hook(
        lambda _, inputs: layouts.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    generator = torch.Generator().manual_seed(1)
    views = [torch.randn(6, 3, 8, 8, generator=generator) for _ in range(2)]
    batch = Batch(views[0], views[1], torch.arange(6))
    plain = method.training_step(batch, 0)["loss"]
    method.channels_last = True
    method.to(memory_format=torch.channels_last)
    turned = method.training_step(batch, 0)["loss"]
    assert layouts == [False, True]
    torch.testing.assert_close(plain, turned, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("only_training")
def test_compile_on_trains_compiled_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if not any(shutil.which(name) for name in (os.environ.get("CXX", "g++"), "clang++")):
        pytest.skip("there is no compiler")
    compiled: list[str] = []
    original = Method.compile_parts

    def compile_parts(self: Method, device: torch.device, *, alone: bool = True) -> None:
        original(self, device, alone=alone)
        compiled.extend(name for name, part in self.named_children() if part._compiled_call_impl is not None)

    monkeypatch.setattr(Method, "compile_parts", compile_parts)
    settings = {"epochs": 1, "batch_size": 1024, "learning_rate": 0.01}
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    one = train(digits(**settings, compile="on"), out=tmp_path / "compiled")
    assert sorted(compiled) == ["encoder", "projection"]
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] >= 2
    other = train(digits(**settings, compile="off"), out=tmp_path / "plain")
    assert one is not None
    assert other is not None
    rows = [float(next(csv.DictReader(run.metrics.open()))["loss"]) for run in (one, other)]
    assert rows[0] == pytest.approx(rows[1], rel=1e-3)
    for name, value in load_file(one.encoder).items():
        torch.testing.assert_close(value, load_file(other.encoder)[name], rtol=1e-2, atol=2e-4)


@pytest.mark.slow
def test_the_digits_recipe_beats_what_needs_no_training(tmp_path: Path) -> None:
    run = train(dataclasses.replace(recipe("digits"), device="cpu"), name="digits", out=tmp_path / "run")
    assert run is not None
    results = json.loads(run.results.read_text())
    assert results["knn"] > results["untrained"]["knn"]
    assert results["linear"] > results["untrained"]["linear"]
    assert results["linear"] > results["raw_pixels"]["linear"]


def test_only_the_last_room_imports_from_the_last_room() -> None:
    rooms = ("report", "training", "text_training", "sweep_checks", "sweep", "run_commands", "cli", "__main__")
    last = {f"fmicl.{name}" for name in rooms}
    for path in (Path(training.__file__).parent).rglob("*.py"):
        if path.stem in {name.removeprefix("fmicl.") for name in last}:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{name}" for name in names)]
            assert not last & set(names), path


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(("given", "seen"), [(None, [5, 5, 2]), (8, [8, 4])])
def test_embed_takes_fewer_large_images_at_a_time(
    given: int | None, seen: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("images", tmp_path)
    run = train(digits(epochs=1), out=tmp_path / "run")
    assert folder is not None
    assert run is not None
    found: list[int] = []
    original = SmallConv.forward

    def forward(self: SmallConv, images: Tensor) -> Tensor:
        found.append(len(images))
        return original(self, images)

    monkeypatch.setattr(SmallConv, "forward", forward)
    monkeypatch.setattr("fmicl.evaluation.features.CPU_PIXELS", 5 * 8**2)  # as if these were large
    embed_folder(run.path, folder, tmp_path / "vectors.csv", device="cpu", workers=0, batch_size=given)
    assert found[1:] == seen  # the first is a trial of the encoder when it is built


@pytest.mark.usefixtures("only_training")
def test_embed_writes_the_same_vectors_in_three_formats(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow.parquet

    folder = make("images", tmp_path)
    assert folder is not None
    (folder / "broken.png").write_bytes(b"not an image")
    run = train(digits(epochs=1), out=tmp_path / "run")
    assert run is not None
    outputs = [tmp_path / f"vectors{suffix}" for suffix in (".parquet", ".npz", ".csv")]
    for output in outputs:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            count, skipped = embed_folder(run.path, folder, output, device="cpu", workers=0)
        assert count == 12
        assert len(skipped) == 1
        assert "broken.png" in skipped[0]
    table = pyarrow.parquet.read_table(outputs[0])
    arrays = np.load(outputs[1])
    with outputs[2].open() as file:
        rows = list(csv.reader(file))[1:]
    assert table["path"].to_pylist() == arrays["paths"].tolist() == [row[0] for row in rows]
    assert "a/0.png" in arrays["paths"]
    vectors = np.array(table["embedding"].to_pylist(), dtype=np.float32)
    assert np.array_equal(vectors, arrays["embeddings"])
    assert np.allclose(vectors, np.array([row[1:] for row in rows], dtype=np.float32))
    grey = Image.open(folder / "a" / "0.png").convert("L").resize((9, 9), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy(np.asarray(grey)[:8, :8] / 255.0).float()
    view = recipe("digits").views
    expected = load_encoder(run.path)(((pixels - view.mean[0]) / view.std[0]).view(1, 1, 8, 8))
    got = torch.from_numpy(vectors[arrays["paths"].tolist().index("a/0.png")])
    assert nn.functional.cosine_similarity(expected[0], got, dim=0) > 0.95  # resizing before or after the grey differs
    with pytest.raises(FileExistsError, match="not overwritten"):
        embed_folder(run.path, folder, outputs[0], device="cpu", workers=0)
    odd = tmp_path / "odd"
    odd.mkdir()
    (folder / "a" / "0.png").rename(os.fsdecode(os.fsencode(odd) + b"/\xff\xc3\xa9.png"))
    data = (folder / "a" / "3.png").read_bytes()
    (odd / "x.png").write_bytes(data[: len(data) // 3] + data[-12:])  # header and end are fine
    for suffix in (".PARQUET", ".Npz", ".CSV"):
        count, skipped = embed_folder(run.path, odd, tmp_path / f"odd{suffix}", device="cpu", workers=0)
        assert (count, len(skipped)) == (1, 1)
        assert "x.png" in skipped[0]
    assert pyarrow.parquet.read_table(tmp_path / "odd.PARQUET")["path"].to_pylist() == [r"\xffé.png"]
    assert np.load(tmp_path / "odd.Npz")["paths"].tolist() == [r"\xffé.png"]
    assert (tmp_path / "odd.CSV").read_text(encoding="utf-8").splitlines()[1].startswith(r"\xffé.png,")
    next(path for path in odd.iterdir() if path.name != "x.png").unlink()
    with pytest.raises(ValueError, match=r"none of the images .* can be decoded, for example .*x\.png"):
        embed_folder(run.path, odd, tmp_path / "none.csv", device="cpu", workers=0)
    with pytest.raises(ValueError, match="--batch-size must be positive"):
        embed_folder(run.path, folder, tmp_path / "x.csv", device="cpu", batch_size=0)
    with pytest.raises(FileNotFoundError, match=r"there is no folder \S*nowhere$"):
        embed_folder(run.path, tmp_path / "nowhere", tmp_path / "x.csv", device="cpu", workers=0)
    with pytest.raises(ValueError, match=r"\.parquet, \.npz, \.csv"):
        embed_folder(run.path, folder, tmp_path / "x.txt", device="cpu", workers=0)
