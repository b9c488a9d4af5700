"""`fmicl mi`: the table, JSON, warnings, and one line for files that can't be used."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fmicl.cli import main as cli
from fmicl.cli.mi import read_array


def save(folder: Path, name: str, values: Any) -> str:
    np.save(folder / name, values)
    return str(folder / name)


def test_table_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    generator = np.random.default_rng(0)
    x = generator.standard_normal((400, 2)).astype(">f4")  # another byte order
    y = x[:, 0] + generator.standard_normal(400)
    files = save(tmp_path, "x.npy", x), save(tmp_path, "y.npy", y)
    out = tmp_path / "mi.json"
    words = ["mi", *files, "--estimator", "nwj", "infonce", "--steps", "20", "--json", str(out)]
    assert cli.main(words) == 0
    said = capsys.readouterr().out
    assert "400 samples" in said
    record = json.loads(out.read_text())
    assert list(record["estimates"]) == ["nwj", "infonce"]
    for name, each in record["estimates"].items():
        assert f"{each['value']:.4f}" in said, name
        assert each["low"] < 0.3466 < each["high"]
    assert record["samples"] == 400
    before = out.read_bytes()
    assert cli.main(words) == 2
    assert out.read_bytes() == before
    assert "mi.json" in capsys.readouterr().err


def test_too_few_samples_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = np.random.default_rng(0).standard_normal(40)
    files = save(tmp_path, "x.npy", x), save(tmp_path, "y.npy", x + 1)
    assert cli.main(["mi", *files, "--estimator", "classifier", "--steps", "2"]) == 0
    said = capsys.readouterr().err
    assert "40 samples" in said
    assert "above 3.69" in said, "log 40"


@pytest.mark.parametrize(
    ("x", "y", "fact"),
    [
        (np.zeros((50, 2)), np.zeros((60, 2)), "60"),
        (np.array([0.0, np.nan] * 30), np.zeros(60), "30 of 60"),
        (np.array(["a"] * 50), np.zeros(50), "<U1"),
        (np.zeros(50), np.arange(50.0), "constant"),
        (np.float64(3.0), np.zeros(50), "()"),
        (np.arange(5.0), np.arange(5.0), "5 samples"),
    ],
)
def test_arrays_that_can_not_be_used_are_one_line(
    x: Any, y: Any, fact: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = save(tmp_path, "x.npy", x), save(tmp_path, "y.npy", y)
    assert cli.main(["mi", *files, "--steps", "2"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("fmicl: error: ")
    assert said.count("\n") == 1
    assert fact in said


def test_files_that_are_no_arrays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = save(tmp_path, "x.npy", np.arange(50.0))
    text, several = tmp_path / "y.npy", tmp_path / "several.npz"
    text.write_text("1, 2, 3")
    np.savez(several, a=np.zeros(3), b=np.zeros(3))
    pickled = save(tmp_path, "objects.npy", np.array([{}, []], dtype=object))
    for path in (str(text), str(several), pickled, str(tmp_path / "nowhere.npy"), str(tmp_path)):
        assert cli.main(["mi", good, path]) == 2, path
        said = capsys.readouterr().err
        assert path in said
        assert said.count("\n") == 1
    for words, name in ((["--estimator", "dv"], "dv"), (["--divergence", "kll"], "kll"), (["--critic", "x"], "'x'")):
        assert cli.main(["mi", good, good, *words]) == 2
        assert name in capsys.readouterr().err


def test_unsigned_integers_are_categories(tmp_path: Path) -> None:
    assert not read_array(Path(save(tmp_path, "x.npy", np.arange(5, dtype=np.uint16)))).is_floating_point()
