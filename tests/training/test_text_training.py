"""Runs on text from settings to report: settings, choice by STS-B dev, exported files, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

import pyarrow.parquet
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer

import fmicl
from fmicl.cli import main as cli
from fmicl.config.settings import schema_of
from fmicl.evaluation.sts import load_stsb
from fmicl.methods import Method
from fmicl.models.text import build_sentence_encoder
from fmicl.runs.embedding import embed_text
from fmicl.runs.settings import read_fingerprint, read_settings, read_task
from fmicl.training.checkpoints import load_checkpoint
from fmicl.training.tasks.text import StsMonitor
from fmicl.training.tasks.text_evaluation import evaluate_text, stsb_scorer
from small_text_settings import small
from sts_files import write_sts
from tiny_bert import SENTENCES, tiny_bert
from train_run import train


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, one without dropout, a text file and STS tasks."""
    folder = tmp_path_factory.mktemp("place")
    tiny_bert(folder / "bert").save_pretrained(str(folder / "model"), create_model_card=False)
    tiny_bert(folder / "still", dropout=0.0)
    (folder / "text.txt").write_text("\n".join(SENTENCES) + "\n\n")
    write_sts(folder / "sts")
    return folder


@pytest.mark.usefixtures("only_text_training")
def test_the_last_step_counts_also_if_it_has_fewer_batches(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight batches make three steps: of three, three and two."""
    run = train(small(place, accumulate=3, epochs=2, sts_every=1), out=tmp_path / "run")
    rows = list(csv.DictReader(run.metrics.open()))
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert load_checkpoint(run.checkpoint)["optimizer"]["state"][0]["step"] == 3  # the optimiser counts, too
    assert json.loads(run.results.read_text())["step"] == 3
    assert "step 3 is exported" in capsys.readouterr().out


def test_collapse_is_warned_of_in_training_and_in_the_end(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = small(place, alpha=1e-9, learning_rate=3e-3, epochs=12, sts=place / "sts", sts_every=24)
    run = train(settings, out=tmp_path / "run")
    assert json.loads(run.results.read_text())["uniformity"] == pytest.approx(0, abs=0.02)
    said = capsys.readouterr().out
    assert "the embeddings have collapsed" in said
    assert "the sentence vectors have collapsed" in said
    assert "--alpha" in said


def test_a_batch_that_does_not_fit_is_refused_before_there_is_a_folder(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fmicl.training.memory.free_memory", lambda: 2**10)
    with pytest.raises(ValueError, match=r"a batch of 8 .*--model or --length"):
        train(small(place), out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("model", "warned"), [("still", True), ("bert", False)])
@pytest.mark.usefixtures("only_text_training")
def test_a_model_without_dropout_is_warned_of(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, warned: bool
) -> None:
    train(small(place, model=str(place / model)), out=tmp_path / "run")
    said = capsys.readouterr().out
    assert (f"warning: {place / model} has no dropout" in said) == warned


@pytest.mark.usefixtures("only_text_training")
def test_rows_every_so_many_steps_and_a_linear_learning_rate(place: Path, tmp_path: Path) -> None:
    run = train(small(place, epochs=3, sts_every=5, learning_rate=1e-3), out=tmp_path / "run")
    rows = list(csv.DictReader(run.metrics.open()))
    assert [int(row["step"]) for row in rows] == [5, 10, 12]
    assert [float(row["epoch"]) for row in rows] == [1.25, 2.5, 3.0]
    assert [float(row["lr"]) for row in rows] == pytest.approx([1e-3 * (1 - step / 12) for step in (4, 9, 11)])
    assert all(row["stsb_dev"] == "" and math.isfinite(float(row["loss"])) for row in rows)
    state = load_checkpoint(run.checkpoint)
    assert state["batches"] == 12
    assert read_task(run) == "text"
    fingerprint = read_fingerprint(run)
    assert fingerprint is not None
    assert fingerprint["samples"] == len(SENTENCES)
    assert read_settings(run, "text").epochs == 3
    with pytest.raises(ValueError, match="text"):
        read_settings(run, "images")
    with pytest.raises(ValueError, match="SentenceTransformer"):
        fmicl.load_encoder(run.path)


@pytest.mark.parametrize(
    ("scores", "chosen"),
    [([10.0, 30.0, 20.0, 30.0], 1), ([None, 5.0, 4.0, None], 1), ([1.0, 2.0, 3.0, 4.0], 3), ([None] * 4, None)],
)
def test_the_best_on_stsb_dev_is_what_is_exported(
    scores: list[float | None], chosen: int | None, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[dict[str, Tensor]] = []

    def scorer(*_: Any) -> Any:
        def score(encoder: nn.Module) -> float | None:
            seen.append({name: value.clone() for name, value in encoder.state_dict().items()})
            return scores[len(seen) - 1]

        return score

    heads: list[dict[str, Tensor]] = []
    measure = StsMonitor.measure

    def watched(monitor: StsMonitor, method: Method, step: int) -> float | None:
        heads.append({name: value.clone() for name, value in method.projection.state_dict().items()})
        return measure(monitor, method, step)

    monkeypatch.setattr(StsMonitor, "measure", watched)
    monkeypatch.setattr("fmicl.training.tasks.text.stsb_scorer", scorer)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)
    settings = small(place, sts=place / "sts", epochs=2, learning_rate=1e-2)
    run = train(settings, out=tmp_path / "run")
    assert len(seen) == 4
    exported = load_file(run.sentence_transformer / "model.safetensors")
    best = seen[3 if chosen is None else chosen]
    assert all(torch.equal(value, best[f"model.{name}"]) for name, value in exported.items())
    assert sum(all(torch.equal(v, weights[f"model.{n}"]) for n, v in exported.items()) for weights in seen) == 1
    head = load_file(run.projection)  # of the same step
    best_head = heads[3 if chosen is None else chosen]
    assert all(torch.equal(value, best_head[name]) for name, value in head.items())
    assert sum(all(torch.equal(value, other[name]) for name, value in head.items()) for other in heads) == 1
    results = json.loads(run.results.read_text())
    assert results["step"] == (8 if chosen is None else 2 * (chosen + 1))
    assert results["stsb_dev"] == (None if chosen is None else scores[chosen])
    assert results["chosen_by"] == ("last step" if chosen is None else "STS-B dev")
    assert results["avg"] is not None
    assert [row["stsb_dev"] for row in csv.DictReader(run.metrics.open())] == [
        "" if s is None else str(s) for s in scores
    ]


def test_the_score_on_stsb_dev_is_that_of_the_exported_folder(place: Path, tmp_path: Path) -> None:
    """The tokens of training and sentence-transformers give the same number."""
    run = train(small(place, sts=place / "sts", sts_every=4, learning_rate=1e-2), out=tmp_path / "run")
    results = json.loads(run.results.read_text())
    dev = load_stsb(place / "sts", "dev")
    model = SentenceTransformer(str(run.path), device="cpu")
    rows = [F.normalize(model.encode(list(side), convert_to_tensor=True)) for side in (dev.first, dev.second)]
    from scipy.stats import spearmanr

    cosines = (rows[0] * rows[1]).sum(dim=1).double().numpy().round(6)
    assert results["stsb_dev"] == pytest.approx(100 * spearmanr(cosines, dev.scores).statistic)
    encoder, tokenizer = build_sentence_encoder(str(run.sentence_transformer), "cls")
    assert stsb_scorer(dev, tokenizer, 16, torch.device("cpu"))(encoder) == pytest.approx(results["stsb_dev"])
    assert encoder.training  # as it was before
    scored = evaluate_text(run.path, place / "sts", device="cpu")
    assert all(results[key] == value for key, value in scored.items() if key != "model")
    page = run.report.read_text()
    assert f"{results['avg']:.2f}" in page
    assert "STS-B dev" in page
    assert {path.name for path in (run.path / "figures").iterdir()} >= {"loss.png", "stsb_dev.png"}
    assert "k-NN" not in page
    assert "arrays.safetensors" not in page


def run_cli(*arguments: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "COLUMNS": "200"}
    command = [sys.executable, "-m", "fmicl", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def options(place: Path, *more: object) -> list[object]:
    return [
        "--data", place / "text.txt", "--cache-dir", place / "cache", "--length", 16, "--batch-size", 8,
        "--device", "cpu", *more,
    ]  # fmt: skip


def test_from_the_command_line_to_sentence_transformers(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    done = run_cli(
        "train", "wikipedia", *options(place, "--model", place / "bert", "--divergence", "kl", "--out", folder)
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(SENTENCES)} sentences" in done.stdout
    assert "1 blank line(s) skipped" in done.stdout
    assert "step 4 is exported: the last one" in done.stdout
    assert done.stderr == ""
    (tmp_path / "x.txt").write_bytes(
        "a man\r\n\nthe dog sings a song two cat plays fast . the red food guitar\nñ".encode()
    )
    for ending in ("npz", "csv", "parquet"):
        output = tmp_path / f"x.{ending}"
        assert cli.main(["embed", str(folder), str(tmp_path / "x.txt"), "-o", str(output), "--device", "cpu"]) == 0
    assert f"4 sentences -> {output}" in capsys.readouterr().out
    arrays = np.load(tmp_path / "x.npz")
    lines = ["a man", "", "the dog sings a song two cat plays fast . the red food guitar", "ñ"]
    assert arrays["sentences"].tolist() == lines
    for path in (folder, folder / "sentence_transformer"):
        vectors = SentenceTransformer(str(path), device="cpu").encode(lines)
        np.testing.assert_allclose(arrays["embeddings"], vectors, atol=1e-5)
    rows = list(csv.reader((tmp_path / "x.csv").open()))
    assert rows[0] == ["sentence", *map(str, range(8))]
    np.testing.assert_allclose(np.array([row[1:] for row in rows[1:]], dtype=float), vectors, atol=1e-5)
    table = pyarrow.parquet.read_table(tmp_path / "x.parquet").to_pydict()
    assert table["sentence"] == lines
    np.testing.assert_allclose(np.array(table["embedding"]), vectors, atol=1e-5)
    results = json.loads((folder / "results.json").read_text())
    assert results == {"step": 4, "stsb_dev": None, "chosen_by": "last step"}
    assert "fmicl evaluate RUN --sts DIR" in (folder / "report.html").read_text()
    scores = tmp_path / "scores.json"
    command = ["evaluate", str(folder), "--sts", str(place / "sts"), "--json", str(scores), "--device", "cpu"]
    assert cli.main(command) == 0
    written = json.loads(scores.read_text())
    results = json.loads((folder / "results.json").read_text())
    assert results["step"] == 4
    assert results["avg"] == written["avg"]
    assert json.loads((folder / "results-1.json").read_text())["step"] == 4  # the ones before are kept
    assert f"{written['avg']:.2f}" in (folder / "report.html").read_text()


def test_two_processes_train_as_one(place: Path, tmp_path: Path) -> None:
    """Without dropout, halves of a batch in two processes move the weights as the whole in one."""
    changes = ["--model", place / "still", "--learning-rate", 1e-3, "--optimizer", "sgd", "--clip", 0, "--alpha", 10.0]
    changes += ["--pooling", "mean", "--gamma", 2.0, "--sts-every", 2]
    two = run_cli("train", "wikipedia", *options(place, *changes, "--devices", 2, "--out", tmp_path / "two"))
    assert two.returncode == 0, two.stderr
    assert two.stdout.count("run folder") == 1
    assert cli.main(["train", "wikipedia", *map(str, options(place, *changes, "--out", tmp_path / "one"))]) == 0
    start = load_file(place / "still" / "model.safetensors")
    one, both = (load_file(tmp_path / name / "sentence_transformer" / "model.safetensors") for name in ("one", "two"))
    moved = max(float((value - start[name]).abs().max()) for name, value in one.items())
    assert moved > 1e-4
    for name, value in one.items():
        torch.testing.assert_close(both[name], value, rtol=0, atol=1e-3 * moved, msg=name)


def test_a_plain_transformers_folder_is_embedded_with_the_given_pooling(place: Path, tmp_path: Path) -> None:
    output = tmp_path / "x.npz"
    command = ["embed", place / "bert", place / "text.txt", "-o", output, "--pooling", "mean", "--device", "cpu"]
    assert cli.main(list(map(str, command))) == 0
    vectors = SentenceTransformer(str(place / "model"), device="cpu").encode([*SENTENCES, ""])
    np.testing.assert_allclose(np.load(output)["embeddings"], vectors, atol=1e-5)


def test_a_npz_that_one_long_line_makes_huge_is_refused(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("a\n" * 999 + "b" * 1000 + "\n")
    monkeypatch.setattr("fmicl.runs.embedding.LARGEST_NAMES", 4 * 1000 * 1000 - 1)
    with pytest.raises(ValueError, match=r"each of 1,000 names to the longest, of 1,000 characters.*write \.parquet"):
        embed_text(place / "model", text, tmp_path / "x.npz", device="cpu")
    assert embed_text(place / "model", text, tmp_path / "x.csv", device="cpu") == 1000


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(list(map(str, arguments))) == 2
    error = capsys.readouterr().err
    assert error.startswith("fmicl: error: ")
    return error.removeprefix("fmicl: error: ")


def test_wrong_input_ends_in_one_message(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["train", "wikipedia", "--device", "cpu", "--cache-dir", place / "cache"]
    model = ["--model", place / "bert", "--length", 16]
    text = ["--data", place / "text.txt"]
    assert "--data FILE" in error_of(capsys, *command)
    assert "there is no file none.txt" in error_of(capsys, *command, "--data", "none.txt")
    assert "there is no model folder ./none" in error_of(capsys, *command, *text, "--model", "./none")
    assert "at most 16 tokens" in error_of(capsys, *command, *text, "--model", place / "bert")
    assert "encode_length is 17" in error_of(capsys, *command, *text, *model, "--encode-length", 17)
    assert "don't fill one batch of 64" in error_of(capsys, *command, *text, *model)
    assert "there is no folder none" in error_of(capsys, *command, *text, "--sts", "none")
    assert "queue (4) must hold" in error_of(capsys, *command, *text, "--method", "moco", "--queue", 4)
    (tmp_path / "bad.txt").write_bytes(b"fine\nb\xe4d\n")
    assert "line 2, byte 2 (0xe4)" in error_of(capsys, *command, *model, "--data", "bad.txt", "--batch-size", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["bad.txt"]
    assert "no folder none" in error_of(capsys, "embed", "none", "bad.txt", "-o", "x.csv")
    assert "line 2, byte 2" in error_of(capsys, "embed", place / "model", "bad.txt", "-o", "x.csv")
    assert "a plain transformers model" in error_of(capsys, "embed", place / "bert", place / "text.txt", "-o", "x.csv")
    assert "leave --pooling out" in error_of(
        capsys, "embed", place / "model", "bad.txt", "-o", "x.csv", "--pooling", "mean"
    )
    assert "--pooling is for sentences" in error_of(
        capsys, "embed", place / "bert", tmp_path, "-o", "x.csv", "--pooling", "mean"
    )
    assert "--workers is for folders" in error_of(
        capsys, "embed", place / "bert", "bad.txt", "-o", "x.csv", "--workers", 2
    )
    (tmp_path / "empty.txt").write_text("")
    assert "is empty" in error_of(capsys, "embed", place / "model", "empty.txt", "-o", "x.csv")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "settings.json").write_text('{"recipe": "wikipedia", "task": "text", "settings": {}}')
    assert "training has not ended" in error_of(capsys, "evaluate", "half", "--sts", place / "sts")


def test_help_shows_the_options_of_text_and_no_others() -> None:
    text = run_cli("train", "wikipedia", "--help").stdout
    for option in schema_of("text").options.values():
        assert option.flag in text, option.name
    for name in ("--data-dir", "--encoder ", "--monitor-every", "--stem", "--crop-scale", "--workers", "--dim "):
        assert name not in text, name
