"""Sentence encoders: any Hugging Face encoder with a pooling on top, and its tokenizer.

A batch of sentences is one tensor of token ids (N, L), -1 after the end of a sentence, so that every method takes
sentences as it takes images. What is exported is a folder of sentence-transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import stat
import tempfile
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import torch
from torch import Tensor, nn

from fmicl.data import padded_width
from fmicl.utils.options import check_fields, option, require_positive_fields
from fmicl.utils.validation import Pooling, TokenPooling

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

__all__ = [
    "SentenceEncoder",
    "SentenceEncoderOptions",
    "Tokenizer",
    "build_sentence_encoder",
    "makes_views",
    "point_to",
    "pooled_transformer",
    "quiet_transformers",
    "save_sentence_encoder",
    "sentence_head",
    "told_limit",
]

_TOO_LONG = 10**6  # tokenizers without a limit name an astronomic one


@dataclass(frozen=True)
class SentenceEncoderOptions:
    """Which sentence encoder to train, and how many tokens it reads.

    Raises:
        ValueError: an option is out of range; the message names it.
    """

    model: str = option(
        "bert-base-uncased",
        "Any Hugging Face encoder: a name on the hub, a folder that save_pretrained wrote, or a run on sentences.",
    )
    pooling: Pooling = option(
        "cls_mlp",
        "Sentence vector: the first token's (cls), the same with an MLP that is dropped after training (cls_mlp, as "
        "in SimCSE), or the mean over tokens.",
    )
    length: int = option(32, "Tokens of a sentence in training, special tokens included; longer ones are truncated.")
    encode_length: int | None = option(
        None,
        "Tokens of a sentence in evaluation and in the exported model (None: as many as the model takes, as in "
        "SimCSE's evaluation).",
    )
    hidden: int = option(2048, "Width of mocov3's predictor.")

    def __post_init__(self) -> None:
        check_fields(self)
        require_positive_fields(self, "hidden", *([] if self.encode_length is None else ["encode_length"]))
        if self.length < 3:
            raise ValueError(f"length must be at least 3, two special tokens and one other, but it is {self.length}")


class SentenceEncoder(nn.Module):
    """A transformer, and one vector for each sentence: its first token's last hidden state, or the mean of all.

    Args:
        model: a Hugging Face encoder.
        mean: the mean over a sentence's tokens, not the first one's.
        padding: the token to put where there is none; some models count positions by it.

    Attributes:
        num_features: entries of a vector.
    """

    def __init__(self, model: nn.Module, *, mean: bool, padding: int) -> None:
        super().__init__()
        self.model, self.mean, self.padding = model, mean, padding
        self.num_features = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors (N, num_features) of token ids (N, L), -1 after the end of a sentence."""
        there = ids >= 0
        tokens = torch.where(there, ids, self.padding).long()
        states: Tensor = self.model(input_ids=tokens, attention_mask=there.long()).last_hidden_state
        if not self.mean:
            return states[:, 0]
        weights = there.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1)


def sentence_head(pooling: Pooling, width: int, spread: float = 0.02) -> nn.Module:
    """What stands between vectors and embeddings in training: for ``cls_mlp`` a linear layer and tanh, else nothing.

    Args:
        pooling: of the recipe.
        width: entries of a vector and of an embedding.
        spread: standard deviation of the first weights; biases are 0, as in BERT.

    Example:
        >>> sentence_head("cls_mlp", 8)(torch.zeros(2, 8)).tolist() == [[0.0] * 8] * 2
        True
        >>> sentence_head("mean", 8)
        Identity()
    """
    if pooling != "cls_mlp":
        return nn.Identity()
    linear = nn.Linear(width, width)
    nn.init.normal_(linear.weight, std=spread)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.Tanh())


