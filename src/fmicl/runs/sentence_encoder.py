"""Loading of sentence encoders: of a run, of a sentence-transformers folder, or of a plain transformers folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fmicl.evaluation.sts import Encode
from fmicl.models.text import pooled_transformer, quiet_transformers
from fmicl.runs.folder import Run
from fmicl.runs.settings import require_task
from fmicl.utils.device import pick_device
from fmicl.utils.extras import how_to_install
from fmicl.utils.validation import TokenPooling

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer


def load_sentence_encoder(path: Path, device: str = "auto", pooling: TokenPooling | None = None) -> Encode:
    """The encoder of a sentence-transformers folder, as a function from sentences to embeddings.

    Sentences are truncated at the folder's own length (max_seq_length); nothing is downloaded. A plain transformers
    folder needs a pooling, and is then the encoder that training would start from.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is not a sentence-transformers folder, can't be loaded, or the pooling is missing or superfluous.
    """
    model = load_sentence_transformer(path, device, pooling)

    def encode(sentences: Sequence[str]) -> Tensor:
        with torch.no_grad():
            return model.encode(
                list(sentences), batch_size=len(sentences), convert_to_tensor=True, show_progress_bar=False
            )

    return encode


def load_sentence_transformer(
    path: Path, device: str = "auto", pooling: TokenPooling | None = None
) -> SentenceTransformer:
    """The model itself; see :func:`load_sentence_encoder`."""
    place = pick_device(device)
    check_sentence_encoder(path, pooling)
    try:
        from sentence_transformers import SentenceTransformer
    except ImportError as error:
        raise ValueError(f"sentence encoders need sentence-transformers: {how_to_install('text')} ({error})") from error
    try:
        with quiet_transformers():
            if pooling is not None:
                return pooled_transformer(path, pooling, str(place))
            return SentenceTransformer(str(path), device=str(place), local_files_only=True)
    except Exception as error:  # its parts raise a handful of unrelated types for damaged folders
        raise ValueError(f"{path} can't be loaded as a sentence-transformers model: {error}") from error


def check_sentence_encoder(path: Path, pooling: TokenPooling | None = None) -> None:
    """Refuse what is neither a sentence-transformers folder nor a plain transformers one with a pooling.

    Raises:
        FileNotFoundError: there is no such folder, or it is a run that has not ended.
        ValueError: it is something else, which the message names, or it defines its own pooling.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}")
    run = Run(path)
    if run.modules.is_file():
        if pooling is not None:
            raise ValueError(f"{path} defines its own pooling (modules.json): leave --pooling out")
        return
    if run.settings.is_file():
        require_task(run, "text")
        raise FileNotFoundError(
            f"{path} has no modules.json yet: its training has not ended; continue it with `fmicl train ... --resume`"
        )
    if (path / "config.json").is_file():
        if pooling is not None:
            return
        raise ValueError(
            f"{path} is a plain transformers model, which doesn't define how its tokens make one vector: choose "
            "--pooling cls (the first token's) or --pooling mean"
        )
    raise ValueError(
        f"{path} is neither a run folder of `fmicl train` (no settings.json) nor a sentence-transformers folder "
        "(no modules.json)"
    )
