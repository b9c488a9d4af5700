"""Soak test: runs that are killed at random moments, many times each, end with the bits of an undisturbed run.

    pytest -m slow tests/training/test_soak.py                              about half an hour on two cores
    FMICL_RECORDS=results/soak pytest -m slow tests/training/test_soak.py   writes the record, too

A fifth of the moments is counted from the start of the process, when it imports and loads data; the others from its
first line of output, so that they fall into training, export, evaluation and report. A run that was killed after its
last batch is left to end at its next start: most kills are to fall into training.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_resume import assert_same as assert_same_images

from fmicl.config import Settings
from fmicl.runs.folder import Run
from fmicl.training.checkpoints import load_checkpoint
from records import record
from small_settings import digits

KILLS, TERMS = 25, 5
"""Times that the runs of one method are killed by SIGKILL and stopped by SIGTERM: 100 and 20 for the four of them."""
METHODS: dict[str, dict[str, Any]] = {
    "simclr": {},
    "moco": {"method": "moco", "queue": 100},
    "mocov3": {"method": "mocov3"},
}


class Process:
    """`fmicl train ... --resume` in a process of its own."""

    def __init__(self, settings: Settings, run: Run) -> None:
        words = ["train", settings.recipe, *settings.arguments(), "--out", str(run.path), "--resume"]
        self.started, self.output = time.monotonic(), run.path.with_suffix(".out")
        with self.output.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "fmicl", *words],
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def wait(self, until: Callable[[], bool] = lambda: False, seconds: float = 300) -> bool:
        """Wait until something holds, or the process has ended; returns whether it has ended."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None and not until():
            if time.monotonic() > deadline:
                self.process.send_signal(signal.SIGABRT)  # prints where it hangs
                self.process.wait()
                pytest.fail(f"no end after {seconds:g} s:\n{self.output.read_text()}")
            time.sleep(0.002)
        return self.process.poll() is not None

    def sleep(self, seconds: float) -> bool:
        """Wait for so long, or until the process has ended; returns whether it has ended."""
        end = time.monotonic() + seconds
        return self.wait(lambda: time.monotonic() > end)

    def reach_first_line(self) -> bool:
        """Wait for the first line of output; returns whether the process has ended."""
        return self.wait(lambda: self.output.stat().st_size > 0)


def soak(name: str, settings: Settings, folder: Path, assert_same: Callable[[Path, Path], None]) -> None:
    """Kill and resume runs until there were enough kills, and compare each run that ends with an undisturbed one."""
    whole = Run(folder / "whole")
    process = Process(settings, whole)
    assert not process.reach_first_line(), process.output.read_text()
    before = time.monotonic() - process.started
    process.wait()
    assert process.process.returncode == 0, process.output.read_text()
    after = time.monotonic() - process.started - before
    total = load_checkpoint(whole.checkpoint)["batches"]

    random_ = random.Random(name)
    signals = [signal.SIGKILL] * KILLS + [signal.SIGTERM] * TERMS
    random_.shuffle(signals)
    runs, cut, trained = 0, Run(folder / "cut"), False
    kills: list[dict[str, Any]] = []
    while signals or cut.path.exists():
        process = Process(settings, cut)
        ended = not signals or trained
        if not ended:
            early = random_.random() < 0.2
            delay = random_.uniform(0, before if early else after / 3)
            ended = process.sleep(delay) if early else process.reach_first_line() or process.sleep(delay)
        if not ended:
            number = signals.pop()
            process.process.send_signal(number)
            process.wait(seconds=60)
            code = process.process.returncode
            done = load_checkpoint(cut.checkpoint)["batches"] if cut.checkpoint.exists() else 0
            trained = done == total
            kills.append({"signal": number.name, "code": code, "batches": done, "evaluating": trained})
            if code != 0:  # it may have ended at this very moment
                codes = (-signal.SIGKILL,) if number == signal.SIGKILL else (-signal.SIGTERM, 128 + signal.SIGTERM)
                assert code in codes, process.output.read_text()
                assert "Traceback" not in process.output.read_text()
                continue
        process.wait()
        assert process.process.returncode == 0, process.output.read_text()
        assert_same(whole.path, cut.path)
        assert whole.results.read_bytes() == cut.results.read_bytes()
        assert not list(cut.path.rglob("*.tmp"))
        assert cut.finished
        shutil.rmtree(cut.path)
        runs, trained = runs + 1, False
    facts = {
        "seed": name,
        "settings": {key: value for key, value in settings.changes.items() if str(folder) not in str(value)},
        "seconds": {"until the first line": round(before, 2), "after it": round(after, 2)},
        "runs resumed to the same bits": runs,
        "signals": dict(Counter(kill["signal"] for kill in kills)),
        "kills before the first checkpoint": sum(kill["batches"] == 0 for kill in kills),
        "kills after the last batch": sum(kill["evaluating"] for kill in kills),
        "kills": [[kill["signal"], kill["code"], kill["batches"]] for kill in kills],
        "batches of a run": total,
    }
    record(f"kills-cpu-{name}", name, facts)


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_killed_runs_on_images(method: str, tmp_path: Path) -> None:
    settings = digits(
        **METHODS[method], epochs=8, batch_size=64, checkpoint_steps=5, monitor_every=2, learning_rate=0.1
    )
    soak(method, settings, tmp_path, assert_same_images)


@pytest.mark.slow
def test_killed_runs_on_text(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed (the extra text)")
    from test_text_resume import assert_same, text_settings

    from sts_files import write_sts
    from tiny_bert import SENTENCES, tiny_bert

    tiny_bert(tmp_path / "bert")
    (tmp_path / "text.txt").write_text("\n".join(SENTENCES * 2) + "\n")
    write_sts(tmp_path / "sts")
    soak("text", text_settings(tmp_path, epochs=40, sts_every=9, checkpoint_steps=10), tmp_path, assert_same)
