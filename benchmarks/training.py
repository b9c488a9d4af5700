"""Profile of a training step: time of its parts and of an epoch, memory, and the kernels that take longest.

    python benchmarks/training.py --json results/benchmarks/training-h200.json  # the recipe cifar10 on random images
    python benchmarks/training.py --set method=moco symmetric=True --kernels kernels.txt --timeline step.txt

The parts are the times of their kernels, added up; the step as a whole is timed by the clock, over many in a row.
Neither sees the data's content, so random pictures do. The epoch of a real run is in its metrics.csv.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import growth  # noqa: E402
import measure  # noqa: E402
import tables  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from fmicl.cli.sweep import parse_case  # noqa: E402
from fmicl.config import RECIPES, OptimisationOptions, Settings, recipe  # noqa: E402
from fmicl.data import ArraySamples, Batch, ViewStream  # noqa: E402
from fmicl.data.augmentations.views import SecondViewOptions, Views, view_pair  # noqa: E402
from fmicl.methods import Comparison, MoCo  # noqa: E402
from fmicl.methods.simclr import anchored_pairs  # noqa: E402
from fmicl.training.module import TrainingModule  # noqa: E402
from fmicl.training.optimisation import Optimisation  # noqa: E402
from fmicl.training.pipeline import resolve_precision  # noqa: E402
from fmicl.training.tasks.image_parts import build_image_encoder, build_image_method  # noqa: E402
from fmicl.utils.files import read_json, write_json  # noqa: E402

IMAGES = 50_000
UNUSED = frozenset({"accumulate", "baselines", "clip", "dataset", "k", "probe_views", "seed", "sync_batchnorm"})
UNUSED |= {"validation"}
"""Options without effect here, like those of the machine: each batch is a step on random images, without evaluation."""


def changed(settings: Settings, changes: list[str]) -> Settings:
    """The settings with changes of the form name=value, as in `fmicl sweep --case`.

    Raises:
        ValueError: an unknown option, one that has no effect on a step, or a wrong value.
    """
    if not changes:
        return settings
    _, values = parse_case(["--set", *changes], settings)
    roles = {name: settings.schema.options[name].role for name in values}
    idle = [name for name in values if name in UNUSED or (roles[name] != "compute" and name != "precision")]
    if idle:
        raise ValueError(f"--set: {', '.join(idle)} has no effect on a step with random images: leave it out")
    return settings.replace(**values)


class Bench:
    """One method on one device, and the steps of its training."""

    def __init__(self, settings: Settings, device: torch.device, compile: bool, images: int = IMAGES) -> None:
        self.settings, self.device = settings, device
        began = time.monotonic()
        torch.manual_seed(0)
        pictures = torch.randint(256, (images, len(settings.mean), settings.size, settings.size), dtype=torch.uint8)
        self.stream = ViewStream(
            ArraySamples(pictures),
            view_pair(settings[Views], settings[SecondViewOptions]),
            settings.batch_size,
            seed=0,
            device=device,
            multiplicity=settings.multiplicity,
            compile=compile,
        )
        self.method = build_image_method(settings, build_image_encoder(settings)).to(device)
        self.module = TrainingModule(self.method, Optimisation.of(settings[OptimisationOptions], len(self.stream)))
        if device.type == "cuda":
            self.method.to(memory_format=torch.channels_last)
            self.module.channels_last = True
            torch.set_float32_matmul_precision("high")
        if compile:
            self.module.accelerate(device)
        self.optimizer = self.module.configure_optimizers()
        self.module.optimizers = lambda *_, **__: self.optimizer  # type: ignore[assignment,method-assign]
        self.batches = self._forever()
        for _ in range(3):
            self.step(next(self.batches))
        self.synchronise()
        self.start_up = time.monotonic() - began

    def _forever(self) -> Iterator[Batch]:
        while True:
            yield from self.stream

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        half = resolve_precision(self.settings, self.device) == "bf16-mixed"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=half)

    def synchronise(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def forward(self, batch: Batch) -> Tensor:
        with self.autocast():
            return self.module.training_step(batch, 0)["loss"]

    def step(self, batch: Batch) -> None:
        self.optimizer.zero_grad()
        self.forward(batch).backward()
        self.module.on_after_backward()
        self.optimizer.step()

    def clock(self, run: Callable[[], object], times: int) -> float:
        """Milliseconds of one of many runs in a row."""
        for _ in range(3):
            run()
        self.synchronise()
        began = time.perf_counter()
        for _ in range(times):
            run()
        self.synchronise()
        return (time.perf_counter() - began) / times * 1e3

    def parts(self, times: int) -> dict[str, float]:
        """Milliseconds that the kernels of each part of a step take; without a GPU, the part itself by the clock."""
        spent = self.busy if self.device.type == "cuda" else self.clock
        fixed, objective = next(self.batches), self._objective()

        def ahead() -> None:
            self.optimizer.zero_grad()
            self.forward(fixed)
            self.module.on_after_backward()  # keys of this batch go into the queue, or they would pile up

        def both() -> None:
            self.optimizer.zero_grad()
            self.forward(fixed).backward()
            self.module.on_after_backward()

        forward = spent(ahead, times)
        found = {
            "views": spent(lambda: next(self.batches), times),
            "forward and loss": forward,
            "backward": spent(both, times) - forward,
            "optimiser": spent(self.optimizer.step, times),
            "the loss and its gradient, of them": spent(lambda: objective().backward(), times),
        }
        return {name: round(value, 3) for name, value in found.items()}

    def _objective(self) -> Callable[[], Tensor]:
        """The objective alone, on embeddings like those of a batch."""
        directions = 2 if self.settings.method == "moco" and self.settings.symmetric else 1
        shape = (directions * self.settings.batch_size, self.settings.dim)
        number = self.settings.multiplicity
        views = [torch.randn(shape, device=self.device, dtype=torch.bfloat16) for _ in range(number)]
        for view in views if self.settings.method == "simclr" else views[:1]:  # keys of a momentum encoder have none
            view.requires_grad_()
        queue = self.method.queue if isinstance(self.method, MoCo) else None
        compare, pairs = self.method.compare, anchored_pairs(number)
        return lambda: Comparison.mean([compare(views[i], views[j], queue) for i, j in pairs]).loss

    def busy(self, run: Callable[[], object], times: int) -> float:
        """Milliseconds of the kernels of one of some runs: what Python takes to ask for them doesn't count."""
        run()
        return sum(duration for _, duration, _ in self._traced(times, run)) / times / 1e3

    def kernels(self, steps: int = 5) -> list[tuple[float, float, str]]:
        """(milliseconds a step, times a step, name) of each kernel, the longest first."""
        found: dict[str, list[float]] = {}
        for _, duration, name in self._traced(steps):
            found.setdefault(name, []).append(duration)
        rows = [(sum(durations) / steps / 1e3, len(durations) / steps, name) for name, durations in found.items()]
        return sorted(rows, reverse=True)

    def timeline(self) -> list[tuple[float, float, float, str]]:
        """(start, idle before it, duration, name) of each kernel of one step in order, in microseconds."""
        events = self._traced(3)
        length = len(events) // 3  # a step is like the other, and the one in the middle has others around it
        before, step = events[:length], events[length : 2 * length]
        end = max((begin + duration for begin, duration, _ in before), default=0.0)
        rows = []
        for begin, duration, name in step:
            rows.append((begin - step[0][0], max(0.0, begin - end), duration, name))
            end = max(end, begin + duration)
        return rows

    def _traced(self, times: int, run: Callable[[], object] | None = None) -> list[tuple[float, float, str]]:
        """(start, duration, name) of all that a GPU does in some runs (None: steps), in microseconds and in order."""
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            for _ in range(times):
                self.step(next(self.batches)) if run is None else run()
            self.synchronise()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            seen.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        kinds = ("kernel", "gpu_memcpy", "gpu_memset")
        return sorted((event["ts"], event["dur"], event["name"]) for event in events if event.get("cat") in kinds)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [entry.name for entry in RECIPES if entry.value.task == "images"]
    parser.add_argument("--recipe", default="cifar10", choices=names)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="options of the recipe to change")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--kernels", type=Path, help="file to write the kernels to, the longest first")
    parser.add_argument("--timeline", type=Path, help="file to write the kernels of one step to, in order")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--readme", action="store_true", help="update the table of README.md from results/benchmarks")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    return parser.parse_args()


