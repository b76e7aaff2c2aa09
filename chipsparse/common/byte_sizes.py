"""Amounts of memory as people write and read them."""

from __future__ import annotations

import re


def parse_bytes(text: str) -> int:
    """Return the bytes of ``24G``, ``1.5 GiB``, ``800MB`` or ``1048576``, or raise `ValueError`.

    As memory is sold and as Linux counts it, G is GiB; GB, with the B, is a billion bytes.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?B)?|B)?\s*", text.upper())
    if match is None:
        raise ValueError(f"expected an amount of memory such as 24G or 512M, got {text!r}")
    number, letter, tail = match.groups()
    power = 0 if letter is None else 1 + "KMGT".index(letter)
    return round(float(number) * (1000 if tail == "B" else 1024) ** power)


def format_bytes(count: int) -> str:
    """Return bytes for people: three digits or more, in binary units, as in ``1.42 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
