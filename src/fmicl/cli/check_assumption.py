"""`fmicl check-assumption RUN`: whether a run's positive pairs follow a Gaussian kernel on the sphere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmicl.cli.command import command
from fmicl.runs.folder import Run


@dataclass(frozen=True)
class CheckAssumption:
    """Test the paper's assumption on a run: is the density of positive pairs a Gaussian kernel on the sphere?"""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder, of images."""
    data_dir: Path | None = None
    """The folder of the run's images, if they have moved."""
    pairs: int = 4096
    """Positive pairs, about; images are augmented again until there are so many."""
    flow_steps: int = 1000
    """Training steps of each flow at most."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where the embeddings are computed; auto takes a GPU if there is one."""

    def __call__(self) -> None:
        """Test, write assumption.json and the figure, and print the verdict."""
        from fmicl.training.tasks.assumption import check_run

        check, figure = check_run(
            self.run, data_dir=self.data_dir, pairs=self.pairs, flow_steps=self.flow_steps, device=self.device
        )
        print(*check.verdict, sep="\n")
        print(f"{Run(self.run).assumption}, {figure}")


run = command("check-assumption", CheckAssumption)
