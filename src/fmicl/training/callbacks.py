"""What watches a training run: the guard against broken numbers, and the record.

A run is one long pass of batches: batch b belongs to epoch b // batches_per_epoch. Nothing here depends on Lightning's
own counters, which start anew when a run is resumed in the middle of an epoch.
"""

# Lightning calls hooks with more arguments than most of them need.
# ruff: noqa: ARG002
from __future__ import annotations

import csv
import math
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from fmicl.evaluation import geometry as analysis
from fmicl.methods import Method
from fmicl.runs.folder import Run
from fmicl.utils.files import write_atomically
from fmicl.utils.numerics import normalise

COLUMNS = (
    "epoch", "step", "loss", "alignment", "uniformity", "lr", "knn", "effective_rank", "seconds",
    "loss_alignment", "loss_uniformity",
)  # fmt: skip
COLLAPSED = 1.5
"""Below this effective rank all embeddings lie about on one line through the origin."""
TELLING = 8
"""Embeddings in a batch whose rank tells that: of two, it is little more at the best."""
AHEAD = 4
"""Batches that may be asked of a GPU before the first one's loss is looked at: what holds Python up for less than they
take, a file to be written, say, does not hold up the GPU."""


class _OnItsWay:
    """A copy of a tensor on the CPU, which a GPU makes when it comes to it: nobody waits before `wait`."""

    def __init__(self, value: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self.copy = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.copy = value.detach().cpu()

    def there(self) -> bool:
        """Whether nobody would wait."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The copy, once it is there."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy


class NonFiniteError(RuntimeError):
    """The loss, or a weight, is not a finite number any more."""


class Guard(Callback):
    """Stop the run when the loss is not finite.

    On a CPU this is before the step; on a GPU it is some batches later (`AHEAD`), for to look at a number sooner would
    make the device wait. A checkpoint is only written after all losses up to it were looked at.

    Args:
        describe: the objective's settings in words, for the message.
        checkpoint: where the run's checkpoint is, once there is one; None on all processes but the first.
    """

    def __init__(self, describe: str, checkpoint: Path | None = None) -> None:
        self.describe, self.checkpoint = describe, checkpoint
        self._unseen: deque[tuple[Method, int, _OnItsWay]] = deque()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Look at an earlier loss, and on a CPU at this one."""
        assert isinstance(pl_module, Method)
        # A copy: the loss of a recorded step is overwritten by the next one.
        self._unseen.append((pl_module, pl_module.batches, _OnItsWay(loss.detach())))
        self.look(but=AHEAD if loss.device.type == "cuda" else 0)

    def look(self, but: int = 0) -> None:
        """Look at the losses that are still unseen, but for so many of the last ones.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        while len(self._unseen) > but:
            method, batch, loss = self._unseen.popleft()
            value = float(loss.wait())
            if not math.isfinite(value):
                self.stop(method, batch, f"the loss is {value}")

    def check(self, method: Method) -> None:
        """Look at the unseen losses and at all weights, before something is made of these.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        self.look()
        norms = torch.stack(torch._foreach_norm(list(method.parameters())))
        if not bool(norms.isfinite().all()):
            self.stop(method, method.batches, "a weight is not finite")

    def stop(self, method: Method, batch: int, what: str) -> None:
        """Raise the error that ends the run in the given batch, the first being 1."""
        step = math.ceil(batch / method.optimisation.accumulate)
        kept = ""
        if self.checkpoint is not None:
            there = self.checkpoint.exists()
            kept = f"The last good checkpoint is kept in {self.checkpoint}. " if there else "There is no checkpoint. "
        raise NonFiniteError(
            f"{what} at step {step} (batch {batch}); objective: {self.describe}. {kept}"
            "Hint: lower --learning-rate, lengthen --warmup-epochs or set --clip 1; large --gamma or --mu also make "
            "divergences such as pearson, tsallis and neyman overflow. Start again with the new settings."
        )


class Recorder(Callback):
    """One row of metrics.csv for each epoch, and TensorBoard; warns of collapse.

    ``alignment`` and ``uniformity`` are those of Wang and Isola for the last batch's embeddings, comparable between
    objectives; ``loss_alignment`` and ``loss_uniformity`` are the summands of its loss where it has two. In a run with
    the term of turned images, ``loss_rotation`` is that batch's: minus the weight times the bound of their information.

    Args:
        run: the folder, or None on all processes but the first.
        batches_per_epoch: length of an epoch.
        monitor: gives the k-NN accuracy of an encoder in percent.
        monitor_every: epochs between two such looks; 0 is never.
        advice: what the warning of collapse says to do.
        say: where warnings go.
        guard: asked before the encoder is looked at, as broken weights have no accuracy.
    """

    columns: tuple[str, ...] = COLUMNS
    tensorboard_every = 25
    """Batches between two points of TensorBoard."""

    def __init__(
        self,
        run: Run | None,
        batches_per_epoch: int,
        *,
        monitor: Callable[[nn.Module], float] | None,
        monitor_every: int,
        advice: str,
        say: Callable[[str], None],
        guard: Guard | None = None,
    ) -> None:
        self.guard = guard
        self.run, self.batches_per_epoch = run, batches_per_epoch
        self.monitor, self.monitor_every = monitor, monitor_every
        self.advice, self.say = advice, say
        self.rows: list[dict[str, float | None]] = []
        self.seconds = 0.0  # of the epoch under way, before the last start
        self._sum: Tensor | None = None
        self._carried = 0.0
        self._collapsed = False
        self._since = 0.0
        self._writer: Any = None
        self._points: deque[tuple[int, float, _OnItsWay]] = deque()
        self._measuring = ThreadPoolExecutor(max_workers=1)
        self._row: Future[tuple[dict[str, float | None], int]] | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold for the record to go on as if nothing had happened.

        Of several processes the first one writes it, so that of a row which a stop cuts through, the mean loss up to
        there is the first one's share.
        """
        self.finish_row()
        if self._writer is not None:  # a run that goes on from here has the points after it only
            self._write_points(wait=True)
            self._writer.flush()
        loss = self._carried + (0.0 if self._sum is None else float(self._sum))
        return {"rows": self.rows, "loss": loss, "seconds": self.seconds + time.monotonic() - self._since}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        self.rows, self._carried, self.seconds = list(state["rows"]), float(state["loss"]), float(state["seconds"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open TensorBoard, and drop rows that were written after the checkpoint that the run goes on from."""
        assert isinstance(pl_module, Method)
        self._since = time.monotonic()
        if self.run is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = pl_module.step + 1 if pl_module.batches else None  # the first step to be hidden
            self._writer = SummaryWriter(str(self.run.tensorboard), purge_step=purge)
            self._write_rows()

    def on_train_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        """Add the loss; at the end of an epoch, write its row."""
        assert isinstance(pl_module, Method)
        # Lightning hands out the loss divided by the number of accumulated batches.
        loss = outputs["loss"].detach() * pl_module.optimisation.accumulate
        loss = loss if loss.device.type == "mps" else loss.double()  # that device has no float64
        self._sum = loss if self._sum is None else self._sum + loss
        if self._writer is not None and pl_module.batches % self.tensorboard_every == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self._points.append((pl_module.step, rate, _OnItsWay(loss)))
        self._write_points(wait=False)
        if self._row is not None and self._row.done():
            self.finish_row()
        span = self._span(pl_module.batches)
        if span:
            self._end_span(trainer, pl_module, outputs, span)

    def _write_points(self, *, wait: bool) -> None:
        """Hand TensorBoard the points that have come from the GPU, or all of them."""
        while self._points and (wait or self._points[0][2].there()):
            step, rate, loss = self._points.popleft()
            self._writer.add_scalar("batch/loss", float(loss.wait()), step)
            self._writer.add_scalar("batch/learning_rate", rate, step)

    def _span(self, batches: int) -> int:
        """How many batches the row covers that is due after so many; 0 where none is due."""
        return 0 if batches % self.batches_per_epoch else self.batches_per_epoch

    def _epoch(self, method: Method) -> float:
        """What a row calls the epoch."""
        return method.batches // self.batches_per_epoch

    def _look(self, method: Method) -> float | None:
        """How good the encoder is now, where that is to be looked at."""
        if self.monitor is None or not self.monitor_every or self._epoch(method) % self.monitor_every:
            return None
        if self.guard is not None:
            self.guard.check(method)
        return self.monitor(method.encoder)

    def _end_span(self, trainer: Trainer, method: Method, outputs: dict[str, Tensor], span: int) -> None:
        assert self._sum is not None
        mean = torch.as_tensor((self._carried + self._sum) / span)
        mean = trainer.strategy.reduce(mean, reduce_op="mean")
        if self.run is not None:
            self._begin_row(method, outputs, mean, trainer.optimizers[0].param_groups[0]["lr"])
        self._sum, self._carried, self.seconds, self._since = None, 0.0, 0.0, time.monotonic()

    def _begin_row(self, method: Method, outputs: dict[str, Tensor], loss: Tensor, learning_rate: float) -> None:
        """Measure the last batch's embeddings and write the row: on the CPU, while a GPU goes on."""
        self.finish_row()
        epoch, step = self._epoch(method), method.step
        seconds = self.seconds + time.monotonic() - self._since
        quality = self._look(method)
        wanted = {"mean": loss.detach()}
        wanted |= {name: outputs[name].detach() for name in ("first", "second", "terms", "rotation") if name in outputs}
        copies = {name: _OnItsWay(value) for name, value in wanted.items()}

        def measure() -> tuple[dict[str, float | None], int]:
            found = {name: copy.wait() for name, copy in copies.items()}
            mean, x, y = found["mean"], normalise(found["first"].float()), normalise(found["second"].float())
            summands = found["terms"].tolist() if "terms" in found else (None, None)
            values: tuple[float | None, ...] = (
                epoch, step, float(mean), float(analysis.alignment(x, y)), float(analysis.uniformity(x)),
                learning_rate, quality, float(analysis.effective_rank(x)), round(seconds, 3), *summands,
            )  # fmt: skip
            row = dict(zip(self.columns, values, strict=True))
            if "rotation" in found:
                row["loss_rotation"] = float(found["rotation"])
            self.rows.append(row)
            self._write_rows()
            for name, value in row.items():
                if value is not None and name not in ("epoch", "step"):
                    self._writer.add_scalar(f"epoch/{name}", value, row["step"])
            return row, len(x)

        self._row = self._measuring.submit(measure)
        if wanted["first"].device.type != "cuda":
            self.finish_row()

    def finish_row(self) -> None:
        """Wait for the row that is being measured and written, if there is one.

        Raises:
            NonFiniteError: it can't be measured, for the loss is not finite; the guard may not have looked yet.
        """
        if self._row is None:
            return
        measured, self._row = self._row, None
        try:
            row, embeddings = measured.result()
        except ValueError:
            if self.guard is not None:
                self.guard.look()
            raise
        assert row["effective_rank"] is not None
        self._warn_of_collapse(row["effective_rank"], row["epoch"], embeddings)

    def _warn_of_collapse(self, rank: float, epoch: float | None, embeddings: int) -> None:
        collapsed = rank < COLLAPSED and embeddings >= TELLING
        if collapsed and not self._collapsed:
            self.say(
                f"warning: the embeddings have collapsed: their effective rank is {rank:.2f} after epoch {epoch:g}. "
                f"{self.advice}"
            )
        self._collapsed = collapsed

    def _write_rows(self) -> None:
        assert self.run is not None
        write_atomically(self.run.metrics, self._csv)

    def _csv(self, path: Path) -> None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(self.rows[0]) if self.rows else self.columns)
            writer.writeheader()
            writer.writerows(self.rows)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Let the row under way come to its end: the run may go on in this process, and write the same file."""
        self._measuring.shutdown()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what is still to be written, and close TensorBoard."""
        if self._writer is not None:
            self.finish_row()
            self._write_points(wait=True)
            self._writer.close()
        self._measuring.shutdown()
