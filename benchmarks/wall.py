"""Wall-clock time of a loss and its gradient, called from Python, from batches of 16 up.

    python benchmarks/loss.py --wall --json results/benchmarks/wall-h200.json      # measure: a CUDA GPU in 2 minutes
    python benchmarks/wall.py results/benchmarks/wall-*.json                       # the tables of benchmarks/README.md

Inputs are raw embeddings, as an encoder gives them. What a user would write is `dense`: normalisation, one matrix of
inner products, and elementwise functions or a cross entropy, run eagerly or by torch.compile. Several processes compile
at once; then one after the other measures.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import measure  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor  # noqa: E402

import fmicl  # noqa: E402

Loss = Callable[[Tensor, Tensor], Tensor]
Job = dict[str, Any]
Cell = dict[str, Any]

ALPHA, TEMPERATURE = 40.0, 0.5
LARGE = 32768  # rows from which a dense matrix takes most of a GPU, so that one process at a time may hold it


def _log_ratios(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """-|x_i - y_i|^2 of the positives, -|x_i - x_j|^2 of all pairs, and which of these are negatives."""
    x, y = F.normalize(x, dim=1), F.normalize(y, dim=1)
    positive = 2 * (x * y).sum(dim=1).float() - 2
    negative = 2 * (x @ x.T).float() - 2
    return positive, negative, ~torch.eye(len(x), dtype=torch.bool, device=x.device)


def dense_kl(x: Tensor, y: Tensor) -> Tensor:
    positive, negative, others = _log_ratios(x, y)
    n = len(x)
    return ALPHA * (negative.exp() * others).sum() / (n * (n - 1)) - (positive + 1).mean()


def dense_js(x: Tensor, y: Tensor) -> Tensor:
    positive, negative, others = _log_ratios(x, y)
    n, log2 = len(x), 0.6931471805599453
    cost = ((F.softplus(negative) - log2) * others).sum() / (n * (n - 1))
    return ALPHA * cost - (log2 + F.logsigmoid(positive)).mean()


def dense_ntxent(x: Tensor, y: Tensor) -> Tensor:
    n = len(x)
    views = F.normalize(torch.cat((x, y)), dim=1)
    logits = (views @ views.T).float() / TEMPERATURE
    logits = logits.masked_fill(torch.eye(2 * n, dtype=torch.bool, device=x.device), float("-inf"))
    targets = torch.arange(2 * n, device=x.device).roll(n)
    return F.cross_entropy(logits, targets)


def dense_infonce(x: Tensor, y: Tensor) -> Tensor:
    logits = (F.normalize(x, dim=1) @ F.normalize(y, dim=1).T).float() / TEMPERATURE
    return F.cross_entropy(logits, torch.arange(len(x), device=x.device))


def _lightly() -> Loss:
    from lightly.loss import NTXentLoss

    loss: Loss = NTXentLoss(TEMPERATURE)
    return loss


def _metric_learning() -> Loss:
    from pytorch_metric_learning.losses import NTXentLoss

    loss = NTXentLoss(TEMPERATURE)

    def both(x: Tensor, y: Tensor) -> Tensor:
        labels = torch.arange(len(x), device=x.device).repeat(2)
        value: Tensor = loss(torch.cat((x, y)), labels)
        return value

    return both


def _sentence_transformers() -> Loss:
    from sentence_transformers.losses import MultipleNegativesRankingLoss

    loss = MultipleNegativesRankingLoss(torch.nn.Sequential(torch.nn.Identity()), scale=1 / TEMPERATURE)

    def ranking(x: Tensor, y: Tensor) -> Tensor:
        labels = torch.zeros(len(x), device=x.device)
        value: Tensor = loss.compute_loss_from_embeddings([x, y], labels)
        return value

    return ranking


def _dense(loss: Loss) -> dict[str, Callable[[], Loss]]:
    return {"dense eager": lambda: loss, "dense compiled": lambda: torch.compile(loss, dynamic=False)}


IMPLEMENTATIONS: dict[str, dict[str, Callable[[], Loss]]] = {
    "KL": {"ours": lambda: fmicl.FMICLLoss("kl", alpha=ALPHA), **_dense(dense_kl)},
    "JS": {"ours": lambda: fmicl.FMICLLoss("js", alpha=ALPHA), **_dense(dense_js)},
    "NT-Xent": {
        "ours": lambda: fmicl.InfoNCELoss(TEMPERATURE),
        **_dense(dense_ntxent),
        "lightly": _lightly,
        "pytorch-metric-learning": _metric_learning,
    },
    "InfoNCE, one direction": {
        "ours": lambda: fmicl.InfoNCELoss(TEMPERATURE, "cross"),
        **_dense(dense_infonce),
        "sentence-transformers": _sentence_transformers,
    },
}
"""By setting; all of a setting compute the same value and gradient."""


def jobs(device: str, quick: bool, sizes: list[tuple[int, int]] | None) -> list[Job]:
    """Every cell of the table, those that compile longest first."""
    if quick:
        usual = [(16, 16), (32, 16)]
    elif device == "cuda":
        usual = [(n, 128) for n in (16, 64, 256, 1024, 4096, 16384, 65536, 2**20)] + [(512, 512), (4096, 512)]
    else:
        usual = [(n, 128) for n in (16, 64, 128, 256, 512, 1024, 4096)]
    found = []
    for setting, implementations in IMPLEMENTATIONS.items():
        for name in implementations:
            for n, d in sizes or usual:
                for dtype in ("bfloat16", "float32") if device == "cuda" else ("float32",):
                    job = {"setting": setting, "name": name, "n": n, "d": d, "dtype": dtype}
                    if n <= 2**17 or (name == "ours" and dtype == "bfloat16" and setting in ("KL", "JS")):
                        found.append(job)
    return sorted(found, key=lambda job: (job["name"] != "dense compiled", -job["n"]))


def skipped(job: Job, memory: int) -> str | None:
    """Why a cell isn't run."""
    n, name = job["n"], job["name"]
    if name == "pytorch-metric-learning" and 32 * n**3 > memory:
        return "does not fit"
    if name == "dense compiled" and n >= LARGE and (job["dtype"] == "float32" or job["setting"] not in ("KL", "JS")):
        return "not run"
    rows = 2 * n if job["setting"] == "NT-Xent" else n
    if name != "ours" and 12 * rows**2 > memory:
        return "does not fit"
    return None


