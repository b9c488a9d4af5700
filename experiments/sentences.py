"""Data of masked language modelling: a vocabulary, packed rows of tokens, masked batches.

A row holds whole sentences, each [CLS] ... [SEP], and padding at its end only. All that the model needs to keep them
apart, attention and positions, follows from the tokens (`sentence_layout`).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import sys
import zipfile
from pathlib import Path
from typing import Any

os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))  # this tree, installed or not

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor
from transformers import BertTokenizer

from fmicl.utils.files import write_atomically

Rows = NDArray[np.uint16]
Batch = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""Tokens as seen, who may look at whom, positions; flat positions to predict at, and the tokens there."""

CHOSEN, MASKED, RANDOM = 0.15, 0.8, 0.1


# --- text to rows of tokens ------------------------------------------------------------------------------------------


def read_lines(text: Path) -> list[str]:
    """The lines of a text file that are not blank."""
    lines = [line for line in text.read_text(encoding="utf-8").split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{text} has no sentences: one a line was expected")
    return lines


def train_vocabulary(lines: list[str], size: int) -> BertTokenizer:
    """An uncased WordPiece vocabulary of at most `size` entries, [PAD] [UNK] [CLS] [SEP] [MASK] first.

    Letters beyond the 1,000 most frequent ones are [UNK]: else rare scripts take entries from whole words.
    Two runs number their entries differently, and may differ in a few (equally frequent pairs): keep the folder.
    """
    batches = (lines[start : start + 10_000] for start in range(0, len(lines), 10_000))
    trained: BertTokenizer = BertTokenizer().train_new_from_iterator(  # type: ignore[no-untyped-call]
        batches, size, limit_alphabet=1000
    )
    return trained


def tokenise(lines: list[str], tokenizer: BertTokenizer, longest: int) -> list[Rows]:
    """[CLS] tokens [SEP] of each line, cut at `longest`, on all cores. A line that says "[SEP]" is taken literally."""
    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())  # a copy, as its settings change
    backend.encode_special_tokens = True
    backend.enable_truncation(longest)
    sentences: list[Rows] = []
    for start in range(0, len(lines), 50_000):
        encoded = backend.encode_batch_fast(lines[start : start + 50_000])
        sentences += [np.array(sentence.ids, np.uint16) for sentence in encoded]
    return sentences


def pack(sentences: list[Rows], width: int, padding: int) -> Rows:
    """Rows of `width` tokens, each of whole sentences: the longest one left that fits, until none does."""
    by_length: list[list[Rows]] = [[] for _ in range(width + 1)]
    for sentence in sentences:
        by_length[len(sentence)].append(sentence)
    rows: list[list[Rows]] = []
    placed = 0
    while placed < len(sentences):
        row: list[Rows] = []
        room = length = width
        while length:  # what fits next is never longer than what fitted last
            if by_length[length]:
                row.append(by_length[length].pop())
                room -= length
                length = min(length, room)
            else:
                length -= 1
        rows.append(row)
        placed += len(row)
    packed = np.full((len(rows), width), padding, np.uint16)
    for values, row in zip(packed, rows, strict=True):
        filled = np.concatenate(row)
        values[: len(filled)] = filled
    return packed


