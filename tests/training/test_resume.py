"""Interrupted runs end with the same bits: killed processes, exceptions at any batch, and signals."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from fmicl.cli import main as cli
from fmicl.config import Settings
from fmicl.data.images.decoding import load_batches
from fmicl.methods import METHODS
from fmicl.models.vision import SmallConv
from fmicl.runs.folder import Run
from fmicl.training.checkpoints import Checkpointer, load_checkpoint
from fmicl.training.tasks.image_parts import build_image_encoder, load_splits
from fmicl.utils.errors import Stopped
from fmicl.utils.files import read_json
from fmicl.utils.locks import lock_folder
from image_sets import make
from small_settings import digits, small
from train_run import train

pytestmark = pytest.mark.usefixtures("only_training")


def assert_same(one: Path, other: Path) -> None:
    """Exported files to the byte; the whole state with optimiser and queue; and the metrics except for their times."""
    for name in ("encoder.safetensors", "projection.safetensors", "encoder.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    a, b = (load_checkpoint(Run(path).checkpoint) for path in (one, other))
    assert a["batches"] == b["batches"]
    _assert_equal(a["method"], b["method"])
    _assert_equal(a["optimizer"], b["optimizer"])
    for row, twin in zip(a["metrics"]["rows"], b["metrics"]["rows"], strict=True):
        assert {k: v for k, v in row.items() if k != "seconds"} == {k: v for k, v in twin.items() if k != "seconds"}


def _assert_equal(a: Any, b: Any) -> None:
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b)
    elif isinstance(a, dict):
        assert a.keys() == b.keys()
        for key in a:
            _assert_equal(a[key], b[key])
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            _assert_equal(x, y)
    else:
        assert a == b


@pytest.mark.parametrize("method", ["simclr", "moco"])
def test_killed_and_resumed_run_is_bit_identical(method: str, tmp_path: Path) -> None:
    changes = {"method": method, "epochs": 3, "batch_size": 64, "checkpoint_steps": 2, "monitor_every": 1, "queue": 100}
    settings = digits(**changes)
    train(settings, out=tmp_path / "whole")
    # The same run in a process of its own, which is killed in the middle of an epoch.
    script = "import sys; from pathlib import Path; import fmicl; from small_settings import digits; "
    script += f"fmicl.train(digits(**{changes!r}), out=Path(sys.argv[1]))"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "cut")], env=environment, stdout=subprocess.DEVNULL
    )
    checkpoint = Run(tmp_path / "cut").checkpoint
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None, "the run ended without a checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    batches = load_checkpoint(checkpoint)["batches"]
    assert 0 < batches < 3 * 21
    (checkpoint.parent / ".last.ckpt.1.tmp").write_bytes(b"half")  # as if it had been killed while writing
    assert not (tmp_path / "cut" / "encoder.safetensors").exists()
    train(settings, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert not list((tmp_path / "cut").rglob("*.tmp"))


class Cut(Exception):  # noqa: N818 (no error: the interruption by a test)
    pass


@contextlib.contextmanager
def interrupted_after(after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Interrupt the training within after so many batches."""
    original = Checkpointer.on_train_batch_end

    def cut(self: Checkpointer, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        if module.batches == after:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_batch_end", cut)
        with pytest.raises(Cut):
            yield


def cut_and_resume(settings: Settings, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare a run with one that is interrupted after so many batches and resumed."""
    train(settings, out=tmp_path / "whole")
    with interrupted_after(after, monkeypatch):
        train(settings, out=tmp_path / "cut")
    train(settings, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


CUTS = [
    *((name, 8, 3, 1) for name in METHODS.names()),  # in the middle of an epoch, some batches after a checkpoint
    ("simclr", 1, 4, 1),  # before the first checkpoint
    ("simclr", 5, 1, 1),  # at its end
    ("moco", 7, 1, 2),  # with gradients half accumulated
    ("symmetric moco", 7, 3, 1),
    ("simclr of 3 views", 7, 3, 1),
    ("swav with a queue and local crops", 7, 3, 2),
    ("moco with local crops", 7, 3, 1),
    ("simclr", 9, 2, 3),  # where accumulation goes across the end of an epoch
    ("simclr with a learned f", 4, 1, 1),
    ("simclr", 15, 1, 1),  # after the last batch, before the export
]


@pytest.mark.parametrize(("method", "after", "steps", "accumulate"), CUTS)
def test_cut_anywhere(
    method: str, after: int, steps: int, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: dict[str, dict[str, Any]] = {
        "symmetric moco": {"method": "moco", "symmetric": True},
        "simclr with a learned f": {"divergence": "learned", "alpha": "auto"},
        "simclr of 3 views": {"method": "simclr", "multiplicity": 3},
        "swav with a queue and local crops": {
            "method": "swav", "prototypes": 20, "sinkhorn_queue": 512, "local_crops": 2, "freeze_prototypes": 0.5,
        },
        "moco with local crops": {"method": "moco", "local_crops": 2},
    }  # fmt: skip
    settings = digits(
        **kinds.get(method, {"method": method}), epochs=3, checkpoint_steps=steps, accumulate=accumulate, clip=1.0,
        optimizer="adamw", learning_rate=1e-3,
    )  # fmt: skip
    cut_and_resume(settings, after, tmp_path, monkeypatch)


def test_files_that_are_decoded_during_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("images", tmp_path)
    settings = small("images", folder, memory_gib=0.0, epochs=2, checkpoint_steps=1, workers=1, monitor_every=0)
    cut_and_resume(settings, 1, tmp_path, monkeypatch)


@pytest.mark.parametrize("memory_gib", [4.0, 0.0])
def test_broken_files_are_left_out_again(
    memory_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In memory, or found and replaced during training, as in a folder too large to decode beforehand."""
    monkeypatch.setattr("fmicl.data.images.listing.DECODED_LIMIT", 0)
    folder = make("images", tmp_path)
    settings = small("images", folder, memory_gib=memory_gib, epochs=3, checkpoint_steps=1, monitor_every=0)
    trained = load_splits(settings).names
    (folder / trained[0]).write_bytes(b"not an image")
    data = (folder / trained[4]).read_bytes()
    (folder / trained[4]).write_bytes(data[: len(data) // 3] + data[-12:])  # header and end are fine
    cut_and_resume(settings, 3, tmp_path, monkeypatch)
    told = [line for line in capsys.readouterr().out.splitlines() if "can't be" in line]
    said = ["2 image(s) can't be read"] if memory_gib else ["1 image(s) can't be read", "1 image(s) can't be decoded"]
    assert len(told) == 3 * len(said)  # once for each start
    assert all(any(words in line for line in told[: len(said)]) for words in said)


def test_dropout_draws_the_same_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def noisy(settings: Settings, **options: Any) -> torch.nn.Module:
        encoder = build_image_encoder(settings, **options)
        assert isinstance(encoder, SmallConv)
        encoder.body.append(torch.nn.Dropout(0.5))
        return encoder

    monkeypatch.setattr("fmicl.training.tasks.images.build_image_encoder", noisy)
    test_cut_anywhere("simclr", 7, 3, 1, tmp_path, monkeypatch)


@contextlib.contextmanager
def signalled(after: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Send these signals to the training within, at the end of this batch."""
    original = Checkpointer.on_train_batch_end

    def send(self: Checkpointer, trainer: Any, module: Any, *rest: Any) -> None:
        if module.batches == after:
            for number in numbers:
                os.kill(os.getpid(), number)
        original(self, trainer, module, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_batch_end", send)
        yield


STOPS = [
    ("simclr", signal.SIGINT, 1, 1, 1),
    ("moco", signal.SIGINT, 7, 1, 7),
    ("simclr", signal.SIGTERM, 7, 2, 8),  # after the step
    ("simclr", signal.SIGINT, 15, 1, 15),  # after the last batch
]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("method", "number", "after", "accumulate", "stopped"), STOPS)
def test_stopped_and_resumed_is_bit_identical(
    method: str, number: int, after: int, accumulate: int, stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = digits(method=method, epochs=3, accumulate=accumulate, optimizer="adamw", learning_rate=1e-3)
    train(settings, out=tmp_path / "whole")
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    message = f"batch {stopped} of 15.*--resume"
    with signalled(after, [number], monkeypatch), pytest.raises(Stopped, match=message) as stop:
        train(settings, out=tmp_path / "cut")
    assert stop.value.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert load_checkpoint(Run(tmp_path / "cut").checkpoint)["batches"] == stopped
    assert not (tmp_path / "cut" / "encoder.safetensors").exists()
    train(settings, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_second_interrupt_stops_at_once(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = "--resume continues from the last checkpoint" if steps else "nothing was saved yet: --resume"
    with signalled(3, [signal.SIGINT] * 2, monkeypatch), pytest.raises(Stopped, match=message):
        train(digits(checkpoint_steps=steps), out=tmp_path / "run")
    run = Run(tmp_path / "run")
    assert run.checkpoint.exists() == bool(steps)
    assert not steps or load_checkpoint(run.checkpoint)["batches"] == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_callers_handler_is_called_and_restored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def mine(number: int, _: Any) -> None:
        called.append(number)

    before = {number: signal.signal(number, mine) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            with signalled(1, [number], monkeypatch), pytest.raises(Stopped, match="after batch 1 of"):
                train(digits(), out=tmp_path / str(number))
            assert signal.getsignal(number) is mine
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
        with signalled(1, [signal.SIGINT, signal.SIGHUP], monkeypatch):
            train(digits(epochs=1), out=tmp_path / "ignored")
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == [signal.SIGINT, signal.SIGTERM]


def test_training_outside_the_main_thread(tmp_path: Path) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(train, digits(epochs=1), out=tmp_path / "run").result() is not None


class _Handlers(torch.utils.data.Dataset[bool]):
    def __getitem__(self, index: int) -> bool:
        os.kill(os.getpid(), signal.SIGTERM)
        outlived = signal.alarm(0) > 0  # seconds until it would have ended
        return outlived and all(signal.getsignal(x) is signal.SIG_IGN for x in (signal.SIGINT, signal.SIGHUP))


def test_workers_outlive_the_signals_of_a_terminal_and_a_scheduler() -> None:
    assert bool(next(iter(load_batches(_Handlers(), [[0]], 1, torch.device("cpu"))))[0])


def start(out: Path, *options: str, recipe: str = "digits") -> subprocess.Popen[str]:
    """Start a long run in its own process group, as a terminal does, and wait until it trains."""
    command = [sys.executable, "-m", "fmicl", "train", recipe, "--device", "cpu", "--epochs", "5000", *options]
    process = subprocess.Popen(
        [*command, "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
        # a shell's background jobs ignore SIGINT, those of nohup SIGHUP, and so would their children
        preexec_fn=lambda: [signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGHUP)],
    )
    deadline = time.monotonic() + 120
    while not (out / "metrics.csv").exists() or (out / "metrics.csv").stat().st_size < 200:
        assert process.poll() is None, process.stderr.read() if process.stderr else ""
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP"])
def test_a_stopped_command_says_how_to_continue(name: str, tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    process.send_signal(getattr(signal, name))
    try:
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()  # if it ignored the signal
    assert process.returncode == 128 + getattr(signal, name)
    batches = load_checkpoint(Run(tmp_path / "run").checkpoint)["batches"]
    *notes, last = error.splitlines()
    assert last.startswith(f"fmicl: stopped after batch {batches} of 25000")
    assert "--resume" in last
    assert ("Ctrl-C again" in "".join(notes)) == (name == "SIGINT")
    assert len(notes) == (2 if name == "SIGINT" else 0)


def test_only_one_process_trains_in_a_folder(tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    try:
        words = ["--device", "cpu", "--resume", "--out", str(tmp_path / "run")]
        command = [sys.executable, "-m", "fmicl", "train", "digits", *words]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert second.stderr.startswith(f"fmicl: error: another process is training in {tmp_path / 'run'}")
    finally:
        process.kill()
        process.communicate()
    with lock_folder(tmp_path / "run", "taken"):
        pass  # a killed process holds no lock


@pytest.mark.parametrize("resume", [True, False])
def test_ctrl_c_outside_of_training(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--device", "cpu", "--epochs", "1", *(["--resume"] if resume else [])]
    with monkeypatch.context() as patch:
        patch.setattr("fmicl.training.tasks.images.evaluate_run", interrupted)
        assert cli.main(["train", "digits", "--device", "cpu", "--epochs", "1"]) == 130
    left = capsys.readouterr().err
    assert left.startswith("fmicl: stopped")
    assert left.endswith("--resume continues from the last checkpoint in runs/digits-001\n")
    monkeypatch.setattr("fmicl.training.tasks.images.load_splits", interrupted)  # before this command has a run
    assert cli.main(words) == 130
    error = capsys.readouterr().err
    assert error == left if resume else "nothing was saved yet" in error


@pytest.mark.parametrize("whole", [True, False])
def test_several_processes_stop_together(whole: bool, tmp_path: Path) -> None:
    """By Ctrl-C in a terminal, which reaches all of them, or by a scheduler's SIGTERM to the first."""
    process = start(tmp_path / "run", "--devices", "2", "--hidden", "32")
    if whole:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]  # all of them have closed it
    assert process.returncode == (130 if whole else 143), error
    batches = load_checkpoint(Run(tmp_path / "run").checkpoint)["batches"]
    assert error.count("stopped after") == error.count(f"stopped after batch {batches} of 25000") == 1
    assert "Traceback" not in error


def test_sigterm_to_all_processes_of_a_job_leaves_a_checkpoint(tmp_path: Path) -> None:
    """As SLURM sends it, also to the workers that load images: the last steps still need them."""
    words = small(
        "images", make("images", tmp_path), memory_gib=0.0, workers=2, monitor_every=0, epochs=5000
    ).arguments()
    process = start(tmp_path / "run", *words, recipe="images")
    os.killpg(process.pid, signal.SIGTERM)
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 143, error
    batches = load_checkpoint(Run(tmp_path / "run").checkpoint)["batches"]
    assert error.startswith(f"fmicl: stopped after batch {batches} of")
    assert "Traceback" not in error


def test_resume_refuses_other_settings_and_allows_another_machine(tmp_path: Path) -> None:
    train(digits(epochs=1), out=tmp_path / "run")
    with pytest.raises(ValueError, match="seed was 0, is now 1"):  # more epochs alone would be an extension
        train(digits(epochs=2, seed=1), out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"size was 8, is now 16$"):
        train(digits(epochs=1, size=16), out=tmp_path / "run", resume=True)
    train(digits(epochs=1, workers=1, checkpoint_minutes=3), out=tmp_path / "run", resume=True)


def test_resume_starts_a_run_if_there_is_none_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(digits(epochs=1), resume=True)
    assert run.path == Path("runs/digits-001")
    assert "digits-001: there was no run to continue" in capsys.readouterr().out
    again = train(digits(epochs=1), resume=True)
    assert again.path == run.path
    other = train(digits(epochs=1))
    assert other.path == Path("runs/digits-002")
    other.checkpoint.unlink()
    train(digits(epochs=1), out=other.path, resume=True)
    assert "digits-002: it has no checkpoint yet" in capsys.readouterr().out


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    run = train(digits(epochs=1), out=tmp_path / "run")
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last\.ckpt can't be read"):
        train(digits(epochs=1), out=tmp_path / "run", resume=True)


def test_a_finished_run_goes_on_for_more_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changes = {"method": "moco", "queue": 512, "batch_size": 256, "warmup_epochs": 0.0}
    run = train(digits(epochs=2, **changes), out=tmp_path / "run")
    run.results.write_text('{"knn": 12.5}')  # `only_training` leaves none
    run.report.write_text("page")
    first = load_checkpoint(run.checkpoint)["metrics"]["rows"]
    train(digits(epochs=2, **changes), out=run.path, resume=True)
    assert "finished already" in capsys.readouterr().out
    train(digits(epochs=4, **changes), out=run.path, resume=True)
    assert "going on to 4 epochs" in capsys.readouterr().out
    rows = load_checkpoint(run.checkpoint)["metrics"]["rows"]
    assert rows[:2] == first
    assert [row["epoch"] for row in rows] == [1, 2, 3, 4]
    # The schedule is that of four epochs from the third on: the last steps of an epoch of five batches.
    peak, steps = digits(**changes).learning_rate, 20
    rate = [peak * 0.5 * (1 + math.cos(math.pi * step / steps)) for step in (14, 19)]
    assert [row["lr"] for row in rows[2:]] == pytest.approx(rate)
    assert (run.path / "results-2-epochs.json").read_text() == '{"knn": 12.5}'
    assert (run.path / "report-2-epochs.html").read_text() == "page"
    saved = read_json(run.settings)
    assert saved["settings"]["epochs"] == 4
    assert [entry["epochs"] for entry in saved["extended"]] == [2]


def test_an_interrupted_extension_ends_with_the_same_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("whole", "cut"):
        train(digits(epochs=1, checkpoint_steps=1), out=tmp_path / name)
    longer = digits(epochs=3, checkpoint_steps=1)
    train(longer, out=tmp_path / "whole", resume=True)
    write = Checkpointer.write

    def stop(self: Checkpointer, trainer: Any) -> None:
        write(self, trainer)
        if self.module.batches == 8:
            raise KeyboardInterrupt

    monkeypatch.setattr(Checkpointer, "write", stop)
    with pytest.raises((Stopped, KeyboardInterrupt)):
        train(longer, out=tmp_path / "cut", resume=True)
    monkeypatch.setattr(Checkpointer, "write", write)
    train(longer, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


def test_what_can_not_go_on_is_refused(tmp_path: Path) -> None:
    run = train(digits(epochs=1, accumulate=2), out=tmp_path / "run")  # five batches
    with pytest.raises(ValueError, match="accumulate"):
        train(digits(epochs=2, accumulate=2), out=run.path, resume=True)
    whole = train(digits(epochs=1), out=tmp_path / "whole")
    with pytest.raises(ValueError, match="alpha"):
        train(digits(epochs=2, alpha=3.0), out=whole.path, resume=True)
    whole.results.write_text("{}")
    whole.report.write_text("")
    whole.checkpoint.unlink()
    with pytest.raises(ValueError, match="checkpoint"):
        train(digits(epochs=2), out=whole.path, resume=True)
