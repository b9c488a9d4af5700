"""`fmicl embed RUN SOURCE -o FILE`: embeddings of a folder of images or a text file."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from fmicl.cli.command import command
from fmicl.utils.validation import TokenPooling


@dataclass(frozen=True)
class Embed:
    """Write the embeddings of a folder of images, or of a text file, by a run's encoder."""

    run: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run folder; for text, any sentence-transformers or transformers folder too."""
    source: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="SOURCE")]
    """A folder of images, with or without subfolders; or a text file with a sentence per line."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """File to write, which must not exist: .parquet, .npz or .csv."""
    pooling: TokenPooling | None = None
    """For a plain transformers folder, how tokens make one vector: the first token's (cls), or their mean."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """Where to compute; auto takes a GPU if there is one."""
    batch_size: int | None = None
    """Images or sentences per batch (None: 512 images, and fewer large ones on a CPU; 256 sentences)."""
    workers: int | None = None
    """Processes that decode images (None: 4)."""

    def __call__(self) -> None:
        """Embed, and print how many."""
        from fmicl.data.images.decoding import EXTENSIONS
        from fmicl.runs.embedding import embed_folder, embed_text
        from fmicl.runs.folder import Run

        is_text = Run(self.run).modules.is_file()
        if self.source.is_file() and not is_text and self.source.suffix.lower() in EXTENSIONS:
            raise ValueError(f"{self.source} is one image: name its folder; all images in it are embedded")
        if is_text or self.source.is_file():
            if self.workers is not None:
                raise ValueError("--workers is for folders of images: leave it out with text")
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


run = command("embed", Embed)
