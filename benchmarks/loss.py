"""Loss plus gradient: time, peak memory and error of our kernels, and of what others offer for the same objective.

    python benchmarks/loss.py --json results/benchmarks/loss-h200.json       # whatever the machine has: CUDA, else CPU
    python benchmarks/loss.py --wall --json results/benchmarks/wall-h200.json    # wall-clock time alone
    python benchmarks/loss.py --quick                                        # seconds, to see that it works

Every cell is guarded: where something runs out of memory, does not compile or breaks the device, its cell says so and
the rest goes on. Steps run in a process of their own, a new one after each failure that a process does not survive
(and for every cell on the CPU, where the peak of the resident set is the measure of memory).
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import measure  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
import wall  # noqa: E402
from rows import CRITIC, ROWS, Row, operations  # noqa: E402

from fmicl.utils.files import write_json  # noqa: E402

Job = dict[str, Any]
Cell = dict[str, Any]

GROWTH = [1024 * 4**k for k in range(6)]
PACKAGES = (
    "torch", "triton", "sentence-transformers", "lightly", "pytorch-metric-learning", "pykeops", "cut-cross-entropy",
    "liger-kernel",
)  # fmt: skip
ERRORS = {
    "cuda": ("ours, triton fast", "ours, triton high", "ours, reference (dense)", "dense, bf16 autocast"),
    "cpu": ("ours, tiled", "ours, reference (dense)"),
}
LONG = 1e14  # N^2 d from which a GPU's clock and power are on record with the time
LONGEST = {"cuda": 8.0, "cpu": 90.0}  # seconds of a single step above which it is not run
PATIENCE = 100.0  # seconds without an answer after which a cell is given up: compilers take their time


# --- in the process that measures ------------------------------------------------------------------------------------


def work(connection: Any, settings: dict[str, Any]) -> None:
    """Take jobs from the connection and answer each with a cell, for as long as there is somebody to ask."""
    parent = os.getppid()
    while True:
        while not connection.poll(5):
            if os.getppid() != parent:  # nobody is left to ask
                return
        job = connection.recv()
        try:
            cell = run_job(job, settings)
        except Exception as problem:
            cell = {"status": measure.describe(problem), "lost": settings["device"] == "cuda" and not device_works()}
        connection.send(cell)
        gc.collect()
        if settings["device"] == "cuda" and not cell.get("lost"):
            torch.cuda.empty_cache()


def device_works() -> bool:
    try:
        torch.ones(1, device="cuda").sum().item()
    except Exception:
        return False
    return True


def free_memory(device: str) -> int:
    if device == "cuda":
        return int(torch.cuda.mem_get_info()[0])
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))


def run_job(job: Job, settings: dict[str, Any]) -> Cell:
    device, quick = settings["device"], settings["quick"]
    if job["kind"] == "rate":
        rate = {"rate": measure.matmul_rate(device, quick)}
        return {"status": "ok", **rate, **(measure.sustained_rate(2.0) if device == "cuda" and not quick else {})}
    row = ROWS[job["setting"], job["name"]]
    n, d = job["n"], job["d"]
    needed = 4 * (row.dense + row.cubic * n) * n * n
    if needed > free_memory(device):
        return {"status": f"does not fit: {needed / 1e9:.0f} GB"}
    return (errors if job["kind"] == "error" else times)(row, n, d, settings)


def times(row: Row, n: int, d: int, settings: dict[str, Any]) -> Cell:
    device = settings["device"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    if device == "cpu":  # libraries and threads are loaded by something small
        small = measure.inputs(64, d, device, dtype)
        row.make(*small)()
    x, y = measure.inputs(n, d, device, dtype)
    step = row.make(x, y)
    with measure.watched(device == "cuda" and n * n * d >= LONG) as seen:
        found = measure.measure(step, (x, y), settings["time_limit"])
    return {"status": "ok", **found, **seen}


def errors(row: Row, n: int, d: int, settings: dict[str, Any]) -> Cell:
    """Inputs are float32 leaves, on CUDA with values that bfloat16 has, so that the gradient is not rounded to it."""
    device = settings["device"]
    rounded = torch.bfloat16 if device == "cuda" else torch.float32
    x, y = (value.detach().float().requires_grad_() for value in measure.inputs(n, d, device, rounded))
    total = row.make(x, y)().detach()
    assert x.grad is not None
    gradient, x.grad = x.grad, None
    loss, slope = measure.kl_errors(total, gradient, x, float(CRITIC.offset), float(CRITIC.scale))
    return {"status": "ok", "loss_error": loss, "gradient_error": slope}


# --- what to measure -------------------------------------------------------------------------------------------------


def plan(settings: dict[str, Any], sizes: list[tuple[int, int]] | None) -> tuple[list[Job], dict[str, Any]]:
    """Every cell once, the most important first; of one implementation the smaller sizes first.

    Returns:
        The jobs, and which sizes the tables of each setting and of the growth show.
    """
    device, quick = settings["device"], settings["quick"]
    cuda = device == "cuda"
    if quick:
        main, growth, middle, losses, wide = [(256, 32)], [256, 512], (256, 32), [(256, 32)], [(256, 32)]
    elif cuda:
        main = [(4096, 512), (65536, 128), (65536, 512), (1048576, 128)]
        growth, middle = GROWTH, (65536, 128)
        losses, wide = [(4096, 512), (65536, 128), (65536, 512)], [(512, 128), (4096, 512), (65536, 128)]
    else:
        main, growth, middle = [(8192, 128), (65536, 128)], GROWTH[:4], (8192, 128)
        losses, wide = [(8192, 128)], [(256, 128), (4096, 128)]
    if sizes is not None:
        main, growth, losses, wide, middle = sizes, [], sizes, sizes, sizes[0]
    only_ours = 65536 if not cuda else 2**62  # the CPU's large size is for the tiled kernel alone
    series = [(n, 128 if not quick else 32) for n in growth]

    def timed(setting: str, where: list[tuple[int, int]], ours: bool | None) -> list[Job]:
        found = []
        for row in ROWS.values():
            if row.setting != setting or row.device not in (None, device) or ours not in (None, row.ours):
                continue
            for n, d in sorted(where, key=lambda size: size[0] ** 2 * size[1]):
                if n < only_ours or row.name == "ours, tiled":
                    found.append({"kind": "time", "setting": setting, "name": row.name, "n": n, "d": d})
        return found

    jobs: list[Job] = [{"kind": "rate"}]
    jobs += timed("kl", main, True) + timed("kl", series, True)
    jobs += timed("divergence", [middle], None) + timed("loss", losses, None)
    jobs += [
        {"kind": "error", "setting": "kl", "name": name, "n": n, "d": d}
        for n, d in main
        for name in ERRORS[device]
        if n * n * d < 2e13 and n < only_ours
    ]
    for setting, where in (("kl", main), ("infonce", losses), ("ntxent", wide)):
        jobs += timed(setting, where, None)
    jobs += timed("kl", series, None) + timed("infonce", [size for size in series if size[0] <= 2**18], None)
    unique = {json.dumps(job, sort_keys=True): job for job in jobs}
    shown = {"kl": main, "infonce": losses, "ntxent": wide, "loss": losses, "growth": series}
    return list(unique.values()), shown


def predicted(job: Job, cells: list[Cell]) -> float:
    """Seconds of a step, from the largest smaller one of the same implementation; 0 if nothing is known."""
    size = job["n"] ** 2 * job["d"]
    known = [
        (cell["n"] ** 2 * cell["d"], cell["seconds"])
        for cell in cells
        if (cell["setting"], cell["name"], cell["status"]) == (job["setting"], job["name"], "ok")
        and "seconds" in cell
        and cell["n"] ** 2 * cell["d"] < size
    ]
    return max(known)[1] * size / max(known)[0] if known else 0.0


# --- the process that keeps the books --------------------------------------------------------------------------------


class Worker:
    """A process that measures; started when it is needed, and again when it was lost."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        # a forked process is new and has torch loaded already, but a GPU does not survive a fork
        self.context: Any = multiprocessing.get_context("spawn" if settings["device"] == "cuda" else "fork")
        self.process: Any = None

    def run(self, job: Job) -> Cell:
        if self.process is None:
            self.connection, other = self.context.Pipe()
            self.process = self.context.Process(target=work, args=(other, self.settings), daemon=True)
            self.process.start()
            other.close()
        try:
            self.connection.send(job)
            if not self.connection.poll(
                PATIENCE + 4 * LONGEST[self.settings["device"]] + 4 * self.settings["time_limit"]
            ):
                self.stop()
                return {"status": "error: no answer in time"}
            cell: Cell = self.connection.recv()
        except (EOFError, OSError):
            self.process.join()
            code, self.process = self.process.exitcode, None
            return {"status": "oom" if code == -9 else f"error: the process ended with {code}"}
        if cell.pop("lost", False) or self.settings["device"] == "cpu":
            self.stop()
        return cell

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.join()
            self.process = None


