"""A text file as token ids: tokenised once, kept on disk, mapped into memory.

CACHE/tokens/<key>/ids.bin        int32, all sentences one after the other
                   offsets.bin    int64, where each starts, and the end of the last
                   manifest.json  what it was made from, and how long the other two must be

The key is a digest of the file's bytes, the tokenizer's state and the length, so a changed file or tokenizer is another
entry. A folder is filled under another name and then renamed: who finds it finds all of it.
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

from fmicl.data.text.lines import LineReader, file_digest
from fmicl.utils.locks import one_at_a_time

__all__ = ["Sentences", "cache_root", "text_changed", "tokenise_file"]

FORMAT = 1
Tokenise = Callable[[list[str]], Sequence[Sequence[int]]]
"""From sentences to token ids, special ones included, cut off at the length."""


@dataclass(frozen=True, eq=False)
class Sentences:
    """Sentences as token ids, in memory or mapped from a file.

    Attributes:
        ids: (T,) all tokens, sentence after sentence.
        offsets: (N + 1,) sentence i is ``ids[offsets[i]:offsets[i + 1]]``.
        blank: lines of the file that held nothing.
        fingerprint: number of sentences, and digests of the file and of the tokenizer.

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

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def lengths(self, index: NDArray[Any]) -> NDArray[Any]:
        """Tokens of each of these sentences."""
        counts: NDArray[Any] = self.offsets[index + 1] - self.offsets[index]
        return counts

    def padded(self, index: NDArray[Any], width: int) -> NDArray[np.int32]:
        """(n, width) tokens of n sentences, none longer than the width; -1 where there is none."""
        starts, lengths = self.offsets[index], self.lengths(index)
        there = np.arange(width) < lengths[:, None]
        rows = np.full(there.shape, -1, dtype=np.int32)
        rows[there] = self.ids[(starts[:, None] + np.arange(width))[there]]
        return rows


def cache_root(chosen: Path | None = None) -> Path:
    """Where tokenised files are kept: the folder that was chosen, or fmicl in the user's cache folder."""
    if chosen is not None:
        return chosen
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard: a relative path is to be ignored.
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".cache") / "fmicl"


def tokenise_file(
    path: Path,
    tokenise: Tokenise,
    state: bytes,
    length: int,
    *,
    cache: Path | None = None,
    say: Callable[[str], None] = print,
) -> Sentences:
    """The sentences of a text file as tokens, from the cache if it has them.

    Blank lines are skipped and counted.

    Args:
        path: UTF-8, a sentence a line.
        tokenise: gives the tokens of sentences.
        state: all that ``tokenise`` depends on, but for the length.
        length: tokens at which it cuts a sentence off.
        cache: another folder for tokenised files.
        say: told when a file is tokenised, and of a damaged entry.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds no sentence, or lines that are not UTF-8 (all counted, the first ones named), or it
            changed while it was read.
        OSError: the cache can't be written.
    """
    fingerprint = {"file": file_digest(path), "tokenizer": hashlib.blake2b(state, digest_size=16).hexdigest()}
    key = hashlib.blake2b(json.dumps([FORMAT, fingerprint, length]).encode(), digest_size=16).hexdigest()
    root = cache_root(cache) / "tokens"
    entry = root / key
    with _locked(root, key):
        found = _open(entry, key, fingerprint)
        if found is None:
            if entry.exists():
                say(f"warning: the tokens in {entry} are damaged; the file is tokenised again")
                shutil.rmtree(entry)
            for left in root.glob(f".{key}.*.tmp"):  # of a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            say(f"tokenising {path}; the tokens are kept in {entry}")
            _build(path, tokenise, entry, key, fingerprint["file"])
            found = _open(entry, key, fingerprint)
            if found is None:
                raise OSError(f"the tokens in {entry} can't be read back: is the disk full?")
    return found


def text_changed(then: dict[str, Any] | None, now: dict[str, Any]) -> str:
    """In words, how the text differs from what a run was started with; "" where it doesn't, or none was noted.

    Example:
        >>> text_changed({"samples": 3, "file": "a"}, {"samples": 4, "file": "b"})
        'it was trained on 3 sentences then, and there are 4 now'
    """
    if then is None or then == now:
        return ""
    if then.get("samples") != now.get("samples"):
        return f"it was trained on {then.get('samples')} sentences then, and there are {now.get('samples')} now"
    if then.get("file") != now.get("file"):
        return f"there are {now.get('samples')} sentences as before, but not the same ones"
    if then.get("tokenizer") != now.get("tokenizer"):
        return "the model's tokenizer is another one"
    return "STS-B dev, which chooses the checkpoint, is not what it was (--sts)"


def _open(entry: Path, key: str, fingerprint: dict[str, Any]) -> Sentences | None:
    """What an entry holds; None if it isn't there or not whole."""
    try:
        manifest = json.loads((entry / "manifest.json").read_text(encoding="utf-8"))
        sentences, tokens, blank = (int(manifest[name]) for name in ("sentences", "tokens", "blank"))
        sizes = [(entry / name).stat().st_size for name in ("ids.bin", "offsets.bin")]
        if manifest["key"] != key or sizes != [4 * tokens, 8 * (sentences + 1)]:
            return None
        ids = np.memmap(entry / "ids.bin", dtype="<i4", mode="r")
        offsets = np.memmap(entry / "offsets.bin", dtype="<i8", mode="r")
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if int(offsets[0]) != 0 or int(offsets[-1]) != tokens:
        return None
    return Sentences(ids, offsets, blank, {"samples": sentences, **fingerprint})


def _build(path: Path, tokenise: Tokenise, entry: Path, key: str, digest: str) -> None:
    """Tokenise into a folder of another name, then give it its own."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{key}.", suffix=".tmp", dir=entry.parent))
    try:
        reader = LineReader(path)
        sentences = tokens = blank = 0
        with (temporary / "ids.bin").open("wb") as ids, (temporary / "offsets.bin").open("wb") as offsets:
            np.zeros(1, dtype="<i8").tofile(offsets)
            for lines in reader:
                if reader.broken:
                    continue  # nothing is made of this file any more, but its broken lines are still counted
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
            raise ValueError(f"{path} changed while it was read: start again when it is complete")
        if not sentences:
            raise ValueError(f"{path} holds no sentence: {reader.lines} lines, all of them blank")
        manifest = {"format": FORMAT, "key": key, "sentences": sentences, "tokens": tokens, "blank": blank}
        (temporary / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        temporary.rename(entry)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(root: Path, key: str) -> Iterator[None]:
    """Of several processes that want the same tokens, one makes them and the others wait.

    Where there are no file locks, each process makes its own, and the last rename wins.
    """
    with contextlib.ExitStack() as stack:
        try:
            root.mkdir(parents=True, exist_ok=True)
            stack.enter_context(one_at_a_time(root / f".{key}.lock"))
        except OSError as error:
            raise OSError(
                f"tokens can't be kept in {root} ({error.strerror}): name another folder by --cache-dir"
            ) from error
        yield
