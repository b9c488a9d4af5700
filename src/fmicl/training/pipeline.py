"""From a recipe to a run folder: data, encoder, method and trainer put together, trained, evaluated and shown.

This is what the command line calls, and stands beside it: it may import from every room, the report's included, and
none but the command line from it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn

from fmicl.config.recipes import RECIPES, Recipe
from fmicl.config.settings import Settings
from fmicl.data import (
    Skipped,
    Splits,
    Stream,
    ViewStream,
    describe_change,
    describe_splits,
    fingerprint,
    summarise_skipped,
)
from fmicl.methods import Method
from fmicl.models.vision import encoder_specific_options
from fmicl.runs.export import EncoderConfig, export
from fmicl.runs.folder import (
    COPY_IT,
    Run,
    check_place,
    new_run,
    old_run,
    read_fingerprint,
    read_settings,
    remove_halves,
    write_settings,
)
from fmicl.training.building import build_method, build_recipe_encoder, rotation_divergence
from fmicl.training.callbacks import Guard, Recorder
from fmicl.training.checkpoints import Checkpoints, RemainingBatches
from fmicl.training.image_evaluation import evaluate_run, knn_monitor, load_splits
from fmicl.training.memory import check_memory, explained
from fmicl.training.objectives import build_objective, collapse_advice, overweight
from fmicl.training.processes import Processes, check_batch, resolve_processes
from fmicl.training.progress import Progress
from fmicl.training.signals import Signals, Stopped, what_is_left
from fmicl.utils.device import pick_device
from fmicl.utils.files import check_writable
from fmicl.utils.locks import LOCK_NAME, lock_folder


def train(recipe: Recipe, *, name: str = "run", out: Path | None = None, resume: bool = False) -> Run | None:
    """Train an encoder by a recipe, evaluate it, and write the page.

    Args:
        recipe: all settings.
        name: name of the recipe; the run folder is ``runs/<name>-001`` or the next free number.
        out: another folder for the run. It must not exist, unless the run is resumed.
        resume: go on with the run in ``out``, or with the newest of this name, to the same end as if it had never
            been cut off. Where nothing has been written yet, start.

    Returns:
        The run; None on all processes but the first, where several train together.

    Raises:
        FileExistsError: ``out`` exists.
        ValueError: settings that don't go together, a batch that doesn't fit into memory, or a resumed run that was
            started with others.
        fmicl.training.callbacks.NonFiniteError: the loss is not finite; the last good checkpoint is kept.
        fmicl.training.signals.Stopped: by Ctrl-C, SIGTERM or SIGHUP in training, which leave a checkpoint; a KeyboardInterrupt.
    """
    with quiet_lightning(), contextlib.ExitStack() as held:
        device, processes = pick_device(recipe.device), resolve_processes(recipe)
        if processes.rank == 0 and not resume:
            check_place(out)  # now, and not when the data has been read
        check_batch(recipe, processes.world_size)
        torch.manual_seed(recipe.seed)  # the same weights on all processes, and in all runs with this seed
        build_objective(recipe)  # wrong settings are found before data is read and a folder made
        rotation_divergence(recipe)
        encoder = build_recipe_encoder(recipe)
        splits = load_splits(recipe, say if processes.rank == 0 else None)
        stream = _stream(recipe, splits, device, processes)
        old = old_run(name, out) if resume else None
        changed = functools.partial(describe_change, splits=splits)
        if old is not None and old.finished:  # all processes see this, and none of them waits for another
            check_same(old, recipe, changed)
            if processes.rank == 0:
                say(f"the run in {old.path} has ended already")
            return old if processes.rank == 0 else None
        method = build_method(recipe, encoder, len(stream))
        shape = (len(recipe.views.mean), recipe.views.size, recipe.views.size)
        check_fits(recipe, method, lambda n: torch.rand(n, *shape), device, processes)
        run = None
        if processes.rank == 0:
            run = held.enter_context(open_folder(recipe, name, out, old, str(device), fingerprint(splits), changed))
            say(beginning(run, old, resume))
            say(describe_splits(splits))
            usual = RECIPES[name].recipe if name in RECIPES else Recipe(dataset=recipe.dataset)
            report_unused(recipe, usual)
            _report_unused_by(encoder, recipe, usual)
            report_overweight(recipe, recipe.dim)
        guard = Guard(describe(method), None if run is None else run.checkpoint)
        recorder = Recorder(
            run,
            len(stream),
            monitor=knn_monitor(recipe, splits, device) if run is not None else None,
            monitor_every=recipe.monitor_every,
            advice=collapse_advice(recipe, recipe.dim),
            say=say,
            guard=guard,
        )
        fit(recipe, method, stream, run, device, processes, resume, recorder, guard)
        if run is None:
            return None
        config = EncoderConfig.of(recipe, int(encoder.num_features))  # type: ignore[arg-type]
        export(run, method.encoder, method.projection, config)
        say("trained; now k-NN and a linear probe" if splits.test is not None else "trained; now its geometry")
        evaluate_run(run, splits=splits, device=recipe.device, workers=recipe.workers, say=say)
        from fmicl.runs.report import write_report

        write_report(run.path)
        return run


def _stream(recipe: Recipe, splits: Splits, device: torch.device, processes: Processes) -> ViewStream:
    return ViewStream(
        splits.pretrain,
        recipe.view_pair,
        recipe.batch_size // processes.world_size,
        seed=recipe.seed,
        device=device,
        rank=processes.rank,
        world_size=processes.world_size,
        workers=recipe.workers,
        multiplicity=recipe.multiplicity,
        compile=_compiled(recipe, device),
        report=_report_broken,
    )


def _compiled(recipe: Settings, device: torch.device) -> bool:
    return recipe.compile == "on" or (recipe.compile == "auto" and device.type == "cuda")


def check_fits(
    recipe: Settings, method: Method, views: Callable[[int], Tensor], device: torch.device, processes: Processes
) -> None:
    """Refuse a batch that would end the run without a word: see :func:`fmicl.training.memory.check_memory`.

    GPUs say so themselves, and what a compiled network keeps is the compiler's choice.
    """
    if device.type == "cpu" and not _compiled(recipe, device):
        check_memory(recipe, method, views, processes, half=resolve_precision(recipe, device) == "bf16-mixed")


def beginning(run: Run, old: Run | None, resume: bool) -> str:
    """In words, whether a run goes on or begins, and why it begins where it was to go on."""
    if run.checkpoint.exists():
        return f"going on in {run.path}"
    if not resume:
        return f"run folder {run.path}"
    why = "there was no run to go on with" if old is None else "it has no checkpoint yet"
    return f"run folder {run.path}: {why}, so it starts from the beginning"


@contextlib.contextmanager
def open_folder(
    recipe: Settings,
    name: str,
    out: Path | None,
    old: Run | None,
    device: str,
    data: dict[str, Any],
    changed: Callable[[dict[str, Any] | None], str],
) -> Iterator[Run]:
    """The folder to go on in, or a new one, held so that no other process trains in it.

    Of several processes that train together, the first one alone calls this. See :func:`check_same` for the last two
    arguments.

    Raises:
        ValueError: it is no run to resume, or another process trains in it.
        PermissionError: nothing can be written there.
        Stopped: Ctrl-C came before or after the training itself.
    """
    if old is not None and old.settings.exists():
        check_same(old, recipe, changed)
    elif old is not None and any(path.name != LOCK_NAME for path in old.path.iterdir()):
        raise ValueError(f"{old.path} holds files but no settings.json: it is not a run to resume")
    if old is not None:
        check_writable(old.path, COPY_IT)
    run = old or new_run(name, out)
    taken = f"another process is training in {run.path}: wait for it, end it first, or take another --out"
    with lock_folder(run.path, taken):
        if run.settings.exists():
            remove_halves(run)
        else:
            write_settings(run, name, recipe, device, data)
        try:
            yield run
        except Stopped:
            raise
        except KeyboardInterrupt:
            raise Stopped(what_is_left(run)) from None


def check_same(run: Run, recipe: Settings, changed: Callable[[dict[str, Any] | None], str]) -> None:
    """A resumed run must compute what it was started to compute, from the same data.

    Args:
        run: the run.
        recipe: what it is to go on with.
        changed: says in words how the data differs from a fingerprint; "" where it doesn't.

    Raises:
        ValueError: settings differ that are not the machine's, or the data does.
    """
    others = recipe.differences(read_settings(run, type(recipe)))
    if others:
        raise ValueError(f"{run.path} was started with other settings, so it can't be resumed with these: {others}")
    changed_data = changed(read_fingerprint(run))
    if changed_data:
        raise ValueError(
            f"the data has changed since {run.path} was started, so it can't be resumed: {changed_data}. "
            f"Put the data back as it was, or start a new run"
        )


def fit(
    recipe: Settings,
    method: Method,
    stream: Stream,
    run: Run | None,
    device: torch.device,
    processes: Processes,
    resume: bool,
    recorder: Recorder,
    guard: Guard,
    unit: str = "images",
) -> None:
    """The training itself; afterwards the method holds the trained weights.

    Raises:
        Stopped: by Ctrl-C, SIGTERM or SIGHUP; a checkpoint is left, unless a second Ctrl-C came before it was written.
        fmicl.training.memory.DoesNotFitError: the memory ran out.
    """
    epoch = len(stream)
    remaining = RemainingBatches(stream, method, recipe.epochs)
    images = isinstance(recipe, Recipe)
    signals = Signals(tell=run is not None)
    checkpoints = Checkpoints(
        run,
        recorder,
        guard,
        signals,
        resume=resume,
        batches_per_epoch=epoch,
        total=remaining.total,
        minutes=recipe.checkpoint_minutes,
        steps=recipe.checkpoint_steps,
    )
    callbacks = [guard, recorder, checkpoints]
    if run is not None:
        live = sys.stdout.isatty()
        callbacks.append(Progress(remaining.total, epoch, recipe.batch_size, say=say, live=live, unit=unit))
    if device.type == "cuda":
        if images:
            method.channels_last = True
            method.to(memory_format=torch.channels_last)
        torch.set_float32_matmul_precision("high")
    several = processes.world_size > 1
    if several and device.type == "cuda" and getattr(recipe, "sync_batchnorm", True):  # torch has it for GPUs alone
        method.share_statistics()
    if _compiled(recipe, device):
        method.compile_parts(device, alone=not several)
    trainer = Trainer(
        accelerator="gpu" if device.type == "cuda" else device.type,
        devices=processes.devices,
        num_nodes=processes.nodes,
        # Each process keeps its own buffers: training uses no running statistics but those that are taken over all
        # processes (fmicl.models.norms), and the queue, which all hold alike, needn't be sent about.
        strategy=DDPStrategy(broadcast_buffers=False, gradient_as_bucket_view=True) if several else "auto",
        plugins=list(processes.plugins) or None,
        precision=resolve_precision(recipe, device),
        max_epochs=1,  # one long pass: see fmicl.training.callbacks
        accumulate_grad_batches=recipe.accumulate,
        gradient_clip_val=recipe.clip or None,
        use_distributed_sampler=False,
        callbacks=callbacks,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    try:
        with explained(recipe):
            trainer.fit(method, remaining)
    except SystemExit as exit_:  # which Lightning makes of a second Ctrl-C, or of one before the first batch
        words = "" if run is None else what_is_left(run)
        raise Stopped(words, signals.noted or signal.SIGINT) from exit_
    except OSError as error:
        if run is None or run.settings.exists():
            raise
        raise FileNotFoundError(f"{run.path} was moved or deleted while the run trained in it") from error
    finally:
        signals.leave()
    if checkpoints.stopped or signals.noted:
        words = f"stopped after batch {method.batches} of {remaining.total}; the same command with --resume goes on "
        raise Stopped("" if run is None else f"{words}from there", signals.noted or signal.SIGTERM)


def resolve_precision(recipe: Settings, device: torch.device) -> Literal["32-true", "bf16-mixed"]:
    """bf16 mixed precision where it was asked for, or where the GPU has it."""
    if recipe.precision == "auto":
        return "bf16-mixed" if device.type == "cuda" and torch.cuda.is_bf16_supported() else "32-true"
    return "bf16-mixed" if recipe.precision == "bf16" else "32-true"


def describe(method: Method) -> str:
    """Method and objective with all settings, in one line."""
    turned = "" if method.rotation is None else f" and Rotation({method.rotation.extra_repr()})"
    return f"{type(method).__name__} with {type(method.objective).__name__}({method.objective.extra_repr()}){turned}"


def _report_broken(broken: Sequence[Skipped]) -> None:
    """Of files that passed the look at their header and end; each process tells what it has met."""
    files = summarise_skipped(broken)
    say(f"warning: {len(broken)} image(s) can't be decoded, others are trained on in their place: {files}")


def report_unused(recipe: Settings, default: Settings) -> None:
    """Of what was asked for, other than the default, and has no effect."""
    unused, because = recipe.without_part(default), recipe.because()
    for name in unused:
        if name in because:
            say(f"warning: {name} has no part {because[name]}")
    unused = [name for name in unused if name not in because]
    if unused:
        listed, have = ", ".join(unused), "have" if len(unused) > 1 else "has"
        say(f"warning: {listed} {have} no part in objective {recipe.objective} with method {recipe.method}")


def _report_unused_by(encoder: nn.Module, recipe: Recipe, default: Recipe) -> None:
    """The same of settings that only some encoders have."""
    without = {"stem", "stable_vit"} - encoder_specific_options(encoder)
    unused = [name for name in sorted(without) if getattr(recipe, name) != getattr(default, name)]
    if unused:
        say(f"warning: {', '.join(unused)} {'have' if len(unused) > 1 else 'has'} no part in encoder {recipe.encoder}")


def report_overweight(recipe: Settings, dim: int) -> None:
    """Of negatives that push so hard that the run may fail."""
    line = overweight(recipe, dim)
    if line:
        say(f"warning: {line}")


def say(line: str) -> None:
    """A line for whoever watches."""
    print(line, flush=True)


@contextlib.contextmanager
def quiet_lightning() -> Iterator[None]:
    """Lightning's notes about hardware and its tips say nothing that this run's own lines don't."""
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
