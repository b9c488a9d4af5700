"""Progress bar of training."""

# Lightning calls hooks with more arguments than most of them need.
# ruff: noqa: ARG002
from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from fmicl.training.module import TrainingModule
from fmicl.utils.formatting import format_duration


class ProgressDisplay(Callback):
    """A bar with epoch, loss, rate and time left; where there is no terminal, a line each ten seconds.

    The first batch, in which kernels are compiled, takes no part in the rate.

    Args:
        module: what is trained.
        batch_size: samples of a batch.
        say: where lines go without a terminal.
        live: draw a bar.
        unit: what a sample is called.
    """

    def __init__(
        self, module: TrainingModule, batch_size: int, *, say: Callable[[str], None], live: bool, unit: str = "images"
    ) -> None:
        self.module, self.batch_size, self.say, self.live, self.unit = module, batch_size, say, live, unit
        self._bar: Any = None
        self._task: Any = None
        self._shown, self._done = 0.0, 0  # when, and where the run stood
        self._rate: float | None = None  # batches a second, recent
        self._first = True

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the clock, and the bar where there is a terminal."""
        self._shown, self._done = time.monotonic(), self.module.batches
        if self.live:
            from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

            text = "epoch {task.fields[epoch]}  loss {task.fields[loss]}  {task.fields[rate]} "
            text += f"{self.unit}/s  time left"
            self._bar = Progress(BarColumn(), TextColumn(text), TimeRemainingColumn(), refresh_per_second=4)
            self._bar.start()
            total = self.module.optimisation.total_batches
            self._task = self._bar.add_task("", total=total, completed=self._done, epoch="", loss="", rate="")

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Show where the run stands, a few times a second at most: to read the loss makes a GPU wait."""
        now, done, optimisation = time.monotonic(), self.module.batches, self.module.optimisation
        total, length = optimisation.total_batches, optimisation.batches_per_epoch
        if self._first and done < total:
            if not self.live and now - self._shown >= 10.0:
                self.say(f"the first batch took {format_duration(now - self._shown)}, which the rate below leaves out")
            self._shown, self._done, self._first = now, done, False
            return
        if now - self._shown < (0.25 if self.live else 10.0) and done < total:
            return
        recent = (done - self._done) / max(now - self._shown, 1e-9)
        rate = self._rate = recent if self._rate is None else 0.7 * self._rate + 0.3 * recent
        self._shown, self._done = now, done
        loss = float(outputs["loss"]) * optimisation.accumulate
        epoch = f"{-(-done // length)}/{total // length}"
        samples = f"{rate * self.batch_size:.0f}"
        if self._bar is not None:
            self._bar.update(self._task, completed=done, epoch=epoch, loss=f"{loss:.4f}", rate=samples)
        else:
            left = (total - done) / rate
            self.say(f"epoch {epoch}  loss {loss:.4f}  {samples} {self.unit}/s  time left {format_duration(left)}")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """After an exception Lightning calls no `teardown`."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the terminal as it was, cursor and all."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
