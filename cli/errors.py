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
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in PyTorch's message


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
        _end(f"error: {described(error)}", EXIT_USER_ERROR, error, debug)
    except KeyboardInterrupt as error:
        _end(f"interrupted, {kept()}", EXIT_INTERRUPTED, error, debug)
    except Exception as error:
        hint = "" if debug or _is_out_of_memory(error) else " (--debug shows the traceback)"
        _end(f"error: {described(error)}{hint}", EXIT_FAILED, error, debug)


def first_line(error: BaseException) -> str:
    """The first line of what an exception says, without its final stop."""
    lines = str(error).strip().splitlines()
    return lines[0].strip().rstrip(".") if lines else type(error).__name__


def described(error: Exception) -> str:
    """One sentence about an error."""
    if isinstance(error, UserError):
        return _one_line(str(error))
    if _is_out_of_memory(error):
        where, also = "GPU", ", or use --dtype bfloat16"
        if type(error).__name__ != "OutOfMemoryError":
            where, also = "machine", ""
        return (
            f"the {where} ran out of memory; ask for fewer --frames or a smaller --height and "
            f"--width{also}"
        )
    return f"{type(error).__name__}: {first_line(error)}"


def _is_out_of_memory(error: Exception) -> bool:
    """Whether a device or the machine had too little; PyTorch has no type of its own for a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)


def _one_line(text: str) -> str:
    return " ".join(text.split())


def _end(line: str, code: int, error: BaseException, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    print(f"chipsparse: {line}", file=sys.stderr)
    raise typer.Exit(code) from error
