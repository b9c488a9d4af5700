"""What lets a training run go on where it was: its checkpoints, and the batches that are still to come."""

# Lightning calls hooks with more arguments than most of them need.
# ruff: noqa: ARG002
from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fmicl.methods import Method
from fmicl.runs.folder import Run, load_checkpoint, save_checkpoint
from fmicl.training.callbacks import Guard, Recorder
from fmicl.training.signals import Signals

if TYPE_CHECKING:
    from fmicl.data import Batch, Stream

SHORTEST_INTERVAL = 60.0
"""Seconds between two checkpoints at ends of epochs, so that short epochs don't spend their time writing."""


class RemainingBatches:
    """The batches of a run that are still to come, as one pass over several epochs.

    Its start is read from ``method.batches`` when the pass begins, and so after a checkpoint was loaded.
    """

    def __init__(self, stream: Stream, method: Method, epochs: int) -> None:
        self.stream, self.method = stream, method
        self.total = epochs * len(stream)

    def __len__(self) -> int:
        return self.total - self.method.batches

    def __iter__(self) -> Iterator[Batch]:
        start = self.method.batches
        first, batch = divmod(start, len(self.stream))
        for epoch in range(first, self.total // len(self.stream)):
            self.stream.set_position(epoch, batch if epoch == first else 0)
            yield from self.stream


class Checkpoints(Callback):
    """Write the whole state of the run between two steps, and read it back.

    A checkpoint is due at the end of an epoch (if the last one is a minute old), after ``minutes``, after
    ``steps``, and at the end. It is always between two steps, when no gradient is half accumulated. Where a signal
    was noted, by any of the processes, all of them stop there after one more checkpoint.

    Args:
        run: the folder, or None on all processes but the first.
        recorder: its rows are part of the state.
        guard: asked before a checkpoint is written.
        signals: whether the run is to stop.
        resume: go on from the checkpoint in the folder, if there is one.
        batches_per_epoch: length of an epoch.
        total: batches of the run.
        minutes: longest time between two checkpoints.
        steps: longest distance between two checkpoints; 0 is no limit.
    """

    def __init__(
        self,
        run: Run | None,
        recorder: Recorder,
        guard: Guard,
        signals: Signals,
        *,
        resume: bool,
        batches_per_epoch: int,
        total: int,
        minutes: float,
        steps: int,
    ) -> None:
        self.run, self.recorder, self.guard, self.signals = run, recorder, guard, signals
        self.resume, self.batches_per_epoch, self.total = resume, batches_per_epoch, total
        self.minutes, self.steps = minutes, steps
        self._optimizer: dict[str, Any] | None = None
        self._last = time.monotonic()
        self._last_step = 0
        self.stopped = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load what is there: the first process reads, the others hear of it."""
        assert isinstance(pl_module, Method)
        state = None
        if self.resume and self.run is not None and self.run.checkpoint.exists():
            state = load_checkpoint(self.run.checkpoint)
        state = trainer.strategy.broadcast(state)
        if state is None:
            return
        pl_module.load_state_dict(state["method"])
        pl_module.batches = int(state["batches"])
        self.recorder.restore(state["record"])
        self._optimizer = state["optimizer"]
        self._last_step = pl_module.step

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """The optimiser exists only now."""
        if self._optimizer is not None:
            trainer.optimizers[0].load_state_dict(self._optimizer)
            self._optimizer = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """In the place of Lightning's handler of SIGTERM: that one talks to the other processes wherever it comes."""
        self.signals.listen()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Write a checkpoint if one is due, and stop if that was asked for."""
        assert isinstance(pl_module, Method)
        done = pl_module.batches == self.total
        if pl_module.batches % pl_module.optimisation.accumulate and not done:
            return
        self.stopped = trainer.strategy.reduce_boolean_decision(self.signals.noted is not None, all=False)
        age = time.monotonic() - self._last
        due = self.steps > 0 and pl_module.step - self._last_step >= self.steps
        due |= pl_module.batches % self.batches_per_epoch == 0 and age > SHORTEST_INTERVAL
        if self.run is not None and (done or due or self.stopped or age > 60 * self.minutes):
            self.write(trainer, pl_module)
        if self.stopped:
            trainer.strategy.barrier()  # where one process leaves, others may be ended: not before the file is there
            trainer.should_stop = True

    def write(self, trainer: Trainer, method: Method) -> None:
        """Write a checkpoint now, unless the state is broken.

        Raises:
            NonFiniteError: a weight is not finite; the checkpoint before is kept.
        """
        assert self.run is not None
        self.guard.check(method)
        state = {
            "format": 1,
            "batches": method.batches,
            "method": method.state_dict(),
            "optimizer": trainer.optimizers[0].state_dict(),
            "record": self.recorder.state(),
        }
        save_checkpoint(self.run.checkpoint, state)
        self._last, self._last_step = time.monotonic(), method.step
