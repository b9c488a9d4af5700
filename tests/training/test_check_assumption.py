"""`fmicl check-assumption` on a run: files, nothing overwritten, and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fmicl.cli import main as cli
from small_settings import digits
from train_run import train


@pytest.mark.usefixtures("only_training")
def test_check_assumption_writes_results_and_a_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(digits(epochs=1), out=tmp_path / "run")
    words = ["check-assumption", str(run.path), "--pairs", "900", "--device", "cpu", "--flow-steps"]
    assert cli.main([*words, "8"]) == 0
    said = capsys.readouterr().out
    record = json.loads(run.assumption.read_text())
    assert all(line in said for line in record["verdict"])
    assert record["pairs"] == 2 * record["distinct"], "two passes over 450 held-out images"
    assert record["dimensions"] == 16
    assert [flow["prior"] for flow in record["flows"]] == ["gaussian", "uniform"]
    assert (run.figures / "assumption.png").stat().st_size > 10_000
    assert cli.main([*words, "12"]) == 0
    assert json.loads(run.assumption.with_name("assumption-1.json").read_text()) == record, "the first results are kept"


def test_wrong_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check-assumption", str(tmp_path)]) == 2
    assert str(tmp_path) in capsys.readouterr().err
    (tmp_path / "settings.json").write_text('{"recipe": "wikipedia", "task": "text", "settings": {}}')
    assert cli.main(["check-assumption", str(tmp_path)]) == 2
    assert "a run on text, not on images" in capsys.readouterr().err
