"""Prompts, as they were typed or stand in a file."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from chipsparse.cli.errors import UserError, reason
from chipsparse.cli.wording import counted
from chipsparse.common import text_files
from chipsparse.profiles.profile import ASSETS


@dataclass(frozen=True)
class Prompt:
    """A prompt with its seed."""

    index: int  # from 0, among all that are generated with
    text: str
    seed: int

    @property
    def name(self) -> str:
        """What measurements of it are called."""
        return f"seed {self.seed}, {self.text}"

    @property
    def digest(self) -> str:
        """What files and measurements call its text where they are not to tell it."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:12]


def shapes(*, video: bool) -> str:
    """The bundled prompts about what the bundled models were trained on."""
    return "shapes.txt" if video else "images.txt"


def first_prompts(
    path: Path | None, *, bundled: str, usual: int, count: int | None, seed: int
) -> list[Prompt]:
    """The first prompts of a file; the seed of each is one more than that of the one before.

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
    return [Prompt(i, text, seed + i) for i, text in enumerate(texts[:wanted])]


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: a line each; empty lines and those that begin with ``#`` are left out.

    Raises `UserError` for a file that cannot be read, or has no prompt.
    """
    found = [line.strip() for line in read_text(path, f"--prompts {path}").splitlines()]
    prompts = [line for line in found if line and not line.startswith("#")]
    if not prompts:
        raise UserError(f"--prompts {path} has no prompt; write one a line")
    return prompts


def read_text(path: Path, name: str) -> str:
    """What a text file says; raises `UserError`, which calls it ``name``."""
    try:
        return text_files.read_text(path)
    except (OSError, UnicodeError) as error:
        why = reason(error) if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UserError(f"{name} could not be read: {why}") from error


def typed_prompt(text: str) -> str:
    """The prompt that a user typed, also where the locale takes UTF-8 for ASCII.

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
