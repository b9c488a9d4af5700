"""Checkpoints of a training run, and resumption from them."""

# Lightning calls hooks with more arguments than most of them need.
# ruff: noqa: ARG002
from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

from fmicl.models.weights import load_weights
from fmicl.runs.folder import Run
from fmicl.training.callbacks import FiniteLossCheck, MetricsLogger
from fmicl.training.module import TrainingModule
from fmicl.training.signals import StopSignals
from fmicl.utils.files import write_atomically

if TYPE_CHECKING:
    from fmicl.data import Batch, Stream

SHORTEST_INTERVAL = 60.0
"""Seconds between two checkpoints at ends of epochs, so that short epochs don't spend their time writing."""


def save_checkpoint(path: Path, state: dict[str, Any]) -> None:
    """Write a checkpoint, whole or not at all."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:  # a file raises what is wrong, a path torch's own error
            torch.save(state, file)

    write_atomically(path, write)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint: tensors and plain values only, no pickled objects.

    Raises:
        ValueError: the file is damaged.
    """
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises a handful of unrelated types for damaged files
        raise ValueError(f"the checkpoint {path} can't be read ({error}); remove it to start this run again") from error
    missing = {"batches", "method", "metrics", "optimizer"} - (state.keys() if isinstance(state, dict) else set())
    if missing:
        raise ValueError(
            f"the checkpoint {path} is not a run's state: it has no {', '.join(sorted(missing))}; remove it to start "
            "this run again"
        )
    return state


class RemainingBatches:
    """The remaining batches of a run, as one pass over several epochs.

    The start is read from ``module.batches`` when the pass begins, and so after a checkpoint was loaded.
    """

    def __init__(self, stream: Stream, module: TrainingModule) -> None:
        self.stream, self.module = stream, module

    def __len__(self) -> int:
        return self.module.optimisation.total_batches - self.module.batches

    def __iter__(self) -> Iterator[Batch]:
        first, batch = divmod(self.module.batches, len(self.stream))
        for epoch in range(first, self.module.optimisation.total_batches // len(self.stream)):
            self.stream.set_position(epoch, batch if epoch == first else 0)
            yield from self.stream


class Checkpointer(Callback):
    """Write the whole state of the run between two steps, and read it back.

    A checkpoint is due at the end of an epoch (if the last one is a minute old), after ``minutes``, after ``steps``,
    and at the end; always between two steps, when no gradient is partly accumulated. If any process received a stop
    signal, all of them stop there after one more checkpoint.

    Args:
        module: what is trained.
        run: the folder, or None on all processes but the first.
        metrics: its rows are part of the state.
        finite: checked before a checkpoint is written.
        signals: whether the run is to stop.
        resume: continue from the checkpoint in the folder, if there is one.
        minutes: longest time between two checkpoints.
        steps: longest distance between two checkpoints; 0 is no limit.
    """

    def __init__(
        self,
        module: TrainingModule,
        run: Run | None,
        metrics: MetricsLogger,
        finite: FiniteLossCheck,
        signals: StopSignals,
        *,
        resume: bool,
        minutes: float,
        steps: int,
    ) -> None:
        self.module, self.run, self.metrics, self.finite, self.signals = module, run, metrics, finite, signals
        self.resume, self.minutes, self.steps = resume, minutes, steps
        self._optimizer: dict[str, Any] | None = None
        self._last = time.monotonic()
        self._last_step = 0
        self.stopped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the checkpoint: the first process reads it and broadcasts it to the others."""
        state = None
        if self.resume and self.run is not None and self.run.checkpoint.exists():
            state = load_checkpoint(self.run.checkpoint)
        state = trainer.strategy.broadcast(state)
        if state is None:
            return
        load_weights(self.module.method, state["method"], "the checkpoint", "this run's method")
        self.module.batches = int(state["batches"])
        self.metrics.restore(state["metrics"])
        self._optimizer = state["optimizer"]
        self._last_step = self.module.step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimiser exists only now."""
        if self._optimizer is not None:
            trainer.optimizers[0].load_state_dict(self._optimizer)
            self._optimizer = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Replace Lightning's handler of SIGTERM, which would communicate with other processes at any moment."""
        self.signals.install()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Write a checkpoint if one is due, and stop if a signal came."""
        module, optimisation = self.module, self.module.optimisation
        done = module.batches == optimisation.total_batches
        if module.batches % optimisation.accumulate and not done:
            return
        self.stopped = trainer.strategy.reduce_boolean_decision(self.signals.received is not None, all=False)
        age = time.monotonic() - self._last
        due = self.steps > 0 and module.step - self._last_step >= self.steps
        due |= module.batches % optimisation.batches_per_epoch == 0 and age > SHORTEST_INTERVAL
        if self.run is not None and (done or due or self.stopped or age > 60 * self.minutes):
            self.write(trainer)
        if self.stopped:
            trainer.strategy.barrier()  # launchers kill all processes when one exits: the file must be complete before
            trainer.should_stop = True

    def write(self, trainer: Trainer) -> None:
        """Write a checkpoint now.

        Raises:
            NonFiniteError: a weight is not finite; the checkpoint before is kept.
        """
        assert self.run is not None
        self.finite.check()
        state = {
            "format": 1,
            "batches": self.module.batches,
            "method": self.module.method.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "metrics": self.metrics.state(),
        }
        save_checkpoint(self.run.checkpoint, state)
        self._last, self._last_step = time.monotonic(), self.module.step
