"""The `chipsparse` command: its global options and subcommands."""

from __future__ import annotations

import codecs
import sys
from collections.abc import Callable
from io import TextIOWrapper
from typing import Annotated, Any

import typer

from chipsparse import __version__
from chipsparse.cli.commands import COMMANDS, generate
from chipsparse.cli.errors import usage_errors
from chipsparse.cli.options import as_command


def _example(command: Callable[[Any], None]) -> str:
    return f"Example: [bold]chipsparse {COMMANDS[command]}[/bold]"


app = typer.Typer(
    name="chipsparse",
    help="Faster diffusion transformers, without training.\n\n"
    "Diffusion models compute much the same at every denoising step. chipsparse computes a few "
    "steps in full, and between them only what changes.",
    epilog=_example(generate),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in COMMANDS:
    app.command(epilog=_example(command))(as_command(command))


def _print_version(asked: bool) -> None:
    if asked:
        print(f"chipsparse {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    pass


def main() -> None:
    """Entry point of the `chipsparse` command."""
    for stream in (sys.stdout, sys.stderr):
        # Else a prompt or a file's name with a letter that the encoding lacks would be an error.
        if isinstance(stream, TextIOWrapper) and stream.errors == "strict":
            is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
            stream.reconfigure(errors="surrogateescape" if is_utf8 else "replace")
    with usage_errors():
        # As a module, too: a shell completes no `python -m chipsparse`.
        code = app(prog_name="chipsparse", standalone_mode=False)
        if code:
            sys.exit(code)


if __name__ == "__main__":
    main()
