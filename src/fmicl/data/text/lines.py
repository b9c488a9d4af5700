"""Lines of a text file of any size, a piece of it in memory at a time."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

__all__ = ["LineReader", "file_digest"]

CHUNK = 4 * 2**20
"""Bytes that are read at a time."""
_NAMED = 5  # broken lines that are named; all are counted
_PACKED = {b"\x1f\x8b": "gzip", b"\xfd7zXZ": "xz", b"BZh": "bzip2", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}


class LineReader:
    r"""The lines of a UTF-8 file, in lists of as many as a chunk holds; a line ends with ``\n`` or ``\r\n``.

    Blank lines come as they are, for whoever reads to skip or to keep. The last line needs no end, and a byte order
    mark at the start is no part of the text. Lines that are not UTF-8 are left out of the lists, and counted;
    :meth:`check` is there to be called at the end.

    Args:
        path: the file.
        chunk: bytes to read at a time.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: it is a folder, or compressed.

    Example:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "x.txt"
        >>> _ = path.write_bytes(b"one\r\n\ntwo")
        >>> reader = LineReader(path)
        >>> [line for lines in reader for line in lines], reader.lines
        (['one', '', 'two'], 3)
    """

    def __init__(self, path: Path, chunk: int = CHUNK) -> None:
        if path.is_dir():
            raise ValueError(f"{path} is a folder; a text file, with a sentence a line, is expected")
        if not path.is_file():
            raise FileNotFoundError(f"there is no text file {path}")
        with path.open("rb") as file:
            start = file.read(8)
        packed = next((name for magic, name in _PACKED.items() if start.startswith(magic)), None)
        if packed:
            raise ValueError(f"{path} is compressed ({packed}): unpack it first")
        self.path, self.chunk = path, max(chunk, 3)  # the mark at the start has three bytes
        self.lines = 0
        self.broken = 0
        self.named: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[list[str]]:
        rest: list[bytes] = []  # of the line under way
        with self.path.open("rb") as file:
            first = True
            while data := file.read(self.chunk):
                self._hash.update(data)
                if first:
                    first, data = False, data.removeprefix(b"\xef\xbb\xbf")
                whole, end, last = data.rpartition(b"\n")
                if not end:
                    rest.append(data)
                    continue
                yield self._decode(b"".join([*rest, whole]))
                rest = [last] if last else []
        if rest:
            yield self._decode(b"".join(rest))

    def _decode(self, block: bytes) -> list[str]:
        """Lines of a block, which has no end of line at its own end."""
        try:
            lines = block.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            return self._decode_each(block.split(b"\n"))
        self.lines += len(lines)
        return [line.removesuffix("\r") for line in lines]

    def _decode_each(self, block: list[bytes]) -> list[str]:
        decoded = []
        for number, line in enumerate(block, start=self.lines + 1):
            try:
                decoded.append(line.removesuffix(b"\r").decode("utf-8"))
            except UnicodeDecodeError as error:
                self.broken += 1
                if len(self.named) < _NAMED:
                    self.named.append(f"line {number}, byte {error.start + 1} (0x{line[error.start]:02x})")
        self.lines += len(block)
        return decoded

    @property
    def digest(self) -> str:
        """Of all bytes that were read."""
        return self._hash.hexdigest()

    def check(self) -> None:
        """To be called after the last line.

        Raises:
            ValueError: some lines were not UTF-8; the message counts all and names the first ones.
        """
        if self.broken:
            more = f", and {self.broken - len(self.named)} more" if self.broken > len(self.named) else ""
            raise ValueError(
                f"{self.path}: {self.broken} of {self.lines} lines are not UTF-8: {'; '.join(self.named)}{more}. "
                "Convert the file to UTF-8 (iconv -f ENCODING -t UTF-8), or leave out what is not (iconv -c)"
            )


def file_digest(path: Path) -> str:
    """A digest of a file's bytes, read in chunks; the same as :attr:`LineReader.digest` after the last line."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
