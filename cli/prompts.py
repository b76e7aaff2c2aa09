"""Prompts, as they were typed or stand in a file."""

from __future__ import annotations

from pathlib import Path

from chipsparse.cli.errors import UserError, reason
from chipsparse.common import text_files
from chipsparse.profiles.profile import ASSETS

BUNDLED_PROMPTS = ASSETS / "prompts"


def shapes(*, video: bool) -> str:
    """Return the file of bundled prompts about what the bundled models were trained on."""
    return "shapes.txt" if video else "images.txt"


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a file but empty ones and those with ``#`` in front, at least one."""
    lines = [line.strip() for line in prompts_text(path, f"--prompts {path}").splitlines()]
    prompts = [line for line in lines if line and not line.startswith("#")]
    if not prompts:
        raise UserError(f"--prompts {path} has no prompt; write one a line")
    return prompts


def prompts_text(path: Path, name: str) -> str:
    """Return the text of a file of prompts, or of bundled ones that have the path's name.

    A file of that name wins, as a folder does over a bundled model.
    """
    bundled = BUNDLED_PROMPTS / f"{path.name}.txt"
    if path == Path(path.name) and not path.is_file() and bundled.is_file():
        path = bundled
    return read_text(path, name)


def read_text(path: Path, name: str) -> str:
    """Return the text of a file; raise `UserError`, which calls it ``name``."""
    try:
        return text_files.read_text(path)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{name} could not be read: {why}") from error


def typed_prompt(text: str) -> str:
    """Return the prompt that a user typed; raise `UserError` for bytes that are no text."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:  # Python could not decode all bytes of the argument
        raise UserError(
            "the prompt holds bytes that are no text in UTF-8; set the terminal to UTF-8, or give "
            "the prompt in a file with --prompts",
        ) from error
    return text
