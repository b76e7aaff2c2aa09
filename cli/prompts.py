"""Prompts, as they were typed or stand in a file."""

from __future__ import annotations

import os
from pathlib import Path

from chipsparse.cli.errors import UserError, reason


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
