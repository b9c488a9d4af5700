"""Sentence encoders: any Hugging Face encoder with pooling, and its tokenizer.

A batch of sentences is one tensor of token ids (N, L), padded with -1, so that every method takes sentences as it takes
images. Encoders are exported as sentence-transformers folders.
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

from fmicl.data.text.sentence_stream import padded_width
from fmicl.utils.options import Options, option
from fmicl.utils.validation import Pooling, TokenPooling

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

_UNLIMITED = 10**6  # tokenizers without a limit declare an astronomic one


@dataclass(frozen=True)
class SentenceEncoderOptions(Options):
    """Which sentence encoder to train, and how many tokens it reads."""

    model: str = option(
        "bert-base-uncased",
        "Any Hugging Face encoder: a name on the hub, a folder that save_pretrained wrote, or a run on sentences.",
    )
    pooling: Pooling = option(
        "cls_mlp",
        "Sentence vector: the first token's (cls), the same with an MLP that is dropped after training (cls_mlp, as "
        "in SimCSE), or the mean over tokens.",
    )
    length: int = option(
        32, "Tokens of a sentence in training, special tokens included; longer ones are truncated.", at_least=3
    )
    encode_length: int | None = option(
        None,
        "Tokens of a sentence in evaluation and in the exported model (None: as many as the model takes, as in "
        "SimCSE's evaluation).",
        above=0,
    )
    hidden: int = option(2048, "Width of the predictor of mocov3 and byol.", above=0)


class SentenceEncoder(nn.Module):
    """A transformer with pooling: the last hidden state of a sentence's first token, or the mean over its tokens.

    Args:
        model: a Hugging Face encoder.
        mean: pool by the mean over tokens, not by the first token.
        padding: id of the padding token; some models count positions by it.

    Attributes:
        num_features: dimension of a sentence vector.
    """

    def __init__(self, model: nn.Module, *, mean: bool, padding: int) -> None:
        super().__init__()
        self.model, self.mean, self.padding = model, mean, padding
        self.num_features = int(model.config.hidden_size)  # type: ignore[union-attr, arg-type]

    def forward(self, ids: Tensor) -> Tensor:
        """Vectors (N, num_features) of token ids (N, L), padded with -1."""
        mask = ids >= 0
        tokens = torch.where(mask, ids, self.padding).long()
        states: Tensor = self.model(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
        if not self.mean:
            return states[:, 0]
        weights = mask.unsqueeze(-1).to(states.dtype)
        return (states * weights).sum(dim=1) / weights.sum(dim=1)


def sentence_head(pooling: Pooling, width: int, std: float = 0.02) -> nn.Module:
    """The projection head in training: for ``cls_mlp`` a linear layer and tanh, else the identity.

    Args:
        pooling: the pooling option.
        width: dimension of a vector and of an embedding.
        std: standard deviation of the initial weights; biases are 0, as in BERT.

    Example:
        >>> sentence_head("cls_mlp", 8)(torch.zeros(2, 8)).tolist() == [[0.0] * 8] * 2
        True
        >>> sentence_head("mean", 8)
        Identity()
    """
    if pooling != "cls_mlp":
        return nn.Identity()
    linear = nn.Linear(width, width)
    nn.init.normal_(linear.weight, std=std)
    nn.init.zeros_(linear.bias)
    return nn.Sequential(linear, nn.Tanh())


class Tokenizer:
    """A Hugging Face tokenizer.

    Args:
        tokenizer: of transformers.
        limit: largest number of tokens that the model takes.
    """

    def __init__(self, tokenizer: Any, limit: int) -> None:
        self.inner, self.limit = tokenizer, limit

    def encode(self, sentences: Sequence[str], length: int) -> list[list[int]]:
        """Token ids of each sentence with special tokens, truncated to a length."""
        # A user's own choice is kept.
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
        """(N, L) token ids, padded with -1; L is a multiple of 8 or the length."""
        rows = self.encode(sentences, length)
        ids = torch.full((len(rows), padded_width(max(map(len, rows)), length)), -1)
        for line, row in zip(ids, rows, strict=True):
            line[: len(row)] = torch.tensor(row)
        return ids

    def save(self, folder: Path) -> None:
        """Write its files, which don't depend on how it was last called."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is not None:
            backend.no_truncation()
            backend.no_padding()
        self.inner.save_pretrained(folder)

    def state(self) -> bytes:
        """A hash of all that the ids depend on, except the length."""
        with tempfile.TemporaryDirectory() as folder:
            self.save(Path(folder))
            files = {path.name: path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}
        if "tokenizer.json" in files:
            files = {"tokenizer.json": files["tokenizer.json"]}
        else:
            files.pop("tokenizer_config.json", None)  # it has the paths of folders, which may differ
        digest = hashlib.blake2b()
        for name, content in sorted(files.items()):
            digest.update(f"{name} {len(content)}\n".encode() + content)
        return digest.digest()


