"""Lightning callbacks: the check for non-finite losses, and the log of metrics.

A run is one long pass over batches: batch b belongs to epoch b // batches_per_epoch. Nothing here depends on
Lightning's own counters, which restart when a run is resumed in the middle of an epoch.
"""

# Lightning calls hooks with more arguments than most of them need.
# ruff: noqa: ARG002
from __future__ import annotations

import csv
import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from fmicl.evaluation import geometry
from fmicl.runs.folder import Run
from fmicl.training.module import TrainingModule
from fmicl.training.tasks.base import Monitor
from fmicl.utils.errors import NonFiniteError
from fmicl.utils.files import write_atomically
from fmicl.utils.numerics import normalise

COLLAPSED = 1.5
"""Effective rank below which all embeddings lie about on one line through the origin."""
COLLAPSED_UNIFORMITY = -0.02
"""Uniformity above which all embeddings are about the same: their mean squared distance is below 0.01. Where dropout
makes small differences in many dimensions, the effective rank is high all the same."""
ENOUGH_EMBEDDINGS = 8
"""Smallest batch whose effective rank shows collapse: of two embeddings it is at most two."""
BATCHES_AHEAD = 4
"""Batches that are queued on a GPU before the first one's loss is read: a pause of Python that is shorter than they
take, such as writing a file, doesn't stall the GPU."""
TENSORBOARD_EVERY = 25
"""Batches between two points in TensorBoard."""


class _AsyncCopy:
    """A copy of a tensor to the CPU that doesn't block before `wait`."""

    def __init__(self, value: Tensor) -> None:
        self.event: torch.cuda.Event | None = None
        if value.device.type == "cuda":
            self.copy = torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)
            self.event = torch.cuda.Event()
            self.event.record()
        else:
            self.copy = value.detach().cpu()

    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self.event is None or self.event.query()

    def wait(self) -> Tensor:
        """The copy."""
        if self.event is not None:
            self.event.synchronize()
        return self.copy


class FiniteLossCheck(Callback):
    """Stop the run when the loss is not finite.

    On a CPU this happens before the step; on a GPU some batches later (`BATCHES_AHEAD`), since reading a number sooner
    would stall the device. A checkpoint is only written after all losses up to it have been checked.

    Args:
        module: what is trained.
        checkpoint: path of the run's checkpoint; None on all processes but the first.
    """

    def __init__(self, module: TrainingModule, checkpoint: Path | None = None) -> None:
        self.module, self.checkpoint = module, checkpoint
        self._unread: deque[tuple[int, _AsyncCopy]] = deque()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Read an earlier loss, and on a CPU this one."""
        # A copy: the loss of a captured step is overwritten by the next one.
        self._unread.append((self.module.batches, _AsyncCopy(loss.detach())))
        self.read(keep=BATCHES_AHEAD if loss.device.type == "cuda" else 0)

    def read(self, keep: int = 0) -> None:
        """Read the losses that are still unread, except for the last `keep`.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        while len(self._unread) > keep:
            batch, loss = self._unread.popleft()
            value = float(loss.wait())
            if not math.isfinite(value):
                self.fail(batch, f"the loss is {value}")

    def check(self) -> None:
        """Check the unread losses and all weights.

        Raises:
            NonFiniteError: one of them is not finite.
        """
        self.read()
        norms = torch.stack(torch._foreach_norm(list(self.module.parameters())))
        if not bool(norms.isfinite().all()):
            self.fail(self.module.batches, "a weight is not finite")

    def fail(self, batch: int, what: str) -> None:
        """Raise the error that ends the run at the given batch, the first being 1."""
        step = math.ceil(batch / self.module.optimisation.accumulate)
        kept = ""
        if self.checkpoint is not None:
            exists = self.checkpoint.exists()
            kept = f"The last good checkpoint is kept in {self.checkpoint}. " if exists else "There is no checkpoint. "
        raise NonFiniteError(
            f"{what} at step {step} (batch {batch}); objective: {self.module.describe()}. {kept}"
            "Hint: lower --learning-rate, lengthen --warmup-epochs or set --clip 1; large --gamma or --mu also make "
            "divergences such as pearson, tsallis and neyman overflow. Start again with the new settings."
        )