def table(files: list[dict[str, Any]]) -> str:
    """One column for each file."""
    rows: dict[str, list[str]] = {
        "recipe": [" ".join([found["recipe"], *found["settings"]]) for found in files],
        "device, commit, date": [f"{found['device']}, {found['commit']}, {found['date']}" for found in files],
        "an epoch": [
            f"{found['epoch_s']:.2f} s ({round(found['epoch_s'] * 1e3 / found['step_ms'])} steps)" for found in files
        ],
        "a step": [f"{found['step_ms']:.2f} ms" for found in files],
        "its kernels, added up": [f"{found['kernels_ms']:.2f} ms" if "kernels_ms" in found else "" for found in files],
    }
    for part in files[0].get("kernels_by_part_ms", ()):
        values = [found.get("kernels_by_part_ms", {}).get(part) for found in files]
        rows[f"its kernels: {part}"] = ["" if value is None else f"{value:.2f} ms" for value in values]
    rows["views a second, by their kernel"] = [_kernel_rate(found) for found in files]
    rows["views a second, asked for from Python one batch after the other"] = [
        f"{found['views_a_second']:,}" for found in files
    ]
    rows["peak memory"] = [f"{found['peak_memory_gib']:.1f} GiB" for found in files]
    head, *rest = ([name, *values] for name, values in rows.items())
    return tables.table(head, rest)


