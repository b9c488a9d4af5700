"""Speed of random views: on a CPU against torchvision, and from folders of files for a GPU.

    python benchmarks/views.py cpu --json results/benchmarks/views-cpu.json
    python benchmarks/views.py files --json results/benchmarks/views-files-h200.json
    python benchmarks/views.py --readme                                # the tables of README.md

`cpu` compares one thread with torchvision's transforms of PIL images, in CPU time, so that other work on the machine
counts as little as it can. `files` writes folders of synthetic JPEG files, and measures the start of a run and the
stream of batches, alone and with a network (ViT-S of six blocks, uncompiled, bfloat16) that is trained on them.
"""

from __future__ import annotations

import argparse
import functools
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "src"), str(HERE)]  # this tree, installed or not

import growth  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from measure import provenance  # noqa: E402
from PIL import Image  # noqa: E402
from tables import table  # noqa: E402

from fmicl.data import Batch, Splits, ViewStream, load_images  # noqa: E402
from fmicl.data.augmentations.maker import ViewMaker  # noqa: E402
from fmicl.data.augmentations.views import Views  # noqa: E402
from fmicl.data.images.decoding import map_in_processes  # noqa: E402
from fmicl.losses import FMICLLoss  # noqa: E402
from fmicl.utils.files import write_json  # noqa: E402
from fmicl.utils.machine import available_cpus  # noqa: E402

SIZES = ((32, 32), (64, 64), (96, 96), (224, 256))
"""Sides of a view, and of its image."""
ROUNDS = 5
"""Measurements, of which the best is taken: the others had more company on the machine."""
LOADED = """
import sys, time, json
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from fmicl.data import fingerprint, load_images
start = time.perf_counter()
splits = load_images("images", sys.argv[2], size=int(sys.argv[3]), cache_limit=2**36, cache=Path(sys.argv[4]),
                     memory_limit=int(sys.argv[5]))
loaded = time.perf_counter()
fingerprint(splits)
print(json.dumps([loaded - start, time.perf_counter() - loaded]))
"""


