"""Figure of time against N, and the tables of benchmarks/README.md, from the JSON files of benchmarks/loss.py.

    python benchmarks/growth.py results/benchmarks/loss-*.json

Files of one device are put together, in whatever order they are named. Tables go between the markers of the README that
name the device; what is outside them stays as it is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import tables  # noqa: E402

Data = dict[str, Any]

COLOURS = {
    "ours, triton fast": "#c8102e",
    "ours, triton high": "#e8833a",
    "ours, tiled": "#8e44ad",
    "ours, reference (dense)": "#7f8c8d",
    "dense, bf16 autocast": "#b0b7bc",
    "chunked matrix products, eager": "#2e86c1",
    "KeOps": "#27ae60",
    "torch.pdist": "#935116",
}


def series(data: Data) -> dict[str, list[tuple[int, float]]]:
    """Points (N, seconds) of each implementation of the KL sum, for the d of the growth series."""
    widths = {d for _, d in data["sizes"]["growth"]} or {128}
    lines: dict[str, list[tuple[int, float]]] = {}
    for cell in data["cells"]:
        if cell["kind"] == "time" and cell["setting"] == "kl" and cell["status"] == "ok" and cell["d"] in widths:
            lines.setdefault(cell["name"], []).append((cell["n"], cell["seconds"]))
    return {name: sorted(points) for name, points in lines.items()}


def draw(measured: list[Data], path: Path) -> None:
    """One panel for each device: time against N, both logarithmic, with the floor as a line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(measured), figsize=(6.4 * len(measured), 5), squeeze=False)
    for axis, data in zip(axes[0], measured, strict=True):
        lines = series(data)
        for name, points in lines.items():
            n, seconds = zip(*points, strict=True)
            width = 2.4 if name.startswith("ours, triton") or name == "ours, tiled" else 1.2
            axis.plot(n, seconds, "o-", label=name, color=COLOURS.get(name), linewidth=width, markersize=4)
        widths = sorted({d for _, d in data["sizes"]["growth"]} or {128})
        if lines and data["rate"]:
            every = sorted({n for points in lines.values() for n, _ in points})
            floor = [4 * n**2 * widths[0] / data["rate"] for n in every]
            axis.plot(every, floor, "k--", linewidth=1, label="floor: 4 N² d at the matrix rate")
        axis.set_xscale("log", base=2)
        axis.set_yscale("log")
        axis.set_xlabel("N, rows")
        axis.set_ylabel("loss and gradient, seconds")
        axis.set_title(f"KL, d = {widths[0]}, {data['machine']['dtype']}\n{data['machine']['name']}", fontsize=10)
        axis.grid(True, which="major", alpha=0.3)
        if lines:
            axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def update(page: Path, contents: Mapping[str, str]) -> None:
    """Put contents between the markers of their names in a Markdown page.

    Raises:
        ValueError: if the page has no such markers.
    """
    text = page.read_text(encoding="utf-8")
    for name, content in contents.items():
        begin, end = f"<!-- begin {name} -->", f"<!-- end {name} -->"
        before, found_begin, rest = text.partition(begin)
        _, found_end, after = rest.partition(end)
        if not (found_begin and found_end):
            raise ValueError(f"there is no part between {begin} and {end} to put the tables into")
        text = f"{before}{begin}\n\n{content}\n\n{end}{after}"
    page.write_text(text, encoding="utf-8")


def join(files: list[Data]) -> list[Data]:
    """Put the files of one device together, by what they hold and not by the order that they come in.

    The file with the most cells says which rows there are, and the rate of its run is the one quoted. A cell that was
    measured again is the newest one: one that did not come to an end takes the place of one that there was no time for,
    and of no other. Only files that a cell is taken from are named. Which packages there were may differ; the ones that
    everything runs on may not.

    Raises:
        ValueError: if two files of a device are of different machines or versions.
    """
    devices: dict[str, list[Data]] = {}
    for data in sorted(files, key=_age):
        devices.setdefault(data["machine"]["device"], []).append(data)
    return [_joined(devices[device]) for device in sorted(devices, reverse=True)]  # cuda, cpu


def _age(data: Data) -> tuple[Any, ...]:
    """The oldest first; of those put on record together, the fullest."""
    machine = data["machine"]
    return machine.get("recorded", machine["date"]), -len(data["cells"]), machine["command"]


def _joined(files: list[Data]) -> Data:
    """One measurement of several, the oldest first."""
    base = max(reversed(files), key=lambda data: len(data["cells"]))  # of equals, the newest
    versions: dict[str, str] = dict(base["machine"]["versions"])
    newest: dict[tuple[Any, ...], Data] = {}
    for data in files:
        machine = data["machine"]
        for key in ("name", "dtype"):
            if machine.get(key) != base["machine"].get(key):
                raise ValueError(f"two files of {machine['device']} differ in {key} and can't be put together")
        if any(versions.get(name, version) != version for name, version in machine["versions"].items()):
            raise ValueError(f"two files of {machine['device']} differ in versions and can't be put together")
        versions |= machine["versions"]
        for cell in data["cells"]:
            before = newest.setdefault(_cell_key(cell), cell)
            if cell["status"] == "ok" or (_missing(before) and not _missing(cell)):
                newest[_cell_key(cell)] = cell
    cells = [newest[_cell_key(cell)] for cell in base["cells"]]
    shown = {id(cell) for cell in cells}
    others = [data for data in files if data is not base and any(id(cell) in shown for cell in data["cells"])]
    later = [{key: data["machine"][key] for key in ("date", "commit", "command")} for data in others]
    return {
        **base,
        "machine": {**base["machine"], "versions": _versions([base, *others]), "later": later},
        "cells": cells,
        "sustained": _sustained(files),
    }


def _versions(files: list[Data]) -> dict[str, str]:
    """Those of all, which agree on what they have in common."""
    return {name: version for data in files for name, version in data["machine"]["versions"].items()}


def _sustained(files: list[Data]) -> Data | None:
    """What was left of the matrix rate in the run that measured the longest work, with that run's own rate."""
    seen = [data for data in files if data.get("sustained")]
    if not seen:
        return None
    longest = max(reversed(seen), key=lambda data: max((cell["n"] for cell in data["cells"] if _ok(cell)), default=0))
    return {**longest["sustained"], "rate": longest["rate"], "commit": longest["machine"]["commit"]}


def _ok(cell: Data) -> bool:
    return bool(cell["status"] == "ok")


def _missing(cell: Data) -> bool:
    return bool(cell["status"].startswith("not run: out of time"))


def _cell_key(cell: Data) -> tuple[Any, ...]:
    return tuple(cell.get(key) for key in ("kind", "setting", "name", "n", "d"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("json", type=Path, nargs="+", help="files that benchmarks/loss.py wrote")
    parser.add_argument("--readme", type=Path, default=HERE / "README.md", help="file with the markers")
    parser.add_argument("--figure", type=Path, default=HERE / "growth.png", help="picture to write")
    options = parser.parse_args()
    measured = join([json.loads(path.read_text()) for path in options.json])
    contents = {}
    for data in measured:
        device = data["machine"]["device"]
        contents[device] = tables.render(data)
        print(contents[device])
        if device == "cuda" and data["rate"]:
            contents["paper"] = tables.paper(data["rate"])
    draw(measured, options.figure)
    update(options.readme, contents)


if __name__ == "__main__":
    main()
