"""A BERT of a few thousand parameters with a vocabulary of its own, made on the spot."""

from __future__ import annotations

from pathlib import Path

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Pooling, Transformer
from transformers import BertConfig, BertModel, BertTokenizer

SENTENCES = [
    f"{who} {verb} {what}"
    for who in ("a man", "the woman", "two cat", "the dog")
    for verb in ("plays", "sings")
    for what in ("guitar", "a song", "fast .", "the red food")
]
WORDS = sorted({word for sentence in SENTENCES for word in sentence.split()})


def tiny_bert(folder: Path, *, dropout: float = 0.1, seed: int = 0) -> SentenceTransformer:
    """A SentenceTransformer with mean pooling, written to and read from `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(seed)
    config = BertConfig(
        vocab_size=len(WORDS) + 5, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=16, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    words = Transformer(str(folder))
    return SentenceTransformer(modules=[words, Pooling(words.get_embedding_dimension(), "mean")], device="cpu")
