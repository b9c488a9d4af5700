"""Line-by-line reading of UTF-8 text files of any size, in chunks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

CHUNK = 4 * 2**20
"""Bytes that are read at a time."""
LONG_LINE = 100_000
"""Characters above which a line is hardly a sentence."""
_REPORTED = 5  # invalid lines whose position is reported; all are counted
_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"\xfd7zXZ": "xz",
    b"BZh": "bzip2",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
}


class LineReader:
    r"""The lines of a UTF-8 file, in one list per chunk; a line ends with ``\n`` or ``\r\n``.

    Blank lines are kept, the last line needs no end, and a byte order mark is removed. Lines that are not UTF-8, or
    have NUL bytes as UTF-16 and binary files do, are left out and counted; call :meth:`check` after the last line.

    Args:
        path: the file.
        chunk: bytes to read at a time.

    Attributes:
        lines: lines up to now.
        invalid: of these, how many are not UTF-8 text.
        long: of these, how many have more than `LONG_LINE` characters.

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
            raise ValueError(f"{path} is a folder, but a text file with one sentence per line is needed")
        if not path.is_file():
            raise FileNotFoundError(f"there is no text file {path}")
        with path.open("rb") as file:
            start = file.read(8)
        compression = next((name for magic, name in _COMPRESSED.items() if start.startswith(magic)), None)
        if compression:
            raise ValueError(f"{path} is compressed ({compression}): decompress it first")
        self.path, self.chunk = path, max(chunk, 3)  # the byte order mark has three bytes
        self.lines = 0
        self.invalid = 0
        self.long = 0
        self.reported: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16)

    def __iter__(self) -> Iterator[list[str]]:
        rest: list[bytes] = []  # of the current line
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
        """Lines of a block that doesn't end with a line end."""
        try:
            lines = block.decode("utf-8").split("\n")
        except UnicodeDecodeError:
            return self._decode_each(block.split(b"\n"))
        if b"\0" in block:
            return self._decode_each(block.split(b"\n"))
        self.lines += len(lines)
        self.long += sum(len(line) > LONG_LINE for line in lines)
        return [line.removesuffix("\r") for line in lines]

    def _decode_each(self, block: list[bytes]) -> list[str]:
        decoded = []
        for number, line in enumerate(block, start=self.lines + 1):
            at = line.find(b"\0")
            try:
                text = line.removesuffix(b"\r").decode("utf-8")
            except UnicodeDecodeError as error:
                at = error.start
            if at < 0:
                decoded.append(text)
                continue
            self.invalid += 1
            if len(self.reported) < _REPORTED:
                self.reported.append(f"line {number}, byte {at + 1} (0x{line[at]:02x})")
        self.lines += len(block)
        return decoded

    @property
    def digest(self) -> str:
        """Hash of all bytes that were read."""
        return self._hash.hexdigest()

    def check(self) -> None:
        """Check that all lines were UTF-8.

        Raises:
            ValueError: some were not; the message counts them and has the position of the first ones.
        """
        if self.invalid:
            more = f", and {self.invalid - len(self.reported)} more" if self.invalid > len(self.reported) else ""
            raise ValueError(
                f"{self.path}: {self.invalid} of {self.lines} lines are not UTF-8 text: "
                f"{'; '.join(self.reported)}{more}. Convert the file to UTF-8 (iconv -f ENCODING -t UTF-8; UTF-16 and "
                "binary files have NUL bytes, 0x00), or drop what is not (iconv -c)"
            )


def file_digest(path: Path) -> str:
    """Hash of a file's bytes, the same as :attr:`LineReader.digest` after the last line."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
