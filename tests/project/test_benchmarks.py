"""The benchmark runs, its rows compute the same thing, and its tables and picture come out of the JSON."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))

import command
import growth
import loss
import measure
import rows
import tables
import views
import wall

import training
from fmicl.config import recipe
from fmicl.data import ViewStream, load_images
from fmicl.data.augmentations.views import Views

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = ROOT / "results" / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()


def run(script: str, *arguments: str, **environment: str) -> str:
    usual = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / script), *arguments],
        capture_output=True,
        text=True,
        env={**usual, "OMP_NUM_THREADS": "1", **environment},
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmark") / "new" / "loss.json"
    rows = ("ours", "divergence", "loss", "chunked")
    printed = run("loss.py", "--quick", "--device", "cpu", "--only", *rows, "--json", str(path))
    assert "| ours, tiled (pair_sum) |" in printed
    return path


def test_quick_run_measures_every_row_of_ours(measured: Path) -> None:
    data = json.loads(measured.read_text())
    assert data["rate"] > 0
    assert data["machine"]["device"] == "cpu"
    for cell in data["cells"]:
        if cell["ours"]:
            assert cell["status"] == "ok", cell
        if cell["kind"] == "time" and cell["status"] == "ok":
            assert cell["seconds"] > 0
            assert cell["memory"] >= 0
            assert cell["floor"] == pytest.approx(cell["operations"] / data["rate"])
    errors = [cell for cell in data["cells"] if cell["kind"] == "error"]
    assert errors
    for cell in errors:
        assert cell["loss_error"] < 1e-6
        assert cell["gradient_error"] < 1e-6


def test_growth_writes_the_picture_and_between_the_markers_only(
    measured: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readme, figure = tmp_path / "README.md", tmp_path / "growth.png"
    readme.write_text("before\n<!-- begin cpu -->\nold\n<!-- end cpu -->\nafter\n")
    monkeypatch.setattr(sys, "argv", ["x", str(measured), "--readme", str(readme), "--figure", str(figure)])
    growth.main()
    text = readme.read_text()
    assert text.startswith("before\n<!-- begin cpu -->\n")
    assert text.endswith("<!-- end cpu -->\nafter\n")
    assert "old" not in text
    assert "ours, tiled" in text
    assert figure.read_bytes().startswith(b"\x89PNG")
    growth.main()
    assert readme.read_text() == text


def test_the_wall_clock_tables_are_those_of_their_files() -> None:
    paths = sorted(RESULTS.glob("wall-*.json"))
    assert paths
    assert all(tables.wall(json.loads(path.read_text())) in PAGE for path in paths)


def test_implementations_of_the_wall_clock_table_agree() -> None:
    for implementations in wall.IMPLEMENTATIONS.values():
        found = []
        for name, make in implementations.items():
            leaves = measure.inputs(12, 6, "cpu", torch.float32, normalised=False)
            try:
                loss = make()
            except ImportError:
                continue
            if name != "dense compiled":
                found.append((wall.step(loss, leaves).detach(), *(leaf.grad for leaf in leaves)))
        assert len(found) >= 2
        for other in found[1:]:
            torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)


def test_readme_has_the_markers() -> None:
    for name in ("cuda", "cpu", "paper", "wall cuda", "wall cpu"):
        assert PAGE.count(f"<!-- begin {name} -->") == PAGE.count(f"<!-- end {name} -->") == 1


def along_the_sphere(gradient: Tensor, x: Tensor) -> Tensor:
    """Without the part that normalisation takes away: there implementations may differ."""
    x = x.detach()
    return gradient - (gradient * x).sum(dim=1, keepdim=True) * x


def test_rows_of_a_setting_have_one_value_and_one_gradient() -> None:
    first: dict[str, list[Tensor]] = {}
    values: dict[str, list[float]] = {}
    compared = 0
    for row in rows.ROWS.values():
        if row.device == "cuda" or row.setting not in ("kl", "infonce", "ntxent"):
            continue
        x, y = measure.inputs(40, 8, "cpu", torch.float32)
        try:
            values.setdefault(row.setting, []).append(float(row.make(x, y)().detach()))
        except ImportError:
            continue
        found = [along_the_sphere(leaf.grad, leaf) for leaf in (x, y) if leaf.grad is not None]
        for mine, theirs in zip(first.setdefault(row.setting, found), found, strict=True):
            torch.testing.assert_close(theirs, mine, rtol=1e-4, atol=1e-5 * float(mine.abs().max()))
            compared += 1
    assert compared >= 6
    assert len(values["kl"]) >= 4
    for same in values.values():
        assert same == pytest.approx([same[0]] * len(same), rel=1e-5)


def test_paper_hides_the_ring_from_that_many_rows_on() -> None:
    lines = [[entry.strip() for entry in line.split("|")[1:-1]] for line in tables.paper(772e12).splitlines()[4:]]
    assert len(lines) == 12
    for line in lines:
        processes, rows, width = int(line[1]), int(line[2].replace(",", "")), int(line[3])
        link = 450e9 if processes <= 8 else 50e9
        assert line[8] == ("yes" if rows >= width * 772e12 / (4 * link) else "no")


def test_a_cell_that_kills_its_process_does_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def run_job(job: dict[str, str], _: object) -> dict[str, str]:
        if job["kind"] == "dies":
            os._exit(3)
        if job["kind"] == "memory":
            raise MemoryError
        if job["kind"] == "breaks":
            raise RuntimeError("no such\nkernel")
        return {"status": "ok"}

    monkeypatch.setattr(loss, "run_job", run_job)
    worker = loss.Worker({"device": "cpu", "time_limit": 0.1})
    found = [worker.run({"kind": kind})["status"] for kind in ("dies", "fine", "memory", "breaks", "fine")]
    worker.stop()
    assert found == ["error: the process ended with 3", "ok", "oom", "error: RuntimeError: no such kernel", "ok"]


def test_the_check_of_the_kernel_runs(tmp_path: Path) -> None:
    """In the interpreter here; on a GPU it is the same script."""
    environment = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    run("check.py", "--quick", "--json", str(tmp_path / "check.json"), **environment)
    found = json.loads((tmp_path / "check.json").read_text())["errors"]
    wanted = {
        "kl", "js, cosine", "square", "log-sum-exp", "both sides", "FMICLLoss", "SpectralContrastiveLoss",
        "FMICLLoss, strided", "FMICLLoss, sentences, as trained", "js, rows alike", "InfoNCELoss, temperature 0.05",
    }  # fmt: skip
    assert {row["what"] for row in found} >= wanted
    types = {f"{name}, any length" for name in ("float32", "bfloat16", "float16")}
    assert {row["mode"] for row in found} == {"fast", "high", "bfloat16", "text"} | types


def test_the_page_shows_what_was_measured_of_a_step() -> None:
    """The table of benchmarks/README.md is made of the files in results/."""
    paths = sorted(RESULTS.glob("training-*.json"), key=lambda path: path.stem)
    assert training.table([json.loads(path.read_text()) for path in paths]) in PAGE


def test_a_step_is_timed_in_its_parts() -> None:
    changes = ["batch_size=32", "method=moco", "queue=64", "symmetric=True", "rotation_weight=0.4"]
    settings = training.changed(recipe("digits"), changes)
    assert settings == recipe("digits", batch_size=32, method="moco", queue=64, symmetric=True, rotation_weight=0.4)
    assert training.changed(settings, []) is settings
    for wrong in ("nonsense=1", "batch_size", "batch_size=many", "symmetric=perhaps", "device=cpu", "probe-views=8"):
        with pytest.raises(ValueError, match="--set"):
            training.changed(settings, [wrong])
    bench = training.Bench(settings, torch.device("cpu"), compile=False, images=100)
    assert bench.clock(lambda: bench.step(next(bench.batches)), 1) > 0
    parts = bench.parts(1)
    assert list(parts)[:4] == ["views", "forward and loss", "backward", "optimiser"]
    assert all(value > 0 for name, value in parts.items() if name != "backward")  # which is a difference


def test_a_part_is_the_time_of_its_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = object.__new__(training.Bench)
    ran: list[int] = []
    monkeypatch.setattr(
        bench, "_traced", lambda times, _: [(0.0, 250.0, "a"), (9.0, 750.0, "b")] * times, raising=False
    )
    assert bench.busy(lambda: ran.append(1), 4) == 1.0
    assert ran == [1]  # what is slow the first time is not counted


def test_kernels_of_a_step_are_added_up_and_put_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of two kernels; a name may hold anything, as that of a lambda in C++ does."""
    copy = "copy<{lambda(int)#1}>"
    events = [(10.0 * k + start, took, name) for k in range(3) for start, took, name in ((0, 4, "a"), (5, 2, copy))]
    bench = object.__new__(training.Bench)
    monkeypatch.setattr(bench, "_traced", lambda steps: events[: 2 * steps], raising=False)
    assert bench.kernels(3) == [(0.004, 1.0, "a"), (0.002, 1.0, copy)]
    assert bench.timeline() == [(0.0, 3.0, 4, "a"), (5.0, 1.0, 2, copy)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        (["1980, 600.5, 0x0000000000000000", "1900, 690, 0x0000000000000004", "1900, 6"], (1940, 645.25, 0.5)),
        (["[N/A], [N/A], [N/A]"], None),
    ],
)
def test_clock_and_power_are_medians_of_what_the_driver_says(
    lines: list[str], expected: tuple[float, ...] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = tmp_path / "ready"
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + f"touch {ready}\nexec sleep 60\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with measure.watched() as seen:
        deadline = time.monotonic() + 30
        while not ready.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert seen == (
        {} if expected is None else dict(zip(("clock_mhz", "power_w", "power_limited"), expected, strict=True))
    )
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    with measure.watched() as unseen:
        pass
    assert unseen == {}


def test_the_summary_says_what_holds_the_rate_down() -> None:
    rates = {"sustained_rate": 7.1e14, "rate": 8e14, "commit": "abc"}
    seen = {**rates, "clock_mhz": 1500.0, "power_w": 699.0, "power_limited": 0.9}
    text = tables._sustained({"sustained": seen})
    assert text == (
        "; at abc 800, and 710 over two seconds of nothing else, at 1,500 MHz and 699 W, held down by its power limit"
    )
    assert tables._sustained({"sustained": rates}).endswith("nothing else")
    assert tables._sustained({}) == ""
    for commit, shown in (("abc", "at abc 800"), (None, "at unknown commit 800")):  # the record of a single run
        own = {"machine": {"commit": commit}, "rate": 8e14, "sustained": {"sustained_rate": 7.1e14}}
        assert shown in tables._sustained(own)


def test_what_was_not_measured_is_named_below_its_table() -> None:
    common = {"kind": "time", "setting": "kl", "n": 64, "d": 8, "via": "pair_sum", "memory": 1e6, "seconds": 1e-3}
    cells = [
        {**common, "name": "ours, tiled", "ours": True, "status": "ok"},
        {**common, "name": "late", "ours": False, "status": "not run: out of time"},
        {**common, "name": "absent", "ours": False, "status": "not available: No module named 'x'"},
        {**common, "name": "large", "ours": False, "status": "oom"},
    ]
    data = {"machine": {"name": "a CPU", "device": "cpu"}, "sizes": {"kl": [[64, 8]]}}
    shown = tables._compared("kl", cells, data)
    assert [line.split("|")[3].strip() for line in shown.splitlines() if line.startswith("| 64")] == [
        "ours, tiled (pair_sum)",
        "large (pair_sum)",
    ]
    assert shown.endswith("Not measured at 64 x 8: late / absent.")
    growth = tables._growth(cells, [[64, 8]])
    assert "| large | oom |" in growth
    assert "late" not in growth


def test_commit_is_null_without_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    machine = loss.describe_machine({"device": "cpu", "quick": True}, None)
    assert machine["commit"] is None
    assert "at commit unknown" in tables.summary({"machine": machine, "rate": None})


def test_the_sustained_rate_is_of_the_run_with_the_longest_work() -> None:

    def file(commit: str, n: int, status: str = "ok") -> dict[str, Any]:
        cells = [{"n": n, "status": status}]
        return {"machine": {"commit": commit}, "cells": cells, "rate": n, "sustained": {"sustained_rate": n / 2}}

    small, large, later = file("a", 10), file("b", 1000), file("c", 1000)
    assert growth._sustained([large, small]) == {"sustained_rate": 500, "rate": 1000, "commit": "b"}
    newest = growth._sustained([small, large, later, file("d", 9999, "oom")])
    assert newest is not None
    assert newest["commit"] == "c"
    assert growth._sustained([{"cells": []}]) is None


def test_cells_that_were_measured_again_are_the_newest() -> None:

    def file(command: str, hour: int, *cells: tuple[str, str, float]) -> dict[str, Any]:
        machine = {
            "device": "cuda", "name": "x", "dtype": "y", "versions": {"torch": "1", command: "2"},
            "date": "today", "recorded": f"today at {hour}", "commit": "abc", "command": command,
        }  # fmt: skip
        made = [{"kind": "time", "name": name, "status": status, "seconds": value} for name, status, value in cells]
        return {"machine": machine, "cells": made}

    late = "not run: out of time"
    old = file("one", 1, ("a", "ok", 1.0), ("b", late, 0.0), ("c", late, 0.0), ("d", "ok", 4.0))
    new = file("two", 2, ("a", "ok", 2.0), ("b", "oom", 0.0), ("c", late, 0.0))
    last = file("a third", 3, ("d", "oom", 0.0), ("e", "ok", 5.0))
    for files in itertools.permutations([old, new, last]):
        (joined,) = growth.join(list(files))
        assert [(cell["status"], cell["seconds"]) for cell in joined["cells"]] == [
            ("ok", 2.0), ("oom", 0.0), (late, 0.0), ("ok", 4.0),
        ]  # fmt: skip
        assert list(joined["machine"]["versions"]) == ["torch", "one", "two"]
        assert [run["command"] for run in joined["machine"]["later"]] == ["two"]  # no cell is of the third
    with pytest.raises(ValueError, match="differ in versions"):
        growth.join([old, {**new, "machine": {**new["machine"], "versions": {"torch": "2"}}}])


def test_the_documented_command_makes_the_page_in_any_order_of_its_files(tmp_path: Path) -> None:
    (documented,) = re.findall(r"^ +(python benchmarks/growth\.py .*)$", PAGE, re.MULTILINE)
    assert documented in str(growth.__doc__)  # what --help says
    readme = tmp_path / "README.md"
    command = documented.replace("python", shlex.quote(sys.executable), 1)
    command += f" --readme {shlex.quote(str(readme))} --figure {shlex.quote(str(tmp_path / 'g.png'))}"
    readme.write_text(re.sub(r"(<!-- begin (cuda|cpu|paper) -->).*?(?=<!-- end)", r"\1", PAGE, flags=re.DOTALL))
    subprocess.run(command, shell=True, cwd=ROOT, check=True, capture_output=True)
    assert readme.read_text() == PAGE
    paths = sorted(ROOT.glob(documented.split()[-1]))
    assert len(paths) >= 5
    for order in itertools.islice(itertools.permutations(paths), 120):
        joined = growth.join([json.loads(path.read_text()) for path in order])
        assert all(tables.render(data) in PAGE for data in joined)


@pytest.mark.skipif(torch.cuda.is_available(), reason="where there is a GPU, its kernels are shown")
def test_kernels_of_a_gpu_are_not_shown_without_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["x", "--recipe", "digits", "--timeline", str(tmp_path / "step.txt")])
    with pytest.raises(SystemExit, match="--timeline"):
        training.main()


