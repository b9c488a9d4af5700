"""The guard and the record by themselves, as on a GPU: numbers come some batches later."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fmicl.config.recipes import RECIPES
from fmicl.evaluation import geometry as analysis
from fmicl.methods import Method
from fmicl.models.vision import build_encoder
from fmicl.runs import folder as runs
from fmicl.training.building import build_method
from fmicl.training.callbacks import Guard, NonFiniteError, Recorder, _OnItsWay


def some_method() -> Method:
    return build_method(RECIPES["digits"].recipe, build_encoder("resnet18", size=8, channels=1), 10)


def test_a_guard_that_looks_later_names_the_batch_that_broke() -> None:
    method = some_method()
    guard = Guard("an objective")
    for batch, loss in enumerate([1.0, 2.0, math.nan, 3.0], start=1):
        guard._unseen.append((method, batch, _OnItsWay(torch.tensor(loss))))
    guard.look(but=2)
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 3 \(batch 3\); objective: an objective"):
        guard.look()


def recorder_of(run: runs.Run | None, guard: Guard | None = None) -> Recorder:
    return Recorder(run, 10, monitor=None, monitor_every=0, advice="", say=print, guard=guard)


def points(run: runs.Run, name: str) -> list[int]:
    """Steps of what TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # type: ignore[import-untyped]

    shown = EventAccumulator(str(run.tensorboard))
    shown.Reload()
    return [event.step for event in shown.Scalars(name)]


def test_of_a_broken_batch_the_guard_speaks_and_not_who_measures_it() -> None:
    """On a GPU the last embeddings of an epoch may be measured before their loss is looked at."""
    method = some_method()
    guard = Guard("an objective")
    guard._unseen.append((method, 10, _OnItsWay(torch.tensor(math.nan))))
    recorder = recorder_of(None, guard)
    broken: Any = recorder._measuring.submit(analysis.effective_rank, torch.full((4, 2), math.nan))
    recorder._row = broken
    with pytest.raises(NonFiniteError, match=r"the loss is nan at step 10 \(batch 10\)"):
        recorder.finish_row()
    recorder._row = broken
    with pytest.raises(ValueError, match="4 of 4 rows"):  # what else goes wrong is said as it is
        recorder.finish_row()


def test_tensorboard_has_all_points_up_to_a_checkpoint(tmp_path: Path) -> None:
    """A run that goes on from there has the points after it, and no other ones."""

    class Late(_OnItsWay):
        def there(self) -> bool:
            return False

    run, unused = runs.Run(tmp_path / "run"), cast(Any, None)
    method = some_method()
    recorder = recorder_of(run)
    recorder.on_train_start(unused, method)
    for step in (5, 6):
        recorder._points.append((step, 0.1, Late(torch.tensor(2.0))))
    recorder._write_points(wait=False)
    assert len(recorder._points) == 2
    recorder.state()
    assert points(run, "batch/loss") == [5, 6], "also where the process is killed after it"
    recorder._points.append((7, 0.1, Late(torch.tensor(2.0))))
    recorder.teardown(unused, method, "fit")
    assert points(run, "batch/loss") == [5, 6, 7]
    method.batches = 6
    resumed = recorder_of(run)
    resumed.on_train_start(unused, method)
    resumed._points.append((8, 0.1, _OnItsWay(torch.tensor(2.0))))
    resumed.teardown(unused, method, "fit")
    assert points(run, "batch/learning_rate") == [5, 6, 8]


def test_a_run_that_is_stopped_leaves_nobody_writing() -> None:
    recorder = recorder_of(None)
    row: Any = recorder._measuring.submit(time.sleep, 0.3)
    recorder.on_exception(cast(Any, None), cast(Any, None), KeyboardInterrupt())
    assert row.done()