def measure_wall(loss: Loss, leaves: tuple[Tensor, Tensor], seconds: float) -> dict[str, Any]:
    """Median wall-clock time of a loss and its gradient.

    Steps are called one after the other in groups, with a synchronisation after each group: as in a training loop, the
    GPU may compute while Python goes on.
    """
    cuda = leaves[0].is_cuda

    def run(number: int) -> float:
        start = time.perf_counter()
        for _ in range(number):
            step(loss, leaves)
        if cuda:
            torch.cuda.synchronize()
        return (time.perf_counter() - start) / number

    once = run(1)
    if once < seconds:
        run(3)
        once = run(1)
    group = max(1, min(20, int(seconds / 10 / once)))
    times = [run(group) for _ in range(max(1 if once > 1 else 3, min(50, int(seconds / once / group))))]
    return {"seconds": statistics.median(times), "seconds_best": min(times), "repeats": len(times) * group}


def step(loss: Loss, leaves: tuple[Tensor, Tensor]) -> Tensor:
    for leaf in leaves:
        leaf.grad = None
    value = loss(*leaves)
    value.backward()
    return value


def work(mine: list[Job], settings: Job, ready: Any, alone: Any, large: Any, answers: Any) -> None:
    """Compile what is to be compiled, wait for the others, and then measure in turn."""
    device = settings["device"]
    memory = (
        torch.cuda.mem_get_info()[1] if device == "cuda" else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
    if device == "cuda":
        torch._inductor.config.compile_threads = 1
    torch._dynamo.config.recompile_limit = 64

    def inputs(job: Job) -> tuple[Tensor, Tensor]:
        return measure.inputs(job["n"], job["d"], device, getattr(torch, job["dtype"]), normalised=False)

    def clean() -> None:
        gc.collect()
        if device == "cuda":
            torch.cuda.empty_cache()

    def prepare(job: Job) -> Loss | str:
        """The loss, compiled, or why there is none."""
        why = skipped(job, memory)
        if why is not None:
            return why
        large_matrix = job["n"] >= LARGE
        try:
            loss = IMPLEMENTATIONS[job["setting"]][job["name"]]()
            if not large_matrix or job["name"] == "dense compiled":
                with large if large_matrix else nullcontext():
                    step(loss, inputs(job))
                    clean()
        except Exception as problem:
            return measure.describe(problem)
        return loss

    made = [prepare(job) for job in mine]
    clean()
    ready.wait()
    for job, loss in zip(mine, made, strict=True):
        cell: Cell = {"status": loss} if isinstance(loss, str) else {}
        if not isinstance(loss, str):
            with alone:
                try:
                    leaves = inputs(job)
                    cell = {"status": "ok", **measure_wall(loss, leaves, settings["time_limit"])}
                    cell["value"] = float(step(loss, leaves).detach())
                except Exception as problem:
                    cell = {"status": measure.describe(problem)}
                leaves = None  # type: ignore[assignment]
                clean()
        answers.put({**job, **cell})
    answers.put(None)
    answers.close()
    answers.join_thread()
    os._exit(0)  # the compiler's own processes would be waited for


def run_all(todo: list[Job], settings: Job, processes: int) -> list[Cell]:
    """Cells of all jobs, in the order of the table."""
    context: Any = multiprocessing.get_context("spawn")
    processes = max(1, min(processes, len(todo)))
    ready, alone, large = context.Barrier(processes), context.Lock(), context.Lock()
    answers = context.Queue()
    running = [
        context.Process(target=work, args=(todo[k::processes], settings, ready, alone, large, answers), daemon=True)
        for k in range(processes)
    ]
    for process in running:
        process.start()
    cells, ended = [], 0
    while ended < processes:
        cell = answers.get(timeout=600)
        if cell is None:
            ended += 1
            continue
        cells.append(cell)
        shown = f"{1e3 * cell['seconds']:.3f} ms" if cell["status"] == "ok" else cell["status"]
        print(*(cell[key] for key in ("setting", "n", "d", "dtype", "name")), shown, file=sys.stderr, flush=True)
    for process in running:
        process.join(10)
        process.kill()
    order = {setting: k for k, setting in enumerate(IMPLEMENTATIONS)}
    return sorted(cells, key=lambda cell: (order[cell["setting"]], cell["dtype"], cell["n"], cell["d"]))


def main() -> None:
    import growth
    import tables

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="files that benchmarks/loss.py --wall wrote")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md", help="file with the markers")
    options = parser.parse_args()
    files = [json.loads(path.read_text()) for path in options.json]
    growth.update(options.readme, {f"wall {data['machine']['device']}": tables.wall(data) for data in files})


if __name__ == "__main__":
    main()
