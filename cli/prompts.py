"""Prompts, as they were typed or stand in a file, and the clips that are made of them."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from chipsparse.cli.errors import UserError, reason
from chipsparse.cli.views.units import counted
from chipsparse.common import text_files
from chipsparse.experiments.samples import Sample
from chipsparse.profiles.profile import ASSETS

DIGITS = 3  # at least, of the numbers of a series, so that names sort
SHOWN = 80  # letters of what a text encoder does not read
NO_LIMIT = 1_000_000  # a tokenizer without a limit of its own says a number like 1e30


@dataclass(frozen=True)
class Item(Sample):
    """One clip of a command; sparse, dense or both. Its label is empty where it is the only one.

    Attributes:
        output: the file that ``--output`` names, with the item's number in a series.
        report: likewise of ``--report``; None where none is asked for.
    """

    output: Path = field(kw_only=True)
    report: Path | None = None


def numbered_items(
    pairs: Sequence[tuple[str, int]], output: Path, report: Path | None
) -> list[Item]:
    """Return the clips of prompts with seeds, whose files are numbered: ``out-000.mp4``, ..."""
    digits = max(DIGITS, len(str(len(pairs) - 1)))

    def numbered(path: Path, number: int) -> Path:
        return path.with_name(f"{path.stem}-{number:0{digits}}{path.suffix}")

    return [
        Item(
            number,
            text,
            seed,
            f"{number + 1} of {len(pairs)}",
            output=numbered(output, number),
            report=None if report is None else numbered(report, number),
        )
        for number, (text, seed) in enumerate(pairs)
    ]


def shapes(*, video: bool) -> str:
    """Return the file of bundled prompts about what the bundled models were trained on."""
    return "shapes.txt" if video else "images.txt"


def first_prompts(
    path: Path | None, *, bundled: str, usual: int, count: int | None, seed: int
) -> list[Sample]:
    """Return the first prompts of a file; the seed of each is one more than that before.

    Args:
        path: of ``--prompts``; None for bundled ones.
        bundled: which of these.
        usual: how many of these.
        count: how many of either; None for all of the file's, or the usual number.
        seed: of the first.

    Raises:
        UserError: the file cannot be read, or has too few.
    """
    file = path or ASSETS / "prompts" / bundled
    texts = read_prompts(file)
    wanted = count or (usual if path is None else len(texts))
    if wanted > len(texts):
        raise UserError(
            f"{file} has {counted(len(texts), 'prompt')}; --count {count} asks for more"
        )
    return [Sample(i, text, seed + i) for i, text in enumerate(texts[:wanted])]


def read_prompts(path: Path) -> list[str]:
    """Return the prompts of a file: a line each, without empty lines and those with ``#`` in front.

    Raises `UserError` for a file that cannot be read, or has no prompt.
    """
    lines = [line.strip() for line in read_text(path, f"--prompts {path}").splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UserError(f"--prompts {path} has no prompt; write one a line")
    return prompts


def read_text(path: Path, name: str) -> str:
    """Return the text of a file; raise `UserError`, which calls it ``name``."""
    try:
        return text_files.read_text(path)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{name} could not be read: {why}") from error


def typed_prompt(text: str) -> str:
    """Return the prompt that a user typed, also where the locale takes UTF-8 for ASCII.

    Raises `UserError` where its bytes are no UTF-8.
    """
    with suppress(UnicodeEncodeError):  # else it has bytes that Python could not decode
        text.encode("utf-8")
        return text
    try:
        return os.fsencode(text).decode("utf-8")
    except UnicodeError as error:
        raise UserError(
            "the prompt holds bytes that are no text in UTF-8; set the terminal to UTF-8, or give "
            "the prompt in a file with --prompts"
        ) from error


def cut_text(pipe: Any, prompt: str, max_sequence_length: int | None) -> str | None:
    """Return one sentence about what is cut from a prompt; None where all of it is read.

    Of several text encoders the one that reads most counts.

    Args:
        pipe: loaded; its tokenizers are asked.
        max_sequence_length: what the pipeline's call is given, or its default.
    """
    from transformers import PreTrainedTokenizerBase

    longest: tuple[int, str] | None = None
    for tokenizer in pipe.components.values():
        if not isinstance(tokenizer, PreTrainedTokenizerBase):
            continue
        limits = [getattr(tokenizer, "model_max_length", None), max_sequence_length]
        limit = min((number for number in limits if number and number < NO_LIMIT), default=None)
        if limit is None:
            return None
        words = tokenizer(prompt, add_special_tokens=False, verbose=False).input_ids
        read = limit - tokenizer.num_special_tokens_to_add()
        if len(words) <= read:
            return None
        lost = tokenizer.decode(words[read:], skip_special_tokens=True).strip()
        if longest is None or limit > longest[0]:
            longest = limit, lost or counted(len(words) - read, "unknown word")
    if longest is None:
        return None
    shown = textwrap.shorten(longest[1], SHOWN, placeholder=" ...")
    return (
        f"the prompt is longer than the {longest[0]} tokens that the text encoder reads; cut: "
        f'"{shown}"'
    )