def describe_machine(settings: dict[str, Any], commit: str | None) -> dict[str, Any]:
    cuda = settings["device"] == "cuda"
    found = measure.provenance(settings["device"], commit, PACKAGES)
    return {
        **found,
        "versions": {**found["versions"], **({"cuda": str(torch.version.cuda)} if cuda else {})},
        "device": settings["device"],
        "name": found["device"],
        "threads": torch.get_num_threads(),
        "dtype": "bfloat16" if cuda else "float32",
        "recorded": datetime.now(UTC).isoformat(timespec="seconds"),  # of two records of a cell, the later one counts
        "quick": settings["quick"],
    }


def parse_sizes(text: str) -> list[tuple[int, int]]:
    sizes = []
    for part in text.split(","):
        n, _, d = part.partition("x")
        if not (n.isdigit() and d.isdigit() and int(n) >= 2 and int(d) >= 1):
            raise argparse.ArgumentTypeError(f"sizes are like 4096x512,65536x128; got {part!r}")
        sizes.append((int(n), int(d)))
    return sizes


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that everything works")
    parser.add_argument("--sizes", type=parse_sizes, help="such as 4096x512,65536x128, in place of the usual ones")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="where to measure; CUDA if there is one")
    parser.add_argument("--rivals", type=Path, help="folder with unpacked packages of others, searched first")
    parser.add_argument("--wall", action="store_true", help="measure the wall-clock table alone")
    parser.add_argument("--only", nargs="+", metavar="WORD", help="only rows whose setting or name has such a word")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--time-limit", type=float, help="seconds for a cell (default: 2 on CUDA, 5 on the CPU)")
    parser.add_argument("--budget", type=float, help="seconds for all (default: 330 on CUDA, none on the CPU)")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    if options.rivals is not None:
        if not options.rivals.is_dir():
            sys.exit(f"--rivals {options.rivals}: there is no such folder")
        folder = str(options.rivals.resolve())
        sys.path.insert(0, folder)
        # for the processes that measure, and for the compilers that they start
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    usual = 0.05 if options.quick else (2.0 if device == "cuda" else 5.0)
    settings = {
        "device": device,
        "quick": options.quick,
        "time_limit": usual if options.time_limit is None else options.time_limit,
    }
    if options.wall:
        measure_wall_clock(options, device)
        return
    budget = (330.0 if device == "cuda" else float("inf")) if options.budget is None else options.budget
    jobs, shown_sizes = plan(settings, options.sizes)
    machine = describe_machine(settings, options.commit)
    data: dict[str, Any] = {"machine": machine, "sizes": shown_sizes, "rate": None, "cells": []}
    worker, started = Worker(settings), time.monotonic()
    for job in jobs:
        words = f"{job.get('setting')} {job.get('name')}".lower()
        if options.only and job["kind"] != "rate" and not any(word.lower() in words for word in options.only):
            continue
        began = time.monotonic()
        expected = predicted(job, data["cells"]) if job["kind"] == "time" else 0.0
        if began - started > budget:
            cell: Cell = {"status": "not run: out of time"}
        elif expected > LONGEST[device]:
            cell = {"status": f"not run: about {expected:.0f} s"}
        else:
            cell = worker.run(job)
        if job["kind"] == "rate":
            data["rate"] = cell.get("rate")
            data["sustained"] = {key: value for key, value in cell.items() if key not in ("status", "rate")}
        else:
            row = ROWS[job["setting"], job["name"]]
            work_done = operations(job["setting"], job["name"], job["n"], job["d"])
            cell = {**job, "ours": row.ours, "via": row.via, "operations": work_done, **cell}
            if data["rate"]:
                cell["floor"] = work_done / data["rate"]
            data["cells"].append(cell)
        shown = {key: value for key, value in cell.items() if key in ("seconds", "memory", "gradient_error", "rate")}
        what = f"{words} {job.get('n', '')}x{job.get('d', '')}" if job["kind"] != "rate" else "matrix rate"
        print(f"[{time.monotonic() - started:5.0f} s] {what}: {cell['status']} {shown}", file=sys.stderr, flush=True)
        if options.json is not None:
            write_json(options.json, data)
    worker.stop()
    print(tables.render(json.loads(json.dumps(data))))


def measure_wall_clock(options: argparse.Namespace, device: str) -> None:
    """The table of benchmarks/wall.py, by as many processes as a GPU's machine has cores to compile with."""
    limit = (
        (0.02 if options.quick else 0.12 if device == "cuda" else 0.4)
        if options.time_limit is None
        else options.time_limit
    )
    settings = {"device": device, "quick": options.quick, "time_limit": limit}
    todo = wall.jobs(device, options.quick, options.sizes)
    if options.only:
        words = [word.lower() for word in options.only]
        todo = [job for job in todo if any(word in f"{job['setting']} {job['name']}".lower() for word in words)]
    processes = max(1, min(14, (os.cpu_count() or 2) - 2)) if device == "cuda" else 1
    cells = wall.run_all(todo, settings, processes)
    data = {"machine": describe_machine(settings, options.commit), "cells": cells}
    if options.json is not None:
        write_json(options.json, data)
    print(tables.wall(data))


if __name__ == "__main__":
    main()
