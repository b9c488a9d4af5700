"""`fmicl evaluate PATH --sts DIR --json FILE`: scores on the screen and in a new file, or one message."""

from __future__ import annotations

import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")

from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer

from fmicl.cli import main as cli
from fmicl.evaluation.sts import TASKS, evaluate_sts
from fmicl.runs.sentence_encoder import load_sentence_encoder
from fmicl.training.tasks.text_evaluation import evaluate_text
from fmicl.utils.files import write_json
from fmicl.utils.validation import TokenPooling
from sts_files import write_sts
from tiny_bert import tiny_bert


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("encoder")
    tiny_bert(folder / "bert").save_pretrained(str(folder / "model"))
    return folder / "model"


@pytest.fixture
def sts(tmp_path: Path) -> Path:
    write_sts(tmp_path / "sts")
    return tmp_path / "sts"


def test_it_prints_a_table_and_writes_what_the_function_gives(
    saved: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    assert cli.main(["evaluate", str(saved), "--sts", str(sts), "--json", str(output), "--device", "cpu"]) == 0
    written = json.loads(output.read_text())
    model = SentenceTransformer(str(saved), device="cpu")
    expected = evaluate_sts(lambda sentences: torch.as_tensor(model.encode(list(sentences), batch_size=64)), sts)
    assert written.pop("model") == str(saved)
    assert set(written) == {*TASKS, "avg", "missing", "alignment", "uniformity", "pairs", "incomplete"}
    for name in (*TASKS, "avg", "alignment", "uniformity"):
        assert written[name] == pytest.approx(expected[name], abs=1e-3)
    shown = capsys.readouterr().out
    for name in (*TASKS, "avg"):
        assert name in shown
        assert f"{written[name]:.2f}" in shown
    assert f"scores -> {output}" in shown.replace("\n", "")
    assert "not the official number of pairs" in shown
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize("pooling", ["cls", "mean"])
def test_a_plain_transformers_folder_is_scored_with_the_given_pooling(
    saved: Path, sts: Path, tmp_path: Path, pooling: TokenPooling
) -> None:
    plain, output = saved.with_name("bert"), tmp_path / "scores.json"
    options = ["--sts", sts, "--json", output, "--device", "cpu", "--pooling", pooling]
    assert cli.main(["evaluate", *map(str, (plain, *options))]) == 0
    words = Transformer(str(plain))
    whole = SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), pooling)], device="cpu")
    whole.save_pretrained(str(tmp_path / "whole"))
    expected = evaluate_text(tmp_path / "whole", sts, device="cpu")
    assert json.loads(output.read_text()) == {**expected, "model": str(plain), "pooling": pooling}


def test_missing_sets_are_shown_and_there_is_no_average(
    saved: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(sts / "SICK")
    output = tmp_path / "scores.json"
    assert cli.main(["evaluate", str(saved), "--sts", str(sts), "--json", str(output), "--device", "cpu"]) == 0
    assert "missing: SICK-R" in capsys.readouterr().out
    written = json.loads(output.read_text())
    assert (written["avg"], written["missing"]) == (None, ["SICK-R"])
    assert "SICK-R" not in written


def test_without_a_file_nothing_is_written(saved: Path, sts: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    assert cli.main(["evaluate", str(saved), "--sts", str(sts), "--device", "cpu"]) == 0
    assert sorted(tmp_path.rglob("*")) == before


def error_of(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["evaluate", *map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("fmicl: error: ")
    return error


def test_wrong_paths_and_options_end_in_one_message(
    saved: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, plain, other = tmp_path / "run", tmp_path / "plain", tmp_path / "other"
    for folder, file in ((run, "settings.json"), (plain, "config.json"), (other, "notes.txt")):
        folder.mkdir()
        (folder / file).write_text('{"recipe": "x", "task": "images", "settings": {}}' if folder == run else "{}")
    assert "there is no folder /nowhere" in error_of(capsys, "/nowhere", "--sts", sts)
    assert "neither a run folder" in error_of(capsys, other, "--sts", sts)
    assert "a run on images" in error_of(capsys, run, "--sts", sts)
    message = error_of(capsys, plain, "--sts", sts)
    assert "a plain transformers model" in message
    assert "--pooling cls" in message
    assert "leave --pooling out" in error_of(capsys, saved, "--sts", sts, "--pooling", "cls")
    assert "a run on images" in error_of(capsys, run, "--sts", sts, "--pooling", "cls")
    assert "plain can't be loaded" in error_of(capsys, plain, "--sts", sts, "--pooling", "mean")
    assert "--pooling is for sentences" in error_of(capsys, plain, "--pooling", "mean")
    assert "there is no folder /nowhere with the STS tasks" in error_of(capsys, saved, "--sts", "/nowhere")
    assert "name the STS tasks with --sts DIR" in error_of(capsys, saved)
    assert "--json is for --sts" in error_of(capsys, run, "--json", tmp_path / "x.json")
    assert "--data-dir is for runs on images" in error_of(capsys, saved, "--sts", sts, "--data-dir", tmp_path)
    assert "--workers is for runs on images" in error_of(capsys, saved, "--sts", sts, "--workers", 2)
    assert "there is no folder" in error_of(capsys, saved, "--sts", sts, "--json", tmp_path / "no" / "x.json")


def test_a_damaged_encoder_is_refused(saved: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(saved, broken)
    (broken / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(ValueError, match=r"broken can't be loaded as a sentence-transformers model"):
        load_sentence_encoder(broken, "cpu")


def test_an_existing_file_is_not_overwritten(
    saved: Path, sts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "scores.json"
    output.write_text("mine")
    assert "exists and is not overwritten" in error_of(capsys, saved, "--sts", sts, "--json", output)
    with pytest.raises(FileExistsError, match="exists and is not overwritten"):  # it came while the scores were made
        write_json(output, {}, overwrite=False)
    assert output.read_text() == "mine"


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_json(tmp_path / "x.json", {"avg": math.nan}, overwrite=False)
    monkeypatch.setattr(os, "link", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_json(tmp_path / "x.json", {}, overwrite=False)
    assert list(tmp_path.iterdir()) == []
