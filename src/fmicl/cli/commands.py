"""The commands for a run that is there: evaluate, embed and report. As in the command line, imports wait for a call."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmicl.cli.tables import print_results, print_sts
from fmicl.utils.validation import TokenPooling

__all__ = ["Embed", "Evaluate", "Report"]


@dataclass(frozen=True)
class Evaluate:
    """Evaluate an encoder: images by k-NN, linear probe and geometry; sentences by the STS tasks (--sts)."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder; with --sts, one of sentences, or any folder of sentence-transformers or transformers."""
    data_dir: Path | None = None
    """Where a run's images are now, if they have moved."""
    sts: Path | None = None
    """STS12-16, STS-B and SICK-R in SentEval's layout (a folder with STS/ and SICK/)."""
    pooling: TokenPooling | None = None
    """Of a plain transformers folder, how tokens make one vector: the first one's (cls), or their mean."""
    json: Path | None = None
    """File to write the STS scores to, which must not exist."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    workers: int | None = None
    """Processes that decode images (None: as in training)."""
    probe_views: int | None = None
    """Fit a second linear probe, to so many random crops and flips of each training image too (None: as the run
    says)."""

    def __call__(self) -> None:
        """Evaluate, then print what came out."""
        if self.sts is not None:
            self._sentences(self.sts)
            return
        if self.json is not None:
            raise ValueError("--json goes with --sts; the results of a run on images are in its results.json")
        if self.pooling is not None:
            raise ValueError("--pooling is for sentences: name the STS tasks with --sts DIR")
        if (self.run / "modules.json").is_file():
            raise ValueError(f"{self.run} holds a sentence encoder: name the STS tasks with --sts DIR")
        from fmicl.runs.report import write_report
        from fmicl.training.image_evaluation import evaluate_run
        from fmicl.training.startup import import_lightning

        import_lightning()
        evaluate_run(
            self.run, data_dir=self.data_dir, device=self.device, workers=self.workers, probe_views=self.probe_views
        )
        page = write_report(self.run)  # it would tell the results from before
        print_results(self.run)
        print(f"page: {page}")

    def _sentences(self, sts: Path) -> None:
        of_images = {"--data-dir": self.data_dir, "--workers": self.workers, "--probe-views": self.probe_views}
        for option, value in of_images.items():
            if value is not None:
                raise ValueError(f"{option} is for runs on images, and does not go with --sts")
        from fmicl.runs.folder import COPY_IT, Run
        from fmicl.training.text_evaluation import evaluate_text, note_scores
        from fmicl.utils.files import check_writable

        noted = (self.run / "settings.json").is_file()
        if noted:
            check_writable(self.run, COPY_IT)
        scores = evaluate_text(self.run, sts, pooling=self.pooling, output=self.json, device=self.device, bar=True)
        print_sts(scores)
        if self.json is not None:
            print(f"scores -> {self.json}")
        if noted:
            from fmicl.runs.report import write_report

            note_scores(Run(self.run), scores)
            print(f"page: {write_report(self.run)}")


@dataclass(frozen=True)
class Embed:
    """Write the vectors of a folder of images, or of a file of sentences, as a run's encoder sees them."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder; for sentences, any folder of sentence-transformers or transformers too."""
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder of images, with or without subfolders; or a text file with a sentence a line."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write, which must not exist: .parquet, .npz or .csv."""
    pooling: TokenPooling | None = None
    """Of a plain transformers folder, how tokens make one vector: the first one's (cls), or their mean."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    batch_size: int | None = None
    """Images or sentences at a time (None: 512 images, and fewer large ones on a CPU; 256 sentences)."""
    workers: int | None = None
    """Processes that decode images (None: 4)."""

    def __call__(self) -> None:
        """Embed, then say how many."""
        from fmicl.data.images.decoding import EXTENSIONS
        from fmicl.runs.embedding import embed_folder, embed_text

        of_text = (self.run / "modules.json").is_file()
        if self.source.is_file() and not of_text and self.source.suffix.lower() in EXTENSIONS:
            raise ValueError(f"{self.source} is one image: name its folder, of which all images are embedded")
        if of_text or self.source.is_file():
            if self.workers is not None:
                raise ValueError("--workers is for folders of images, and does not go with sentences")
            lines = embed_text(
                self.run,
                self.source,
                self.output,
                pooling=self.pooling,
                device=self.device,
                batch_size=self.batch_size,
            )
            print(f"{lines} sentences -> {self.output}")
            return
        if self.pooling is not None:
            raise ValueError("--pooling is for sentences, and does not go with a folder of images")
        workers = 4 if self.workers is None else self.workers
        count, skipped = embed_folder(
            self.run, self.source, self.output, device=self.device, batch_size=self.batch_size, workers=workers
        )
        for line in skipped:
            print(f"left out: {line}", file=sys.stderr)
        print(f"{count} images -> {self.output}")


@dataclass(frozen=True)
class Report:
    """Draw a run's figures and write its page."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder."""

    def __call__(self) -> None:
        """Write the page, then say where it is."""
        from fmicl.runs.folder import COPY_IT, open_run
        from fmicl.runs.report import write_report
        from fmicl.utils.files import check_writable

        run = open_run(self.run)
        check_writable(run.path, COPY_IT)
        print(f"page: {write_report(run.path)}")
