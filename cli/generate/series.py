"""What one command makes: one clip, or a numbered series of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

DIGITS = 3  # at least, so that names sort


@dataclass(frozen=True)
class Item:
    """One clip of the series; sparse, dense or both.

    Attributes:
        output: the file that ``--output`` names, with the item's number in a series.
        report: likewise of ``--report``; None where none is asked for.
        label: what the user sees in front of what is said of it; empty where it is the only one.
    """

    prompt: str
    seed: int
    output: Path
    report: Path | None
    label: str = ""


def series(
    prompts: list[str], *, seed: int, num: int | None, output: Path, report: Path | None, many: bool
) -> list[Item]:
    """Every prompt with every seed: all seeds of the first prompt, then those of the next one.

    Args:
        num: how many seeds, each one more than the one before; None for 1.
        many: whether names get a number, ``out-000.mp4`` for ``out.mp4``, be it one item only: who
            asks for a series finds the same names however long it is.
    """
    pairs = [(text, seed + i) for text in prompts for i in range(num or 1)]
    if not many:
        ((text, first),) = pairs
        return [Item(text, first, output, report)]
    digits = max(DIGITS, len(str(len(pairs) - 1)))
    return [
        Item(
            text,
            own,
            _numbered(output, number, digits),
            None if report is None else _numbered(report, number, digits),
            f"{number + 1} of {len(pairs)}",
        )
        for number, (text, own) in enumerate(pairs)
    ]


def _numbered(path: Path, number: int, digits: int) -> Path:
    return path.with_name(f"{path.stem}-{number:0{digits}}{path.suffix}")
