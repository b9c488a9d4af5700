"""Text files: lines, the cache of tokens, batches of sentences."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fmicl.data import LineReader, Sentences, SentenceStream, cache_root, describe_text_change, tokenise_file
from fmicl.data.text import tokens as tokens_module
from fmicl.data.text.lines import file_digest


def lines_of(path: Path, chunk: int = 2**20) -> list[str]:
    reader = LineReader(path, chunk)
    lines = [line for part in reader for line in part]
    reader.check()
    assert reader.lines == len(lines)
    assert reader.digest == file_digest(path)
    return lines


@pytest.mark.parametrize("chunk", [3, 4, 5, 7, 64, 2**20])
@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", []),
        (b"one", ["one"]),
        (b"one\n", ["one"]),
        (b"\n", [""]),
        (b"\n\n", ["", ""]),
        (b"one\r\ntwo\r\n", ["one", "two"]),
        (b"one\r\n\r\n\ntwo", ["one", "", "", "two"]),
        (b"a\rb\n", ["a\rb"]),
        ("\ufeffone\ntwo".encode(), ["one", "two"]),
        ("é\nнет слов\n字字字\n👩‍🚀".encode(), ["é", "нет слов", "字字字", "👩‍🚀"]),
        ("one\u2028half\nnext\u0085line".encode(), ["one\u2028half", "next\u0085line"]),
        (b"long " * 50 + b"\nshort", ["long " * 50, "short"]),
    ],
)
def test_lines_do_not_depend_on_the_chunk_size(chunk: int, content: bytes, expected: list[str], tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes(content)
    assert lines_of(path, chunk) == expected


@pytest.mark.parametrize("chunk", [5, 2**20])
def test_lines_that_are_not_utf8_are_counted_and_located(chunk: int, tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    good = "größe\n".encode()
    path.write_bytes(good * 2 + b"caf\xe9\n" + good + b"\xff\xfe\r\n" + b"x\xf0\x9f\n" * 7 + b"\xc3")
    reader = LineReader(path, chunk)
    assert [line for part in reader for line in part] == ["größe"] * 3
    with pytest.raises(
        ValueError, match=r"10 of 13 lines are not UTF-8 text: line 3, byte 4 \(0xe9\); line 5, byte 1"
    ) as e:
        reader.check()
    assert "line 8, byte 2 (0xf0), and 5 more" in str(e.value)
    assert "iconv" in str(e.value)


def test_missing_folders_and_compressed_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none.txt"):
        LineReader(tmp_path / "none.txt")
    with pytest.raises(ValueError, match="folder"):
        LineReader(tmp_path)
    (tmp_path / "x.txt.xz").write_bytes(b"\xfd7zXZ\x00rest")
    with pytest.raises(ValueError, match=r"\(xz\)"):
        LineReader(tmp_path / "x.txt.xz")


class Letters:
    """Tokenizer whose tokens are letters, between 1 and 2; counts the lines that it has tokenised."""

    def __init__(self, length: int = 100) -> None:
        self.length, self.lines = length, 0

    def __call__(self, lines: list[str]) -> list[list[int]]:
        self.lines += len(lines)
        return [[1, *map(ord, line), 2][: self.length] for line in lines]


def read(path: Path, cache: Path, tokenise: Any = None, state: bytes = b"letters", **options: Any) -> Sentences:
    options.setdefault("say", lambda _: None)
    length = options.pop("length", 100)
    return tokenise_file(path, tokenise or Letters(length), state, length, cache=cache, **options)


def texts(sentences: Sentences) -> list[str]:
    pieces = [sentences.ids[a:b] for a, b in zip(sentences.offsets, sentences.offsets[1:], strict=False)]
    assert all(piece[0] == 1 for piece in pieces)
    return ["".join(map(chr, piece[1:][piece[1:] != 2])) for piece in pieces]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "x.txt"
    path.write_bytes("one\n\n  \t\ntwo three\r\n\u3000\nfö".encode())
    return path


def test_a_file_is_tokenised_once_and_blank_lines_are_counted(file: Path, tmp_path: Path) -> None:
    tokenise, messages = Letters(), list[str]()
    first = read(file, tmp_path / "cache", tokenise, say=messages.append)
    assert texts(first) == ["one", "two three", "fö"]
    assert (len(first), first.blank) == (3, 3)
    assert tokenise.lines == 3
    assert len(messages) == 1
    again = read(file, tmp_path / "cache", tokenise, say=messages.append)
    assert (texts(again), again.blank, again.fingerprint) == (texts(first), 3, first.fingerprint)
    assert tokenise.lines == 3
    assert len(messages) == 1
    assert isinstance(again.ids, np.memmap)


def test_a_file_larger_than_the_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineReader.__init__, "__defaults__", (64,))
    path, tokenise = tmp_path / "x.txt", Letters(1000)
    expected = [f"sentence {i} " + "x" * (i % 90) for i in range(300)]
    path.write_text("\n".join(expected))
    assert texts(read(path, tmp_path / "cache", tokenise, length=1000)) == expected
    assert tokenise.lines == 300


def test_lines_without_a_token_count_as_blank(file: Path, tmp_path: Path) -> None:
    """Tokenizers without special tokens may give no token for a line."""

    def tokenise(lines: list[str]) -> list[list[int]]:
        return [[] if line.startswith("two") else [7] for line in lines]

    found = read(file, tmp_path / "cache", tokenise)
    assert (len(found), found.blank) == (2, 4)
    with pytest.raises(ValueError, match="no sentence"):
        read(file, tmp_path / "cache", lambda lines: [[] for _ in lines], state=b"nothing")


def test_the_cache_key_depends_on_text_tokenizer_and_length(file: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first = read(file, cache)
    for changes in ({"state": b"other"}, {"length": 4}):
        tokenise = Letters(4)
        found = read(file, cache, tokenise, **changes)
        assert tokenise.lines == 3, changes
        assert found.lengths(np.arange(3)).tolist() == [4, 4, 4]
    file.write_text("one\nfour\nfive\n")
    assert texts(changed := read(file, cache)) == ["one", "four", "five"]
    assert "3 sentences as before, but not the same" in describe_text_change(first.fingerprint, changed.fingerprint)
    assert (
        describe_text_change(first.fingerprint, first.fingerprint)
        == describe_text_change(None, first.fingerprint)
        == ""
    )
    assert "tokenizer" in describe_text_change(first.fingerprint, {**first.fingerprint, "tokenizer": "x"})
    assert "STS-B dev" in describe_text_change({"stsb_dev": "x"}, {"stsb_dev": None})
    file.write_text("one\n")
    assert "had 3 sentences, and has 1 now" in describe_text_change(first.fingerprint, read(file, cache).fingerprint)


@pytest.mark.parametrize("name", ["ids.bin", "offsets.bin", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_entry_is_replaced(name: str, damage: str, file: Path, tmp_path: Path) -> None:
    cache, messages = tmp_path / "cache", list[str]()
    expected = texts(read(file, cache))
    (entry,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    if damage == "cut":
        (entry / name).write_bytes((entry / name).read_bytes()[:-8])
    else:
        (entry / name).unlink()
    assert texts(read(file, cache, say=messages.append)) == expected
    assert "damaged" in messages[0]
    assert texts(read(file, cache, say=messages.append)) == expected
    assert len(messages) == 2


def test_an_incomplete_entry_is_never_used(file: Path, tmp_path: Path) -> None:
    """A process that dies while writing leaves nothing that looks complete, and its temporary files are removed."""
    cache = tmp_path / "cache"

    def killed(_: list[str]) -> list[list[int]]:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        read(file, cache, killed)
    assert not [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    read(file, cache)
    (entry,) = (path for path in (cache / "tokens").iterdir() if path.is_dir())
    entry.rename(entry.with_name(f".{entry.name}.abc.tmp"))  # as after SIGKILL
    tokenise = Letters()
    read(file, cache, tokenise)
    assert tokenise.lines == 3
    assert [path.name for path in (cache / "tokens").iterdir() if path.is_dir()] == [entry.name]


def test_invalid_text_leaves_no_entry(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = tmp_path / "cache"
    file.write_bytes(b"good\nb\xe4d\nworse\xff")
    with pytest.raises(ValueError, match="2 of 3 lines are not UTF-8"):
        read(file, cache)
    file.write_bytes(b" \n\n")
    with pytest.raises(ValueError, match=r"no sentence.* 2 lines"):
        read(file, cache)
    file.write_bytes(b"good\n")
    with monkeypatch.context() as patch:
        patch.setattr(tokens_module, "file_digest", lambda _: "other")
        with pytest.raises(ValueError, match="changed"):
            read(file, cache)
    assert not [path for path in (cache / "tokens").iterdir() if path.is_dir()]
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(OSError, match="--cache-dir"):
        read(file, tmp_path / "taken")


def test_cache_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "fmicl"
    assert cache_root(Path("mine")) == Path("mine")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_root() == Path.home() / ".cache" / "fmicl"


def sentences(count: int = 203) -> Sentences:
    """Sentence i is the number i, 1 to 30 times."""
    lengths = 1 + np.arange(count) * 7 % 30
    return Sentences(np.repeat(np.arange(count), lengths), np.concatenate([[0], np.cumsum(lengths)]), 0, {})


def test_batches_are_padded_to_a_multiple_of_eight() -> None:
    data = sentences()
    widths = set()
    for batch in SentenceStream(data, 4, length=30, seed=1, device="cpu"):
        assert batch.first is batch.second
        widths.add(batch.first.shape[1])
        longest = int(data.lengths(batch.index.numpy()).max())
        assert batch.first.shape == (4, min(30, -(-longest // 8) * 8))
        for row, sentence in zip(batch.first, batch.index.tolist(), strict=True):
            length = int(data.lengths(np.array(sentence)))
            assert row.tolist() == [sentence] * length + [-1] * (len(row) - length)
    assert widths == {8, 16, 24, 30}


def test_fixed_batches_have_one_shape() -> None:
    data = sentences()
    free, fixed = (SentenceStream(data, 4, length=40, seed=1, device="cpu", fixed=fixed) for fixed in (False, True))
    for one, other in zip(free, fixed, strict=True):
        assert other.first.shape == (4, 32)
        width = one.first.shape[1]
        assert torch.equal(one.first, other.first[:, :width])
        assert bool((other.first[:, width:] == -1).all())


def test_epochs_differ_and_processes_share_them() -> None:
    data = sentences()

    def epochs(**options: Any) -> list[list[list[int]]]:
        stream = SentenceStream(data, options.pop("batch", 6), length=32, device="cpu", **{"seed": 3, **options})
        return [[batch.index.tolist() for batch in stream] for _ in range(2)]

    one, other = epochs()
    assert len(one) == 203 // 6
    assert len({i for batch in one for i in batch}) == 6 * len(one)
    assert one != other
    assert epochs(seed=4)[0] != one
    parts = [epochs(batch=3, rank=rank, world_size=2)[0] for rank in range(2)]
    assert [a + b for a, b in zip(*parts, strict=True)] == one


def test_a_pass_can_start_at_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fmicl.data.text.sentence_stream._BLOCK", 5)
    stream = SentenceStream(sentences(), 6, length=32, seed=0, device="cpu")
    whole = list(stream)
    for start in (0, 1, 5, 13, len(stream) - 1):
        stream.set_position(0, start)
        rest = list(stream)
        assert len(rest) == len(whole) - start
        assert all(torch.equal(a.first, b.first) for a, b in zip(whole[start:], rest, strict=True))
    stream.set_position(0, len(stream))
    assert stream.epoch == 1
    with pytest.raises(ValueError, match="0 to 32"):
        stream.set_position(0, 34)


def test_too_few_sentences_are_refused() -> None:
    with pytest.raises(ValueError, match=r"3 samples.* batch of 2 .* 2 processes"):
        SentenceStream(sentences(3), 2, length=32, seed=0, device="cpu", world_size=2)


def test_manifest(file: Path, tmp_path: Path) -> None:
    read(file, tmp_path / "cache")
    (manifest,) = (tmp_path / "cache").rglob("manifest.json")
    written = json.loads(manifest.read_text())
    assert (written["sentences"], written["blank"]) == (3, 3)
    assert written["tokens"] == sum(len(text) + 2 for text in ("one", "two three", "fö"))
