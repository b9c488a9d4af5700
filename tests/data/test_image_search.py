"""Search for image files: links, excluded folders (those of runs), folders that can't be opened."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fmicl.cli import main as cli
from fmicl.data import find_images, load_images
from fmicl.runs.folder import exclude_runs
from fmicl.training.tasks.image_parts import load_splits
from image_sets import damage_header, make_classes, write_image
from small_settings import small
from train_run import train


def test_find_images(tmp_path: Path) -> None:
    make_classes(tmp_path, {"a": 2, "b": 2})
    damage_header(tmp_path / "a" / "000.png")
    (tmp_path / "b" / "loop").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match="1 of the 4"):
        samples, skipped = find_images(tmp_path)
    assert [p.relative_to(tmp_path).as_posix() for p in samples.paths] == ["a/001.png", "b/000.png", "b/001.png"]
    assert "not an image" in skipped[0].reason


def make_run(folder: Path, *beside: str) -> None:
    """The files by which a run folder is recognised, and a figure."""
    write_image(folder / "figures" / "loss.png")
    for name in ("settings.json", *beside):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize("beside", ["metrics.csv", "encoder.json", "checkpoints/last.ckpt"])
def test_run_folders_are_excluded(tmp_path: Path, beside: str) -> None:
    make_classes(tmp_path, {"cat": 4, "dog": 4})
    make_run(tmp_path / "runs" / "images-001", beside)
    make_run(tmp_path / "runs" / "images-002", beside)
    make_run(tmp_path / "alone", beside)
    write_image(tmp_path / "sweeps" / "images-001" / "run" / "figures" / "loss.png")
    (tmp_path / "sweeps" / "images-001" / "sweep.json").write_text("{}")
    with pytest.warns(UserWarning, match="skipped: .*runs: holds 2 fmicl runs"):
        splits = load_images("images", tmp_path, size=32, exclude=exclude_runs)
    assert splits.classes == ("cat", "dog")
    assert len(splits.pretrain) + len(splits.test or ()) == 8
    names = [x.path.relative_to(tmp_path).as_posix() for x in splits.left_out]
    assert names == ["alone", "runs", "sweeps"]
    assert splits.skipped == ()


def test_a_run_folder_inside_a_class_is_excluded_alone(tmp_path: Path) -> None:
    make_classes(tmp_path, {"cats": 4, "dogs": 4})
    for name in ("cats/run1", "cats/run2", "dogs/runs/images-001", "dogs/runs/images-002"):
        make_run(tmp_path / name, "metrics.csv")
    write_image(tmp_path / "dogs" / "small" / "old" / "0.png")
    make_run(tmp_path / "dogs" / "small" / "run3", "metrics.csv")  # beside a folder of images, not beside images
    with pytest.warns(UserWarning, match="skipped"):
        samples, left_out = find_images(tmp_path, exclude=exclude_runs)
    assert len(samples) == 9
    assert {x.path.relative_to(tmp_path).as_posix(): x.reason for x in left_out} == {
        "cats/run1": "excluded (fmicl run)", "cats/run2": "excluded (fmicl run)",
        "dogs/runs": "holds 2 fmicl runs", "dogs/small/run3": "excluded (fmicl run)",
    }  # fmt: skip


def test_a_settings_file_alone_does_not_make_a_run_folder(tmp_path: Path) -> None:
    make_run(tmp_path / "camera")
    write_image(tmp_path / "a.png")
    samples, left_out = find_images(tmp_path, exclude=exclude_runs)
    assert (len(samples), left_out) == (2, ())


def test_a_run_is_no_folder_of_images(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "metrics.csv")
    with pytest.raises(ValueError, match=r"run .*\(fmicl run\)"):
        find_images(tmp_path / "run", exclude=exclude_runs)
    with pytest.raises(FileNotFoundError, match=r"run: excluded \(fmicl run\)"):
        find_images(tmp_path, exclude=exclude_runs)


def test_training_in_the_photo_folder_twice(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The runs are written to ./runs, which is below the data folder."""
    for i in range(4):
        write_image(tmp_path / "holiday" / f"{i}.png", i)
    monkeypatch.chdir(tmp_path)
    recipe = small("images", Path("."), epochs=1, monitor_every=0)
    first = train(recipe)
    assert list((first.path / "figures").glob("*.png"))
    capsys.readouterr()
    assert len(load_splits(recipe, print).pretrain) == 4
    assert capsys.readouterr().out == "warning: folders in . are left out: runs: holds 1 fmicl run\n"
    assert cli.main(["embed", str(first.path), ".", "-o", "x.csv", "--workers", "0", "--device", "cpu"]) == 0
    printed = capsys.readouterr()
    assert (printed.out, printed.err) == ("4 images -> x.csv\n", "left out: runs: holds 1 fmicl run\n")


def closed_to(name: str, scandir: Callable[..., Any]) -> Callable[..., Any]:
    def listing(path: Any = ".") -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    return listing


def test_folders_that_cannot_be_opened_are_reported(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    make_classes(tmp_path, {"cat": 4, "dog": 4, "private": 4})
    monkeypatch.setattr(os, "scandir", closed_to("private", os.scandir))  # root may enter all that chmod closes
    splits = load_splits(small("images", tmp_path), print)
    assert splits.classes == ("cat", "dog")
    assert "private: can't be opened (Permission denied)" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="can't be opened"):
        assert "can't be opened" in find_images(tmp_path)[1][0].reason
