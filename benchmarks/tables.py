"""Markdown tables of a measurement, from its JSON; and the calculation of many GPUs."""

from __future__ import annotations

from typing import Any

Cell = dict[str, Any]

# what we aim at on one H200: seconds, and bytes beyond inputs and gradient
FEW = 5
"""Steps below which a median says how many it is of."""
TARGETS = {
    (65536, 128): (2.4e-3, 64e6),
    (65536, 512): (15e-3, 64e6),
    (1048576, 128): (750e-3, 512e6),
    (4096, 512): (0.1e-3, 16e6),
}
TITLES = {
    "kl": "KL: the sum over all pairs and its gradient",
    "infonce": "InfoNCE in one direction (x against y), gradient in both",
    "ntxent": "NT-Xent (SimCLR): 2 N views against each other",
    "loss": "Whole losses of two views, gradient in both",
}
FLOORS = {"kl": "4 N² d", "infonce": "8 N² d", "ntxent": "24 N² d", "loss": "4 N² d, the spectral loss 6 N² d"}


def _later(machine: dict[str, Any]) -> str:
    """Where cells of later runs stand in the tables."""
    runs = [
        f"{run['date']} at {run['commit'] or 'unknown commit'} by `{run['command']}`"
        for run in machine.get("later", [])
    ]
    return f", and cells of these later on: {'; '.join(runs)}" if runs else ""


def render(data: dict[str, Any]) -> str:
    """All tables of one measurement."""
    cells = data["cells"]
    parts = [summary(data)]
    parts += [_compared(setting, [cell for cell in cells if _is(cell, setting)], data) for setting in TITLES]
    parts += [_divergences(cells), _errors(cells), _growth(cells, data["sizes"]["growth"])]
    return "\n\n".join(part for part in parts if part)


def wall(data: dict[str, Any]) -> str:
    """Wall-clock milliseconds of a loss and its gradient, one size a line, with the fastest in bold."""
    parts = [f"{_conditions(data['machine'])}."]
    for setting in dict.fromkeys(cell["setting"] for cell in data["cells"]):
        absent = ("not installed", "not available")
        cells = [c for c in data["cells"] if c["setting"] == setting and not c["status"].startswith(absent)]
        names = list(dict.fromkeys(cell["name"] for cell in sorted(cells, key=lambda cell: cell["name"] != "ours")))
        lines = []
        for n, d, dtype in dict.fromkeys((cell["n"], cell["d"], cell["dtype"]) for cell in cells):
            here = {cell["name"]: cell for cell in cells if (cell["n"], cell["d"], cell["dtype"]) == (n, d, dtype)}
            fastest = min((cell["seconds"] for cell in here.values() if cell["status"] == "ok"), default=0.0)
            shown = [_milliseconds(here.get(name, {"status": ""}), fastest) for name in names]
            lines.append([f"{n:,} x {d}", dtype, *shown])
        parts.append(f"**{setting}**, ms\n\n" + table(["N x d", "type", *names], lines))
    return "\n\n".join(parts)


def _milliseconds(cell: Cell, fastest: float) -> str:
    if cell["status"] != "ok":
        return str(cell["status"]).split(":")[0]
    text = f"{1e3 * cell['seconds']:.3g}"
    return f"**{text}**" if cell["seconds"] == fastest else text


def summary(data: dict[str, Any]) -> str:
    """On what, with what, when."""
    machine = data["machine"]
    rate = f"{data['rate'] / 1e12:.3g} TFLOP/s" if data["rate"] else "not measured"
    size = "8,192³" if machine["device"] == "cuda" else "4,096³"
    if machine["quick"]:
        size = "small"
    return (
        f"{_conditions(machine, machine['dtype'])}{_later(machine)}. "
        f"Matrix rate in the same run ({machine['dtype']}, {size}): {rate}{_sustained(data)}."
    )


def _conditions(machine: dict[str, Any], dtype: str = "") -> str:
    """Device, versions, date, commit and command of a measurement."""
    versions = ", ".join(f"{name} {version}" for name, version in machine["versions"].items())
    threads = f", {machine['threads']} thread{'s' * (machine['threads'] > 1)}" if machine["device"] == "cpu" else ""
    inputs = f" {dtype} inputs;" if dtype else ""
    return (
        f"{machine['name']}{threads};{inputs} {versions}. Measured {machine['date']} at commit "
        f"{machine['commit'] or 'unknown'} by `{machine['command']}`"
    )


