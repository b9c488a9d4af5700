"""Settings of runs on sentences: the unsupervised SimCSE setting, under every objective and method.

Nothing in this file imports torch, so that ``fmicl --help`` answers at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Literal

from fmicl.config.recipes import Entry
from fmicl.config.settings import Settings
from fmicl.utils.validation import Pooling


@dataclass(frozen=True, kw_only=True)
class TextRecipe(Settings):
    """All settings of one training run on a text file. Each sentence is its own pair: dropout makes the two views.

    The defaults are the f-MICL paper's for English Wikipedia. With ``objective="infonce"`` it is unsupervised SimCSE
    (Gao, Yao and Chen, 2021). Whatever the encoder's precision, the loss is computed in float32: at gamma = 20,
    inner products in bfloat16 would put the gradient off by several percent.

    Raises:
        ValueError: a number is out of its range, or two settings contradict each other. The message names the field.

    Example:
        >>> TextRecipe(data=Path("wiki.txt"), objective="infonce").temperature
        0.05
    """

    kind: ClassVar[str] = "text"
    machine: ClassVar[frozenset[str]] = Settings.machine | {"data", "sts", "cache_dir"}
    paths: ClassVar[tuple[str, ...]] = ("data", "sts", "cache_dir")

    # What is other for sentences than for images
    alpha: float = 409600.0
    """Weight of the negatives (fmicl)."""
    gamma: float = 20.0
    """Of the kernel exp(-gamma |x - y|^2) (fmicl); the cosine's temperature is 1 / (2 gamma)."""
    negatives: Literal["auto", "anchor", "both", "cross"] = "auto"
    """Other anchors, all other views, or other second views; auto: as the objective's paper (for infonce, SimCSE:
    cross). moco takes its queue instead."""
    temperature: float = 0.05
    """Of infonce; 0.05 is SimCSE's."""
    epochs: int = 1
    """Passes over the data."""
    batch_size: int = 64
    """Sentences of a batch, over all processes together."""
    optimizer: Literal["sgd", "adamw"] = "adamw"
    """SGD with momentum 0.9, or AdamW."""
    learning_rate: float = 3e-5
    """Highest learning rate, reached after the warm-up; the schedule takes it to 0."""
    schedule: Literal["cosine", "linear"] = "linear"
    """How the learning rate falls after the warm-up: along half a cosine, or on a straight line."""
    weight_decay: float = 0.0
    """Of weights; biases and normalisation parameters have none."""
    warmup_epochs: float = 0.0
    """Epochs in which the learning rate rises by the same amount each step, the first being one such amount; never
    more than a fifth of all."""
    clip: float = 1.0
    """Clip the norm of the gradient here (0: never)."""

    # Encoder
    model: str = "bert-base-uncased"
    """Any Hugging Face encoder: a name on the hub, a folder that save_pretrained left, or a run on sentences."""
    pooling: Pooling = "cls_mlp"
    """One vector of all tokens' vectors: the first token's (cls; cls_mlp trains an MLP on top that is dropped
    afterwards, as SimCSE does), or their mean."""
    length: int = 32
    """Tokens of a sentence in training, the special ones included; what is longer is cut off."""
    encode_length: int | None = None
    """Tokens of a sentence after training, in evaluation and in the exported model (None: as many as the model takes,
    as in SimCSE's evaluation)."""
    hidden: int = 2048
    """Width of mocov3's predictor."""

    # Data
    data: Path | None = None
    """The text file: UTF-8, a sentence a line."""
    sts: Path | None = None
    """A folder of STS tasks in SentEval's layout: STS-B dev then chooses the checkpoint, and the seven test sets are
    scored at the end."""
    sts_every: int = 125
    """Steps between two rows of metrics.csv and, with --sts, between two scores on STS-B dev."""
    cache_dir: Path | None = None
    """Where tokenised files are kept (None: fmicl in $XDG_CACHE_HOME, or in ~/.cache)."""

    def __post_init__(self) -> None:
        """Refuse numbers that can't be meant."""
        super().__post_init__()
        self._require_positive("hidden", "length", "sts_every")
        if self.encode_length is not None:
            self._require_positive("encode_length")
        if self.length < 3:
            raise ValueError(f"length must leave room for a token between the special ones, but it is {self.length}")

    @property
    def text(self) -> Path:
        """The text file.

        Raises:
            ValueError: it is not said which one.
        """
        if self.data is None:
            raise ValueError("which text to train on is not said: --data FILE, with a sentence a line")
        return self.data

    def parts(self) -> dict[str, bool]:
        """The width of the predictor has a part where there is one, and statistics of batches have none."""
        return {**super().parts(), "hidden": self.method == "mocov3", "key_statistics": False}

    def because(self) -> dict[str, str]:
        """Of settings whose part doesn't follow from objective and method alone, where they have none, in words."""
        return {**super().because(), "key_statistics": "in sentence encoders, which normalise no batches"}


TEXT_RECIPES: dict[str, Entry[TextRecipe]] = {
    entry.name: entry
    for entry in (
        Entry(
            "wikipedia",
            "BERT-base on a file of sentences, two views by dropout (SimCSE): the paper's setting.",
            TextRecipe(),
        ),
    )
}