def build_sentence_encoder(name: str, pooling: Pooling) -> tuple[SentenceEncoder, Tokenizer]:
    """Load a pretrained encoder and its tokenizer, from a folder or from the hub; without a network, from its cache.

    Weights that a folder lacks (a pooler, after masked language modelling) are random, by torch's seed. Parameters that
    don't influence the vectors are frozen, since distributed training would wait for their gradients.

    Args:
        name: a folder with a model and tokenizer by ``save_pretrained``, a run on sentences, or a name on the hub.
        pooling: the pooling option.

    Raises:
        FileNotFoundError: the name is a path that doesn't exist.
        ValueError: the model can't be loaded, or is no encoder.
    """
    from huggingface_hub import snapshot_download
    from transformers import AutoModel, AutoTokenizer

    check_model_path(name)
    local = Path(name).is_dir()
    location = str(_inner_model(Path(name))) if local else name
    cached = not local and not _hub_reachable()
    options = {"local_files_only": True} if local or cached else {}
    with quiet_transformers():
        try:
            if cached:  # a folder: for a name, transformers asks the hub for an adapter where peft is installed
                location = snapshot_download(name, local_files_only=True)
            inner = AutoTokenizer.from_pretrained(location, **options)
            model = AutoModel.from_pretrained(location, dtype=torch.float32, **options)
        except Exception as error:  # transformers raises a handful of unrelated types
            reason = " ".join(str(error).split()) or type(error).__name__
            where = "from this folder" if local else "from the hub, and there is no folder of this name"
            hint = "" if local else ". Give a model's folder; experiments/warm_start.py makes one from your sentences"
            raise ValueError(f"the model {name!r} can't be loaded {where}: {reason[:300].rstrip('.')}{hint}") from error
    inner.padding_side = "right"
    padding = inner.pad_token_id
    if padding is None:
        padding = getattr(model.config, "pad_token_id", None) or 0
    try:
        encoder = SentenceEncoder(model, mean=pooling == "mean", padding=int(padding))
        _freeze_unused(encoder)
    except Exception as error:  # models raise any type
        reason = " ".join(str(error).split()) or type(error).__name__
        raise ValueError(
            f"the model {name!r} ({type(model).__name__}) is not an encoder from tokens to vectors: {reason[:300]}"
        ) from error
    # from_pretrained leaves a model in eval mode, where dropout is off.
    return encoder.train(), Tokenizer(inner, _length_limit(model, inner))


def _hub_reachable() -> bool:
    """Whether the hub's name resolves. Without a network transformers would retry every file, for a minute."""
    from huggingface_hub import constants

    hub = urlsplit(constants.ENDPOINT)
    if urllib.request.getproxies().keys() & {hub.scheme, "all"}:  # then the proxy resolves names
        return True
    try:
        socket.getaddrinfo(hub.hostname, hub.port)
    except OSError:
        return False
    return True


def _inner_model(folder: Path) -> Path:
    """The transformer's folder inside a sentence-transformers folder, such as a run; else the folder itself."""
    if (folder / "config.json").exists() or not (folder / "modules.json").is_file():
        return folder
    with contextlib.suppress(ValueError, LookupError, TypeError):  # another kind of modules.json
        modules = json.loads((folder / "modules.json").read_text(encoding="utf-8"))
        return folder / str(modules[0]["path"])
    return folder


