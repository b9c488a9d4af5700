"""Embeddings of a folder of images: three formats, batches, names, and what is refused."""

from __future__ import annotations

import csv
import os
import warnings
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from fmicl.config import recipe
from fmicl.models.vision import SmallConv
from fmicl.runs.embedding import embed_folder
from fmicl.runs.export import load_encoder
from image_sets import make
from small_settings import digits
from train_run import train


@pytest.mark.usefixtures("only_training")
@pytest.mark.parametrize(("given", "seen"), [(None, [5, 5, 2]), (8, [8, 4])])
def test_large_images_are_embedded_in_smaller_batches(
    given: int | None, seen: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make("images", tmp_path)
    run = train(digits(epochs=1), out=tmp_path / "run")
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
def test_the_same_vectors_in_three_formats(tmp_path: Path) -> None:
    import numpy as np
    import pyarrow.parquet

    folder = make("images", tmp_path)
    (folder / "broken.png").write_bytes(b"not an image")
    run = train(digits(epochs=1), out=tmp_path / "run")
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
    view = recipe("digits")
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