def picture(random: np.random.Generator, width: int, height: int) -> Image.Image:
    """Smooth regions with grain: about as many bytes as a photo."""
    coarse = Image.fromarray(random.integers(0, 256, (12, 16, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
    grain = random.normal(0, 10, (height, width, 1)).astype(np.float32)
    return Image.fromarray((smooth + grain).clip(0, 255).astype(np.uint8))


def write_folder(folder: Path, count: int, width: int, height: int) -> float:
    """Write JPEG files in ten classes; returns their mean size in bytes."""
    for k in range(10):
        (folder / f"class{k}").mkdir(parents=True)
    kept = [picture(np.random.default_rng(i), 2 * width, 2 * height) for i in range(16)]

    def write(number: int) -> int:
        random = np.random.default_rng(number)
        left, top = int(random.integers(width)), int(random.integers(height))
        path = folder / f"class{number % 10}" / f"{number:06d}.jpg"
        kept[number % 16].crop((left, top, left + width, top + height)).save(path, quality=85)
        return path.stat().st_size

    return float(np.mean(list(map_in_processes(write, range(count)))))


def transform_each(transform: Callable[[Image.Image], torch.Tensor], pictures: list[Image.Image]) -> list[torch.Tensor]:
    """What torchvision makes of some images."""
    return [transform(one) for one in pictures]


def rate(step: Callable[[], object], count: int, seconds: float) -> float:
    """Views a second of CPU time by a step that makes so many, the best of several measurements."""
    step()
    best = 0.0
    for _ in range(ROUNDS):
        start, done = time.process_time(), 0
        while (spent := time.process_time() - start) < seconds:
            step()
            done += count
        best = max(best, done / spent)
    return best


def cpu_rates(seconds: float) -> list[dict[str, Any]]:
    """Views a second by one thread, ours and torchvision's, with and without blur."""
    from torchvision import transforms

    torch.set_num_threads(1)
    rows = []
    for size, side in SIZES:
        pictures = [picture(np.random.default_rng(i), side, side) for i in range(32)]
        images = torch.stack([torch.from_numpy(np.array(x)).permute(2, 0, 1) for x in pictures]).contiguous()
        images = images.repeat(max(1, 256 // size), 1, 1, 1)
        for blur in (0.0, 0.5):
            views = Views(size=size, blur=blur)
            blurs = [transforms.RandomApply([transforms.GaussianBlur(views.kernel_size)], p=blur)] if blur else []
            theirs = transforms.Compose([
                transforms.RandomResizedCrop(size, scale=views.crop_scale),
                transforms.RandomHorizontalFlip(),
                transforms.RandomApply([transforms.ColorJitter(0.4, 0.4, 0.4, 0.1)], p=0.8),
                transforms.RandomGrayscale(0.2),
                *blurs,
                transforms.ToTensor(),
                transforms.Normalize(views.mean, views.std),
            ])  # fmt: skip
            maker, generator = ViewMaker(views), torch.Generator().manual_seed(0)
            row = {
                "size": size, "image": side, "blur": blur,
                "ours": round(rate(functools.partial(maker, images, generator), len(images), seconds)),
                "torchvision": round(rate(functools.partial(transform_each, theirs, pictures), len(pictures), seconds)),
            }  # fmt: skip
            print(row, flush=True)
            rows.append(row)
    return rows


def starts(folder: Path, cache: Path, size: int, memory: int) -> dict[str, float]:
    """Seconds that a first and a later process need to load a folder and to take its fingerprint."""
    found = {}
    for name in ("first", "later"):
        arguments = [str(HERE.parent / "src"), str(folder), str(size), str(cache), str(memory)]
        done = subprocess.run([sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, check=True)
        load, taken = json.loads(done.stdout.splitlines()[-1])
        found[f"{name} load_s"], found[f"{name} fingerprint_s"] = round(load, 2), round(taken, 2)
    return found


class Training:
    """Steps of a small vision transformer with KL."""

    def __init__(self, device: torch.device) -> None:
        from fmicl.models.vision import build_encoder

        self.device = device
        self.encoder = build_encoder("vit_small_patch16_224", size=224, channels=3, depth=6).to(device)
        self.loss = FMICLLoss("kl")
        self.optimiser = torch.optim.AdamW(self.encoder.parameters(), 1e-4)

    def __call__(self, batch: Batch) -> None:
        """A step on one batch."""
        with torch.autocast(self.device.type, torch.bfloat16):
            first, second = self.encoder(torch.cat([batch.first, batch.second])).float().chunk(2)
        self.optimiser.zero_grad()
        self.loss(first, second).backward()
        self.optimiser.step()


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def images_a_second(stream: ViewStream, batches: int, use: Callable[[Batch], object], warm: int = 3) -> float:
    """Images a second of a stream whose batches are put to some use."""
    source: Iterator[Batch] = iter(stream)

    for _ in range(warm):
        use(next(source))
    synchronise(stream.device)
    start = time.perf_counter()
    for _ in range(batches):
        use(next(source))
    synchronise(stream.device)
    return batches * stream.batch_size / (time.perf_counter() - start)


def file_rates(small: int, large: int, batch_size: int, batches: int, place: Path) -> dict[str, Any]:
    """Start-up of a folder of small images; start-up and images a second of one of photos."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cache, photos, tiny = place / "cache", place / "photos", place / "tiny"
    found: dict[str, Any] = {"cpus": available_cpus(), "batch_size": batch_size}

    def note(**values: object) -> None:
        found.update(values)
        print(values, flush=True)

    note(small={"images": small, "bytes": round(write_folder(tiny, small, 64, 64)), "side": 64})
    note(small_start=starts(tiny, cache, 64, 2**36))
    note(large={"images": large, "bytes": round(write_folder(photos, large, 500, 375)), "width": 500, "height": 375})
    note(large_start=starts(photos, cache, 224, 0))

    def stream(limit: int) -> ViewStream:
        splits: Splits = load_images("images", photos, size=224, memory_limit=0, cache_limit=limit, cache=cache)
        views = Views(size=224, blur=0.5)
        return ViewStream(
            splits.pretrain, (views, views), batch_size, seed=0, device=device, workers=max(1, available_cpus() - 1),
            compile=device.type == "cuda",
        )  # fmt: skip

    train = Training(device)
    for name, limit in (("mapped", 2**36), ("files", 0)):
        source = stream(limit)
        note(**{f"{name}_images_a_second": round(images_a_second(source, batches, lambda _: None))})
        source.set_position(1)
        note(**{f"{name}_with_training_images_a_second": round(images_a_second(source, batches, train))})
        if name == "mapped":
            source.set_position(2)
            batch = next(iter(source))
            for _ in range(2):
                train(batch)
            synchronise(device)
            start = time.perf_counter()
            for _ in range(batches):
                train(batch)
            synchronise(device)
            note(training_alone_images_a_second=round(batches * batch_size / (time.perf_counter() - start)))
    return found


def tables(folder: Path) -> str:
    """Markdown tables of the records in a folder."""
    parts = []
    for path in sorted(folder.glob("views-cpu*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = [
            [str(row["size"]), str(row["image"]), f"{row['blur']:g}", f"{row['ours']:,}", f"{row['torchvision']:,}",
             f"{row['ours'] / row['torchvision']:.1f}"]
            for row in found["rows"]
        ]  # fmt: skip
        shown = table(["view", "image", "blur", "ours", "torchvision (PIL)", "ratio"], rows)
        parts.append(f"{_conditions(found)} Views a second of one thread.\n\n{shown}")
    for path in sorted(folder.glob("views-files*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        lines = ["| | |", "| --- | --- |"]
        for name, side in (("small", "64 x 64"), ("large", "500 x 375")):
            start, what = found[f"{name}_start"], f"{found[name]['images']:,} JPEG of {side}"
            later = f"{start['later load_s']:.2f} s, {start['later fingerprint_s']:.2f} s"
            lines.append(f"| {what}: first load | {start['first load_s']:.1f} s |")
            lines.append(f"| {what}: later load, fingerprint | {later} |")
        for name, source in (("files", "decoded in each epoch"), ("mapped", "from the cache")):
            alone, used = found[f"{name}_images_a_second"], found[f"{name}_with_training_images_a_second"]
            lines.append(f"| 224 pixels, {source}: images a second, alone / with a network | {alone:,} / {used:,} |")
        lines.append(f"| the network without the data | {found['training_alone_images_a_second']:,} |")
        parts.append(f"{_conditions(found)} {found['cpus']} CPU cores.\n\n" + "\n".join(lines))
    return "\n\n".join(parts)


def _conditions(found: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    when = f"Measured {found['date']} at commit {found['commit']} by `{found['command']}`."
    return f"{found['device']}; {versions}. {when}"


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=("cpu", "files"))
    parser.add_argument("--seconds", type=float, default=0.5, help="CPU time of a measurement of `cpu`")
    parser.add_argument("--small", type=int, default=110_000, help="number of small images")
    parser.add_argument("--large", type=int, default=20_000, help="number of photos")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--place", type=Path, help="folder for the files, which is removed (default: a temporary one)")
    parser.add_argument("--json", type=Path, help="file to write all numbers to")
    parser.add_argument("--commit", help="of the tree, where git is not there to ask")
    parser.add_argument("--readme", action="store_true", help="update the tables of README.md from results/benchmarks")
    options = parser.parse_args()
    if options.part is not None:
        device = "cuda" if options.part == "files" and torch.cuda.is_available() else "cpu"
        found = provenance(device, options.commit, ["torch", "pillow"])
        if options.part == "cpu":
            found["rows"] = cpu_rates(options.seconds)
        else:
            place = Path(tempfile.mkdtemp(dir=options.place))
            try:
                found |= file_rates(options.small, options.large, options.batch_size, options.batches, place)
            finally:
                shutil.rmtree(place, ignore_errors=True)
        if options.json is not None:
            write_json(options.json, found)
    if options.readme:
        growth.update(HERE / "README.md", {"views": tables(HERE.parent / "results" / "benchmarks")})


if __name__ == "__main__":
    main()