def usual_held_out(text: Path) -> int:
    """Lines to hold out where nobody says how many: 2,000, or of a short text a tenth."""
    return min(2000, max(1, len(read_lines(text)) // 10))


def make_rows(text: Path, tokenizer: BertTokenizer, width: int, held_out: int) -> tuple[Rows, Rows]:
    """Rows to train on, and rows of `held_out` random lines, of which no copy is among the first."""
    if len(tokenizer) > 2**16:
        raise ValueError(f"{len(tokenizer)} entries of the vocabulary don't fit 16 bits; take at most {2**16}")
    sentences = tokenise(read_lines(text), tokenizer, width)
    if not 0 < held_out < len(sentences):
        can = f"between 1 and {len(sentences) - 1} can be" if len(sentences) > 1 else "two lines are the least"
        raise ValueError(f"{held_out} lines to hold out (--held-out) of {len(sentences)}: {can}")
    chosen = np.random.default_rng(0).choice(len(sentences), held_out, replace=False)
    held = [sentences[i] for i in chosen]
    copies = {sentence.tobytes() for sentence in held}
    kept = [sentence for sentence in sentences if sentence.tobytes() not in copies]
    if not kept:
        raise ValueError(f"every line of {text} is a copy of one that is held out: nothing is left to train on")
    return pack(kept, width, tokenizer.pad_token_id), pack(held, width, tokenizer.pad_token_id)


def fingerprint(tokenizer: BertTokenizer) -> str:
    return hashlib.sha256(json.dumps(tokenizer.get_vocab(), sort_keys=True).encode()).hexdigest()


def write_rows(path: Path, rows: tuple[Rows, Rows], settings: dict[str, Any]) -> None:
    """A compressed .npz file of both, and of what they were made for."""

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez_compressed(file, train=rows[0], held_out=rows[1], settings=np.array(json.dumps(settings)))

    write_atomically(path, write, overwrite=False)


def read_rows(path: Path, settings: dict[str, Any]) -> tuple[tuple[Rows, Rows], dict[str, Any]]:
    """What `write_rows` wrote, if it was for these settings, of which one that is None may be any."""
    try:
        with np.load(path) as file:
            written = json.loads(str(file["settings"]))
            rows = file["train"], file["held_out"]
    except (zipfile.BadZipFile, KeyError) as error:
        raise ValueError(f"{path} is not a file that `tokens` wrote: {error}") from error
    for name, wanted in settings.items():
        if wanted is not None and written[name] != wanted:
            raise ValueError(f"{path} was made for {name} {written[name]}, but {wanted} is asked for: make it anew")
    return rows, written


# --- a batch ---------------------------------------------------------------------------------------------------------


def mask_tokens(
    rows: Tensor, special: Tensor, mask_token: int, generator: torch.Generator | None = None
) -> tuple[Tensor, Tensor]:
    """What the model sees, and which tokens it has to tell.

    Args:
        rows: tokens, of any shape.
        special: of each entry of the vocabulary, whether it is special and so never masked.
        mask_token: the entry that stands for what is hidden.
        generator: of the random numbers, on the same device.
    """
    uniform = torch.rand((2, *rows.shape), generator=generator, device=rows.device)
    chosen = (uniform[0] < CHOSEN) & ~special[rows]
    others = torch.randint(len(special), rows.shape, generator=generator, device=rows.device)
    seen = torch.where(chosen & (uniform[1] < MASKED), mask_token, rows)
    swapped = chosen & (uniform[1] >= MASKED) & (uniform[1] < MASKED + RANDOM)
    return torch.where(swapped, others, seen), chosen


def select(rows: Tensor, chosen: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Flat positions of the chosen tokens and the tokens, `count` of both whatever is chosen; -100 fills up.

    One shape for all batches, known beforehand, keeps the compiled step compiled and the GPU from waiting.
    """
    marked, positions = chosen.flatten().to(torch.uint8).sort(descending=True, stable=True)
    labels = torch.where(marked.bool(), rows.flatten()[positions], -100)
    return positions[:count], labels[:count]


def slots(valid: Tensor, batch: int, width: int) -> int:
    """How many positions to keep for chosen tokens, if rows have `valid` tokens that can be: mean plus 6 deviations."""
    mean, variance = float(valid.mean()), float(valid.var(correction=0))
    spread = math.sqrt(batch * (CHOSEN * (1 - CHOSEN) * mean + CHOSEN**2 * variance))
    return min(batch * width, 64 * math.ceil((batch * CHOSEN * mean + 6 * spread) / 64))


def sentence_layout(rows: Tensor, start: int, padding: int) -> tuple[Tensor, Tensor]:
    """Which token may look at which, (rows, 1, width, width), and its position in its sentence, (rows, width)."""
    starts = rows == start
    index = torch.arange(rows.shape[1], device=rows.device).expand_as(rows)
    positions = index - torch.where(starts, index, 0).cummax(dim=1).values
    sentence = starts.cumsum(dim=1) * (rows != padding)  # padding looks at padding: a row of no keys would be NaN
    return (sentence[:, None, :] == sentence[:, :, None])[:, None], positions


def make_batch(
    rows: Tensor, special: Tensor, tokenizer: BertTokenizer, count: int, generator: torch.Generator | None = None
) -> Batch:
    rows = rows.long()
    seen, chosen = mask_tokens(rows, special, tokenizer.mask_token_id, generator)
    return seen, *sentence_layout(rows, tokenizer.cls_token_id, tokenizer.pad_token_id), *select(rows, chosen, count)


def held_out_batches(rows: Rows, special: Tensor, tokenizer: BertTokenizer) -> list[Batch]:
    """The rows, masked once and for all: the same masks in every run and on any machine, as no GPU draws them."""
    generator = torch.Generator().manual_seed(0)
    batches: list[Batch] = []
    for portion in torch.from_numpy(rows.astype(np.int32)).split(256):
        batch = make_batch(portion, special.cpu(), tokenizer, portion.numel(), generator)
        chosen = int((batch[4] >= 0).sum())
        seen, look, positions, at, labels = (value.to(special.device) for value in batch)
        batches.append((seen, look, positions, at[:chosen], labels[:chosen]))
    return batches