def _kernel_rate(found: dict[str, Any]) -> str:
    """Views of a step over the time of the kernel that makes them."""
    took = found.get("kernels_by_part_ms", {}).get("views")
    views = round(found["views_a_second"] * found["views_alone_ms"] / 1e3)
    return f"{views / took * 1e3:,.0f}" if took else ""


def main() -> None:
    options = arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        settings = changed(recipe(options.recipe), options.set)
        if device.type != "cuda" and (options.kernels or options.timeline):
            raise ValueError("--kernels and --timeline show what a CUDA GPU does, and there is none here")
        bench = Bench(settings, device, compile=not options.no_compile and device.type == "cuda")
    except ValueError as error:
        sys.exit(str(error))
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    with measure.watched(device.type == "cuda") as seen:
        step = bench.clock(lambda: bench.step(next(bench.batches)), options.steps)
    views = bench.clock(lambda: next(bench.batches), options.steps)
    fixed = next(bench.batches)
    found: dict[str, Any] = {
        **measure.provenance(device.type, options.commit),
        "recipe": options.recipe,
        "settings": options.set,
        "step_ms": round(step, 3),
        **seen,
        "step_without_views_ms": round(bench.clock(lambda: bench.step(fixed), options.steps), 3),
        "epoch_s": round(step * len(bench.stream) / 1e3, 3),
        "kernels_by_part_ms": bench.parts(max(2, options.steps // 20)),
        "views_alone_ms": round(views, 3),
        "views_a_second": round(settings.multiplicity * settings.batch_size / views * 1e3),
        "start_up_s": round(bench.start_up, 1),
        "peak_memory_gib": round(torch.cuda.max_memory_reserved() / 2**30, 2) if device.type == "cuda" else None,
    }
    if options.kernels is not None:
        rows = bench.kernels()
        found["kernels_ms"] = round(sum(row[0] for row in rows), 3)
        lines = (f"{ms:.4f} ms  {count:6.1f} x  {name[:150]}" for ms, count, name in rows)
        options.kernels.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if options.timeline is not None:
        shown = (
            f"{start:9.1f}  {idle:6.1f}  {took:7.1f}  {name[:120]}" for start, idle, took, name in bench.timeline()
        )
        head = "microseconds: start, nothing running before it, duration; kernel"
        options.timeline.write_text("\n".join([head, *shown]) + "\n", encoding="utf-8")
    print(json.dumps(found, indent=1))
    if options.json is not None:
        write_json(options.json, found)
    if options.readme:
        files = sorted((HERE.parent / "results" / "benchmarks").glob("training-*.json"), key=lambda path: path.stem)
        growth.update(HERE / "README.md", {"training": table([read_json(file) for file in files])})


if __name__ == "__main__":
    main()
