"""`fmicl evaluate RUN`: k-NN, linear probe and geometry of image encoders, STS scores of sentence encoders."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmicl.cli.command import command
from fmicl.runs.folder import READ_ONLY_HINT, Run
from fmicl.runs.tables import print_results, print_sts
from fmicl.utils.files import check_writable
from fmicl.utils.validation import TokenPooling


@dataclass(frozen=True)
class Evaluate:
    """Evaluate an encoder: images by k-NN, linear probe and geometry; sentences by the STS tasks (--sts)."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder; with --sts, a run on text, or any sentence-transformers or transformers folder."""
    data_dir: Path | None = None
    """The folder of the run's images, if they have moved."""
    sts: Path | None = None
    """STS12-16, STS-B and SICK-R in SentEval's layout (a folder with STS/ and SICK/)."""
    pooling: TokenPooling | None = None
    """For a plain transformers folder, how tokens make one vector: the first token's (cls), or their mean."""
    json: Path | None = None
    """File to write the STS scores to, which must not exist."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    workers: int | None = None
    """Processes that decode images (None: as in training)."""
    probe_views: int | None = None
    """Random crops and flips of each training image for a second linear probe (None: as in training)."""

    def __call__(self) -> None:
        """Evaluate, and print the results."""
        if self.sts is not None:
            self._evaluate_text(self.sts)
            return
        if self.json is not None:
            raise ValueError("--json is for --sts; the results of a run on images are in its results.json")
        if self.pooling is not None:
            raise ValueError("--pooling is for sentences: name the STS tasks with --sts DIR")
        if Run(self.run).modules.is_file():
            raise ValueError(f"{self.run} holds a sentence encoder: name the STS tasks with --sts DIR")
        from fmicl.runs.report import write_report
        from fmicl.training.tasks.image_evaluation import evaluate_run

        evaluate_run(
            self.run, data_dir=self.data_dir, device=self.device, workers=self.workers, probe_views=self.probe_views
        )
        page = write_report(self.run)  # which shows the results
        print_results(self.run)
        print(f"page: {page}")

    def _evaluate_text(self, sts: Path) -> None:
        image_options = {"--data-dir": self.data_dir, "--workers": self.workers, "--probe-views": self.probe_views}
        for option, value in image_options.items():
            if value is not None:
                raise ValueError(f"{option} is for runs on images: leave it out with --sts")
        from fmicl.training.tasks.text_evaluation import evaluate_text, write_text_results

        is_run = Run(self.run).settings.is_file()
        if is_run:
            check_writable(self.run, READ_ONLY_HINT)
        scores = evaluate_text(self.run, sts, pooling=self.pooling, output=self.json, device=self.device, bar=True)
        print_sts(scores)
        if self.json is not None:
            print(f"scores -> {self.json}")
        if is_run:
            from fmicl.runs.report import write_report

            write_text_results(Run(self.run), scores)
            print(f"page: {write_report(self.run)}")


run = command("evaluate", Evaluate)
