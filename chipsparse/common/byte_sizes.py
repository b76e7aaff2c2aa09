"""Amounts of memory as people write and read them."""

from __future__ import annotations

import re

# As memory is sold and as Linux counts it: G is GiB. GB, with the B, is a billion bytes.
UNITS = {
    "": 1,
    **{
        f"{letter}{tail}": 1024 ** (i + 1) for i, letter in enumerate("KMGT") for tail in ("", "IB")
    },
    **{f"{letter}B": 1000 ** (i + 1) for i, letter in enumerate("KMGT")},
}


def parse_bytes(text: str) -> int:
    """Return the bytes of ``24G``, ``1.5 GiB``, ``800MB`` or ``1048576``; G is GiB, GB 10^9 bytes.

    Raises:
        ValueError: if the text is no amount of memory.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?(?:I?B)?)\s*", text.upper())
    unit = None if match is None else UNITS.get("" if match[2] == "B" else match[2])
    if match is None or unit is None:
        raise ValueError(f"expected an amount of memory such as 24G or 512M, got {text!r}")
    return round(float(match[1]) * unit)


def format_bytes(count: int) -> str:
    """Return bytes for people: three digits or more, in binary units, as in ``1.42 GiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
