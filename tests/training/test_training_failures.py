"""Failures of training runs: what stops a run, what it warns of, and which files it continues without."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fmicl.config import recipe
from fmicl.data import FileSamples
from fmicl.losses.fmicl import FMICLOptions
from fmicl.runs.folder import Run, create_run
from fmicl.training import pipeline
from fmicl.training.callbacks import FiniteLossCheck
from fmicl.training.checkpoints import load_checkpoint
from fmicl.training.pipeline import settings_warnings
from fmicl.training.progress import ProgressDisplay
from fmicl.training.tasks.image_evaluation import evaluate_run
from fmicl.training.tasks.image_parts import load_splits
from fmicl.utils.errors import NonFiniteError
from image_sets import make
from small_settings import digits, small
from train_run import train


@pytest.mark.parametrize("memory_gib", [4.0, 0.0])
def test_a_small_folder_is_trained_on_without_its_broken_files(
    memory_gib: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make("images", tmp_path, n=30)
    settings = small("images", folder, memory_gib=memory_gib, epochs=1)
    whole = load_splits(settings)
    for name in whole.names[:3]:
        (folder / name).write_bytes(b"not an image")
    os.rename(folder / whole.names[0], os.fsencode(folder) + b"/a/\xff.png")  # a name that no terminal can show
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = train(settings, out=tmp_path / "run")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "warning" in line)
    assert line.startswith("warning: 3 image(s)")
    for name in (r"a/\xff.png", *whole.names[1:3]):
        assert f"{name}: not an image" in line
    results = json.loads(run.results.read_text())
    assert results["skipped_images"] == 3
    assert whole.test is not None
    assert (results["train_samples"], results["test_samples"]) == (len(whole.names) - 3, len(whole.test))
    with pytest.raises(ValueError, match="don't fill one batch"):
        train(settings.replace(batch_size=len(whole.names)), out=tmp_path / "other")
    assert "3 image(s)" in capsys.readouterr().out  # which is why


def test_a_file_that_fails_in_decoding_does_not_end_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fmicl.data.images.listing.DECODED_LIMIT", 0)  # as in a folder too large to decode beforehand
    folder = make("images", tmp_path, n=30)
    splits = load_splits(small("images", folder, memory_gib=0.0))
    assert isinstance(splits.test, FileSamples)
    for path in (*(folder / name for name in splits.names[:2]), splits.test.paths[0]):
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 3] + data[-12:])
    run = train(small("images", folder, memory_gib=0.0, monitor_every=1), out=tmp_path / "run")
    said = capsys.readouterr().out
    assert "image(s) can't be decoded, others are trained on" in said
    assert "3 image(s) can't be decoded and are left out of the evaluation" in said
    results = json.loads(run.results.read_text())
    assert results["skipped_images"] == 3
    assert results["test_samples"] == len(splits.test) - 1
    assert results["train_samples"] == len(splits.pretrain) - 2


def test_changed_data_is_noticed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make("images", tmp_path, n=30)
    settings = small("images", folder, epochs=1)
    run = train(settings, out=tmp_path / "run")
    train(settings, out=tmp_path / "run", resume=True)
    name = load_splits(settings).names[0]
    n = len(load_splits(settings).pretrain)
    (folder / name).unlink()
    changed = f"the training set had {n} images, and has {n - 1} now"
    for unfinished in (False, True):
        if unfinished:
            run.report.unlink()
        with pytest.raises(ValueError, match=f"the data has changed since .*: {changed}"):
            train(settings, out=tmp_path / "run", resume=True)
    capsys.readouterr()
    own = json.loads(run.results.read_text())
    assert not {"data_changed", "data_dir"} & own.keys()
    found = evaluate_run(run, device="cpu")
    said = capsys.readouterr().out
    assert "warning: the data has changed" in said
    assert changed in said
    assert said.count("\n") == 2
    assert "results.json is replaced" in said
    assert (found["data_changed"], found["data_dir"]) == (changed, str(folder))
    assert json.loads(run.results.read_text()) == found
    assert json.loads((run.path / "results-1.json").read_text()) == own


class Breaks(nn.Module):
    """An objective that is not finite from its third call on; the memory check doesn't call it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return (x - y).square().sum() * (float("nan") if self.calls > 2 else 1e-6)

    def extra_repr(self) -> str:
        return "alpha=40"


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FMICLOptions, "build", lambda *_: Breaks())
    facts = r"step 3 \(batch 3\).*SimCLR with Breaks\(alpha=40\).*\S*last.ckpt.*--learning-rate"
    with pytest.raises(NonFiniteError, match=facts):
        train(digits(checkpoint_steps=1), out=tmp_path / "run")
    with pytest.raises(NonFiniteError, match=r"step 2 \(batch 3\); .*no checkpoint"):
        train(digits(accumulate=2), out=tmp_path / "other")
    state = load_checkpoint(Run(tmp_path / "run").checkpoint)
    assert state["batches"] == 2
    assert all(bool(value.isfinite().all()) for value in state["method"].values())