def test_the_time_of_a_command_is_told_by_its_stages() -> None:
    lines = [(2.0, "run folder x"), (3.0, "epoch 1/3"), (12.0, "trained; now k-NN and a linear probe"), (13.0, "page")]
    rows = [{"seconds": value, "knn": ""} for value in ("4.0", "1.0", "1.5")]
    found = command.stages(lines, 15.0, rows)
    assert found["before the run folder"] == 2.0
    assert (found["first epoch"], found["an epoch, median of the others"]) == (4.0, 1.25)
    assert found["k-NN looks, checkpoints and the like"] == 12.0 - 2.0 - 6.5
    assert found["evaluation and page"] == 3.0
    parts = ("before the run folder", "epochs", "k-NN looks, checkpoints and the like", "evaluation and page")
    assert sum(found[name] for name in parts) == found["whole"]
    with pytest.raises(ValueError, match="not a whole run"):
        command.stages(lines[:2], 15.0, rows)


def test_a_command_is_watched_line_by_line() -> None:
    program = "import time; print('run folder x', flush=True); time.sleep(0.3); print('trained; now', flush=True)"
    lines, whole = command.watch([sys.executable, "-c", program])
    assert [line for _, line in lines] == ["run folder x", "trained; now"]
    assert lines[1][0] - lines[0][0] > 0.2
    assert whole >= lines[1][0]
    with pytest.raises(subprocess.CalledProcessError):
        command.watch([sys.executable, "-c", "raise SystemExit(3)"])


