"""A program that writes a run folder as `fmicl train` does, in no time; its divergence decides how it ends."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main(words: list[str]) -> None:
    def option(name: str, default: str) -> str:
        return words[words.index(name) + 1] if name in words else default

    assert words[:2] == ["train", "digits"]
    assert words[-1] == "--resume"
    out, what = Path(words[words.index("--out") + 1]), option("--divergence", "kl")
    out.mkdir(exist_ok=True)
    starts = out / "starts"
    first = not starts.exists()
    starts.write_text("x" if first else starts.read_text() + "x")
    print("run folder", out, flush=True)
    seen = {key: value for key, value in os.environ.items() if "CUDA" in key or "OMP" in key}
    (out / "environment.json").write_text(json.dumps(seen))
    if what == "js" and first:
        print("Traceback (most recent call last):", file=sys.stderr)
        print("  File somewhere", file=sys.stderr)
        print("torch.OutOfMemoryError: CUDA out of memory.", file=sys.stderr)
        sys.exit(1)
    if what == "pearson" and first:
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "vlc":
        wait(out, ignore_signals="--hidden" in words)
    (out / "metrics.csv").write_text("epoch,loss,knn,seconds\n1,2.5,50.0,3\n2,2.0,60.0,1\n")
    if what != "neyman":
        results = {"knn": 60.0 + int(option("--seed", "0")), "linear": 70.0}
        (out / "results.json").write_text(json.dumps(results))
    (out / "report.html").write_text("page")


def wait(out: Path, *, ignore_signals: bool) -> None:
    """Wait for a checkpoint, which SIGTERM writes."""

    def stop(*_: object) -> None:
        (out / "checkpoint").write_text("here")
        sys.exit(143)

    signal.signal(signal.SIGTERM, signal.SIG_IGN if ignore_signals else stop)
    (out / "metrics.csv").write_text("epoch,loss,knn,seconds\n1,2.5,50.0,3\n")
    end = time.monotonic() + 60
    while not (out / "checkpoint").exists() and time.monotonic() < end:
        time.sleep(0.02)


if __name__ == "__main__":
    main(sys.argv[1:])
