"""The training pipeline: from settings to a run folder, for images and text alike."""

from __future__ import annotations

import contextlib
import logging
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy

from fmicl.config import OptimisationOptions, Settings
from fmicl.runs.folder import (
    READ_ONLY_HINT,
    Run,
    check_new_run,
    create_run,
    find_run,
    keep_results,
    remove_temporary_files,
)
from fmicl.runs.report import write_report
from fmicl.runs.settings import extend_settings, read_fingerprint, read_settings, write_settings
from fmicl.training.callbacks import FiniteLossCheck, MetricsLogger
from fmicl.training.checkpoints import Checkpointer, RemainingBatches
from fmicl.training.memory import check_memory, explain_out_of_memory
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.training.processes import check_batch, find_processes
from fmicl.training.progress import ProgressDisplay
from fmicl.training.signals import StopSignals, how_to_continue
from fmicl.training.tasks import Context, Monitor, Task, task_class
from fmicl.utils.device import pick_device
from fmicl.utils.errors import DiskFullError, Stopped
from fmicl.utils.files import check_writable, explain_full_disk, is_disk_full
from fmicl.utils.locks import LOCK_NAME, lock_folder


def train(settings: Settings, *, out: Path | None = None, resume: bool = False) -> Run | None:
    """Train an encoder, export and evaluate it, and write the report.

    Args:
        settings: all options, such as ``recipe("cifar10", divergence="js")`` gives.
        out: folder for the run, which must not exist unless the run is resumed; None is ``runs/<recipe>-001`` or the
            next free number.
        resume: continue the run in ``out``, or the newest of this recipe, to the same end as if it had never been
            interrupted. If nothing has been written yet, start. With more epochs than the run had, it goes on for
            these, finished or not: from there on with the learning rates of a run of the new length.

    Returns:
        The run; None on all processes but the first, if several train together.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError: data, or a model, that isn't there.
        ValueError: settings that don't go together, a batch that doesn't fit into memory, or a resumed run that was
            started with other settings or data.
        NonFiniteError: the loss is not finite; the last good checkpoint is kept.
        DiskFullError: the disk is full; the last checkpoint is kept.
        Stopped: by Ctrl-C, SIGTERM or SIGHUP, which leave a checkpoint; a KeyboardInterrupt.
    """
    with quiet_lightning(), contextlib.ExitStack() as stack:
        device, processes = pick_device(settings.device), find_processes(settings.devices)
        main = processes.rank == 0
        if main and not resume:
            check_new_run(out)  # before the data is read, which may take minutes
        kind = task_class(settings.task.name)
        old = find_run(settings.recipe, out) if resume else None
        before = None if old is None or not old.settings.exists() else read_settings(old, settings.task.name)
        if before is not None and settings.unresolved:  # keep what was chosen when the run started
            settings = kind.resolve_as(settings, before)
        settings = kind.resolve(settings, device, say if main else lambda _: None)
        check_batch(settings, processes.world_size)
        kind.check(settings)
        fresh = old is None or not old.checkpoint.exists()
        compiled = settings.compile == "on" or (settings.compile == "auto" and device.type == "cuda")
        context = Context(device, processes, say if main else lambda _: None, compiled, fresh)
        torch.manual_seed(settings.seed)  # the same weights on all processes, and in all runs with this seed
        task = kind(settings, context)
        longer = before is not None and settings.epochs > before.epochs
        if old is not None and old.finished and not longer:  # all processes see this, and none waits for another
            check_same(old, settings, task)
            context.say(f"the run in {old.path} is finished already")
            return old if main else None
        module = TrainingModule(task.build_method(), Optimisation.of(settings[OptimisationOptions], len(task.stream)))
        precision = resolve_precision(settings, device)
        if device.type == "cpu" and not compiled:  # a GPU raises an error; a compiled network saves other tensors
            check_memory(
                task.batch_description(), module.method, task.example_views, processes,
                optimizer=settings.optimizer, bf16=precision == "bf16-mixed",
            )  # fmt: skip
        run = None
        if main:
            if old is not None and before is not None and longer:
                check_extension(old, before, task)
            run = stack.enter_context(open_folder(settings, task, out, old, before if longer else None))
            say(start_line(run, old, resume))
            for line in (*task.start_lines(), *settings_warnings(settings, task.embedding_dim())):
                say(line)
        monitor = task.monitor() if main else Monitor()
        fit(settings, task, module, run, monitor, resume=resume, precision=precision)
        if run is None:
            return None
        task.finish(run, module.method, monitor)
        write_report(run.path)
        return run


