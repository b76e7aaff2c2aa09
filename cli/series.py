"""What one command makes: one picture, or a numbered series of them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from chipsparse.cli.errors import UserError, reason

DIGITS = 3  # at least, so that names sort


@dataclass(frozen=True)
class Item:
    """One picture of the series; sparse, dense or both.

    Attributes:
        prompt: what to show.
        seed: of its noise.
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
        prompts: one or more.
        seed: the first one.
        num: how many seeds, each one more than the one before; None for 1.
        output: of the command.
        report: of the command.
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


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: a line each; empty lines and those that begin with ``#`` are left out.

    Raises:
        UserError: the file cannot be read, or has no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"--prompts {path} could not be read: {why}") from error
    found = [line.strip() for line in lines]
    prompts = [line for line in found if line and not line.startswith("#")]
    if not prompts:
        raise UserError(f"--prompts {path} has no prompt; write one a line")
    return prompts


def typed_prompt(text: str) -> str:
    """The prompt that a user typed, also where the locale takes UTF-8 for ASCII.

    Raises:
        UserError: its bytes are no UTF-8.
    """
    try:
        return os.fsencode(text).decode("utf-8") if not _is_text(text) else text
    except UnicodeError as error:
        raise UserError(
            "the prompt holds bytes that are no text in UTF-8; set the terminal to UTF-8, or give "
            "the prompt in a file with --prompts"
        ) from error


def _is_text(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:  # bytes that Python could not decode
        return False
    return True
