"""The one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import typer

from chipsparse.cli.signals import exit_code, stop_signals, verb
from chipsparse.common.errors import UserError as UserError
from chipsparse.common.errors import first_line as first_line
from chipsparse.common.errors import reason as reason
from chipsparse.common.errors import user_errors as user_errors

EXIT_FAILED = 1
EXIT_USER_ERROR = 2
FULL = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EIO)
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in PyTorch's message
# What Typer finds wrong itself: options that do not exist or are missing, no numbers.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


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
        _end(f"error: {described(error)}", EXIT_USER_ERROR, error, debug)
    except KeyboardInterrupt as error:
        _end(f"{verb(error)}, {kept()}", exit_code(error), error, debug)
    except Exception as error:
        if isinstance(error, OSError) and _of_stdout(error):
            _end_without_stdout(error, debug)
        hint = "" if debug or _is_out_of_memory(error) else " (--debug shows the traceback)"
        _end(f"error: {described(error)}{hint}", EXIT_FAILED, error, debug)


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


@contextmanager
def usage_errors() -> Iterator[None]:
    """Ends the program with a sentence, as for all other errors, where Typer would draw a box."""
    try:
        yield
    except UsageError as raised:
        error: Any = raised
        with suppress(OSError):  # the terminal may be gone
            if type(error).__name__ == "NoArgsIsHelpError":
                if error.format_message():  # help, where it is not shown already
                    error.show()
            else:
                say(f"error: {_usage_sentence(error)}")
        sys.exit(EXIT_USER_ERROR)
    except typer.Abort:
        sys.exit(EXIT_FAILED)


def _usage_sentence(error: Any) -> str:
    wrong = " ".join(error.format_message().split()).rstrip(".")
    where = "chipsparse" if error.ctx is None else error.ctx.command_path
    return f"{wrong[:1].lower()}{wrong[1:]}; {where} --help tells more"


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


def described(error: Exception) -> str:
    """One sentence about an error."""
    if isinstance(error, UserError):
        return " ".join(str(error).split())
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


def _end(line: str, code: int, error: BaseException, debug: bool) -> NoReturn:
    with suppress(OSError):  # the terminal may be gone
        if debug:
            traceback.print_exception(error)
        say(line)
    raise typer.Exit(code) from error


def say(line: str) -> None:
    """Prints a line for the user, which starts with what kind of line it is."""
    print(f"chipsparse: {line}", file=sys.stderr, flush=True)
