"""What of a folder is data, and what is left out of it by name."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fmicl.training.image_evaluation import load_splits
from small_recipes import small

from fmicl.cli import main as cli
from fmicl.config.recipes import Recipe
from fmicl.data import find_images, load_images
from fmicl.data.images import decoding
from fmicl.runs.folder import exclude_runs
from fmicl.training.pipeline import train
from fmicl.utils import machine
from image_sets import make_classes, write_image


def make_run(folder: Path, *beside: str) -> None:
    """What of a run folder the walk looks at, and a figure."""
    write_image(folder / "figures" / "loss.png")
    for name in ("settings.json", *beside):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


@pytest.mark.parametrize("beside", ["metrics.csv", "encoder.json", "checkpoints/last.ckpt"])
def test_figures_of_runs_are_no_data_and_no_class(tmp_path: Path, beside: str) -> None:
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


def test_a_run_among_a_classs_images_is_left_out_and_the_class_is_not(tmp_path: Path) -> None:
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


def test_settings_alone_make_no_run(tmp_path: Path) -> None:
    make_run(tmp_path / "camera")
    write_image(tmp_path / "a.png")
    samples, left_out = find_images(tmp_path, exclude=exclude_runs)
    assert (len(samples), left_out) == (2, ())


def test_a_run_that_is_named_itself_is_looked_into(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "metrics.csv")
    assert len(find_images(tmp_path / "run", exclude=exclude_runs)[0]) == 1
    with pytest.raises(FileNotFoundError, match=r"run: excluded \(fmicl run\)"):
        find_images(tmp_path, exclude=exclude_runs)


def test_training_in_the_photo_folder_twice(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """The runs go to ./runs, which is below the data then."""
    for i in range(4):
        write_image(tmp_path / "holiday" / f"{i}.png", i)
    monkeypatch.chdir(tmp_path)
    recipe = small("images", Path("."), epochs=1, monitor_every=0)
    first = train(recipe, name="images")
    assert first is not None
    assert list((first.path / "figures").glob("*.png"))
    capsys.readouterr()
    assert len(load_splits(recipe, print).pretrain) == 4
    assert capsys.readouterr().out == "warning: folders in . are left out: runs: holds 1 fmicl run\n"
    assert cli.main(["embed", str(first.path), ".", "-o", "x.csv", "--workers", "0", "--device", "cpu"]) == 0
    said = capsys.readouterr()
    assert (said.out, said.err) == ("4 images -> x.csv\n", "left out: runs: holds 1 fmicl run\n")


def closed_to(name: str, scandir: Callable[..., Any]) -> Callable[..., Any]:
    def listing(path: Any = ".") -> Any:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", os.fspath(path))
        return scandir(path)

    return listing


def test_folders_that_cannot_be_entered_are_named(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    make_classes(tmp_path, {"cat": 4, "dog": 4, "private": 4})
    monkeypatch.setattr(os, "scandir", closed_to("private", os.scandir))  # root may enter all that chmod closes
    splits = load_splits(Recipe(dataset="images", data_dir=tmp_path), print)
    assert splits.classes == ("cat", "dog")
    assert "private: can't be opened (Permission denied)" in capsys.readouterr().out
    with pytest.warns(UserWarning, match="can't be opened"):
        assert "can't be opened" in find_images(tmp_path)[1][0].reason


def test_no_more_threads_than_this_process_has_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a container, say, that has two of the machine's sixty-four."""
    monkeypatch.setattr(decoding, "processors", lambda: 2)
    names = set(decoding.map_in_threads(lambda _: threading.current_thread().name, list(range(100))))
    assert 1 <= len(names) <= 2
    nowhere = Path("/nowhere")  # no control groups there
    assert machine.processors(nowhere) == len(os.sched_getaffinity(0))
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 5, 6})
    assert machine.processors(nowhere) == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert machine.processors(nowhere) == os.cpu_count()


def test_processors_are_as_many_as_a_container_has_time_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the group, and of those above it; by either version of the control groups."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    group = tmp_path / "sys/fs/cgroup/pod/box"
    older = tmp_path / "sys/fs/cgroup/cpu"
    for folder in (group, older, tmp_path / "proc/self"):
        folder.mkdir(parents=True)
    mine = tmp_path / "proc/self/cgroup"
    mine.write_text("0::/pod/box\n")
    for box, pod, seen in (
        ("max 100000", "max 100000", 64), ("max 100000", "800000 100000", 8), ("150000 100000", "800000 100000", 2),
        ("20000 100000", "max 100000", 1),
    ):  # fmt: skip
        (group / "cpu.max").write_text(f"{box}\n")
        (group.parent / "cpu.max").write_text(f"{pod}\n")
        assert machine.processors(tmp_path) == seen
    mine.write_text("5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n")
    for quota, seen in ((-1, 64), (400_000, 4)):
        (older / "cpu.cfs_quota_us").write_text(f"{quota}\n")
        (older / "cpu.cfs_period_us").write_text("100000\n")
        assert machine.processors(tmp_path) == seen


def test_one_held_out_image_is_too_few_and_said_before_training(tmp_path: Path) -> None:
    make_classes(tmp_path, {"cat": 4, "dog": 1})
    with pytest.raises(ValueError, match=r"at most 3 of one, and 1 held out"):
        load_images("images", tmp_path, size=32)


def test_a_validation_share_that_leaves_no_class_two_images_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--validation 0.999.* 10 classes, at most 1 of one"):
        load_images("digits", validation=0.999)


def test_a_validation_share_that_holds_out_one_image_is_refused(tmp_path: Path) -> None:
    make_classes(tmp_path / "train", {"cat": 9, "dog": 1})
    make_classes(tmp_path / "test", {"cat": 2, "dog": 2})
    with pytest.raises(ValueError, match=r"--validation 0.1.* 1 held out"):
        load_images("images", tmp_path, size=32, validation=0.1)
