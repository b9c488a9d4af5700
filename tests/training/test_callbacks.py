"""The loss check and the metrics log by themselves, as on a GPU, where numbers arrive some batches later."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fmicl.evaluation import geometry
from fmicl.methods import SimCLR
from fmicl.models.vision import SmallConv
from fmicl.runs.folder import Run
from fmicl.training.callbacks import FiniteLossCheck, MetricsLogger, _AsyncCopy
from fmicl.training.module import TrainingModule
from fmicl.training.optimisation import Optimisation
from fmicl.utils.errors import NonFiniteError
from small_settings import digits


def some_module() -> TrainingModule:
    return TrainingModule(
        SimCLR(SmallConv(1, 4), torch.nn.Identity(), dim=8, hidden=16), Optimisation(total_batches=10)
    )


def test_a_delayed_check_names_the_batch_that_broke() -> None:
    module = some_module()
    check = FiniteLossCheck(module)
    for batch, loss in enumerate([1.0, 2.0, math.nan, 3.0], start=1):
        check._unread.append((batch, _AsyncCopy(torch.tensor(loss))))
    check.read(keep=2)
    with pytest.raises(NonFiniteError, match=r"nan at step 3 \(batch 3\).*SimCLR with Identity"):
        check.read()


def points(run: Run, name: str) -> list[int]:
    """Steps of the points that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    shown = EventAccumulator(str(run.tensorboard))
    shown.Reload()
    return [event.step for event in shown.Scalars(name)]


def test_a_row_that_cannot_be_measured_is_explained_by_the_loss() -> None:
    """On a GPU the last embeddings of an epoch may be measured before their loss is read."""
    finite = FiniteLossCheck(some_module())
    finite._unread.append((10, _AsyncCopy(torch.tensor(math.nan))))
    logger = MetricsLogger(finite.module, None, finite=finite)
    broken: Any = logger._executor.submit(geometry.effective_rank, torch.full((4, 2), math.nan))
    logger._row = broken
    with pytest.raises(NonFiniteError, match=r"nan at step 10 \(batch 10\)"):
        logger.finish_row()
    logger._row = broken
    with pytest.raises(ValueError, match="4 of 4 rows"):  # other errors stay as they are
        logger.finish_row()


def test_tensorboard_has_all_points_up_to_a_checkpoint(tmp_path: Path) -> None:
    """A run that is resumed from there adds the points after it, and no other ones."""

    class Late(_AsyncCopy):
        def ready(self) -> bool:
            return False

    run, unused = Run(tmp_path / "run"), cast(Any, None)
    module = some_module()
    logger = MetricsLogger(module, run)
    logger.on_train_start(unused, module)
    for step in (5, 6):
        logger._points.append((step, 0.1, Late(torch.tensor(2.0))))
    logger._write_points(wait=False)
    assert len(logger._points) == 2
    logger.state()
    assert points(run, "batch/loss") == [5, 6], "also if the process is killed now"
    logger._points.append((7, 0.1, Late(torch.tensor(2.0))))
    logger.teardown(unused, module, "fit")
    assert points(run, "batch/loss") == [5, 6, 7]
    module.batches = 6
    resumed = MetricsLogger(module, run)
    resumed.on_train_start(unused, module)
    resumed._points.append((8, 0.1, _AsyncCopy(torch.tensor(2.0))))
    resumed.teardown(unused, module, "fit")
    assert points(run, "batch/learning_rate") == [5, 6, 8]


def test_a_stopped_run_leaves_no_thread_that_writes() -> None:
    logger = MetricsLogger(some_module(), None)
    row: Any = logger._executor.submit(time.sleep, 0.3)
    logger.on_exception(cast(Any, None), cast(Any, None), KeyboardInterrupt())
    assert row.done()


def test_collapse_is_warned_of_once_with_advice() -> None:
    said: list[str] = []
    settings = digits(divergence="reverse_kl")
    advice = settings.objective_options.collapse_advice(settings.objective_context(settings.dim))
    logger = MetricsLogger(some_module(), None, collapse_advice=advice, say=said.append)

    def warn(rank: float, uniformity: float, embeddings: int = 64) -> None:
        row = {"epoch": 1, "effective_rank": rank, "uniformity": uniformity}
        logger._warn_of_collapse(row, embeddings)

    warn(1.1, -1.0, embeddings=2)  # whose rank is at most two
    assert not said
    for rank in (5.0, 1.1, 1.05, 3.0, 1.2, 3.0):
        warn(rank, -1.0)
    assert len(said) == 2
    warn(30.0, -0.001)  # all the same but for noise in many dimensions
    assert len(said) == 3
    assert "-0.001" in said[2]
    assert "1.10" in said[0]
    assert advice in said[0]
    assert "reverse_kl" in advice
