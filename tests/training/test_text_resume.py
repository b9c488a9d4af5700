"""Interrupted runs on text end with the same bits: processes that are stopped or killed, exceptions at any batch."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

from test_resume import _assert_equal, interrupted_after

from fmicl.config import Settings
from fmicl.runs.folder import Run
from fmicl.training.checkpoints import load_checkpoint
from small_text_settings import small
from sts_files import write_sts
from tiny_bert import SENTENCES, tiny_bert
from train_run import train

pytestmark = pytest.mark.usefixtures("only_text_training")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    tiny_bert(folder / "bert")
    (folder / "text.txt").write_text("\n".join(SENTENCES * 2) + "\n")
    write_sts(folder / "sts")
    return folder


def text_settings(place: Path, **changes: Any) -> Settings:
    usual = {"sts": place / "sts", "sts_every": 3, "checkpoint_steps": 2, "learning_rate": 1e-3, "queue": 32}
    return small(place, **usual | changes)


def assert_same(one: Path, other: Path) -> None:
    """Exported files to the byte; the whole state with optimiser, queue and best encoder; and the metrics."""
    exported = sorted(path.relative_to(one) for path in (one / "sentence_transformer").rglob("*") if path.is_file())
    assert any(path.name == "model.safetensors" for path in exported)
    for path in (*exported, Path("modules.json"), Path("projection.safetensors"), Path("results.json")):
        assert (one / path).read_bytes() == (other / path).read_bytes(), path
    a, b = (load_checkpoint(Run(path).checkpoint) for path in (one, other))
    for state in (a, b):
        state["metrics"].pop("seconds")
        for row in state["metrics"]["rows"]:
            row.pop("seconds")
    assert a["metrics"]["monitor"]["best"]["weights"]
    _assert_equal(a, b)


LONG = {"epochs": 40, "sts_every": 9, "checkpoint_steps": 10}


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A long run without interruption."""
    out = tmp_path_factory.mktemp("whole") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fmicl.training.tasks.text.evaluate_text", lambda *_, **__: None)
        patch.setattr("fmicl.training.pipeline.write_report", lambda _: None)
        train(text_settings(place, **LONG), out=out)
    return out


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGKILL"])
def test_stopped_by_a_signal_and_resumed_is_bit_identical(name: str, place: Path, whole: Path, tmp_path: Path) -> None:
    arguments = text_settings(place, **LONG).arguments()
    process = subprocess.Popen(
        [sys.executable, "-m", "fmicl", "train", "wikipedia", *arguments, "--out", str(tmp_path / "cut")],
        env={**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    run = Run(tmp_path / "cut")
    deadline = time.monotonic() + 120
    # Some rows in, so that there is a best encoder to lose.
    while not (run.checkpoint.exists() and run.metrics.exists() and len(run.metrics.read_text().splitlines()) > 3):
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(getattr(signal, name))
    error = process.communicate(timeout=60)[1]
    assert process.returncode == {"SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9}[name]
    assert ("--resume continues from there" in error) == (name != "SIGKILL")
    assert 0 < load_checkpoint(run.checkpoint)["batches"] < 40 * 8
    (run.path / ".sentence_transformer.1.tmp" / "whole").mkdir(parents=True)  # as if killed while exporting
    assert not run.modules.exists()
    train(text_settings(place, **LONG), out=run.path, resume=True)
    assert_same(whole, run.path)
    assert not list(run.path.rglob("*.tmp"))


CUTS = [
    ("simclr", 1, 4, 1),  # before the first checkpoint
    ("simclr", 12, 1, 1),  # in the middle of an epoch, just after STS-B dev was scored
    ("moco", 13, 3, 1),  # some batches after the last checkpoint
    ("mocov3", 15, 1, 2),  # with gradients half accumulated
    ("simclr", 16, 1, 1),  # after the last batch, before the export
]


@pytest.mark.parametrize(("method", "after", "steps", "accumulate"), CUTS)
def test_cut_anywhere(
    method: str, after: int, steps: int, accumulate: int, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = text_settings(place, method=method, checkpoint_steps=steps, accumulate=accumulate, epochs=2)
    train(settings, out=tmp_path / "whole")
    with interrupted_after(after, monkeypatch):
        train(settings, out=tmp_path / "cut")
    train(settings, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_resume_refuses_another_text_and_allows_another_place(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved.txt"
    moved.write_bytes((place / "text.txt").read_bytes())
    train(text_settings(place), out=tmp_path / "run")
    again = text_settings(place, data=moved, cache_dir=tmp_path / "cache", checkpoint_minutes=3)
    train(again, out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="length was 16, is now 12"):
        train(text_settings(place, length=12), out=tmp_path / "run", resume=True)
    moved.write_text(moved.read_text() + "a man sings\n")
    with pytest.raises(ValueError, match=r"64 .*65"):
        train(again, out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match="STS-B dev"):
        train(text_settings(place, sts=None), out=tmp_path / "run", resume=True)
    Run(tmp_path / "run").report.write_text("the report, which is written last")
    capsys.readouterr()
    train(text_settings(place), out=tmp_path / "run", resume=True)
    assert "finished already" in capsys.readouterr().out
