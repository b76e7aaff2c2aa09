"""The one place where an error becomes a sentence and an exit code."""

from __future__ import annotations

import errno
import importlib.util
import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, redirect_stdout, suppress
from typing import Any, TypeGuard

import typer

from chipsparse.common import stopping
from chipsparse.common.errors import UserError as UserError
from chipsparse.common.errors import first_line as first_line
from chipsparse.common.errors import reason as reason
from chipsparse.common.errors import user_errors as user_errors
from chipsparse.common.stopping import STOP_SIGNALS as STOP_SIGNALS
from chipsparse.common.stopping import exit_code as exit_code

MAKE_SEEDS = ("generate", "batch")  # commands of which ``--num`` is a number of seeds
EXIT_FAILED = 1
EXIT_USER_ERROR = 2
OUTPUT_FAILED = "the output could not be written"
CPU_ALLOCATOR = "DefaultCPUAllocator"  # in PyTorch's message
# What Typer refuses itself: options that do not exist or are missing, no numbers.
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


class OutputError(Exception):
    """The standard output takes no more, as on a full disk."""


@contextmanager
def reported_errors(
    *,
    debug: bool,
    kept: Callable[[], str] = lambda: "nothing was written",
) -> Iterator[None]:
    """End the command with one line on stderr in place of a traceback, or with both.

    ``kept`` says, asked behind an interruption, what that leaves. Exit codes: 2 for what the user
    can put right, 130, 143 and 129 for SIGINT (Ctrl-C), SIGTERM and SIGHUP, 1 for everything else.
    A reader of the output that went away, such as ``head``, ends it with 1 and no word.
    """
    try:
        with _stop_signals(), stopping.kept_is(kept):
            yield
            if sys.stdout is not None:  # as where a shell closed it
                with printing():
                    sys.stdout.flush()
    except typer.Exit:
        raise
    except BrokenPipeError as error:
        _drop_output()
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        _report_stop(error, debug=debug, kept=kept)
        raise typer.Exit(exit_code(error)) from error
    except Exception as error:
        stopped = stopping.asked_to_stop()
        if stopped is not None:  # a library made another error of it
            _report_stop(stopped, debug=debug, kept=kept)
            raise typer.Exit(exit_code(stopped)) from error
        line = f"error: {described(error)}"
        is_users = isinstance(error, UserError) or _is_long_name(error)
        code = EXIT_USER_ERROR if is_users else EXIT_FAILED
        explained = _is_out_of_memory(error) or isinstance(error, OutputError)
        if code == EXIT_FAILED and not debug and not explained:
            line += " (--debug shows the traceback)"
        with suppress(OSError):  # the terminal may be gone
            if debug:
                traceback.print_exception(error)
            say(line)
        raise typer.Exit(code) from error


def _drop_output() -> None:
    """Let what was not written to the standard output go."""
    with suppress(OSError, ValueError):  # else Python complains of what is left, as it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def printing() -> Iterator[None]:
    """Raise `OutputError` where the standard output takes no more; a reader may go away."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        _drop_output()
        raise OutputError(f"{OUTPUT_FAILED}: {reason(error)}") from error


def _report_stop(stopped: KeyboardInterrupt, *, debug: bool, kept: Callable[[], str]) -> None:
    stopping.settle()
    with suppress(OSError):  # the terminal may be gone
        if debug:
            traceback.print_exception(stopped)
        stopping.say_stopped(stopped, kept())


@contextmanager
def _stop_signals() -> Iterator[None]:
    """Raise `Stopped` for SIGTERM and SIGHUP; signals that were ignored stay ignored."""
    before = {number: signal.getsignal(number) for number in STOP_SIGNALS}
    before = {n: handler for n, handler in before.items() if handler not in (signal.SIG_IGN, None)}
    try:
        for number in before:
            signal.signal(number, stopping.stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def plain_words(text: str) -> str:
    """Return what pydantic says of a value, in the words of all other refusals."""
    for words, plain in {
        "Input should": "must",
        ", unable to parse string as an integer": "",
        ", unable to parse string as a number": "",
        "': must be a valid": "': it must be a valid",
    }.items():
        text = text.replace(words, plain)
    return text


def _seed_hint(error: Any) -> str:  # noqa: ANN401 - a `UsageError`, whose class has no name
    """Return what to add where several seeds were typed; nothing elsewhere."""
    if error.ctx is None or error.ctx.command.name not in MAKE_SEEDS:
        return ""
    message = error.format_message()
    extra = re.fullmatch(r"Got unexpected extra argument\(?s?\)? \(([0-9 ]+)\)", message.strip())
    if extra is None and "'--seed'" not in message:
        return ""
    return "; --num N makes N seeds, from --seed on"


@contextmanager
def usage_errors() -> Iterator[None]:
    """End the program with a sentence, as for all other errors, where Typer would draw a box."""
    try:
        yield
    except UsageError as raised:
        error: Any = raised
        if type(error).__name__ == "NoArgsIsHelpError":
            if error.format_message():  # help, where it is not shown already
                error.show()
        else:
            wrong = " ".join(error.format_message().split()).rstrip(".") + _seed_hint(error)
            wrong = plain_words(wrong)
            where = "chipsparse" if error.ctx is None else error.ctx.command_path
            say(f"error: {wrong[:1].lower()}{wrong[1:]}; {where} --help tells more")
        sys.exit(EXIT_USER_ERROR)
    except BrokenPipeError:
        _drop_output()
        sys.exit(EXIT_FAILED)
    except OSError as error:  # help and version are printed before a command begins
        say(f"error: {OUTPUT_FAILED}: {reason(error)}")
        sys.exit(EXIT_FAILED)
    except typer.Abort:  # which Typer makes of Ctrl-C
        stopped = stopping.asked_to_stop()
        if stopped is not None:
            raise stopped from None
        sys.exit(EXIT_FAILED)


def check_installed(package: str, extra: str, needs: str) -> None:
    """Raise `UserError`, which says what ``needs`` it, where the package of an extra is missing."""
    if importlib.util.find_spec(package) is None:
        raise UserError(f"{needs}, which is not installed: pip install 'chipsparse[{extra}]'")


def described(error: Exception) -> str:
    """Return one sentence about an error."""
    if isinstance(error, (UserError, OutputError)):
        return " ".join(str(error).split())
    if _is_long_name(error):
        end = str(error.filename)[-40:]
        return f"a file name has more letters than the file system takes: ...{end}"
    if _is_out_of_memory(error):
        on_gpu = type(error).__name__ == "OutOfMemoryError"
        where, also = ("GPU", ", or use --dtype bfloat16") if on_gpu else ("machine", "")
        return (
            f"the {where} ran out of memory; ask for fewer --frames or a smaller --height and "
            f"--width{also}"
        )
    return f"{type(error).__name__}: {first_line(error)}"


def _is_long_name(error: Exception) -> TypeGuard[OSError]:
    return isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG


def _is_out_of_memory(error: Exception) -> bool:
    """Return whether memory was missing; PyTorch has no type of its own for a CPU."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and CPU_ALLOCATOR in str(error)


def results_alone() -> AbstractContextManager[object]:
    """Return a context in which all that is printed goes to stderr, as it is no result."""
    return redirect_stdout(sys.stderr)


def say(line: str) -> None:
    """Print a line for the user, which starts with what kind of line it is."""
    print(f"chipsparse: {line}", file=sys.stderr, flush=True)