@pytest.mark.parametrize(("needed", "longest"), [(3, 4), (0, 1), (1000, 32)])
def test_python_gets_the_head_start_that_it_needs(needed: int, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that sleeps as told, and a step whose launches take so many head starts."""
    slept: list[int] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            pass

        def query(self) -> bool:
            return bool(slept[-1] <= needed * measure.AHEAD)

        def elapsed_time(self, _: Event) -> float:
            return 1e3 * slept[-1]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", slept.append)
    times = measure._events(lambda: torch.zeros(()), (), 3)
    assert len(times) == 3
    assert slept.count(measure.AHEAD) >= 3  # one miss is no reason to wait longer
    assert max(slept) == longest * measure.AHEAD
    assert all(time > needed * measure.AHEAD for time in times) or longest == 2**measure.LONGER
    assert slept[-1] == (longest if needed < longest else 1) * measure.AHEAD


def test_the_page_shows_how_fast_views_are() -> None:
    """The tables of benchmarks/README.md are made of the files in results/."""
    made = views.tables(RESULTS)
    assert made in PAGE
    for row in json.loads((RESULTS / "views-cpu.json").read_text())["rows"]:
        assert f"| {row['size']} | {row['image']} | {row['blur']:g} | {row['ours']:,} |" in made


def test_views_are_measured_from_files_and_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "SIZES", ((8, 8),))
    monkeypatch.setattr(views, "ROUNDS", 1)
    threads = torch.get_num_threads()
    try:
        rows = views.cpu_rates(0.01)
    finally:
        torch.set_num_threads(threads)
    assert [row["blur"] for row in rows] == [0.0, 0.5]
    assert all(row["ours"] > 0 < row["torchvision"] for row in rows)
    assert views.write_folder(tmp_path / "photos", 50, 60, 40) > 500
    starts = views.starts(tmp_path / "photos", tmp_path / "cache", 24, 0)
    assert set(starts) == {"first load_s", "first fingerprint_s", "later load_s", "later fingerprint_s"}
    splits = load_images("images", tmp_path / "photos", size=24)
    family = Views(size=24)
    stream = ViewStream(splits.pretrain, (family, family), 2, seed=0, device="cpu")
    used: list[int] = []
    assert views.images_a_second(stream, 2, lambda batch: used.append(len(batch.first)), warm=1) > 0
    assert used == [2, 2, 2]
