"""A run that was cut off ends with the same bits: real processes are killed, at moments of their own choosing."""

from __future__ import annotations

import contextlib
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
from fmicl.training.building import build_recipe_encoder

from fmicl.cli import main as cli
from fmicl.data.images import reading
from fmicl.methods import METHODS
from fmicl.models.vision import SmallConv
from fmicl.runs import folder as runs
from fmicl.training import pipeline as training
from fmicl.training.checkpoints import Checkpointer
from fmicl.training.pipeline import train
from fmicl.training.tasks.image_evaluation import load_splits
from fmicl.utils.errors import Stopped
from image_sets import make
from small_settings import digits, small


@pytest.fixture(autouse=True)
def only_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "evaluate_run", lambda *_, **__: None)
    monkeypatch.setattr("fmicl.training.pipeline.write_report", lambda _: None)


def assert_same(one: Path, other: Path) -> None:
    """Exported files to the byte; the whole state, optimiser and queue included; and the record but for its times."""
    for name in ("encoder.safetensors", "projection.safetensors", "encoder.json"):
        assert (one / name).read_bytes() == (other / name).read_bytes(), name
    a, b = (runs.load_checkpoint(runs.Run(path).checkpoint) for path in (one, other))
    assert a["batches"] == b["batches"]
    _assert_equal(a["method"], b["method"])
    _assert_equal(a["optimizer"], b["optimizer"])
    for row, twin in zip(a["record"]["rows"], b["record"]["rows"], strict=True):
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


@pytest.mark.parametrize("method", METHODS)
def test_killed_and_resumed_run_is_bit_identical(method: Any, tmp_path: Path) -> None:
    changes = {"method": method, "epochs": 3, "batch_size": 64, "checkpoint_steps": 2, "monitor_every": 1, "queue": 100}
    recipe = digits(**changes)
    whole = train(recipe, out=tmp_path / "whole")
    assert whole is not None
    # The same run in a process of its own, which is killed in the middle of an epoch.
    script = "import sys; from small_settings import digits; from fmicl.training.pipeline import train; from pathlib import Path; "
    script += f"train(digits(**{changes!r}), out=Path(sys.argv[1]))"
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1] / "helpers"), os.environ.get("PYTHONPATH", "")]),
    }
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path / "cut")], env=environment, stdout=subprocess.DEVNULL
    )
    checkpoint = runs.Run(tmp_path / "cut").checkpoint
    deadline = time.monotonic() + 120
    while not checkpoint.exists():
        assert process.poll() is None, "the run ended without a checkpoint"
        assert time.monotonic() < deadline
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    batches = runs.load_checkpoint(checkpoint)["batches"]
    assert 0 < batches < 3 * 21
    (checkpoint.parent / ".last.ckpt.1.tmp").write_bytes(b"half")  # as if it had been killed while writing
    assert not (tmp_path / "cut" / "encoder.safetensors").exists()
    resumed = train(recipe, out=tmp_path / "cut", resume=True)
    assert resumed is not None
    assert_same(tmp_path / "whole", tmp_path / "cut")
    assert not list((tmp_path / "cut").rglob("*.tmp"))


class Cut(Exception):  # noqa: N818 (not an error: the test's way of pulling the plug)
    pass