def start_line(run: Run, old: Run | None, resume: bool) -> str:
    """The first line of output: whether the run continues or starts, and why it starts in spite of --resume."""
    if run.checkpoint.exists():
        return f"continuing in {run.path}"
    if not resume:
        return f"run folder {run.path}"
    why = "there was no run to continue" if old is None else "it has no checkpoint yet"
    return f"run folder {run.path}: {why}, so it starts from the beginning"


def settings_warnings(settings: Settings, dim: int) -> list[str]:
    """Warnings about options without effect, and about what is known to fail."""
    found = [f"warning: {name} has no effect: {reason}" for name, reason in settings.unused().items()]
    context = settings.objective_context(dim)
    return found + [f"warning: {line}" for line in settings.objective_options.warnings(context)]


@contextlib.contextmanager
def open_folder(
    settings: Settings, task: Task, out: Path | None, old: Run | None, shorter: Settings | None = None
) -> Iterator[Run]:
    """The folder to continue in, or a new one, locked so that no other process trains in it.

    Args:
        settings: of this run.
        task: what it is trained on.
        out: the folder, if it is new; None for a numbered one.
        old: the run to continue.
        shorter: the settings that it had, if it now goes on for more epochs.

    Raises:
        ValueError: it is not a run to resume, or another process trains in it.
        PermissionError: nothing can be written there.
        DiskFullError: the disk is full; the message says what is left of the run.
        Stopped: Ctrl-C came before or after the training itself.
    """
    if old is not None and old.settings.exists():
        check_same(old, settings if shorter is None else settings.replace(epochs=shorter.epochs), task)
    elif old is not None and any(path.name != LOCK_NAME for path in old.path.iterdir()):
        raise ValueError(f"{old.path} holds files but no settings.json: it is not a run to resume")
    if old is not None:
        check_writable(old.path, READ_ONLY_HINT)
    run = old or create_run(settings.recipe, out)
    taken = f"another process is training in {run.path}: wait for it, end it first, or take another --out"
    with lock_folder(run.path, taken):
        if run.settings.exists():
            remove_temporary_files(run)
            if shorter is not None:
                extend_run(run, settings, shorter, task)
        else:
            write_settings(run, settings, str(task.context.device), task.fingerprint())
        try:
            with explain_full_disk(run.path), _quiet_threads(run.path):
                yield run
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise Stopped(how_to_continue(run)) from None
        except DiskFullError as error:
            raise DiskFullError(f"{error}. Free some space; {how_to_continue(run, stopped=False)}") from error


