"""Tokenised text files: a cache on disk, mapped into memory.

CACHE/tokens/<key>/ids.bin        int32, all sentences concatenated
                   offsets.bin    int64, start of each sentence, and end of the last
                   manifest.json  key, and the lengths that the other two must have

The key is a hash of the file's bytes, the tokenizer's state and the length, so a changed file or tokenizer is another
entry. An entry is written under a temporary name and then renamed, so it is never seen incomplete.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fmicl.data.cache import cache_root, locked_entry
from fmicl.data.text.lines import LineReader, file_digest
from fmicl.utils.files import explain_full_disk

FORMAT = 1
Tokenise = Callable[[list[str]], Sequence[Sequence[int]]]
"""From sentences to token ids, special tokens included, truncated."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences as token ids, in memory or mapped from a file.

    Attributes:
        ids: (T,) all tokens, sentences concatenated.
        offsets: (N + 1,) sentence i is ``ids[offsets[i]:offsets[i + 1]]``.
        blank: number of blank lines of the file.
        fingerprint: number of sentences, hashes of the file and of the tokenizer.
        long: number of lines that are hardly sentences (`fmicl.data.text.lines.LONG_LINE`).

    Example:
        >>> sentences = Sentences(np.array([7, 8, 9]), np.array([0, 1, 3]), 0, {})
        >>> sentences.padded(np.array([1, 0]), width=4)
        array([[ 8,  9, -1, -1],
               [ 7, -1, -1, -1]], dtype=int32)
    """

    ids: NDArray[Any]
    offsets: NDArray[Any]
    blank: int
    fingerprint: dict[str, Any]
    long: int = 0

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, index: NDArray[Any]) -> NDArray[Any]:
        """Number of tokens of each of these sentences."""
        counts: NDArray[Any] = self.offsets[index + 1] - self.offsets[index]
        return counts

    def padded(self, index: NDArray[Any], width: int) -> NDArray[np.int32]:
        """(n, width) tokens of n sentences, none longer than the width, padded with -1."""
        starts, lengths = self.offsets[index], self.lengths(index)
        there = np.arange(width) < lengths[:, None]
        rows = np.full(there.shape, -1, dtype=np.int32)
        rows[there] = self.ids[(starts[:, None] + np.arange(width))[there]]
        return rows


def tokenise_file(
    path: Path,
    tokenise: Tokenise,
    state: bytes,
    length: int,
    *,
    cache: Path | None = None,
    say: Callable[[str], None] = print,
) -> Sentences:
    """The sentences of a text file as tokens, from the cache if it has them; blank lines are skipped.

    Args:
        path: UTF-8, one sentence per line.
        tokenise: the tokenizer.
        state: all that ``tokenise`` depends on, except the length.
        length: number of tokens at which it truncates.
        cache: folder of the cache, see :func:`fmicl.data.cache_root`.
        say: called with messages: a file is tokenised, or an entry is damaged.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no sentence or is not UTF-8, or it changed while it was read.
        OSError: the cache can't be written.
    """
    fingerprint = {"file": file_digest(path), "tokenizer": hashlib.blake2b(state, digest_size=16).hexdigest()}
    key = hashlib.blake2b(json.dumps([FORMAT, fingerprint, length]).encode(), digest_size=16).hexdigest()
    root = cache_root(cache) / "tokens"
    with _locked(root, key) as entry:
        found = _open(entry, key, fingerprint)
        if found is None:
            if entry.exists():
                say(f"warning: the tokens in {entry} are damaged; tokenising the file again")
                shutil.rmtree(entry)
            say(f"tokenising {path} into {entry}")
            with explain_full_disk(entry):
                _build(path, tokenise, entry, key, fingerprint["file"])
            found = _open(entry, key, fingerprint)
            if found is None:
                raise OSError(f"the tokens in {entry} can't be read back: is the disk full?")
    return found


def describe_text_change(before: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """How the text differs from an earlier fingerprint, in words; "" if it doesn't, or if there is none.

    Example:
        >>> describe_text_change({"samples": 3, "file": "a"}, {"samples": 4, "file": "b"})
        'the training set had 3 sentences, and has 4 now'
    """
    if before is None or before == now:
        return ""
    if before.get("samples") != now.get("samples"):
        return f"the training set had {before.get('samples')} sentences, and has {now.get('samples')} now"
    if before.get("file") != now.get("file"):
        return f"the training set has {now.get('samples')} sentences as before, but not the same ones"
    if before.get("tokenizer") != now.get("tokenizer"):
        return "the model has another tokenizer"
    return "STS-B dev, which selects the checkpoint, has changed (--sts)"


def _open(entry: Path, key: str, fingerprint: dict[str, Any]) -> Sentences | None:
    """The sentences of an entry; None if it is missing or incomplete."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        sentences, tokens, blank, long = (int(manifest[name]) for name in ("sentences", "tokens", "blank", "long"))
        sizes = [(entry / name).stat().st_size for name in ("ids.bin", "offsets.bin")]
        if manifest["key"] != key or sizes != [4 * tokens, 8 * (sentences + 1)]:
            return None
        ids = np.memmap(entry / "ids.bin", dtype="<i4", mode="r")
        offsets = np.memmap(entry / "offsets.bin", dtype="<i8", mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        return None
    return Sentences(ids, offsets, blank, {"samples": sentences, **fingerprint}, long)


def _build(path: Path, tokenise: Tokenise, entry: Path, key: str, digest: str) -> None:
    """Tokenise into a temporary folder, then rename it."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".tmp", dir=entry.parent))
    try:
        reader = LineReader(path)
        sentences = tokens = blank = 0
        with (temporary / "ids.bin").open("wb") as ids, (temporary / "offsets.bin").open("wb") as offsets:
            np.zeros(1, dtype="<i8").tofile(offsets)
            for lines in reader:
                if reader.invalid:
                    continue  # it is an error in the end, but all invalid lines are counted
                kept = [line for line in lines if line.strip()]
                blank += len(lines) - len(kept)
                rows = [row for row in tokenise(kept) if len(row)] if kept else []
                blank += len(kept) - len(rows)
                if not rows:
                    continue
                ends = tokens + np.cumsum([len(row) for row in rows], dtype="<i8")
                np.concatenate([np.asarray(row, dtype="<i4") for row in rows]).tofile(ids)
                ends.tofile(offsets)
                sentences, tokens = sentences + len(rows), int(ends[-1])
            for file in (ids, offsets):
                file.flush()
                os.fsync(file.fileno())
        reader.check()
        if reader.digest != digest:
            raise ValueError(f"{path} changed while it was read: start again once it is complete")
        if not sentences:
            raise ValueError(f"{path} has no sentence: all of its {reader.lines} lines are blank")
        manifest = {
            "format": FORMAT, "key": key, "sentences": sentences, "tokens": tokens, "blank": blank, "long": reader.long
        }  # fmt: skip
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path, key: str) -> Iterator[Path]:
    with contextlib.ExitStack() as stack:
        try:
            entry = stack.enter_context(locked_entry(root, key))
        except OSError as error:
            raise OSError(
                f"tokens can't be written into {root} ({error.strerror}): choose another --cache-dir"
            ) from error
        yield entry