def test_a_broken_encoder_is_not_measured(tmp_path: Path) -> None:
    """One step with a huge learning rate after a finite loss; then k-NN would be due."""
    with pytest.raises(NonFiniteError, match="a weight is not finite at step 1"):
        train(digits(learning_rate=1e38, batch_size=1300, warmup_epochs=0, monitor_every=1), out=tmp_path / "run")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), NonFiniteError("the loss is nan")])
@pytest.mark.usefixtures("only_training")
def test_the_terminal_has_its_cursor_back_whatever_stops_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException
) -> None:
    class Terminal(ProgressDisplay):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **{**options, "live": True})

    def stop(*_: object) -> None:
        raise error

    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(pipeline, "ProgressDisplay", Terminal)
    monkeypatch.setattr(FiniteLossCheck, "on_before_backward", stop)
    with pytest.raises(type(error)):
        train(digits(epochs=1), out=tmp_path / "run")
    said = capsys.readouterr().out
    assert said.count("\x1b[?25l") == said.count("\x1b[?25h") == 1


@pytest.mark.usefixtures("only_training")
def test_options_without_effect_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(digits(epochs=1, hidden=8, temperature=0.7, queue=999), out=tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert [line.split()[1] for line in lines] == ["temperature", "queue"]
    assert [word in line for line, word in zip(lines, ("infonce", "moco"), strict=True)] == [True, True]  # their owners


@pytest.mark.parametrize(
    ("changes", "name", "reason"),
    [
        ({"alpha": 3.0, "shift": "optimal"}, "alpha", "kl with the optimal shift"),
        ({"order": 2.0, "divergence": "js"}, "order", "divergence tsallis"),
        ({"order": 2.0, "objective": "infonce"}, "order", "divergence tsallis"),
        ({"symmetric": True, "method": "mocov3"}, "symmetric", "method moco"),
        ({"encoder_momentum": 0.9}, "encoder_momentum", "method byol, moco, mocov3"),
        ({"negatives": "both", "method": "moco", "alpha": 5.0}, "negatives", "queue"),
        ({"method": "moco"}, "the", "negatives of moco have no gradient"),
    ],
)
def test_a_warning_names_the_option_and_its_owner(changes: dict[str, Any], name: str, reason: str) -> None:
    (line,) = settings_warnings(recipe("digits", **changes), 64)
    assert line.startswith(f"warning: {name} ")
    assert reason in line


@pytest.mark.parametrize(
    ("changes", "unused"),
    [
        ({"stem": "small", "stable_vit": False}, ["stable_vit", "stem"]),
        ({"encoder": "resnet18", "stem": "small", "stable_vit": False}, ["stable_vit"]),
        (
            {"encoder": "vit_tiny_patch16_224", "size": 16, "depth": 1, "stem": "standard", "stable_vit": False},
            ["stem"],
        ),
        ({"encoder": "resnet18", "stem": "small"}, []),
    ],
)
@pytest.mark.usefixtures("only_training")
def test_an_option_of_another_encoder_is_warned_of(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, Any],
    unused: list[str],
) -> None:
    monkeypatch.setattr(pipeline, "fit", lambda *_, **__: None)
    settings = digits(hidden=8, **changes)
    train(settings, out=tmp_path / "run")
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert [line.split()[1] for line in lines] == unused
    assert all(settings.encoder in line for line in lines)


def test_a_broken_weight_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FiniteLossCheck, "read", lambda *_, **__: None)  # as if the loss had been finite
    monkeypatch.setattr(FMICLOptions, "build", lambda *_: Breaks())
    with pytest.raises(NonFiniteError, match="a weight is not finite"):
        train(digits(checkpoint_steps=1), out=tmp_path / "run")
    assert load_checkpoint(Run(tmp_path / "run").checkpoint)["batches"] == 2


def test_existing_folders_are_never_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "note").write_text("keep")
    with pytest.raises(FileExistsError, match="never overwrites"):
        train(digits(epochs=1), out=Path("mine"))
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file"):
        train(digits(epochs=1), out=Path("file"), resume=True)
    with pytest.raises(ValueError, match="not a run to resume"):
        train(digits(epochs=1), out=Path("mine"), resume=True)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["note"]
    assert [create_run("digits").path.as_posix() for _ in range(2)] == ["runs/digits-001", "runs/digits-002"]


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"encoder": "resnet_18"}, "did you mean"),
        ({"encoder": "vit_small_patch16_224"}, "8 x 8"),
        ({"divergence": "jss"}, "js"),
        ({"batch_size": 5000}, "batch"),
        ({"method": "moco", "queue": 10}, r"queue \(10\)"),
        ({"method": "moco", "queue": 300, "symmetric": True}, r"queue \(300\).*\(512\)"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_wrong_settings_are_found_before_a_folder_is_made(changes: dict[str, Any], match: str, tmp_path: Path) -> None:
    if changes.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("this machine has one")
    with pytest.raises(ValueError, match=match):
        train(digits(**changes), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