class MetricsLogger(Callback):
    """Rows of metrics.csv, and TensorBoard; warns of collapse.

    ``alignment`` and ``uniformity`` are those of Wang and Isola for the last batch's embeddings, comparable between
    objectives; ``loss_alignment`` and ``loss_uniformity`` are the summands of its loss, if it has two. With rotation
    prediction, ``loss_rotation`` is its term for that batch.

    Args:
        module: what is trained.
        run: the folder, or None on all processes but the first.
        every: batches of a row; the last row may have fewer. None: an epoch.
        monitor: the score of the encoder.
        collapse_advice: what the warning of collapse recommends.
        say: prints a line.
        finite: checked before the encoder is measured, since broken weights have no score.
    """

    def __init__(
        self,
        module: TrainingModule,
        run: Run | None,
        *,
        every: int | None = None,
        monitor: Monitor | None = None,
        collapse_advice: str = "",
        say: Callable[[str], None] = print,
        finite: FiniteLossCheck | None = None,
    ) -> None:
        self.module, self.run, self.every = module, run, every
        self.monitor = monitor or Monitor()
        self.collapse_advice, self.say, self.finite = collapse_advice, say, finite
        self.columns = (
            "epoch", "step", "loss", "alignment", "uniformity", "lr", self.monitor.column, "effective_rank", "seconds",
            "loss_alignment", "loss_uniformity",
        )  # fmt: skip
        self.rows: list[dict[str, float | None]] = []
        self.seconds = 0.0  # of the row under way, before the last start
        self._sum: Tensor | None = None
        self._carried = 0.0
        self._collapsed = False
        self._since = 0.0
        self._writer: Any = None
        self._points: deque[tuple[int, float, _AsyncCopy]] = deque()
        self._executor = ThreadPoolExecutor(max_workers=1)
        self._row: Future[tuple[dict[str, float | None], int]] | None = None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold to continue the log.

        Of several processes the first writes it, so that the mean loss of a row that a stop interrupts is, up to the
        stop, the first process's share.
        """
        self.finish_row()
        if self._writer is not None:  # a run that resumes from here writes only the points after it
            self._write_points(wait=True)
            self._writer.flush()
        loss = self._carried + (0.0 if self._sum is None else float(self._sum))
        seconds = self.seconds + time.monotonic() - self._since
        return {"rows": self.rows, "loss": loss, "seconds": seconds, "monitor": self.monitor.state()}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state back."""
        self.rows, self._carried, self.seconds = list(state["rows"]), float(state["loss"]), float(state["seconds"])
        self.monitor.restore(state["monitor"])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Open TensorBoard, and drop rows that were written after the checkpoint from which the run resumes."""
        self._since = time.monotonic()
        if self.run is not None:
            from torch.utils.tensorboard import SummaryWriter

            purge = self.module.step + 1 if self.module.batches else None  # points from this step on are discarded
            self._writer = SummaryWriter(str(self.run.tensorboard), purge_step=purge)
            self._write_rows()

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        """Add the loss; write a row of metrics when its batches are complete."""
        module, optimisation = self.module, self.module.optimisation
        # Lightning hands out the loss divided by the number of accumulated batches.
        loss = outputs["loss"].detach() * optimisation.accumulate
        loss = loss if loss.device.type == "mps" else loss.double()  # that device has no float64
        self._sum = loss if self._sum is None else self._sum + loss
        rate = trainer.optimizers[0].param_groups[0]["lr"]
        if self._writer is not None and module.batches % TENSORBOARD_EVERY == 0:
            self._points.append((module.step, rate, _AsyncCopy(loss)))
        self._write_points(wait=False)
        if self._row is not None and self._row.done():
            self.finish_row()
        every = self.every or optimisation.batches_per_epoch
        if module.batches % every == 0 or module.batches == optimisation.total_batches:
            mean = torch.as_tensor((self._carried + self._sum) / ((module.batches - 1) % every + 1))
            mean = trainer.strategy.reduce(mean, reduce_op="mean")
            if self.run is not None:
                self._start_row(outputs, mean, rate)
            self._sum, self._carried, self.seconds, self._since = None, 0.0, 0.0, time.monotonic()

    def _write_points(self, *, wait: bool) -> None:
        """Hand TensorBoard the points that have arrived from the GPU, or all of them."""
        while self._points and (wait or self._points[0][2].ready()):
            step, rate, loss = self._points.popleft()
            self._writer.add_scalar("batch/loss", float(loss.wait()), step)
            self._writer.add_scalar("batch/learning_rate", rate, step)

    def _score(self, epoch: float) -> float | None:
        if not self.monitor.due(epoch):
            return None
        if self.finite is not None:
            self.finite.check()
        return self.monitor.measure(self.module.method, self.module.step)

    def _start_row(self, outputs: dict[str, Tensor], loss: Tensor, rate: float) -> None:
        """Measure the last batch's embeddings and write the row: on the CPU, while a GPU continues."""
        self.finish_row()
        module, length = self.module, self.module.optimisation.batches_per_epoch
        epoch = round(module.batches / length, 6) if module.batches % length else module.batches // length
        step, seconds = module.step, self.seconds + time.monotonic() - self._since
        score = self._score(epoch)
        wanted = {"mean": loss.detach()}
        wanted |= {name: outputs[name].detach() for name in ("first", "second", "terms", "rotation") if name in outputs}
        copies = {name: _AsyncCopy(value) for name, value in wanted.items()}

        def measure() -> tuple[dict[str, float | None], int]:
            found = {name: copy.wait() for name, copy in copies.items()}
            mean, x, y = found["mean"], normalise(found["first"].float()), normalise(found["second"].float())
            terms = found["terms"].tolist() if "terms" in found else (None, None)
            values: tuple[float | None, ...] = (
                epoch, step, float(mean), float(geometry.alignment(x, y)), float(geometry.uniformity(x)),
                rate, score, float(geometry.effective_rank(x)), round(seconds, 3), *terms,
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

        self._row = self._executor.submit(measure)
        if wanted["first"].device.type != "cuda":
            self.finish_row()

    def finish_row(self) -> None:
        """Wait for the row that is being measured and written, if there is one.

        Raises:
            NonFiniteError: it can't be measured, since the loss is not finite.
        """
        if self._row is None:
            return
        measured, self._row = self._row, None
        try:
            row, embeddings = measured.result()
        except ValueError:
            if self.finite is not None:
                self.finite.read()
            raise
        self._warn_of_collapse(row, embeddings)

    def _warn_of_collapse(self, row: Mapping[str, float | None], embeddings: int) -> None:
        rank, uniformity = row["effective_rank"], row["uniformity"]
        assert rank is not None
        assert uniformity is not None
        collapsed = (rank < COLLAPSED or uniformity > COLLAPSED_UNIFORMITY) and embeddings >= ENOUGH_EMBEDDINGS
        if collapsed and not self._collapsed:
            self.say(
                f"warning: the embeddings have collapsed: their effective rank is {rank:.2f} and their uniformity "
                f"{uniformity:.3f} after epoch {row['epoch']:g}. {self.collapse_advice}"
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
        """Finish the row under way: the run may be resumed in this process, and write the same file."""
        self._executor.shutdown()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Write what is left, and close TensorBoard."""
        if self._writer is not None:
            self.finish_row()
            self._write_points(wait=True)
            self._writer.close()
        self._executor.shutdown()
