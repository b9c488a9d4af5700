"""Atomic file writes, checks of writability, file locks."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fmicl.runs import folder as runs
from fmicl.training.checkpoints import load_checkpoint, save_checkpoint
from fmicl.utils.files import check_writable, write_atomically
from fmicl.utils.locks import wait_for_lock


def test_an_interrupted_write_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    state = {"batches": 1, "method": {}, "metrics": {}, "optimizer": {}}
    save_checkpoint(target, state)

    def half(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(target, half)
    assert load_checkpoint(target) == state
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_the_mode_follows_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "x.safetensors", lambda path: save_file({"x": torch.zeros(2)}, path))
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask


def test_without_hard_links_existing_files_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on FAT file systems."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    target = tmp_path / "x.csv"
    write_atomically(target, lambda path: path.write_text("mine"), overwrite=False)
    assert target.read_text() == "mine"
    with pytest.raises(FileExistsError, match=r"x\.csv exists"):
        write_atomically(target, lambda path: path.write_text("other"), overwrite=False)
    assert target.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["x.csv"]


def test_a_file_is_not_a_writable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path / "file", tmp_path / "file" / "new" / "run"):
        with pytest.raises(NotADirectoryError, match=r"/file is a file.*take another --out"):
            check_writable(path, "take another --out")
        with pytest.raises(NotADirectoryError, match=r"/file is a file"):
            runs.create_run("digits", path)
    assert (tmp_path / "file").read_text() == "mine"


def test_wait_for_lock_excludes_others(tmp_path: Path) -> None:
    pytest.importorskip("fcntl")
    at_work, most = 0, 0

    def work() -> None:
        nonlocal at_work, most
        with wait_for_lock(tmp_path / ".lock"):  # its own descriptor each time, as in another process
            at_work += 1
            most = max(most, at_work)
            time.sleep(0.02)
            at_work -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == 1
    with pytest.raises(OSError, match="none"):
        wait_for_lock(tmp_path / "none" / ".lock").__enter__()
