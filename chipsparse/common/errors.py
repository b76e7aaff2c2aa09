"""Mistakes that the caller can put right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake of the user; the text says what is wrong and what would be right."""


@contextmanager
def user_errors(*kinds: type[Exception], what: str | None = None) -> Iterator[None]:
    """Turns errors of these kinds into a `UserError`, after the name of the step that failed."""
    try:
        yield
    except UserError:
        raise
    except kinds as error:
        if what is None:
            raise UserError(str(error)) from error
        why = reason(error) if isinstance(error, OSError) else first_line(error)
        raise UserError(f"{what}: {why}") from error


def first_line(error: BaseException) -> str:
    """The first line of an exception's text, without its final stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def reason(error: OSError) -> str:
    """The reason why a file could not be read or written, without the name of the file."""
    return error.strerror or first_line(error)