@contextlib.contextmanager
def _quiet_threads(folder: Path) -> Iterator[None]:
    """Suppress tracebacks of threads that fail because the disk is full: TensorBoard raises in the main thread too."""
    before = threading.excepthook

    def hook(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_value is None or not is_disk_full(arguments.exc_value, folder):
            before(arguments)

    threading.excepthook = hook
    try:
        yield
    finally:
        threading.excepthook = before


def check_extension(run: Run, before: Settings, task: Task) -> None:
    """Refuse more epochs for a run that can't be continued after its last one.

    Raises:
        ValueError: it is finished and has no checkpoint any more, or its last step had fewer batches than the others.
    """
    if run.finished and not run.checkpoint.exists():
        raise ValueError(f"{run.path} can't go on: its checkpoint {run.checkpoint} is gone. Start a new run")
    if before.epochs * len(task.stream) % before.accumulate:
        raise ValueError(
            f"{run.path} can't go on: its last step had fewer batches than --accumulate {before.accumulate}. "
            "Start a new run with more epochs"
        )


def extend_run(run: Run, settings: Settings, before: Settings, task: Task) -> None:
    """Extend a run, finished or not, to more epochs; its results and page so far are kept under other names."""
    kept = keep_results(run, before.epochs)
    extend_settings(run, settings, str(task.context.device))
    names = f" {' and '.join(path.name for path in kept)} are kept; its encoder is replaced at the end." if kept else ""
    say(
        f"going on to {settings.epochs} epochs, where there were {before.epochs}: from here on with the learning rates "
        f"of a run of {settings.epochs}, so the end is not the same as of one that had them from the start.{names}"
    )


def check_same(run: Run, settings: Settings, task: Task) -> None:
    """Refuse to resume a run with settings that compute something else, or with other data.

    Raises:
        ValueError: options differ that change the result, or the data does.
    """
    others = settings.differences(read_settings(run, settings.task.name))
    if others:
        raise ValueError(f"{run.path} was started with other settings, so it can't be resumed with these: {others}")
    changed = task.data_changes(read_fingerprint(run))
    if changed:
        raise ValueError(
            f"the data has changed since {run.path} was started, so it can't be resumed: {changed}. "
            f"Restore the data, or start a new run"
        )


def fit(
    settings: Settings,
    task: Task,
    module: TrainingModule,
    run: Run | None,
    monitor: Monitor,
    *,
    resume: bool,
    precision: Literal["32-true", "bf16-mixed"],
) -> None:
    """The training itself; afterwards the method has the trained weights.

    Raises:
        Stopped: by Ctrl-C, SIGTERM or SIGHUP; a checkpoint is left, unless a second Ctrl-C came before it was written.
        BatchTooLargeError: the memory ran out.
    """
    device, processes = task.context.device, task.context.processes
    signals = StopSignals(announce=run is not None)
    finite = FiniteLossCheck(module, None if run is None else run.checkpoint)
    advice = settings.objective_options.collapse_advice(settings.objective_context(task.embedding_dim()))
    metrics = MetricsLogger(
        module, run, every=task.row_batches, monitor=monitor, collapse_advice=advice, say=say, finite=finite
    )
    checkpointer = Checkpointer(
        module, run, metrics, finite, signals,
        resume=resume, minutes=settings.checkpoint_minutes, steps=settings.checkpoint_steps,
    )  # fmt: skip
    callbacks: list[Any] = [finite, metrics, checkpointer]
    if run is not None:
        callbacks.append(
            ProgressDisplay(module, settings.batch_size, say=say, live=sys.stdout.isatty(), unit=task.unit)
        )
    if device.type == "cuda":
        if task.channels_last:
            module.channels_last = True
            module.to(memory_format=torch.channels_last)
        torch.set_float32_matmul_precision("high")
    several = processes.world_size > 1
    if several and device.type == "cuda" and task.synchronise_batchnorm:  # torch implements it for GPUs only
        module.synchronise_batchnorm()
    if task.context.compiled:
        module.accelerate(device, one_process=not several)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=processes.devices,
        num_nodes=processes.nodes,
        # Each process keeps its own buffers: training uses no running statistics but those that are taken over all
        # processes (fmicl.models.norms), and the queue is the same on all of them.
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True) if several else "auto",
        plugins=list(processes.plugins) or None,
        precision=precision,
        max_epochs=1,  # one long pass: see fmicl.training.callbacks
        accumulate_grad_batches=settings.accumulate,
        gradient_clip_val=settings.clip or None,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        with explain_out_of_memory(task.batch_description(), task.memory_hint):
            trainer.fit(module, RemainingBatches(task.stream, module))
    except SystemExit as exit_:  # Lightning's answer to a second Ctrl-C, or to one before the first batch
        message = "" if run is None else how_to_continue(run)
        raise Stopped(message, signals.received or signal.SIGINT) from exit_
    except OSError as error:
        if run is None or run.settings.exists():
            raise
        raise FileNotFoundError(f"{run.path} was moved or deleted while the run trained in it") from error
    finally:
        signals.restore()
    if checkpointer.stopped or signals.received:
        done = f"stopped after batch {module.batches} of {module.optimisation.total_batches}"
        message = f"{done}; the same command with --resume continues from there"
        raise Stopped("" if run is None else message, signals.received or signal.SIGTERM)


def resolve_precision(settings: Settings, device: torch.device) -> Literal["32-true", "bf16-mixed"]:
    """bf16 mixed precision if it was asked for, or by default if the GPU supports it."""
    if settings.precision == "auto":
        return "bf16-mixed" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    return "bf16-mixed" if settings.precision == "bf16" else "32-true"


def say(line: str) -> None:
    """Print a line at once."""
    print(line, flush=True)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Silence Lightning's notes about hardware and its tips."""
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "lightning")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module="lightning")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
