"""What makes a command begin sooner. For the process of one command only: a user's own process is left as it is."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import threading
from collections.abc import Iterator
from importlib import metadata
from importlib.machinery import ModuleSpec
from types import ModuleType

from fmicl.config.settings import Settings

__all__ = ["import_lightning", "wake_gpu"]


def import_lightning() -> None:
    """Import Lightning without torchmetrics, which would import SciPy, Transformers and more: half of the time.

    Lightning compares types with two of its classes, and needs no more of it as long as nobody logs a metric, which
    nothing here does. A version of it that does need more gets torchmetrics itself.
    """
    if "lightning" in sys.modules or "torchmetrics" in sys.modules:
        return
    before = set(sys.modules)
    with contextlib.suppress(Exception), _stand_in("torchmetrics", "Metric", "MetricCollection"):
        importlib.import_module("lightning.pytorch")
        return
    for name in set(sys.modules) - before:
        if name.partition(".")[0] == "lightning":  # what came of it is half made
            del sys.modules[name]


@contextlib.contextmanager
def _stand_in(name: str, *classes: str) -> Iterator[None]:
    """A module that has these classes, and nothing in them; afterwards, importing it gives the true one."""
    from torch import nn

    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    module.__version__ = metadata.version(name)  # type: ignore[attr-defined]
    for each in classes:
        setattr(module, each, type(each, (nn.Module,), {"__module__": name}))
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]


def wake_gpu(settings: Settings) -> threading.Thread | None:
    """Have the GPU made ready, which takes it seconds, while Python imports; None where it isn't known which one."""
    several = settings.devices != 1 or any(name in os.environ for name in ("WORLD_SIZE", "SLURM_NTASKS"))
    if settings.device not in ("auto", "cuda") or several:
        return None
    thread = threading.Thread(target=_wake)  # no daemon: torch aborts a process that ends while it is in there
    thread.start()
    return thread


def _wake() -> None:
    with contextlib.suppress(Exception):  # whoever needs the GPU will say what is wrong; Python may be ending
        import torch

        if torch.cuda.is_available():
            torch.zeros(1, device="cuda")
