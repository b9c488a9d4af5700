"""Options of text data: the file of sentences, the STS tasks, the cache of tokens."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fmicl.data.cache import CacheOptions
from fmicl.utils.options import option


@dataclass(frozen=True)
class TextDataOptions(CacheOptions):
    """Where the sentences to train on and the STS tasks to evaluate on are."""

    data: Path | None = option(None, "Text file to train on: UTF-8, one sentence per line.", role="location")
    sts: Path | None = option(
        None,
        "Folder of the STS tasks in SentEval's layout. STS-B dev then selects the checkpoint, and the seven test sets "
        "are scored at the end.",
        role="location",
    )
    sts_every: int = option(
        125, "Steps between two rows of metrics.csv and, with --sts, two scores on STS-B dev.", above=0
    )
