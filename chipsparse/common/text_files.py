"""Text files as users have them: UTF-8, or with a byte order mark UTF-16 or UTF-32."""

from __future__ import annotations

import codecs
from pathlib import Path

MOST_BYTES = 1 << 28
MARKS = {  # those of 32 bits first, which begin with those of 16
    codecs.BOM_UTF32_LE: "utf-32",
    codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16",
    codecs.BOM_UTF16_BE: "utf-16",
}


def read_text(path: Path, *, most: int = MOST_BYTES) -> str:
    """The text of a file, without its mark, every line ended by ``\\n``.

    Raises:
        OSError: the file cannot be read, or has more bytes than ``most``.
        UnicodeError: it is no text.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"it has more than {most:,} bytes")
    coding = next((name for mark, name in MARKS.items() if content.startswith(mark)), "utf-8-sig")
    text = content.decode(coding)
    if "\0" in text:  # of UTF-16 without a mark, or of no text at all
        raise UnicodeError("it has characters of value 0")
    return text.replace("\r\n", "\n").replace("\r", "\n")