def check_model_path(name: str) -> None:
    """Check that a model that is named by a path exists; other names may be on the hub.

    Raises:
        FileNotFoundError: there is no such folder.
        ValueError: it is a file, or the folder of something else.
    """
    path = Path(name)
    is_path = path.is_absolute() or name.startswith(".") or name.count("/") > 1
    if path.is_file():
        raise ValueError(f"{name} is a file: give the folder of a model, as save_pretrained writes it")
    if is_path and not path.is_dir():
        raise FileNotFoundError(f"there is no model folder {name}")
    if path.is_dir() and not (_inner_model(path) / "config.json").is_file():
        raise ValueError(
            f"{name} is no model's folder: it has no config.json. Give one that save_pretrained wrote, or a run on text"
        )


def declared_length_limit(name: str) -> int:
    """Largest number of tokens that a model takes by the files in its folder, without loading it.

    Never less than `Tokenizer.limit`; practically infinite if the files don't say it, as for a name on the hub.
    """
    found = [_UNLIMITED]
    for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # loading it reports what is wrong
            declared = json.loads((_inner_model(Path(name)) / file).read_text(encoding="utf-8"))
            found.append(int(min(declared[key] or _UNLIMITED, _UNLIMITED)))
    return min(found)


def _length_limit(model: nn.Module, tokenizer: Any) -> int:
    """Largest number of tokens that model and tokenizer take."""
    limit = int(getattr(model.config, "max_position_embeddings", None) or _UNLIMITED)
    for module in model.modules():
        # RoBERTa and its relatives count positions from the padding token's id + 1.
        positions = getattr(module, "position_embeddings", None)
        if isinstance(positions, nn.Embedding) and positions.padding_idx is not None:
            limit = min(limit, positions.num_embeddings - positions.padding_idx - 1)
    return min(limit, int(min(tokenizer.model_max_length, _UNLIMITED)))


def _freeze_unused(encoder: SentenceEncoder) -> None:
    """Freeze the parameters that get no gradient in a trial."""
    encoder.eval()
    encoder(torch.zeros(1, 2, dtype=torch.long)).sum().backward()
    for parameter in encoder.parameters():
        parameter.requires_grad_(parameter.grad is not None)
        parameter.grad = None


def has_dropout(encoder: SentenceEncoder) -> bool:
    """Whether a sentence's vector is random in training, so that one sentence has two views."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):  # weights of later modules depend on it
        vectors = encoder(torch.zeros(8, 2, dtype=torch.long))
    return not torch.allclose(vectors, vectors[:1].expand_as(vectors), rtol=1e-4, atol=1e-6)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Suppress transformers' progress bars, and its messages on unused weights."""
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
    """A sentence-transformers model from a plain transformers folder.

    Weights are float32, and the length limit is that of :func:`build_sentence_encoder`, whatever the files say.

    Args:
        folder: folder of a model and its tokenizer, by ``save_pretrained``.
        pooling: the first token's vector, or the mean over tokens.
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
    words.max_seq_length = _length_limit(words.model, words.tokenizer)
    return SentenceTransformer(modules=[words, PoolingModule(words.get_embedding_dimension(), pooling)], device=device)


def save_sentence_encoder(encoder: SentenceEncoder, tokenizer: Tokenizer, length: int, folder: Path) -> None:
    """Write a folder that ``SentenceTransformer(folder)`` loads, atomically; an existing one is replaced.

    Args:
        encoder: its model and pooling are written, without a head or normalisation.
        tokenizer: the encoder's.
        length: number of tokens at which the loaded model truncates (its max_seq_length).
        folder: the folder to write.
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
            model.save_pretrained(str(temporary / "complete"), create_model_card=False)
        mode = stat.S_IMODE((temporary / "complete" / "modules.json").stat().st_mode)
        for weights in (temporary / "complete").rglob("*.safetensors"):
            weights.chmod(mode)  # safetensors creates them for their owner alone
        shutil.rmtree(folder, ignore_errors=True)
        (temporary / "complete").rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def nested_modules(folder: Path, inner: Path) -> list[dict[str, Any]]:
    """Contents of modules.json that make a folder with a sentence-transformers folder inside loadable itself."""
    modules: list[dict[str, Any]] = json.loads((inner / "modules.json").read_text(encoding="utf-8"))
    below = inner.relative_to(folder)
    return [{**module, "path": (below / module["path"]).as_posix()} for module in modules]