def _sustained(data: dict[str, Any]) -> str:
    """What is left of the rate after two seconds, and what holds it down."""
    seen = data.get("sustained") or {}
    if "sustained_rate" not in seen:
        return ""
    if "commit" not in seen:  # only files that growth.join put together name the run that it is of
        seen = {**seen, "commit": data["machine"]["commit"], "rate": data["rate"]}
    text = (
        f"; at {seen['commit'] or 'unknown commit'} {seen['rate'] / 1e12:.3g}, and "
        f"{seen['sustained_rate'] / 1e12:.3g} over two seconds of nothing else"
    )
    if "clock_mhz" in seen:
        limited = ", held down by its power limit" if seen["power_limited"] > 0.5 else ""
        text += f", at {seen['clock_mhz']:,.0f} MHz and {seen['power_w']:.0f} W{limited}"
    return text


def _is(cell: Cell, setting: str) -> bool:
    return bool(cell["setting"] == setting and cell["kind"] == "time")


def table(header: list[str], rows: list[list[str]]) -> str:
    """A table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _seconds(value: float) -> str:
    if value >= 1:
        return f"{value:.2f} s"
    if value < 1e-4:
        return f"{value * 1e6:.3g} µs"
    return f"{value * 1e3:.3g} ms" if value < 0.1 else f"{value * 1e3:.0f} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e6:,.0f} MB" if value >= 9.5e5 else f"{value / 1e6:.2f} MB"


def _compared(setting: str, cells: list[Cell], data: dict[str, Any]) -> str:
    """The setting's sizes, one implementation a line."""
    if not cells:
        return ""
    shown = sorted((tuple(size) for size in data["sizes"][setting]), key=lambda size: size[0] ** 2 * size[1])
    h200 = "H200" in data["machine"]["name"] and setting == "kl"
    cuda = data["machine"]["device"] == "cuda"
    lines, missing = [], []
    for n, d in shown:
        here = [cell for cell in cells if (cell["n"], cell["d"]) == (n, d)]
        absent = [cell["name"] for cell in here if not _measured(cell)]
        if absent:
            missing.append(f"at {n:,} x {d}: {' / '.join(absent)}")
        here = [cell for cell in here if _measured(cell)]
        best = next((cell["seconds"] for cell in here if cell["ours"] and cell["status"] == "ok"), None)
        for cell in here:
            via = "" if cell["via"] in cell["name"] else f" ({cell['via']})"
            line = [f"{n:,}", f"{d}", cell["name"] + via]
            if cell["status"] != "ok":
                lines.append([*line, cell["status"], *[""] * (4 + cuda + h200)])
                continue
            line.append(_time(cell))
            if cuda:  # of three steps or fewer there is no second measurement
                line.append(_seconds(cell["seconds_called"]) if cell.get("repeats", FEW) > 3 else "")
            line.append(_seconds(cell["floor"]) if "floor" in cell else "")
            line.append(f"{100 * cell['floor'] / cell['seconds']:.0f} %" if "floor" in cell else "")
            line.append(f"{cell['seconds'] / best:.2f}" if best else "")
            line.append(_bytes(cell["memory"]))
            if h200:
                line.append(_target(cell))
            lines.append(line)
    header = ["N", "d", "implementation", "time", *(["called from Python"] if cuda else [])]
    header += ["floor", "floor / time", "times ours", "memory", *(["target"] if h200 else [])]
    note = f"\n\nNot measured {'; '.join(missing)}." if missing else ""
    return f"**{TITLES[setting]}** (floor: {FLOORS[setting]} operations)\n\n{table(header, lines)}{note}"


def _measured(cell: Cell) -> bool:
    """Whether the cell was run, or failed for want of memory; not if a package or the time for it was missing."""
    return not cell["status"].startswith(("not run", "not available"))


def _time(cell: Cell) -> str:
    """The median, and of how many steps where they are few."""
    few = cell.get("repeats", FEW) < FEW
    return _seconds(cell["seconds"]) + (f" (of {cell['repeats']})" if few else "")


def _target(cell: Cell) -> str:
    wanted = TARGETS.get((cell["n"], cell["d"]))
    if wanted is None or cell["name"] != "ours, triton fast":
        return ""
    seconds, memory = wanted
    met = cell["seconds"] <= seconds and cell["memory"] <= memory
    return f"{_seconds(seconds)}, {_bytes(memory)}: {'met' if met else 'missed'}"


