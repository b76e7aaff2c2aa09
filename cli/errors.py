"""The one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

import typer

from chipsparse.cli.signals import exit_code, stop_signals, verb

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)


class UserError(Exception):
    """What the user can put right; the text says what is wrong and what would be right."""


@contextmanager
def reported_errors(
    *, debug: bool, kept: Callable[[], str] = lambda: "nothing was written"
) -> Iterator[None]:
    """Ends the command with one line on stderr instead of a traceback, or with both under `debug`.

    ``kept`` says, asked behind an interruption, what that leaves. Exit codes: 2 for what the user
    can put right, 130, 143 and 129 for SIGINT (Ctrl-C), SIGTERM and SIGHUP, 1 for everything else.
    A reader of the output that went away, such as ``head``, ends it with 1 and no word.
    """
    try:
        with stop_signals():
            yield
            _flush()
    except typer.Exit:
        raise
    except UserError as error:
        _end(f"error: {_one_line(str(error))}", EXIT_USER_ERROR, error, debug)
    except KeyboardInterrupt as error:
        _end(f"{verb(error)}, {kept()}", exit_code(error), error, debug)
    except OSError as error:
        if _of_stdout(error):
            _end_without_stdout(error, debug)
        _end(_describe(error, debug), EXIT_FAILED, error, debug)
    except Exception as error:
        _end(_describe(error, debug), EXIT_FAILED, error, debug)


@contextmanager
def written_output() -> Iterator[None]:
    """Ends the program where its standard output cannot take what was printed outside a command."""
    try:
        try:
            yield
        finally:
            _flush()
    except OSError as error:
        try:
            _end_without_stdout(error, debug=False)
        except typer.Exit as end:
            sys.exit(end.exit_code)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, without its final stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def reason(error: OSError) -> str:
    """Why a file could not be read or written, without the name of the file."""
    return error.strerror or first_line(error)


def _flush() -> None:
    if sys.stdout is not None:  # as where a shell closed it
        sys.stdout.flush()


def _of_stdout(error: OSError) -> bool:
    """Whether an error is about the standard output: those about files name a file."""
    return isinstance(error, BrokenPipeError) or (error.filename is None and error.errno in FULL)


def _end_without_stdout(error: OSError, debug: bool) -> NoReturn:
    with suppress(OSError, ValueError):  # else Python complains of what is left, as it ends
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        raise typer.Exit(EXIT_FAILED) from error
    line = f"error: the standard output could not be written: {reason(error)}"
    _end(line, EXIT_USER_ERROR, error, debug)


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
    with suppress(OSError):  # the terminal may be gone
        if debug:
            traceback.print_exception(error)
        print(f"chipsparse: {line}", file=sys.stderr, flush=True)
    raise typer.Exit(code) from error
