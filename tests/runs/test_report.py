"""The HTML report of complete, damaged and hostile run folders."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import matplotlib.image as mpimg
import numpy as np
import pytest
from safetensors.numpy import save_file

from fmicl.runs import figures
from fmicl.runs.report import write_report

EVIL = "<script>alert(1)</script>\"'&"
VOID = {"meta", "source", "img", "br"}


def fill(run: Path) -> None:
    """Write a finished run of 40 epochs with HTML in its settings and results."""
    settings: dict[str, Any] = {
        "recipe": "digits",
        "settings": {"method": "simclr", "objective": "fmicl", "divergence": "kl", "encoder": "small_conv",
                     "alpha": 40.0, "download": False, "data_dir": None, "views": {"size": 8, "crop": [0.2, 1.0]}},
        "command": ["fmicl", "train", "digits", "--data-dir", EVIL],
        "versions": {"torch": "2.11.0"},
        "device": EVIL, "commit": None, "seed": 3, "started": "2026-01-02T03:04:05+00:00",
    }  # fmt: skip
    (run / "settings.json").write_text(json.dumps(settings))
    rows = [
        f"{e},{e * 5000},{1 / e},{0.5 / e},{-e / 20},0.1,{80 + e / 4 if e % 10 == 0 else ''},{e},0.5"
        for e in range(1, 41)
    ]
    (run / "metrics.csv").write_text(
        "\n".join(["epoch,step,loss,alignment,uniformity,lr,knn,effective_rank,seconds", *rows]) + "\n"
    )
    results = {
        "knn": 98.0555, "linear": 98.3333, "epoch": 40, "split": EVIL, "k": 20, "alignment": 0.25,
        "uniformity": -3.25, "effective_rank": 41.75, "untrained": {"knn": 97.25, "linear": 96.5},
        "raw_pixels": {"knn": 98.25, "linear": 96.4}, "linear_protocol": "logistic " + EVIL,
    }  # fmt: skip
    (run / "results.json").write_text(json.dumps(results))
    random = np.random.default_rng(0)
    save_file(
        {
            "positive": np.sort(random.random(30, dtype=np.float32)),
            "negative": np.sort(random.random(90, dtype=np.float32) + 1),
            "neighbour_images": random.integers(0, 255, (2, 4, 1, 8, 8), dtype=np.uint8),
            "neighbour_similarity": random.random((2, 3), dtype=np.float32),
        },
        run / "arrays.safetensors",
    )


class Reader(HTMLParser):
    """Checks that tags are closed in order, and collects tags and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text(encoding="utf-8"))
    assert reader.open == []
    return reader


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("digits-007")
    fill(run)
    write_report(run)
    return run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder to damage, with coarse figures, which are drawn faster."""
    monkeypatch.setattr(figures, "_DPI", 50)
    folder = tmp_path / "run"
    folder.mkdir()
    fill(folder)
    return folder


def text_of(page: Path) -> str:
    return " ".join(" ".join(read(page).text).split())


def test_page_shows_results_with_their_split_and_epoch(finished: Path) -> None:
    text = text_of(finished / "report.html")
    assert f"On the {EVIL} split, after epoch 40, k-NN with k = 20" in text
    for part in ("k-NN 98.1 %", "Linear probe 98.3 %", "Alignment 0.25", "Uniformity −3.25", "Effective rank 41.8"):
        assert part in text
    assert "ranks are of views of held-out samples, after training" in text
    for name in ("Alignment", "Uniformity", "Effective rank"):
        assert f"{name} in training. Of the last training batch before each point: " in text
    assert "Trained encoder 98.1 % 98.3 %" in text
    assert "Untrained encoder 97.2 % 96.5 %" in text
    assert "Raw pixels 98.2 % 96.4 %" in text
    assert "Missing" not in text


def test_page_says_if_results_are_on_other_data(run: Path) -> None:
    assert "other data" not in text_of(write_report(run))
    results = json.loads((run / "results.json").read_text())
    changed = {"data_changed": "it was trained on 5 images", "data_dir": "/photos/<new>"}
    (run / "results.json").write_text(json.dumps(results | changed))
    warning = "On other data than the run was trained on (/photos/<new>): it was trained on 5 images"
    assert warning in text_of(write_report(run))


def test_best_of_each_column_is_bold(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert re.findall(r"<td><b>(.*?)</b>", page) == ["98.3 %", "98.2 %"]


def test_page_shows_settings_command_and_metrics(finished: Path) -> None:
    text = text_of(finished / "report.html")
    for part in ("views.crop 0.2, 1", "alpha 40", "download no", "data_dir –", "torch 2.11.0", "seed 3"):
        assert part in text
    assert "fmicl train digits --data-dir" in text
    # The rows with a k-NN accuracy, with steps in full.
    assert "By epoch, 4 of 40 rows" in text
    assert "40 200000 0.025" in text


def test_page_loads_nothing(finished: Path) -> None:
    reader = read(finished / "report.html")
    assert not {tag for tag, _ in reader.tags} & {"script", "link", "iframe", "object", "base", "form"}
    for _, attributes in reader.tags:
        for name in ("src", "srcset", "href", "style", "onerror", "onload"):
            assert (attributes.get(name) or "data:image/png;base64,").startswith("data:image/png;base64,")
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "http://" not in page
    assert "https://" not in page
    assert "url(" not in page
    assert "@import" not in page
    assert str(finished.parent) not in page


def test_text_is_escaped(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert "&lt;script&gt;" in page


def test_every_figure_has_both_themes_and_alternative_text(finished: Path) -> None:
    names = {"loss", "knn", "alignment", "uniformity", "effective_rank", "distances", "neighbours"}
    assert {path.stem for path in (finished / "figures").iterdir()} == names
    tags = read(finished / "report.html").tags
    pictures = [attributes for tag, attributes in tags if tag == "img"]
    sources = [attributes for tag, attributes in tags if tag == "source"]
    assert len(pictures) == len(sources) == len(names)
    for picture, source in zip(pictures, sources, strict=True):
        assert len(picture["alt"] or "") > 20
        light, dark = (
            mpimg.imread(io.BytesIO(base64.b64decode((address or "").split(",")[1])))
            for address in (picture["src"], source["srcset"])
        )
        assert light.shape == dark.shape
        assert light[0, 0, :3].mean() > 0.9
        assert dark[0, 0, :3].mean() < 0.2


def test_page_suits_phones_and_dark_mode(finished: Path) -> None:
    page = (finished / "report.html").read_text(encoding="utf-8")
    assert 'name="viewport" content="width=device-width' in page
    assert "@media(prefers-color-scheme:dark)" in page
    # Wide content scrolls in its own box.
    assert page.count("<table") == len(re.findall(r'<div class="scroll"><table', page))


def test_page_is_reproducible(run: Path) -> None:
    first = write_report(run).read_bytes()
    before = sorted(path.relative_to(run) for path in run.rglob("*"))
    assert write_report(run).read_bytes() == first
    assert sorted(path.relative_to(run) for path in run.rglob("*")) == before


@pytest.mark.parametrize("name", ["settings.json", "metrics.csv", "results.json", "arrays.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "rubbish", "binary"])
def test_missing_and_damaged_files_are_listed(run: Path, name: str, damage: str) -> None:
    if damage == "missing":
        (run / name).unlink()
    else:
        (run / name).write_bytes({"empty": b"", "rubbish": b"[[[ not that", "binary": b"\xff\x00\xfe" * 50}[damage])
    text = text_of(write_report(run))
    assert "Missing" in text
    missing = text.split("Missing")[1]
    assert name in missing
    others = {"settings.json": "All settings", "results.json": "Results", "metrics.csv": "Training loss."}
    for other, sign in others.items():
        assert (sign in text.split("Missing")[0]) == (other != name)


def test_unexpected_values_are_listed(run: Path) -> None:
    (run / "settings.json").write_text('{"settings": 7, "versions": [], "command": "x", "recipe": null}')
    (run / "results.json").write_text('{"knn": NaN, "linear": "high", "untrained": {"knn": null}, "raw_pixels": 3}')
    (run / "metrics.csv").write_text("epoch,loss,knn\n1,nan,\n2,inf,\n")
    save_file(
        {"positive": np.array([np.nan], np.float32), "negative": np.ones(2), "neighbour_images": np.ones((2, 2))},
        run / "arrays.safetensors",
    )
    text = text_of(write_report(run))
    missing = text.split("Missing")[1]
    for name in ("Training loss", "k-NN accuracy", "Pair distances", "Nearest neighbours"):
        assert f"{name}: " in missing
    assert "not finite" in text


def test_a_run_on_data_without_labels_says_why_it_has_no_accuracies(run: Path) -> None:
    (run / "results.json").write_text('{"knn": null, "linear": null, "split": null, "epoch": 9, "alignment": 0.5}')
    text = text_of(write_report(run))
    assert "After epoch 9, without accuracies: these need labels" in text
    assert "Alignment 0.5" in text
    assert "of views of training samples, as none are held out" in text


def test_a_results_file_with_a_list_is_listed(run: Path) -> None:
    (run / "results.json").write_text("[1, 2]")
    assert "results.json contains a list" in text_of(write_report(run))


def test_a_run_that_has_just_started_has_a_page(run: Path) -> None:
    for name in ("metrics.csv", "results.json", "arrays.safetensors"):
        (run / name).unlink()
    text = text_of(write_report(run))
    assert "the run may not have ended" in text
    assert "All settings" in text


def test_only_measured_curves_are_drawn(run: Path) -> None:
    (run / "metrics.csv").write_text("epoch,loss\n1,2\n2,1\n")
    text = text_of(write_report(run))
    assert (run / "figures" / "loss.png").exists()
    assert not (run / "figures" / "knn.png").exists()
    assert "Effective rank in training: metrics.csv has no finite values of it" in text


def test_a_folder_that_is_not_a_run_is_an_error_and_stays_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run folder"):
        write_report(tmp_path / "nowhere")
    (tmp_path / "photo.txt").write_text("x")
    with pytest.raises(FileNotFoundError, match=r"has none of settings\.json"):
        write_report(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["photo.txt"]


def test_page_moves_with_its_folder(finished: Path, tmp_path: Path) -> None:
    copy = tmp_path / finished.name
    shutil.copytree(finished, copy)
    assert write_report(copy).read_bytes() == (finished / "report.html").read_bytes()


def test_page_of_a_text_run_shows_sts_scores_over_steps(run: Path) -> None:
    (run / "settings.json").write_text('{"task": "text", "settings": {"model": "bert"}}')
    (run / "metrics.csv").write_text("step,loss,stsb_dev\n125,2,70\n250,1,75\n")
    results = {"step": 250, "stsb_dev": 75.0, "chosen_by": "stsb_dev"}
    (run / "results.json").write_text(json.dumps(results))
    text = text_of(write_report(run))
    assert "The encoder of step 250, the best on STS-B dev (75.00). No STS scores yet: fmicl evaluate RUN" in text
    assert "By step" in text
    assert "Pair distances" not in text
    (run / "results.json").write_text(json.dumps({**results, "pairs": {"STS12": 3108}, "STS12": 71.234, "avg": None}))
    assert "test splits. Task Spearman x 100 Pairs STS12 71.23 3108 Average –" in text_of(write_report(run))