class Tokenizer:
    """A Hugging Face tokenizer with what is asked of it here.

    Args:
        tokenizer: of transformers.
        limit: the most tokens that the model takes.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.inner, self.limit = tokenizer, limit

    def encode(self, sentences: Sequence[str], length: int) -> list[list[int]]:
        """Token ids of each sentence with the special ones, cut off at a length."""
        # Whoever chose another way for tokenizers to use processors keeps it.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
        rows: list[list[int]] = self.inner(
            list(sentences),
            truncation=True,
            max_length=length,
            padding=False,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return rows

    def batch(self, sentences: Sequence[str], length: int) -> Tensor:
        """(N, L) token ids, -1 after the end of a sentence; L is a multiple of 8 or the length."""
        rows = self.encode(sentences, length)
        ids = torch.full((len(rows), padded_width(max(map(len, rows)), length)), -1)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        return ids

    def save(self, folder: Path) -> None:
        """Write its files, the same ones whatever it was last called with."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        self.inner.save_pretrained(folder)

    def state(self) -> bytes:
        """All that the ids depend on, but for the length."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        if "tokenizer.json" in files:
            files = {"tokenizer.json": files["tokenizer.json"]}
        else:
            files.pop("tokenizer_config.json", None)  # it names folders
        digest = hashlib.blake2b()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.digest()


def build_sentence_encoder(name: str, pooling: Pooling) -> tuple[SentenceEncoder, Tokenizer]:
    """A pretrained encoder and its tokenizer, from a folder or from the hub; without a network, from its cache.

    Weights that a folder lacks (a pooler, after masked language modelling) follow from torch's seed. Parameters that
    have no part in the vectors are frozen, as several processes would wait for their gradients.

    Args:
        name: a folder that ``save_pretrained`` left, model and tokenizer; a run on sentences; or a name on the hub.
        pooling: of the recipe.

    Raises:
        FileNotFoundError: the name is a path, and there is nothing.
        ValueError: the model can't be had, or is no encoder.
    """
    from transformers import AutoModel, AutoTokenizer

    check_model(name)
    local = Path(name).is_dir()
    place = str(_inner_model(Path(name))) if local else name
    options = {"local_files_only": True} if local or not _finds_hub() else {}
    with quiet_transformers():
        try:
            inner = AutoTokenizer.from_pretrained(place, **options)
            model = AutoModel.from_pretrained(place, dtype=torch.float32, **options)
        except Exception as error:  # its parts raise a handful of unrelated types
            reason = " ".join(str(error).split()) or type(error).__name__
            where = "loaded from this folder" if local else "had: it is no folder here, and the hub did not give it"
            hint = (
                "" if local else ". Give the folder of a model; experiments/warm_start.py makes one of your sentences"
            )
            raise ValueError(f"the model {name!r} can't be {where}: {reason[:300].rstrip('.')}{hint}") from error
    inner.padding_side = "right"
    padding = inner.pad_token_id
    if padding is None:
        padding = getattr(model.config, "pad_token_id", None) or 0
    try:
        encoder = SentenceEncoder(model, mean=pooling == "mean", padding=int(padding))
        _freeze_unused(encoder)
    except Exception as error:  # models raise whatever they like
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the model {name!r} ({type(model).__name__}) is no encoder from tokens to vectors: {reason[:300]}"
        ) from error
    # from_pretrained leaves a model in eval mode, where dropout would make no views.
    return encoder.train(), Tokenizer(inner, _limit(model, inner))


def _finds_hub() -> bool:
    """Whether the hub has an address here. Without a network it would be asked for a minute, file by file and again."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {hub.scheme, "all"}:  # a proxy looks it up itself
        return True
    try:
        socket.getaddrinfo(hub.hostname, hub.port)
    except OSError:
        return False
    return True


def _inner_model(folder: Path) -> Path:
    """Of a folder of sentence-transformers, such as a run, where its transformer is; of others, the folder itself."""
    if (folder / "config.json").exists() or not (folder / "modules.json").is_file():
        return folder
    with contextlib.suppress(ValueError, LookupError, TypeError):  # of something else by that name
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return folder / str(modules[0]["path"])
    return folder


def check_model(name: str) -> None:
    """Refuse a path where there is no folder; a name may be one on the hub.

    Raises:
        FileNotFoundError: there is none.
    """
    path = Path(name).is_absolute() or name.startswith(".") or name.count("/") > 1
    if path and not Path(name).is_dir():
        raise FileNotFoundError(f"there is no folder {name} with a model")


