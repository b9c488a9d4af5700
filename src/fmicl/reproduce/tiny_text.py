"""A tiny text task for the small scale: generated sentences, a BERT of two layers, and pairs with graded similarity.

A sentence is drawn from a small grammar: (who, does, what, where). Two sentences are as similar as the share of these
four slots in which they mean the same; each slot value can be said in two ways, so that words alone don't tell.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fmicl.utils.files import write_atomically

SLOTS = tuple(
    tuple(tuple(phrase.strip() for phrase in value.split("/")) for value in slot.split(","))
    for slot in (
        "a man / some guy, a woman / the lady, a child / the kid, a dog / the hound, a cook / the chef",
        "eats / has, buys / gets, sees / notices, carries / holds, paints / draws",
        "bread / a loaf, a car / an automobile, a picture / an image, a stone / a rock, a boat / a ship",
        "at home / in the house, outside / in the open, in town / in the city, by the sea / on the coast",
    )
)
"""Values of each slot, each in two phrasings."""
SENTENCES, PAIRS = 4096, 300
LAYERS, WIDTH, HEADS = 2, 64, 4
Meaning = tuple[int, ...]


def make_tiny_text(folder: Path, seed: int = 0) -> dict[str, Any]:
    """Write sentences, model and STS-Benchmark-like pairs below a folder, unless they are there.

    Args:
        folder: where text.txt, bert/ and sts/ go.
        seed: of sentences, pairs and weights.

    Returns:
        Options of the recipe wikipedia that train on them.
    """
    if not (folder / "done").exists():
        generator = random.Random(seed)
        folder.mkdir(parents=True, exist_ok=True)
        sentences = [_say(_meaning(generator), generator) for _ in range(SENTENCES)]
        _write(folder / "text.txt", "\n".join(sentences))
        for split in ("dev", "test"):
            rows = "\n".join(f"tiny\ttiny\t0\t{i}\t{row}" for i, row in enumerate(_pairs(generator)))
            _write(folder / "sts" / "STS" / "STSBenchmark" / f"sts-{split}.csv", rows)
        _write_bert(folder / "bert", seed)
        _write(folder / "done", "")
    return {
        "data": folder / "text.txt", "model": str(folder / "bert"), "sts": folder / "sts", "learning_rate": 3e-4,
        "sts_every": 32, "length": 16, "queue": 512, "hidden": 128, "cache_dir": folder / "cache",
    }  # fmt: skip


def _meaning(generator: random.Random) -> Meaning:
    return tuple(generator.randrange(len(slot)) for slot in SLOTS)


def _say(meaning: Meaning, generator: random.Random) -> str:
    return " ".join(generator.choice(slot[value]) for slot, value in zip(SLOTS, meaning, strict=True))


def _pairs(generator: random.Random) -> Iterator[str]:
    """Pairs in equal numbers for each number of slots that agree: ``score<tab>sentence<tab>sentence``."""
    for number in range(PAIRS):
        agree = number % (len(SLOTS) + 1)
        same = set(generator.sample(range(len(SLOTS)), agree))
        first = _meaning(generator)
        second = tuple(
            value if i in same else (value + generator.randrange(1, len(SLOTS[i]))) % len(SLOTS[i])
            for i, value in enumerate(first)
        )
        yield f"{5 * agree / len(SLOTS):.3f}\t{_say(first, generator)}\t{_say(second, generator)}"


def _write_bert(folder: Path, seed: int) -> None:
    import torch
    from transformers import BertConfig, BertModel, BertTokenizer

    words = sorted({word for slot in SLOTS for phrase in itertools.chain(*slot) for word in phrase.split()})
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]
    _write(folder / "vocab.txt", "\n".join(vocabulary))
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = BertConfig(
            vocab_size=len(vocabulary), hidden_size=WIDTH, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
            intermediate_size=4 * WIDTH, max_position_embeddings=32,
        )  # fmt: skip
        BertModel(config).save_pretrained(folder)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, lambda temporary: temporary.write_text(text + "\n", "utf-8"))
