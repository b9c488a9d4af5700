"""Tasks and monitors: what training on images and on text do differently."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fmicl.config import Settings
from fmicl.methods import Method
from fmicl.runs.folder import Run
from fmicl.training.memory import BatchDescription
from fmicl.training.processes import Processes

if TYPE_CHECKING:
    from fmicl.data import Stream


@dataclass(frozen=True)
class Context:
    """Where a run is trained: device, processes, and how to print a line (nothing on all processes but the first).

    A run that is not fresh continues from a checkpoint, which has its weights.
    """

    device: torch.device
    processes: Processes
    say: Callable[[str], None]
    compiled: bool = False
    fresh: bool = True


class Monitor:
    """A score of the encoder that is measured during training; this one measures nothing, and its column stays empty.

    Args:
        column: the score's column in metrics.csv.
    """

    def __init__(self, column: str = "knn") -> None:
        self.column = column

    def due(self, epoch: float) -> bool:  # noqa: ARG002 (this class needs none of the arguments)
        """Whether to measure it after this many epochs, at the end of a row."""
        return False

    def measure(self, method: Method, step: int) -> float | None:  # noqa: ARG002
        """The score; None if it is undefined."""
        return None

    def state(self) -> dict[str, Any]:
        """What a checkpoint must hold of it."""
        return {}

    def restore(self, state: dict[str, Any]) -> None:
        """Take a state back."""

    def load_best(self, method: Method) -> dict[str, Any] | None:  # noqa: ARG002
        """Load the best weights so far and describe them for results.json; None if it keeps none."""
        return None


class Task(ABC):
    """One kind of data to train on: loads it, builds the encoder, makes batches of views, evaluates and exports.

    Making a task loads the data and builds the encoder, in this order of errors: settings first, then files, so that
    nothing is read or written for settings that can't work.

    Attributes:
        encoder: maps views to features.
        stream: batches of views.
        row_batches: batches of a row of metrics.csv; None is an epoch.
        memory_hint: what frees memory beside a smaller batch, for the out-of-memory message.
        synchronise_batchnorm: whether several GPUs share the statistics of batch normalisation.
    """

    unit: ClassVar[str]
    """What samples are called."""
    channels_last: ClassVar[bool] = False
    """Whether views are images, for which GPUs prefer that memory format."""

    encoder: nn.Module
    stream: Stream
    row_batches: int | None = None
    memory_hint: str = ""
    synchronise_batchnorm: bool = True

    def __init__(self, settings: Settings, context: Context) -> None:
        self.settings, self.context = settings, context

    @classmethod
    def resolve(cls, settings: Settings, device: torch.device, say: Callable[[str], None]) -> Settings:  # noqa: ARG003
        """The settings with the values that the data decides; ``say`` prints which, and why.

        Raises:
            ValueError, FileNotFoundError: there is no data to decide by.
        """
        return settings

    @classmethod
    def resolve_as(cls, settings: Settings, before: Settings) -> Settings:
        """The settings with the values that the data decided when a run was started with others."""
        return settings.replace(**{name: getattr(before, name) for name in settings.unresolved})

    @classmethod
    @abstractmethod
    def check(cls, settings: Settings, *, local: bool = True) -> None:
        """Refuse settings that would fail in training, without loading data.

        Args:
            settings: all options.
            local: whether training will be on this machine, so that files must exist here.

        Raises:
            ValueError, FileNotFoundError: what is wrong.
        """

    @abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """A digest of the data, for settings.json."""

    @abstractmethod
    def data_changes(self, before: dict[str, Any] | None) -> str:
        """How the data differs from a fingerprint, in words; "" if it doesn't."""

    @abstractmethod
    def build_method(self) -> Method:
        """The method around the encoder."""

    @abstractmethod
    def example_views(self, n: int) -> Tensor:
        """This many views of any content, as the encoder takes them."""

    @abstractmethod
    def batch_description(self) -> BatchDescription:
        """The batch, for messages about memory."""

    @abstractmethod
    def embedding_dim(self) -> int:
        """Dimension of the embeddings."""

    @abstractmethod
    def start_lines(self) -> list[str]:
        """What to print when a run starts: the data, and warnings."""

    @abstractmethod
    def monitor(self) -> Monitor:
        """The score of the encoder during training; called on the first process."""

    @abstractmethod
    def finish(self, run: Run, method: Method, monitor: Monitor) -> None:
        """Export the trained encoder, evaluate it and write results.json."""

    @classmethod
    @abstractmethod
    def print_results(cls, run: Run) -> None:
        """Print the results of a finished run."""
