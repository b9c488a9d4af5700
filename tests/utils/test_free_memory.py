"""Free memory by the kernel and the control groups."""

from __future__ import annotations

from pathlib import Path

from fmicl.utils.machine import free_memory


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


MEMINFO = "MemTotal:       24000000 kB\nMemAvailable:   20000000 kB\n"


def test_the_kernels_number(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    assert free_memory(write(tmp_path, proc__meminfo=MEMINFO)) == 20_000_000 * 1024


def test_the_limit_of_control_groups(tmp_path: Path) -> None:
    """Of the group and of those above it; cached files count as free."""
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step\n")
    groups = tmp_path / "sys/fs/cgroup"
    write(groups / "job/step", **{"memory.max": "max\n", "memory.current": "900\n"})
    stat = "anon 600\nactive_file 100\ninactive_file 250\n"
    write(groups / "job", **{"memory.max": "5000\n", "memory.current": "1000\n", "memory.stat": stat})
    assert free_memory(tmp_path) == 5000 - 1000 + 350
    write(groups / "job/step", **{"memory.max": "500\n"})
    assert free_memory(tmp_path) == 0


def test_the_limit_of_control_groups_version_1(tmp_path: Path) -> None:
    """In a container the group's own path may be hidden, but its root is there."""
    write(tmp_path, proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu,cpuacct:/x\n4:memory:/docker/abc\n0::/\n")
    stat = "active_file 1\ntotal_active_file 30\ntotal_inactive_file 20\n"
    write(
        tmp_path / "sys/fs/cgroup/memory",
        **{"memory.limit_in_bytes": "4000\n", "memory.usage_in_bytes": "1500\n", "memory.stat": stat},
    )
    assert free_memory(tmp_path) == 4000 - 1500 + 50
