"""Files are written whole or not at all, and may be read by whom the user lets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fmicl import runs
from fmicl.files import write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "last.ckpt"
    runs.save_checkpoint(target, {"batches": 1})

    def half(path: Path) -> None:
        path.write_bytes(b"half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_whole(target, half)
    assert runs.load_checkpoint(target) == {"batches": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.skipif(os.name != "posix", reason="modes are POSIX's")
@pytest.mark.parametrize("umask", [0o022, 0o027])
def test_a_file_may_be_read_by_whom_the_umask_lets(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_whole(tmp_path / "x.safetensors", lambda path: save_file({"x": torch.zeros(2)}, path))
    finally:
        os.umask(before)
    assert (tmp_path / "x.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
