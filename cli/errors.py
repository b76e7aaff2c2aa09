"""The one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

import typer

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130


class UserError(Exception):
    """What the user can put right; the text says what is wrong and what would be right."""


@contextmanager
def reported_errors(
    *, debug: bool, kept: Callable[[], str] = lambda: "nothing was written"
) -> Iterator[None]:
    """Ends the command with one line on stderr instead of a traceback, or with both under `debug`.

    ``kept`` says, asked behind an interruption, what that leaves. Exit codes: 2 for what the user
    can put right, 130 for Ctrl-C, 1 for everything else.
    """
    try:
        yield
    except typer.Exit:
        raise
    except UserError as error:
        _end(f"error: {_one_line(str(error))}", EXIT_USER_ERROR, error, debug)
    except KeyboardInterrupt as error:
        _end(f"interrupted, {kept()}", EXIT_INTERRUPTED, error, debug)
    except Exception as error:
        _end(_describe(error, debug), EXIT_FAILED, error, debug)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, without its final stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def _describe(error: Exception, debug: bool) -> str:
    if type(error).__name__ == "OutOfMemoryError":
        return (
            "error: the GPU ran out of memory; ask for fewer --frames or a smaller --height and "
            "--width, or use --dtype bfloat16"
        )
    hint = "" if debug else " (--debug shows the traceback)"
    return f"error: {type(error).__name__}: {first_line(error)}{hint}"


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _end(line: str, code: int, error: BaseException, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"chipsparse: {line}", file=sys.stderr)
    raise typer.Exit(code) from error