@contextlib.contextmanager
def plug_pulled(after: int, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Training in here is cut off after so many batches."""
    original = Checkpointer.on_train_batch_end

    def cut(self: Checkpointer, trainer: Any, module: Any, *rest: Any) -> None:
        original(self, trainer, module, *rest)
        if module.batches == after:
            raise Cut

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_batch_end", cut)
        with pytest.raises(Cut):
            yield


def cut_and_resume(recipe: Recipe, after: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train as a whole; train again, pull the plug after so many batches, and resume; compare."""
    train(recipe, out=tmp_path / "whole")
    with plug_pulled(after, monkeypatch):
        train(recipe, out=tmp_path / "cut")
    train(recipe, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


CUTS = [
    ("simclr", 1, 4, 1),  # before the first checkpoint
    ("simclr", 4, 1, 1),  # in the middle of an epoch
    ("simclr", 5, 1, 1),  # at its end
    ("moco", 7, 3, 1),  # some batches after the last checkpoint
    ("moco", 7, 1, 2),  # with gradients half accumulated
    ("symmetric moco", 7, 3, 1),
    ("simclr of 3 views", 7, 3, 1),
    ("simclr", 9, 2, 3),  # where accumulation goes across the end of an epoch
    ("simclr", 15, 1, 1),  # after the last batch, before the export
]


@pytest.mark.parametrize(("method", "after", "steps", "accumulate"), CUTS)
def test_cut_anywhere(
    method: Any, after: int, steps: int, accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = {
        "symmetric moco": {"method": "moco", "symmetric": True},
        "simclr of 3 views": {"method": "simclr", "multiplicity": 3},
    }.get(method, {"method": method})
    recipe = digits(
        **kind, epochs=3, checkpoint_steps=steps, accumulate=accumulate, clip=1.0, optimizer="adamw",
        learning_rate=1e-3,
    )  # fmt: skip
    cut_and_resume(recipe, after, tmp_path, monkeypatch)


def test_files_that_are_decoded_as_they_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make("images", tmp_path)
    recipe = small("images", folder, memory_gib=0.0, epochs=2, checkpoint_steps=1, workers=1, monitor_every=0)
    cut_and_resume(recipe, 1, tmp_path, monkeypatch)


@pytest.mark.parametrize("memory_gib", [4.0, 0.0])
def test_broken_files_are_left_out_as_before(
    memory_gib: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Held in memory, or found and replaced as they go, as in a folder too large to decode beforehand."""
    monkeypatch.setattr("fmicl.data.images.folders._DECODED", 0)
    folder = make("images", tmp_path)
    assert folder is not None
    recipe = small("images", folder, memory_gib=memory_gib, epochs=3, checkpoint_steps=1, monitor_every=0)
    trained = load_splits(recipe).names
    (folder / trained[0]).write_bytes(b"not an image")
    data = (folder / trained[4]).read_bytes()
    (folder / trained[4]).write_bytes(data[: len(data) // 3] + data[-12:])  # header and end are fine
    cut_and_resume(recipe, 3, tmp_path, monkeypatch)
    told = [line for line in capsys.readouterr().out.splitlines() if "can't be" in line]
    said = ["2 image(s) can't be read"] if memory_gib else ["1 image(s) can't be read", "1 image(s) can't be decoded"]
    assert len(told) == 3 * len(said)  # once for each start
    assert all(any(words in line for line in told[: len(said)]) for words in said)


def test_dropout_draws_the_same_after_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build = build_recipe_encoder

    def noisy(recipe: Recipe) -> torch.nn.Module:
        encoder = build(recipe)
        assert isinstance(encoder, SmallConv)
        encoder.body.append(torch.nn.Dropout(0.5))
        return encoder

    monkeypatch.setattr(training, "build_recipe_encoder", noisy)
    test_cut_anywhere("simclr", 7, 3, 1, tmp_path, monkeypatch)


@contextlib.contextmanager
def signalled(after: int, numbers: list[int], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Training in here gets these signals as its batch of this number ends."""
    original = Checkpointer.on_train_batch_end

    def note(self: Checkpointer, trainer: Any, module: Any, *rest: Any) -> None:
        if module.batches == after:
            for number in numbers:
                os.kill(os.getpid(), number)
        original(self, trainer, module, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Checkpointer, "on_train_batch_end", note)
        yield


STOPS = [
    ("simclr", signal.SIGINT, 1, 1, 1),
    ("moco", signal.SIGINT, 7, 1, 7),
    ("simclr", signal.SIGTERM, 7, 2, 8),  # the step comes to its end
    ("simclr", signal.SIGINT, 15, 1, 15),  # after the last batch
]


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize(("method", "number", "after", "accumulate", "stopped"), STOPS)
def test_stopped_and_resumed_is_bit_identical(
    method: Any, number: int, after: int, accumulate: int, stopped: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = digits(method=method, epochs=3, accumulate=accumulate, optimizer="adamw", learning_rate=1e-3)
    train(recipe, out=tmp_path / "whole")
    handlers = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    words = f"stopped after batch {stopped} of 15; the same command with --resume goes on from there"
    with signalled(after, [number], monkeypatch), pytest.raises(Stopped, match=words) as stop:
        train(recipe, out=tmp_path / "cut")
    assert stop.value.number == number
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert runs.load_checkpoint(runs.Run(tmp_path / "cut").checkpoint)["batches"] == stopped
    assert not (tmp_path / "cut" / "encoder.safetensors").exists()
    train(recipe, out=tmp_path / "cut", resume=True)
    assert_same(tmp_path / "whole", tmp_path / "cut")


@pytest.mark.usefixtures("interruptible")
@pytest.mark.parametrize("steps", [0, 2])
def test_a_second_interrupt_stops_at_once(steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = "goes on from the last checkpoint" if steps else "nothing was saved yet: --resume starts again"
    with signalled(3, [signal.SIGINT] * 2, monkeypatch), pytest.raises(Stopped, match=words):
        train(digits(checkpoint_steps=steps), out=tmp_path / "run")
    run = runs.Run(tmp_path / "run")
    assert run.checkpoint.exists() == bool(steps)
    assert not steps or runs.load_checkpoint(run.checkpoint)["batches"] == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_of_ones_own_is_called_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []

    def own(number: int, _: Any) -> None:
        called.append(number)

    before = {number: signal.signal(number, own) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for number in before:
            with signalled(1, [number], monkeypatch), pytest.raises(Stopped, match="after batch 1 of"):
                train(digits(), out=tmp_path / str(number))
            assert signal.getsignal(number) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a shell's background
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as by nohup
        with signalled(1, [signal.SIGINT, signal.SIGHUP], monkeypatch):
            assert train(digits(epochs=1), out=tmp_path / "ignored") is not None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert called == [signal.SIGINT, signal.SIGTERM]


def test_outside_the_main_thread_signals_are_left_alone(tmp_path: Path) -> None:
    with ThreadPoolExecutor(max_workers=1) as pool:
        assert pool.submit(train, digits(epochs=1), out=tmp_path / "run").result() is not None


class _Handlers(torch.utils.data.Dataset[bool]):
    def __getitem__(self, index: int) -> bool:
        return all(signal.getsignal(number) is signal.SIG_IGN for number in (signal.SIGINT, signal.SIGHUP))


def test_workers_live_on_when_the_terminal_interrupts_or_is_closed() -> None:
    assert bool(next(iter(reading.load(_Handlers(), [[0]], 1, torch.device("cpu"))))[0])


def start(out: Path, *options: str) -> subprocess.Popen[str]:
    """A long run in a process group of its own, as a terminal would start it, once it has begun to train."""
    command = [
        sys.executable,
        "-m",
        "fmicl",
        "train",
        "digits",
        "--device",
        "cpu",
        "--epochs",
        "5000",
        *options,
    ]
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
def test_a_run_that_is_asked_to_stop_says_how_to_go_on(name: str, tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    process.send_signal(getattr(signal, name))
    try:
        error = process.communicate(timeout=60)[1]
    finally:
        process.kill()  # one that didn't heed it would go on for long
    assert process.returncode == 128 + getattr(signal, name)
    batches = runs.load_checkpoint(runs.Run(tmp_path / "run").checkpoint)["batches"]
    said = f"fmicl: stopped after batch {batches} of 25000; the same command with --resume goes on from there"
    told = ["", "stopping after this step, with a checkpoint; Ctrl-C again stops at once"] if name == "SIGINT" else []
    assert error.splitlines() == [*told, said]


def test_a_run_has_one_process_that_trains_in_it(tmp_path: Path) -> None:
    process = start(tmp_path / "run")
    try:
        words = ["--device", "cpu", "--resume", "--out", str(tmp_path / "run")]
        command = [sys.executable, "-m", "fmicl", "train", "digits", *words]
        second = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert second.returncode == 2
        assert second.stderr == (
            f"fmicl: error: another process is training in {tmp_path / 'run'}: "
            "wait for it, end it first, or take another --out\n"
        )
    finally:
        process.kill()
        process.communicate()
    recipe = runs.read_recipe(runs.Run(tmp_path / "run"))[1]
    with training.open_folder(recipe, "digits", None, runs.Run(tmp_path / "run"), "cpu", {}, lambda _: ""):
        pass  # what was killed holds nothing


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.usefixtures("only_training")
def test_ctrl_c_outside_of_training_tells_of_this_run_only(
    resume: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.chdir(tmp_path)
    words = ["train", "digits", "--device", "cpu", "--epochs", "1", *(["--resume"] if resume else [])]
    with monkeypatch.context() as patch:
        patch.setattr(training, "evaluate_run", interrupted)
        assert cli.main(["train", "digits", "--device", "cpu", "--epochs", "1"]) == 130
    left = "fmicl: stopped; the same command with --resume goes on from the last checkpoint in runs/digits-001\n"
    assert capsys.readouterr().err == left
    monkeypatch.setattr(training, "load_splits", interrupted)  # before this command has a run
    assert cli.main(words) == 130
    nothing = "fmicl: stopped; nothing was saved yet: the same command starts again\n"
    assert capsys.readouterr().err == (left if resume else nothing)


@pytest.mark.parametrize("whole", [True, False])
def test_several_processes_stop_together(whole: bool, tmp_path: Path) -> None:
    """By a terminal's Ctrl-C, which reaches all of them, or by a scheduler's SIGTERM to the first."""
    process = start(tmp_path / "run", "--devices", "2", "--hidden", "32")
    if whole:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGTERM)
    error = process.communicate(timeout=60)[1]  # which all of them have closed then
    assert process.returncode == (130 if whole else 143), error
    batches = runs.load_checkpoint(runs.Run(tmp_path / "run").checkpoint)["batches"]
    assert error.count("stopped after") == error.count(f"stopped after batch {batches} of 25000") == 1
    assert "Traceback" not in error


def test_resume_refuses_other_settings_and_takes_another_machine(tmp_path: Path) -> None:
    train(digits(epochs=1), out=tmp_path / "run")
    with pytest.raises(ValueError, match="epochs was 1, is now 2; seed was 0, is now 1"):
        train(digits(epochs=2, seed=1), out=tmp_path / "run", resume=True)
    with pytest.raises(ValueError, match=r"with these: size was 8, is now 16$"):
        train(digits(epochs=1, size=16), out=tmp_path / "run", resume=True)
    assert train(digits(epochs=1, workers=1, checkpoint_minutes=3), out=tmp_path / "run", resume=True) is not None


def test_resume_starts_where_nothing_is_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run = train(digits(epochs=1), name="digits", resume=True)
    assert run is not None
    assert run.path == Path("runs/digits-001")
    again = train(digits(epochs=1), name="digits", resume=True)
    assert again is not None
    assert again.path == run.path
    other = train(digits(epochs=1), name="digits")
    assert other is not None
    assert other.path == Path("runs/digits-002")


def test_a_damaged_checkpoint_says_so(tmp_path: Path) -> None:
    run = train(digits(epochs=1), out=tmp_path / "run")
    assert run is not None
    run.checkpoint.write_bytes(run.checkpoint.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"last\.ckpt can't be read"):
        train(digits(epochs=1), out=tmp_path / "run", resume=True)


@pytest.mark.usefixtures("only_training")
def test_a_run_that_begins_where_it_was_to_go_on_says_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = small("digits", None, epochs=1, baselines=False, monitor_every=0)
    run = train(recipe, out=tmp_path / "typo", resume=True)
    assert run is not None
    assert "typo: there was no run to go on with, so it starts from the beginning" in capsys.readouterr().out
    run.checkpoint.unlink()
    for left in (run.results, run.encoder_config):
        left.unlink(missing_ok=True)
    train(recipe, out=tmp_path / "typo", resume=True)
    assert "typo: it has no checkpoint yet, so it starts from the beginning" in capsys.readouterr().out