def _divergences(cells: list[Cell]) -> str:
    found = [cell for cell in cells if _is(cell, "divergence")]
    if not found:
        return ""
    kl = next((cell["seconds"] for cell in found if cell["name"] == "kl" and cell["status"] == "ok"), None)
    lines = []
    for cell in found:
        if cell["status"] == "ok":
            ratio = f"{cell['seconds'] / kl:.2f}" if kl else ""
            lines.append([cell["name"], _time(cell), ratio, _bytes(cell["memory"])])
        else:
            lines.append([cell["name"], cell["status"], "", ""])
    n, d = found[0]["n"], found[0]["d"]
    return f'**The nine divergences** (N = {n:,}, d = {d}, pair_sum, kernel="auto")\n\n' + table(
        ["divergence", "time", "times KL", "memory"], lines
    )


def _errors(cells: list[Cell]) -> str:
    found = [cell for cell in cells if cell["kind"] == "error"]
    if not found:
        return ""
    lines = []
    for cell in sorted(found, key=lambda cell: cell["n"] ** 2 * cell["d"]):
        good = cell["status"] == "ok"
        numbers = [f"{cell['loss_error']:.1e}", f"{cell['gradient_error']:.1e}"] if good else [cell["status"], ""]
        lines.append([f"{cell['n']:,}", str(cell["d"]), cell["name"], *numbers])
    return "**Relative error against float64** (KL; loss over all pairs, gradient in norm over 2,048 rows)\n\n" + table(
        ["N", "d", "implementation", "loss", "gradient"], lines
    )


def _growth(cells: list[Cell], sizes: list[list[int]]) -> str:
    """Time by N; implementations with one size only are in the tables before."""
    parts = []
    series = [(n, d) for n, d in sizes]
    for setting in ("kl", "infonce"):
        found = [cell for cell in cells if _is(cell, setting) and _measured(cell) and (cell["n"], cell["d"]) in series]
        if not found:
            continue
        by_name: dict[str, dict[tuple[int, int], Cell]] = {}
        for cell in found:
            by_name.setdefault(cell["name"], {})[cell["n"], cell["d"]] = cell
        lines = []
        for name, places in by_name.items():
            if len(places) < min(2, len(series)):
                continue
            line = [name]
            for size in series:
                cell = places.get(size, {"status": ""})
                line.append(_time(cell) if cell["status"] == "ok" else cell["status"].split(":")[0])
            lines.append(line)
        floors = [
            next((c["floor"] for c in found if (c["n"], c["d"]) == size and "floor" in c), None) for size in series
        ]
        lines.append(["*floor*", *("" if floor is None else f"*{_seconds(floor)}*" for floor in floors)])
        title = f"**Growth, {setting}** (d = {series[0][1]})"
        parts.append(f"{title}\n\n" + table(["", *(f"{n:,}" for n, _ in series)], lines))
    return "\n\n".join(parts)


# --- on paper --------------------------------------------------------------------------------------------------------

BATCH = 2**20
NVLINK, INFINIBAND = 450e9, 50e9  # bytes a second, one way, of a GPU
CARDS = 8  # GPUs of a node, each with an InfiniBand card


def paper(rate: float) -> str:
    """One step at a global batch of 2^20 on 8, 64 and 512 GPUs, each at a rate of operations a second."""
    lines = []
    for d in (128, 512):
        for processes in (8, 64, 512):
            rows = BATCH // processes
            whole, step = 4 * rows * BATCH * d / rate, 4 * rows * rows * d / rate
            inside = processes <= CARDS
            for width in (4, 2):
                moved = (processes - 1) * rows * d * width
                transfer = rows * d * width / (NVLINK if inside else INFINIBAND)
                ring = step + (processes - 1) * max(step, transfer)
                # between nodes NCCL's all-gather uses the cards of all eight GPUs at once, the ring one
                gather = moved / (NVLINK if inside else CARDS * INFINIBAND)
                first = [str(d), str(processes), f"{rows:,}", str(width), _seconds(whole), _bytes(moved)]
                hidden = "yes" if step >= transfer else "no"
                lines.append([*first, *map(_seconds, (step, transfer)), hidden, *map(_seconds, (ring, gather + whole))])
    header = ["d", "GPUs", "rows each", "bytes a number", "compute", "moved per link"]
    header += ["ring step: compute", "ring step: transfer", "hidden", "in all, ring", "in all, all-gather"]
    return f"Compute at {rate / 1e12:.0f} TFLOP/s; links as assumed above.\n\n{table(header, lines)}"
