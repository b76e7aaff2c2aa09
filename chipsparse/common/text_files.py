"""Text files: read as users have them, written as a whole or not at all."""

from __future__ import annotations

import codecs
import os
import tempfile
from pathlib import Path

MOST_BYTES = 1 << 28


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """Return the text of a file in UTF-8, or with a byte order mark in UTF-16.

    The mark is left out, and every line ends with ``\\n``. Raises `OSError` where the file cannot
    be read or has more bytes than ``most``, and `UnicodeError` where it is no text.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it has more than {most:,} bytes")
    marks = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
    text = content.decode("utf-16" if content.startswith(marks) else "utf-8-sig")
    if "\0" in text:  # UTF-16 without a mark, or no text
        raise UnicodeError("it has characters of value 0")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def write_text(path: Path, text: str) -> None:
    """Write a file in UTF-8; an `OSError` leaves an earlier file as it was."""
    with tempfile.TemporaryDirectory(prefix=".chipsparse-", dir=path.parent) as scratch:
        file = Path(scratch) / path.name
        file.write_text(readable(text), encoding="utf-8")
        os.replace(file, path)


def readable(text: str) -> str:
    """Return a text that UTF-8 can take: names of files may hold bytes that it cannot."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