def told_limit(name: str) -> int:
    """The most tokens that the files of a model's folder say it takes, without loading it.

    Never less than `Tokenizer.limit`; without a bound where the files say nothing, as of a name on the hub.
    """
    found = [_TOO_LONG]
    for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # loading it will say what is wrong
            told = json.loads((_inner_model(Path(name)) / file).read_text(encoding="utf-8"))
            found.append(int(min(told[key] or _TOO_LONG, _TOO_LONG)))
    return min(found)


def _limit(model: nn.Module, tokenizer: Any) -> int:
    """The most tokens that model and tokenizer take."""
    limit = int(getattr(model.config, "max_position_embeddings", None) or _TOO_LONG)
    for module in model.modules():
        # RoBERTa and its kin count positions from behind the padding token's id.
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
            limit = min(limit, positions.num_embeddings - positions.padding_idx - 1)
    return min(limit, int(min(tokenizer.model_max_length, _TOO_LONG)))


def _freeze_unused(encoder: SentenceEncoder) -> None:
    """Look at two tokens through the encoder, and freeze what gets no gradient."""
    encoder.eval()
    encoder(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def makes_views(encoder: SentenceEncoder) -> bool:
    """Whether one sentence has several vectors in training: not where the model has no dropout."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # whoever seeded the weights counts on the generator
        vectors = encoder(torch.zeros(8, 2, dtype=torch.long))
    return not torch.allclose(vectors, vectors[:1].expand_as(vectors), rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Without bars for reading and writing files, and without notes on weights that have no part here."""
    import transformers.utils.logging

    logging: Any = transformers.utils.logging
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def pooled_transformer(folder: Path, pooling: TokenPooling, device: str = "cpu") -> SentenceTransformer:
    """A plain transformers folder as a model of sentence-transformers.

    Its weights are float32 and it takes as many tokens as in :func:`build_sentence_encoder`, whatever the files say.

    Args:
        folder: what ``save_pretrained`` of a model and its tokenizer left.
        pooling: the vector of a sentence: its first token's, or the mean of all.
        device: where to compute.
    """
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling as PoolingModule
    from sentence_transformers.sentence_transformer.modules import Transformer

    local = {"local_files_only": True}
    words = Transformer(
        str(folder),
        model_kwargs={"dtype": torch.float32, **local},
        processor_kwargs=dict(local),
        config_kwargs=dict(local),
    )
    words.max_seq_length = _limit(words.model, words.tokenizer)
    return SentenceTransformer(modules=[words, PoolingModule(words.get_embedding_dimension(), pooling)], device=device)


def save_sentence_encoder(encoder: SentenceEncoder, tokenizer: Tokenizer, length: int, folder: Path) -> None:
    """Write a folder that ``SentenceTransformer(folder)`` loads; whole, or under another name.

    What is there already is replaced, once the new one is complete.

    Args:
        encoder: its model and pooling; no head and no normalisation come with them.
        tokenizer: the encoder's.
        length: tokens at which the loaded model cuts a sentence off (its max_seq_length).
        folder: where to.
    """
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    plain = temporary / "plain"
    inner: Any = encoder.model
    try:
        with quiet_transformers():
            inner.save_pretrained(plain)
            tokenizer.save(plain)
            model = pooled_transformer(plain, "mean" if encoder.mean else "cls")
            model.max_seq_length = length
            model.save_pretrained(str(temporary / "whole"), create_model_card=False)
        mode = stat.S_IMODE((temporary / "whole" / "modules.json").stat().st_mode)
        for weights in (temporary / "whole").rglob("*.safetensors"):
            weights.chmod(mode)  # they are made for their owner alone
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / "whole").rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def point_to(folder: Path, inner: Path) -> list[dict[str, Any]]:
    """What the modules.json of a folder holds that has a whole sentence-transformers folder inside."""
    modules: list[dict[str, Any]] = json.loads((inner / "modules.json").read_text(encoding="utf-8"))
    place = inner.relative_to(folder)
    return [{**module, "path": (place / module["path"]).as_posix()} for module in modules]
