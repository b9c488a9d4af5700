"""Time, memory and error of a step (loss plus gradient), on a CUDA GPU or on the CPU; and a record's provenance.

Time on CUDA is between two events. The GPU is given something to do first, so that Python is ahead of it and the time
is the GPU's own (`seconds`); what the same step takes when it is called again and again from Python, launches and all,
is `seconds_called`. For a step of a millisecond or more the two are the same.

Memory is what a step needs beyond its inputs and the gradient that it leaves in them. On CUDA the allocator knows its
peak. On the CPU it is the peak of the resident set of a process that has done nothing but a tiny step before.
"""

from __future__ import annotations

import contextlib
import gc
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fmicl.utils.provenance import commit as current_commit
from fmicl.utils.provenance import versions

Step = Callable[[], Tensor]
"""Computes a loss and leaves its gradient in the leaves; returns the loss."""

MATMUL = {"cuda": (8192, torch.bfloat16), "cpu": (4096, torch.float32)}
POWER_LIMIT = 0x4  # the bit of nvidia-smi's reasons that says so
AHEAD = 4_000_000  # GPU cycles (about 2 ms) that Python gets as a head start, doubled up to so many times
LONGER = 5


def inputs(n: int, d: int, device: str, dtype: torch.dtype, *, normalised: bool = True) -> tuple[Tensor, Tensor]:
    """Two leaves of random rows, on the unit sphere or not; the second is a view of the first's samples."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n, d, generator=generator, device=device)
    y = x + 0.5 * torch.randn(n, d, generator=generator, device=device)
    if normalised:
        x, y = (torch.nn.functional.normalize(value, dim=1) for value in (x, y))
    return x.to(dtype).requires_grad_(), y.to(dtype).requires_grad_()


def describe(problem: Exception) -> str:
    """Why a cell of a table has no number."""
    text = " ".join(str(problem).split())
    if isinstance(problem, torch.OutOfMemoryError | MemoryError) or "out of memory" in text.lower():
        return "oom"
    if isinstance(problem, ImportError):
        return f"not available: {text[:80]}"
    return f"error: {type(problem).__name__}: {text[:120]}"


def measure(step: Step, leaves: tuple[Tensor, ...], limit: float) -> dict[str, float]:
    """Memory of the first step, then times of as many as fit into `limit` seconds.

    Returns:
        seconds (median), seconds_best, seconds_called, repeats, memory (bytes beyond inputs and gradient) and value.
    """
    cuda = leaves[0].device.type == "cuda"
    if cuda:
        _run(step, leaves)  # compiles; what that allocates is no part of a step
        torch.cuda.synchronize()
    memory, value = _memory(step, leaves)
    first = _once(step, leaves)
    if first > limit:
        times, called = [first], first
    else:
        # half of the time for steps one by one, half for those called one after the other
        repeats = int(min(100 if cuda else 30, max(3, limit / max(first, 1e-6) / 2)))
        for _ in range(min(10, repeats // 5)):
            _run(step, leaves)
        times = _events(step, leaves, repeats) if cuda else [_once(step, leaves) for _ in range(repeats)]
        called = _called(step, leaves, repeats) if cuda and repeats > 3 else statistics.median(times)
    return {
        "seconds": statistics.median(times),
        "seconds_best": min(times),
        "seconds_called": called,
        "repeats": len(times),
        "memory": memory,
        "value": value,
    }


def _run(step: Step, leaves: tuple[Tensor, ...]) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    return step()


def _synchronise(leaves: tuple[Tensor, ...]) -> None:
    if leaves[0].device.type == "cuda":
        torch.cuda.synchronize()


def _once(step: Step, leaves: tuple[Tensor, ...]) -> float:
    _synchronise(leaves)
    start = time.perf_counter()
    _run(step, leaves)
    _synchronise(leaves)
    return time.perf_counter() - start


def _events(step: Step, leaves: tuple[Tensor, ...], repeats: int) -> list[float]:
    """The GPU's own times: those of steps that Python was done with before the GPU began them.

    Where Python needs longer than its head start three times in a row, it gets one twice as long. A step for which no
    start was long enough counts with the time that it took: it waits for the GPU itself.
    """
    times: list[float] = []
    cycles, longest, misses = AHEAD, AHEAD << LONGER, 0
    while len(times) < repeats:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles if cycles <= longest else AHEAD)
        start.record()
        _run(step, leaves)
        end.record()
        ahead = not start.query()
        torch.cuda.synchronize()
        if ahead or cycles > longest:
            times.append(start.elapsed_time(end) / 1e3)
            misses = 0
            continue
        misses += 1
        if misses == 3:
            cycles, misses = 2 * cycles, 0
    return times


def _called(step: Step, leaves: tuple[Tensor, ...], repeats: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        _run(step, leaves)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats


def _memory(step: Step, leaves: tuple[Tensor, ...]) -> tuple[float, float]:
    """Peak of a step beyond what is there before it and the gradient that it leaves; and its loss."""
    for leaf in leaves:
        leaf.grad = None
    gc.collect()
    if leaves[0].device.type == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        value = float(_run(step, leaves).detach())
        peak = torch.cuda.max_memory_allocated() - before
    else:
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
        value = float(_run(step, leaves).detach())
        peak = _resident("VmHWM") - before
    gradient = sum(leaf.grad.nbytes for leaf in leaves if leaf.grad is not None)
    return max(0, peak - gradient), value


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}; peak memory on the CPU is measured on Linux only")


def matmul_rate(device: str, quick: bool = False) -> float:
    """Operations a second of a square matrix product of random numbers, the median of several."""
    size, dtype = MATMUL[device]
    size = 512 if quick else size
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)

    def step() -> Tensor:
        return torch.mm(a, b, out=out)

    for _ in range(3):
        step()
    times = _events(step, (a,), 50) if device == "cuda" else [_once(step, (a,)) for _ in range(7)]
    return 2 * size**3 / statistics.median(times)


def sustained_rate(seconds: float) -> dict[str, float]:
    """Rate of the same product when a GPU does nothing else for a while, with its clock and power meanwhile.

    A GPU that is at its power limit lowers its clock, which takes longer than the few products of `matmul_rate`.
    """
    size, dtype = MATMUL["cuda"]
    a, b = (torch.randn(size, size, device="cuda").to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    products = 0
    with watched() as seen:
        torch.cuda.synchronize()
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            for _ in range(50):
                torch.mm(a, b, out=out)
            torch.cuda.synchronize()
            products += 50
        spent = time.perf_counter() - start
    return {"sustained_rate": 2 * size**3 * products / spent, **seen}


@contextlib.contextmanager
def watched(on: bool = True) -> Iterator[dict[str, float]]:
    """Clock and power of the GPU meanwhile, asked of nvidia-smi ten times a second: filled in at the end.

    clock_mhz and power_w are medians, and power_limited is the share of looks at which the driver said that the power
    limit holds the clock down. It stays empty where it is not wanted, where there is no nvidia-smi, or too little time.
    """
    found: dict[str, float] = {}
    asked = "clocks.sm,power.draw,clocks_event_reasons.active"
    command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader,nounits", "-i", "0", "-lms", "100"]
    try:
        watcher = (
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) if on else None
        )
    except OSError:
        watcher = None
    if watcher is None:
        yield found
        return
    try:
        yield found
    finally:
        watcher.terminate()
        lines = [line.split(",") for line in watcher.communicate()[0].splitlines()]
    looks: list[tuple[float, float, bool]] = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line that was cut off, or a value that this GPU doesn't tell
            clock, power, reasons = line
            looks.append((float(clock), float(power), bool(int(reasons, 16) & POWER_LIMIT)))
    if looks:
        clocks, powers, limited = zip(*looks, strict=True)
        found["clock_mhz"], found["power_w"] = statistics.median(clocks), statistics.median(powers)
        found["power_limited"] = round(sum(limited) / len(limited), 2)


def kl_errors(
    total: Tensor, gradient: Tensor, x: Tensor, offset: float, scale: float, rows: int = 2048
) -> tuple[float, float]:
    """Relative errors of sum_{i != j} exp(offset + scale x_i.x_j), and in norm of its gradient, against float64.

    The gradient is compared on the first `rows` rows; the sum is over all pairs, in portions.
    """
    exact = x.detach().double()
    n = len(exact)
    reference = exact.new_zeros(())
    compared: list[Tensor] = []
    portion = max(1, min(rows, 2**27 // n))
    for start in range(0, n, portion):
        a = exact[start : start + portion]
        weights = torch.addmm(exact.new_tensor(offset), a, exact.T, alpha=scale).exp_()
        weights.diagonal(start)[: len(a)].zero_()
        reference += weights.sum()
        if start < rows:
            compared.append(2 * scale * (weights @ exact))
    wanted = torch.cat(compared)[:rows]
    found = gradient.detach()[:rows].double()
    return (
        float((total.double() - reference).abs() / reference.abs()),
        float((found - wanted).norm() / wanted.norm()),
    )


def provenance(device: str, commit: str | None = None, packages: Iterable[str] = ("torch",)) -> dict[str, Any]:
    """Command, device, versions, commit and date, for the record of a measurement.

    Args:
        device: cuda or cpu.
        commit: of the tree, where git is not there to ask.
        packages: whose versions count; those that are not installed are left out.
    """
    known = {name: version for name, version in versions(packages).items() if version is not None}
    return {
        "command": shlex.join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "device": torch.cuda.get_device_name() if device == "cuda" else processor(),
        "versions": known,
        "commit": commit or current_commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def processor() -> str:
    """The model of this machine's CPU."""
    information = Path("/proc/cpuinfo")
    for line in information.read_text().splitlines() if information.exists() else ():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
